"""What the settings become: the environment, the automatic choices, the provider."""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from models import save_model
from parity import Layout, policy
from ranks import RankError, run_ranks

from minirl.backends.megatron import setup as megatron_setup
from minirl.config.megatron import Fp8Config, MegatronConfig, MegatronDdpConfig
from minirl.config.megatron_auto import decided
from minirl.config.megatron_fit import Machine
from minirl.config.policy import PolicyConfig
from minirl.parallel import Axis

CPU = Machine(capability=None, transformer_engine=None, deep_ep=False, environ={})
GPU = Machine(capability=(9, 0), transformer_engine="2.10.0", deep_ep=False, environ={})


def automatic(machine: Machine, precision: str = "bfloat16", **megatron: Any) -> MegatronConfig:
    import msgspec

    cfg = msgspec.structs.replace(policy(Layout("", 1, megatron), "m", packed=False))
    return decided(msgspec.structs.replace(cfg, precision=precision), machine).megatron_cfg


def test_nothing_that_code_decides_stays_open() -> None:
    for machine in (CPU, GPU):
        cfg = automatic(machine)
        ddp = cfg.distributed_data_parallel_config
        chosen = [cfg.sequence_parallel, cfg.pipeline_dtype, cfg.moe_permute_fusion]
        chosen += [cfg.apply_rope_fusion, cfg.bias_activation_fusion]
        chosen += [cfg.gradient_accumulation_fusion, cfg.optimizer.use_precision_aware_optimizer]
        chosen += [ddp.grad_reduce_in_fp32, ddp.overlap_grad_reduce, ddp.overlap_param_gather]
        assert None not in chosen


def test_what_is_set_stays() -> None:
    ddp = MegatronDdpConfig(overlap_grad_reduce=False)
    cfg = automatic(
        GPU, tensor_model_parallel_size=2, sequence_parallel=False,
        apply_rope_fusion=False, distributed_data_parallel_config=ddp,
    )  # fmt: skip
    assert cfg.sequence_parallel is False
    assert cfg.apply_rope_fusion is False
    assert cfg.distributed_data_parallel_config.overlap_grad_reduce is False
    # Gathering early needs gradients that are reduced early.
    assert cfg.distributed_data_parallel_config.overlap_param_gather is False


def test_sequence_parallelism_comes_with_tensor_parallelism() -> None:
    assert automatic(CPU, tensor_model_parallel_size=2).sequence_parallel is True
    assert automatic(CPU).sequence_parallel is False


def test_kernels_and_overlap_come_with_the_gpu_and_transformer_engine() -> None:
    for machine, expected in ((CPU, False), (GPU, True)):
        cfg = automatic(machine)
        ddp = cfg.distributed_data_parallel_config
        assert cfg.apply_rope_fusion is expected
        assert cfg.bias_activation_fusion is expected
        assert cfg.optimizer.use_precision_aware_optimizer is expected
        assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (expected, expected)
    assert automatic(GPU).use_fused_linear_logprobs is True
    assert automatic(GPU, defer_fp32_logits=True).use_fused_linear_logprobs is False
    assert automatic(GPU, "float32").optimizer.use_precision_aware_optimizer is False


def test_to_decide_twice_changes_nothing() -> None:
    cfg = decided(policy(Layout("", 1, {}), "m", packed=False), GPU)
    assert decided(cfg, CPU) == cfg


FIRST_SIGHT = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "transformer_engine"):
            print("SEEN", name, os.environ.get("MINIRL_TEST"), flush=True)
        return None
sys.meta_path.insert(0, Watch())
from minirl.backends.megatron import setup as megatron_setup
from minirl.config.megatron import MegatronConfig
print("BEFORE", "megatron.core" in sys.modules)
megatron_setup.prepare_process(MegatronConfig(env_vars={"MINIRL_TEST": "set"}))
"""


@pytest.mark.slow
def test_env_vars_are_set_before_megatron_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_SIGHT], capture_output=True, text=True, check=True, timeout=900
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "BEFORE False"
    seen = [line.split() for line in lines[1:] if line.startswith("SEEN megatron")]
    assert seen
    assert {words[2] for words in seen} == {"set"}


# ---- the provider -------------------------------------------------------------------------------


def describe(axis: Axis, cfg: PolicyConfig, machine: Machine) -> dict[str, Any]:
    """The finished provider's plain fields."""
    cfg = decided(cfg, machine)
    megatron_setup.prepare_process(cfg.megatron_cfg)
    provider = megatron_setup.describe(cfg).provider
    values = {f.name: getattr(provider, f.name) for f in fields(provider)}
    plain = bool | int | float | str | torch.dtype | None
    return {name: value for name, value in values.items() if isinstance(value, plain)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("setup"), "qwen3", num_hidden_layers=4)


@pytest.mark.slow
def test_what_megatron_itself_refuses_is_told_by_the_section(model: str) -> None:
    overrides = {"cpu_offloading": True, "cpu_offloading_num_layers": 99}
    cfg = policy(Layout("", 1, {"model_overrides": overrides}), model, packed=False)
    with pytest.raises(RankError, match=r"policy\.megatron_cfg: Megatron refuses these settings"):
        run_ranks(1, describe, cfg, CPU)


@pytest.mark.slow
def test_what_the_engine_reads_too_is_not_overridden_for_training_alone(model: str) -> None:
    overrides = {"rotary_base": 20000}
    cfg = policy(Layout("", 1, {"model_overrides": overrides}), model, packed=False)
    with pytest.raises(RankError, match=r"set policy\.hf_config_overrides\.rope_theta instead"):
        run_ranks(1, describe, cfg, CPU)


@pytest.mark.slow
def test_first_class_keys_and_overrides_reach_the_provider(model: str) -> None:
    megatron = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "activation_checkpointing": True,
        "model_overrides": {"init_method_std": 0.5, "masked_softmax_fusion": False},
    }
    [found] = run_ranks(1, describe, policy(Layout("", 1, megatron), model, packed=False), CPU)
    expected = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "init_method_std": 0.5,
        "masked_softmax_fusion": False,
        "calculate_per_token_loss": True,
        "params_dtype": torch.float32,
        "num_layers": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    assert {name: found[name] for name in expected} == expected


def gpu_fields() -> set[str]:
    """Every provider field that the settings of a GPU can set."""
    offload = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    cfg = MegatronConfig(fp8_cfg=Fp8Config(enabled=True), activation_checkpointing=True,
                         recompute_granularity="selective", recompute_modules=["core_attn"],
                         **offload, **graphs)  # fmt: skip
    found = [megatron_setup.kernel_fields(cfg), megatron_setup.offload_fields(cfg)]
    found += [megatron_setup.moe_fields(cfg), megatron_setup.recompute_fields(cfg)]
    return {name for each in found for name in each} | set(megatron_setup.NO_GPU)


@pytest.mark.slow
def test_every_field_that_is_set_exists(model: str) -> None:
    cfg = policy(Layout("", 1, {}), model, packed=False)
    [found] = run_ranks(1, all_fields, cfg)
    assert gpu_fields() <= found


def all_fields(axis: Axis, cfg: PolicyConfig) -> set[str]:
    cfg = decided(cfg, CPU)
    megatron_setup.prepare_process(cfg.megatron_cfg)
    return {f.name for f in fields(megatron_setup.describe(cfg).provider)}
