"""Contradictions in `policy.megatron_cfg`: each is refused by its full key, with the remedy."""

from typing import Any

import pytest
import yaml
from configs import MEGATRON, edited, load_tree, message
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.config.megatron_rules import (
    GRAPH_MODULES,
    OFFLOAD_IN_MOE,
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
)

M = "policy.megatron_cfg"

PP2 = "{pipeline_model_parallel_size: 2}"
OFFLOAD = "{fine_grained_activation_offloading: true, offload_modules: [core_attn]}"
EXPERTS = "{fine_grained_activation_offloading: true, offload_modules: [expert_fc1]}"
SELECTIVE = "{activation_checkpointing: true, recompute_granularity: selective}"
CPU = "optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}"
DECAY = "{lr_decay_style: linear, lr_decay_iters: 10}"

RULES: list[tuple[str, str, str, str]] = [
    # (settings, one more setting, the key blamed, the rule or the remedy)
    ("{}", "virtual_pipeline_model_parallel_size: 2", "", "needs {M}.pipeline_model_parallel_size"),
    *(
        ("{}", f"num_layers_in_{end}_pipeline_stage: 2", "", "needs {M}.pipeline_model_parallel_s")
        for end in ("first", "last")
    ),
    (
        "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}",
        "num_layers_in_first_pipeline_stage: 3",
        "",
        "is 3, no multiple of {M}.virtual_pipeline_model_parallel_size 2",
    ),
    ("{}", "sequence_parallel: true", "", "needs {M}.tensor_model_parallel_size > 1"),
    (PP2, "pipeline_dtype: float32", "", "in policy.precision bfloat16; set it to null"),
    ("{}", "recompute_granularity: selective", "", "without {M}.activation_checkpointing"),
    ("{activation_checkpointing: true}", "recompute_modules: [mlp]", "", "granularity: selective"),
    (SELECTIVE, "recompute_modules: []", "", "name some of core_attn, gdn_norm_out"),
    (SELECTIVE, "recompute_modules: [attn]", "", "holds attn; the names there are: core_attn"),
    (
        "{activation_checkpointing: true, recompute_granularity: selective, "
        "moe_shared_expert_overlap: true}",
        "recompute_modules: [shared_experts]",
        "",
        "excludes {M}.moe_shared_expert_overlap",
    ),
    (
        "{activation_checkpointing: true, recompute_granularity: selective, "
        "fp8_cfg: {enabled: true, fp8_recipe: delayed}}",
        "recompute_modules: [layernorm]",
        "",
        "{M}.fp8_cfg.fp8_recipe delayed excludes",
    ),
    ("{}", "offload_modules: [core_attn]", "", "without {M}.fine_grained_activation_offloading"),
    (
        "{fine_grained_activation_offloading: false}",
        "offload_modules: [core_attn]",
        "",
        "without {M}.fine_grained_activation_offloading: true",
    ),
    ("{}", "fine_grained_activation_offloading: true", "offload_modules", "a list of modules that"),
    (
        "{fine_grained_activation_offloading: true}",
        "offload_modules: []",
        "",
        "not empty, from attn_norm, attn_proj",
    ),
    (OFFLOAD, "offload_modules: [attn]", "", "holds attn; the names there are: attn_norm"),
    (OFFLOAD, "offload_modules: [attn_proj]", "", "attn_proj needs core_attn"),
    (OFFLOAD, "offload_modules: [fused_group_mlp, moe_act]", "", "excludes moe_act; drop one"),
    (
        OFFLOAD,
        "offload_modules: [fused_group_mlp]",
        "",
        "set {M}.model_overrides.use_transformer_engine_op_fuser: true",
    ),
    (
        "{activation_checkpointing: true, recompute_granularity: selective, "
        "recompute_modules: [moe], fine_grained_activation_offloading: true}",
        "offload_modules: [moe_act]",
        "",
        "but {M}.recompute_modules holds moe",
    ),
    (
        OFFLOAD,
        "model_overrides: {cpu_offloading: true}",
        "fine_grained_activation_offloading",
        "{M}.model_overrides.cpu_offloading; remove that",
    ),
    ("{}", "cuda_graph_modules: [attn]", "", "no effect with {M}.cuda_graph_impl none"),
    (
        "{cuda_graph_impl: full_iteration}",
        "cuda_graph_modules: [attn]",
        "",
        "no effect with {M}.cuda_graph_impl full_iteration",
    ),
    ("{}", "cuda_graph_warmup_steps: 4", "", "no effect with {M}.cuda_graph_impl none"),
    ("{cuda_graph_impl: local}", "cuda_graph_modules: [x]", "", "the names there are: attn, mamba"),
    ("{cuda_graph_impl: local}", "cuda_graph_modules: [moe_preprocess]", "", "needs moe_router"),
    ("{cuda_graph_impl: local}", "cuda_graph_modules: [moe, moe_router]", "", "drop one"),
    (
        "{activation_checkpointing: true}",
        "cuda_graph_impl: transformer_engine",
        "",
        "{M}.recompute_granularity full needs full_iteration",
    ),
    (OFFLOAD, "cuda_graph_impl: local", "", "not core_attn; use transformer_engine"),
    (EXPERTS, "cuda_graph_impl: local", "cuda_graph_modules", "local graphs capture whole layers"),
    (
        "{cuda_graph_impl: local, fine_grained_activation_offloading: true, "
        "offload_modules: [expert_fc1]}",
        "cuda_graph_modules: [moe]",
        "",
        "excludes {M}.fine_grained_activation_offloading",
    ),
    (
        "{cuda_graph_impl: transformer_engine, fine_grained_activation_offloading: true, "
        "offload_modules: [core_attn]}",
        "cuda_graph_warmup_steps: 0",
        "",
        "needs at least 1",
    ),
    (
        OFFLOAD,
        "cuda_graph_impl: full_iteration",
        "",
        "{M}.model_overrides.fine_grained_offloading_max_inflight_offloads; set it to 0",
    ),
    (
        "{use_fused_linear_logprobs: true}",
        "defer_fp32_logits: true",
        "",
        "no effect with {M}.use_fused_linear_logprobs",
    ),
    ("{}", "moe_token_dispatcher_type: allgather", "", "use alltoall"),
    ("{}", "moe_enable_deepep: true", "", "needs {M}.moe_token_dispatcher_type flex"),
    *(
        ("{}", f"moe_router_load_balancing_type: {kind}", "", "by a count of tokens")
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    ),
    (
        "{}",
        "model_overrides: {moe_z_loss_coeff: 1.0e-3}",
        "model_overrides.moe_z_loss_coeff",
        "would outweigh the policy's",
    ),
    ("{}", "optimizer: {min_lr: 1.0e-3}", "optimizer.min_lr", "more than {M}.optimizer.lr 1e-06"),
    (
        "{}",
        "optimizer: {optimizer_cpu_offload: true}",
        "optimizer.optimizer_offload_fraction",
        "is 0.0; {M}.optimizer.optimizer_cpu_offload needs a fraction greater than 0 and at most 1",
    ),
    (
        "{}",
        "optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.5}",
        "optimizer.optimizer_offload_fraction",
        "is 1.5;",
    ),
    (
        "{}",
        CPU.replace("}", ", use_distributed_optimizer: false}"),
        "optimizer.use_distributed_optimizer",
        "is False, and {M}.optimizer.optimizer_cpu_offload needs it; set it to true",
    ),
    (
        "{}",
        "optimizer: {overlap_cpu_optimizer_d2h_h2d: true}",
        "optimizer.overlap_cpu_optimizer_d2h_h2d",
        "no effect without {M}.optimizer.optimizer_cpu_offload",
    ),
    (
        "{}",
        "optimizer: {optimizer_offload_fraction: 0.5}",
        "optimizer.optimizer_offload_fraction",
        "no effect without {M}.optimizer.optimizer_cpu_offload",
    ),
    (
        "{}",
        "optimizer: {optimizer: sgd, use_precision_aware_optimizer: true}",
        "optimizer.use_precision_aware_optimizer",
        "needs {M}.optimizer.optimizer adam",
    ),
    (
        "{}",
        "optimizer: {use_distributed_optimizer: false, use_precision_aware_optimizer: true}",
        "optimizer.use_precision_aware_optimizer",
        "{M}.optimizer.use_distributed_optimizer: true",
    ),
    ("{}", "optimizer: {sgd_momentum: 0.8}", "optimizer.sgd_momentum", "no effect with"),
    (
        "{}",
        "optimizer: {optimizer: sgd, adam_eps: 1.0e-6}",
        "optimizer.adam_eps",
        "no effect with {M}.optimizer.optimizer sgd",
    ),
    (
        "{optimizer: {use_distributed_optimizer: false}}",
        "distributed_data_parallel_config: {overlap_param_gather: true}",
        "distributed_data_parallel_config.overlap_param_gather",
        "needs {M}.optimizer.use_distributed_optimizer: true",
    ),
    (
        "{}",
        "distributed_data_parallel_config: "
        "{overlap_param_gather: true, overlap_grad_reduce: false}",
        "distributed_data_parallel_config.overlap_param_gather",
        "needs {M}.distributed_data_parallel_config.overlap_grad_reduce",
    ),
    ("{}", "scheduler: {lr_decay_iters: 9}", "scheduler.lr_decay_iters", "lr_decay_style constant"),
    ("{}", "scheduler: {lr_decay_style: cosine}", "scheduler.lr_decay_iters", "is null"),
    (
        "{}",
        "scheduler: {weight_decay_incr_style: linear}",
        "scheduler.lr_decay_iters",
        "weight_decay_incr_style linear needs it",
    ),
    (
        "{}",
        "scheduler: {lr_decay_style: linear, lr_decay_iters: 9, lr_warmup_iters: 9}",
        "scheduler.lr_warmup_iters",
        "not less than {M}.scheduler.lr_decay_iters 9",
    ),
    ("{}", "optimizer: {min_lr: 1.0e-7}", "optimizer.min_lr", "no effect with {M}.scheduler.lr_d"),
    ("{}", "scheduler: {lr_warmup_init: 1.0e-7}", "scheduler.lr_warmup_init", "lr_warmup_iters 0"),
    (
        "{}",
        "scheduler: {lr_warmup_init: 1.0, lr_warmup_iters: 2}",
        "scheduler.lr_warmup_init",
        "more than {M}.optimizer.lr 1e-06",
    ),
    (
        "{}",
        "scheduler: {lr_decay_style: WSD, lr_decay_iters: 9}",
        "scheduler.lr_wsd_decay_iters",
        "WSD needs it",
    ),
    (
        "{}",
        "scheduler: {lr_decay_style: WSD, lr_decay_iters: 9, lr_wsd_decay_iters: 3}",
        "scheduler.lr_wsd_decay_style",
        "WSD needs it",
    ),
    ("{}", "scheduler: {lr_wsd_decay_style: linear}", "scheduler.lr_wsd_decay_style", "no other"),
    (
        "{}",
        "scheduler: {lr_decay_style: WSD, lr_decay_iters: 9, lr_wsd_decay_iters: 10, "
        "lr_wsd_decay_style: linear}",
        "scheduler.lr_wsd_decay_iters",
        "more than {M}.scheduler.lr_decay_iters 9",
    ),
    (
        "{}",
        "scheduler: {start_weight_decay: 0.5}",
        "scheduler.start_weight_decay",
        "differ from {M}.optimizer.weight_decay 0.01",
    ),
    (
        "{}",
        "scheduler: {lr_decay_iters: 9, weight_decay_incr_style: linear, start_weight_decay: 1.0}",
        "scheduler.start_weight_decay",
        "1.0 is more than end_weight_decay 0.01",
    ),
    (
        "{}",
        "model_overrides: {sequence_parallel: true}",
        "model_overrides.sequence_parallel",
        "conflicts with {M}.sequence_parallel",
    ),
    (
        "{}",
        "model_overrides: {vision: {more: {context_parallel_size: 2}}}",
        "model_overrides.vision.more.context_parallel_size",
        "conflicts with {M}.context_parallel_size",
    ),
]


def built(base: str, extra: str) -> dict[str, Any]:
    """MEGATRON with two pieces of YAML in its section."""
    one, two = yaml.safe_load(base), yaml.safe_load(extra)
    edits: dict[str, Any] = {}
    for tree in (one, two):
        for name, value in tree.items():
            inner = value.items() if name in ("optimizer", "scheduler") else ()
            edits |= {f"{M}.{name}.{key}": x for key, x in inner} or {f"{M}.{name}": value}
    return edited(MEGATRON, edits)


@pytest.mark.parametrize(
    ("base", "extra", "key", "part"), RULES, ids=[f"{rule[1]}-{i}" for i, rule in enumerate(RULES)]
)
def test_contradictions_are_refused_by_the_full_key(base, extra, key, part):
    text = message(built(base, extra)).split("run.yaml: ", 1)[1]
    assert text.split()[0] == f"{M}.{key or extra.split(':')[0]}"
    assert part.replace("{M}", M) in text


ACCEPTED = [
    *(f"{{sequence_parallel: {on}, tensor_model_parallel_size: 2}}" for on in ("true", "false")),
    "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2, "
    "num_layers_in_first_pipeline_stage: 4, pipeline_dtype: bfloat16}",
    "{pipeline_model_parallel_size: 2, pipeline_dtype: float32, "
    "model_overrides: {fp32_residual_connection: true}}",
    "{pipeline_model_parallel_size: 2, num_layers_in_last_pipeline_stage: 3}",
    "{activation_checkpointing: true, cuda_graph_impl: full_iteration}",
    f"{{cuda_graph_impl: local, {SELECTIVE[1:]}",
    "{cuda_graph_impl: local, cuda_graph_modules: [moe_router, moe_preprocess]}",
    f"{{recompute_modules: [shared_experts, layernorm], {SELECTIVE[1:]}",
    f"{{moe_shared_expert_overlap: true, recompute_modules: [mlp], {SELECTIVE[1:]}",
    *(
        f"{{fp8_cfg: {{enabled: true, fp8_recipe: {recipe}}}, recompute_modules: [{name}], "
        f"{SELECTIVE[1:]}"
        for recipe, name in (("delayed", "mlp"), ("blockwise", "layernorm"))
    ),
    "{optimizer: {use_precision_aware_optimizer: true}}",
    "{optimizer: {use_distributed_optimizer: false}}",
    "{distributed_data_parallel_config: {overlap_param_gather: true}}",
    "{distributed_data_parallel_config: {overlap_grad_reduce: false}}",
    f"{{cuda_graph_impl: transformer_engine, {OFFLOAD[1:]}",
    f"{{cuda_graph_impl: local, cuda_graph_modules: [attn], {EXPERTS[1:]}",
    f"{{cuda_graph_impl: full_iteration, {OFFLOAD[1:-1]}, "
    "model_overrides: {fine_grained_offloading_max_inflight_offloads: 0}}",
    f"{{activation_checkpointing: true, {OFFLOAD[1:]}",
    "{fine_grained_activation_offloading: true, offload_modules: [fused_group_mlp], "
    "model_overrides: {use_transformer_engine_op_fuser: true}}",
    "{fine_grained_activation_offloading: false}",
    "{moe_token_dispatcher_type: flex, moe_enable_deepep: true}",
    f"{{{CPU}}}",
    f"{{{CPU.replace('0.5', '1.0')}}}",
    "{optimizer: {optimizer: sgd, sgd_momentum: 0.0}}",
    f"{{optimizer: {{min_lr: 1.0e-7}}, scheduler: {DECAY}}}",
    "{scheduler: {lr_warmup_iters: 13, lr_warmup_init: 5.0e-7}}",
    "{scheduler: {start_weight_decay: 0.01, end_weight_decay: 0.01}}",
    "{scheduler: {start_weight_decay: 0.0, weight_decay_incr_style: cosine, lr_decay_iters: 9}}",
    "{scheduler: {lr_decay_style: WSD, lr_decay_iters: 9, lr_wsd_decay_iters: 3, "
    "lr_wsd_decay_style: minus_sqrt}}",
    "{fp8_cfg: {enabled: true, fp8: hybrid, fp8_recipe: delayed}}",
    "{model_overrides: {some: {enabled: true}}}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_is_no_contradiction_is_accepted(text):
    load_tree(built(text, "{}"))


def test_fp8_is_refused_in_float32():
    text = message(built("{fp8_cfg: {enabled: true}}", "{}"), "policy.precision=float32")
    assert f"run.yaml: {M}.fp8_cfg.enabled is True, but policy.precision is float32" in text
    load_tree(MEGATRON, "policy.precision=float32")


def test_the_rules_of_optimizer_offload_come_in_their_order():
    wrong = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": -1.0,
        "use_distributed_optimizer": False,
    }
    tree = edited(MEGATRON, {f"{M}.optimizer.{key}": value for key, value in wrong.items()})
    assert "optimizer_offload_fraction is -1.0" in message(tree)
    assert "use_distributed_optimizer is False" in message(
        tree, f"{M}.optimizer.optimizer_offload_fraction=1.0"
    )


@settings(max_examples=30)
@given(modules=st.sets(st.sampled_from(sorted(OFFLOAD_MODULES)), min_size=1))
def test_any_list_of_known_modules_is_offloaded_but_for_the_stated_pairs(modules):
    edits = {
        f"{M}.fine_grained_activation_offloading": True,
        f"{M}.offload_modules": sorted(modules),
        f"{M}.model_overrides": {"use_transformer_engine_op_fuser": True},
    }
    alone = "attn_proj" in modules and "core_attn" not in modules
    twice = "fused_group_mlp" in modules and len(modules & OFFLOAD_IN_MOE) > 1
    if alone or twice:
        message(edited(MEGATRON, edits))
    else:
        load_tree(edited(MEGATRON, edits))


def test_every_known_module_is_accepted():
    for name in RECOMPUTE_MODULES:
        load_tree(edited(built(SELECTIVE, "{}"), {f"{M}.recompute_modules": [name]}))
    for name in GRAPH_MODULES - {"moe_preprocess"}:
        load_tree(built("{cuda_graph_impl: transformer_engine}", f"cuda_graph_modules: [{name}]"))
