"""What the rules of `megatron_cfg` know of Megatron by heart, against the installed sources.

The sources are read, not imported. A failure here after a change of version means: read the
place again, and change the rule with it.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from minirl.config import megatron as megatron_config
from minirl.config import megatron_fit, megatron_rules
from minirl.config.megatron import Fp8Config, MegatronConfig, MegatronSchedulerConfig

CORE = "core/transformer/transformer_config.py"


@cache
def parsed(file: str) -> ast.Module:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    places = [Path(p) / file for p in spec.submodule_search_locations or []]
    return ast.parse(next(p for p in places if p.is_file()).read_text())


def assigned_sets(file: str, name: str) -> list[set[str]]:
    """The sets of strings that are assigned to a name, in order."""
    found = [
        node
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Set)
        and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]
    ]
    return [strings(node.value) for node in sorted(found, key=lambda node: node.lineno)]


def annotated(file: str, cls: str) -> dict[str, ast.AnnAssign]:
    """The fields of a dataclass."""
    body = next(x.body for x in parsed(file).body if isinstance(x, ast.ClassDef) and x.name == cls)
    return {
        x.target.id: x
        for x in body
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }


def strings(node: ast.AST) -> set[str]:
    return {
        x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)
    }


def literals(section: Any, name: str) -> set[str]:
    """The strings that a key may have."""
    found: set[str] = set()
    pending = [section.__annotations__[name]]
    while pending:
        kind = pending.pop()
        found |= {kind} if isinstance(kind, str) else set()
        pending += get_args(kind)
    return found


def test_the_modules_that_can_be_recomputed_and_offloaded_are_cores():
    recompute, offload = assigned_sets(CORE, "allowed_modules")
    assert recompute == megatron_rules.RECOMPUTE_MODULES
    assert offload == megatron_rules.OFFLOAD_MODULES
    [local] = assigned_sets(CORE, "local_supported_offload_modules")
    assert local == megatron_rules.OFFLOAD_IN_MOE


def test_the_modules_that_graphs_capture_are_cores():
    body = next(
        x.body
        for x in parsed("core/transformer/enums.py").body
        if isinstance(x, ast.ClassDef) and x.name == "CudaGraphModule"
    )
    names = {x.targets[0].id for x in body if isinstance(x, ast.Assign)}  # type: ignore[attr-defined] # members of an enumeration are plain names
    assert names == megatron_rules.GRAPH_MODULES


@pytest.mark.parametrize(
    "name", ["cuda_graph_impl", "moe_token_dispatcher_type", "moe_router_dtype"]
)
def test_the_values_of_literal_keys_are_cores(name):
    known = strings(annotated(CORE, "TransformerConfig")[name].annotation)
    assert literals(MegatronConfig, name) <= known


def test_the_recipes_of_fp8_are_cores():
    known = strings(annotated(CORE, "TransformerConfig")["fp8_recipe"].annotation)
    assert literals(Fp8Config, "fp8_recipe") == set(megatron_fit.FP8_CAPABILITY) <= known


def test_the_styles_of_decay_are_cores():
    source = strings(parsed("core/optimizer_param_scheduler.py"))
    for name in ("lr_decay_style", "weight_decay_incr_style", "lr_wsd_decay_style"):
        assert literals(MegatronSchedulerConfig, name) <= source


def test_fields_that_rules_name_in_model_overrides_exist():
    fields = annotated(CORE, "TransformerConfig") | annotated(
        "core/model_parallel_config.py", "ModelParallelConfig"
    )
    named = {
        *megatron_fit.STAGE_LAYOUTS,
        *("cpu_offloading", "use_transformer_engine_op_fuser", "fp32_residual_connection"),
        "fine_grained_offloading_max_inflight_offloads",
    }
    assert named <= fields.keys()


def test_the_arithmetic_of_ranks_is_cores():
    source = ast.unparse(parsed("core/parallel_state.py"))
    assert "expert_data_parallel_size = world_size // expert_tensor_model_pipeline" in source
    assert "world_size % expert_tensor_model_pipeline_parallel_size != 0" in source
    assert megatron_config.data_parallel_size(MegatronConfig(context_parallel_size=2), 4) == 2


def test_core_asks_for_what_the_rules_ask_for():
    core = ast.unparse(parsed(CORE))
    for fact in (
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading",
        "attn_proj cannot be set to offload_modules alone without core_attn",
        "fused_group_mlp requires use_transformer_engine_op_fuser",
        "num_query_groups % self.tensor_model_parallel_size != 0 and "
        "self.tensor_model_parallel_size % self.num_query_groups != 0",
        "DeepEP backend is only supported with flex token dispatcher",
        "does not support variable sequence length, please use alltoall",
        "full recompute is only supported with full iteration CUDA graph",
    ):
        assert fact in core
    optimizer = ast.unparse(parsed("core/optimizer/optimizer_config.py"))
    assert "--use-precision-aware-optimizer only supported with adam" in optimizer
    assert "NVTE_CPU_OFFLOAD_V1" in ast.unparse(parsed("bridge/training/config.py"))


def test_auxiliary_losses_are_multiplied_by_counts_of_tokens():
    source = ast.unparse(parsed("core/transformer/moe/router.py"))
    assert "aux_loss * num_local_tokens * self.tp_cp_group.size()" in source


def test_the_hybrid_optimizer_needs_a_gpu():
    source = ast.unparse(parsed("core/optimizer/cpu_offloading/hybrid_optimizer.py"))
    assert "torch.cuda.Stream()" in source
