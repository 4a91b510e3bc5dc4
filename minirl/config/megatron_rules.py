"""What contradicts itself in `policy.megatron_cfg`: rules that the settings alone can tell.

They run when a config is loaded. Megatron Core and Bridge check again, later and without the names
of our keys; the lists of names below are Core's (0.19.2).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from minirl.config.loader import refuse
from minirl.config.megatron import KEY, MegatronConfig
from minirl.config.megatron_optim_rules import check_optimizer

OFFLOAD_IN_MOE = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
OFFLOAD_MODULES = OFFLOAD_IN_MOE | {
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
}
"""Modules whose inputs can wait on the CPU."""
RECOMPUTE_IN_MOE = frozenset({"moe_act", "moe", "shared_experts"})
RECOMPUTE_MODULES = RECOMPUTE_IN_MOE | {
    *("core_attn", "layernorm", "mla_up_proj", "mlp", "gdn_norm_out"),
}
"""Modules that can be computed again in backward."""
GRAPHS_IN_MOE = frozenset({"moe", "moe_router", "moe_preprocess"})
GRAPH_MODULES = GRAPHS_IN_MOE | {"attn", "mlp", "mamba"}
"""Modules of a layer that a CUDA graph can capture."""


def check_rules(cfg: MegatronConfig, precision: str) -> None:
    """Refuses contradictions, and settings without an effect, that `cfg` alone shows.

    Raises:
        ValueError: names the full key, its value, the rule and the remedy.
    """
    _check_layout(cfg, precision)
    _check_recompute(cfg)
    _check_offload(cfg)
    _check_graphs(cfg)
    _check_logits(cfg)
    _check_moe(cfg)
    check_optimizer(cfg)
    check_overrides(cfg.model_overrides, MegatronConfig.__struct_fields__)
    refuse(
        cfg.fp8_cfg.enabled and precision == "float32",
        f"{KEY}fp8_cfg.enabled is True, but policy.precision is float32; FP8 needs bfloat16",
    )


def _check_layout(cfg: MegatronConfig, precision: str) -> None:
    stages, chunks = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size
    first, last = cfg.num_layers_in_first_pipeline_stage, cfg.num_layers_in_last_pipeline_stage
    for key, value in (
        ("virtual_pipeline_model_parallel_size", chunks),
        ("num_layers_in_first_pipeline_stage", first),
        ("num_layers_in_last_pipeline_stage", last),
    ):
        refuse(
            value is not None and stages == 1,
            f"{KEY}{key} is {value}, which needs {KEY}pipeline_model_parallel_size > 1 (is 1); "
            "raise that or remove this",
        )
        refuse(
            value is not None and chunks is not None and value % chunks != 0,
            f"{KEY}{key} is {value}, no multiple of {KEY}virtual_pipeline_model_parallel_size "
            f"{chunks}: a stage holds that many chunks of equal size; change one",
        )
    refuse(
        cfg.sequence_parallel is True and cfg.tensor_model_parallel_size == 1,
        f"{KEY}sequence_parallel is True, which needs {KEY}tensor_model_parallel_size > 1 (is 1); "
        "raise that, or set this to null",
    )
    refuse(
        cfg.pipeline_dtype not in (None, precision)
        and not cfg.model_overrides.get("fp32_residual_connection", False),
        f"{KEY}pipeline_dtype is {cfg.pipeline_dtype}, but stages send what they compute, in "
        f"policy.precision {precision}; set it to null",
    )


def _check_recompute(cfg: MegatronConfig) -> None:
    granularity, modules = cfg.recompute_granularity, cfg.recompute_modules
    refuse(
        not cfg.activation_checkpointing and granularity != "full",
        f"{KEY}recompute_granularity is {granularity}, which has no effect without "
        f"{KEY}activation_checkpointing; set that to true or remove this",
    )
    if modules is None:
        return
    refuse(
        granularity != "selective",
        f"{KEY}recompute_modules is {modules}, which has no effect without "
        f"{KEY}activation_checkpointing: true and {KEY}recompute_granularity: selective",
    )
    refuse(
        not modules,
        f"{KEY}recompute_modules is [], so {KEY}activation_checkpointing has no effect; name some "
        f"of {listed(RECOMPUTE_MODULES)}, or null for core_attn",
    )
    _check_names("recompute_modules", modules, RECOMPUTE_MODULES)
    refuse(
        cfg.moe_shared_expert_overlap and "shared_experts" in modules,
        f"{KEY}recompute_modules holds shared_experts, which excludes "
        f"{KEY}moe_shared_expert_overlap; drop one",
    )
    early = sorted({"moe_act", "layernorm"} & set(modules))
    refuse(
        cfg.fp8_cfg.enabled and cfg.fp8_cfg.fp8_recipe == "delayed" and bool(early),
        f"{KEY}recompute_modules holds {listed(early)}, which {KEY}fp8_cfg.fp8_recipe delayed "
        "excludes; drop them or use another recipe",
    )


def _check_offload(cfg: MegatronConfig) -> None:
    on, modules = cfg.fine_grained_activation_offloading, cfg.offload_modules
    refuse(
        on is not True and modules is not None,
        f"{KEY}offload_modules is {modules}, which has no effect without "
        f"{KEY}fine_grained_activation_offloading: true",
    )
    refuse(
        on is True and not modules,
        f"{KEY}offload_modules is {modules}, and {KEY}fine_grained_activation_offloading needs a "
        f"list of modules that is not empty, from {listed(OFFLOAD_MODULES)}",
    )
    if not on or not modules:
        return
    _check_names("offload_modules", modules, OFFLOAD_MODULES)
    refuse(
        "attn_proj" in modules and "core_attn" not in modules,
        f"{KEY}offload_modules is {modules}: attn_proj needs core_attn, whose output it reads; "
        "add core_attn",
    )
    fused, partial = "fused_group_mlp" in modules, sorted({"expert_fc1", "moe_act"} & set(modules))
    refuse(
        fused and bool(partial),
        f"{KEY}offload_modules is {modules}: fused_group_mlp is the whole of the experts and "
        f"excludes {listed(partial)}; drop one",
    )
    refuse(
        fused and cfg.model_overrides.get("use_transformer_engine_op_fuser") is not True,
        f"{KEY}offload_modules is {modules}: fused_group_mlp needs the op fuser; set "
        f"{KEY}model_overrides.use_transformer_engine_op_fuser: true",
    )
    within = sorted(OFFLOAD_IN_MOE & set(modules))
    refuse(
        bool(within) and "moe" in (cfg.recompute_modules or []),
        f"{KEY}offload_modules holds {listed(within)}, but {KEY}recompute_modules holds moe, "
        "which computes them again; drop one of the two",
    )
    refuse(
        cfg.model_overrides.get("cpu_offloading", False) is True,
        f"{KEY}fine_grained_activation_offloading is True, which excludes the offloading of "
        f"layers, {KEY}model_overrides.cpu_offloading; remove that",
    )


def _check_graphs(cfg: MegatronConfig) -> None:
    kind, modules, warmup = cfg.cuda_graph_impl, cfg.cuda_graph_modules, cfg.cuda_graph_warmup_steps
    refuse(
        kind in ("none", "full_iteration") and bool(modules),
        f"{KEY}cuda_graph_modules is {modules}, which has no effect with {KEY}cuda_graph_impl "
        f"{kind}; remove it, or use local or transformer_engine",
    )
    refuse(
        kind == "none" and warmup != 3,
        f"{KEY}cuda_graph_warmup_steps is {warmup}, which has no effect with "
        f"{KEY}cuda_graph_impl none; remove it",
    )
    if kind == "none":
        return
    _check_names("cuda_graph_modules", modules, GRAPH_MODULES)
    refuse(
        "moe_router" not in modules and "moe_preprocess" in modules,
        f"{KEY}cuda_graph_modules is {modules}: moe_preprocess needs moe_router; add it",
    )
    refuse(
        {"moe", "moe_router"} <= set(modules),
        f"{KEY}cuda_graph_modules is {modules}: moe holds moe_router; drop one",
    )
    refuse(
        cfg.activation_checkpointing
        and cfg.recompute_granularity == "full"
        and kind != "full_iteration",
        f"{KEY}cuda_graph_impl is {kind}, but {KEY}recompute_granularity full needs full_iteration "
        "graphs; use selective, or no graphs",
    )
    if cfg.fine_grained_activation_offloading:
        _check_graphs_with_offload(cfg)


def _check_graphs_with_offload(cfg: MegatronConfig) -> None:
    kind, modules = cfg.cuda_graph_impl, cfg.cuda_graph_modules
    outside = sorted(set(cfg.offload_modules or []) - OFFLOAD_IN_MOE)
    refuse(
        kind == "local" and bool(outside),
        f"{KEY}cuda_graph_impl is local, with which {KEY}offload_modules may hold "
        f"{listed(OFFLOAD_IN_MOE)} only, not {listed(outside)}; use transformer_engine",
    )
    refuse(
        kind == "local" and not modules,
        f"{KEY}cuda_graph_modules is [], so local graphs capture whole layers, which excludes "
        f"{KEY}fine_grained_activation_offloading; name modules, for example [attn]",
    )
    refuse(
        "moe" in modules,
        f"{KEY}cuda_graph_modules holds moe, which excludes "
        f"{KEY}fine_grained_activation_offloading; drop it",
    )
    refuse(
        cfg.cuda_graph_warmup_steps == 0,
        f"{KEY}cuda_graph_warmup_steps is 0, and {KEY}fine_grained_activation_offloading needs at "
        "least 1",
    )
    name = "fine_grained_offloading_max_inflight_offloads"
    refuse(
        kind == "full_iteration" and name not in cfg.model_overrides,
        f"{KEY}cuda_graph_impl is full_iteration, with which "
        f"{KEY}fine_grained_activation_offloading needs {KEY}model_overrides.{name}; set it to 0 "
        "or more",
    )


def _check_logits(cfg: MegatronConfig) -> None:
    refuse(
        cfg.defer_fp32_logits and cfg.use_fused_linear_logprobs is True,
        f"{KEY}defer_fp32_logits is True, which has no effect with {KEY}use_fused_linear_logprobs: "
        "there are no logits; drop one",
    )


def _check_moe(cfg: MegatronConfig) -> None:
    dispatcher = cfg.moe_token_dispatcher_type
    refuse(
        dispatcher == "allgather",
        f"{KEY}moe_token_dispatcher_type is allgather, which needs micro-batches of one length; "
        "here a micro-batch is as long as its longest row: use alltoall",
    )
    refuse(
        cfg.moe_enable_deepep and dispatcher != "flex",
        f"{KEY}moe_enable_deepep is True, which needs {KEY}moe_token_dispatcher_type flex (is "
        f"{dispatcher})",
    )
    kind, weight = cfg.moe_router_load_balancing_type, cfg.model_overrides.get("moe_z_loss_coeff")
    for key, wrong in (
        (f"moe_router_load_balancing_type is {kind}", kind != "none"),
        (f"model_overrides.moe_z_loss_coeff is {weight}", bool(weight)),
    ):
        refuse(
            wrong,
            # `attach_and_log_load_balancing_loss` in megatron/core/transformer/moe/router.py.
            f"{KEY}{key}: Core multiplies the gradient of an auxiliary loss by a count of tokens, "
            "to be divided by one later; here losses are divided before they are summed, and it "
            "would outweigh the policy's: remove it",
        )


def check_overrides(overrides: Mapping[str, Any], first_class: Collection[str]) -> None:
    """Refuses overrides of what `policy.megatron_cfg` has a key for, at any depth.

    Raises:
        ValueError: names both keys.
    """
    for key, name in _names(overrides, "model_overrides"):
        refuse(
            # Many a nested config has an `enabled` of its own.
            name in first_class and name != "enabled",
            f"{KEY}{key} conflicts with {KEY}{name}; set the latter instead",
        )


def _names(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """(dotted key, its last name) of everything in a tree."""
    for name, value in tree.items():
        yield f"{path}.{name}", name
        if isinstance(value, dict):
            yield from _names(cast("dict[str, Any]", value), f"{path}.{name}")


def _check_names(key: str, given: Iterable[str], known: Iterable[str]) -> None:
    wrong = sorted(set(given) - set(known))
    refuse(bool(wrong), f"{KEY}{key} holds {listed(wrong)}; the names there are: {listed(known)}")


def listed(names: Iterable[str]) -> str:
    """The names, sorted, for a message."""
    return ", ".join(sorted(names))
