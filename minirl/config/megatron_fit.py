"""Whether `policy.megatron_cfg` suits the model, and this machine.

Both checks run before anything expensive starts. `check_model_rules` reads the model's Hugging
Face config; a fact that it does not state is left to Megatron Core's own checks. `check_machine`
refuses only what the hardware or the installed packages cannot do, and says which.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import structs

from minirl.config.loader import refuse
from minirl.config.megatron import KEY, MegatronConfig
from minirl.config.megatron_rules import GRAPHS_IN_MOE, OFFLOAD_IN_MOE, RECOMPUTE_IN_MOE, listed

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What a mixture's number of experts is called, by family."""
MOE_KEYS = (
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("freeze_moe_router", "moe_router_dtype", "moe_router_load_balancing_type"),
    *("moe_router_bias_update_rate", "moe_per_layer_logging", "moe_token_dispatcher_type"),
    *("moe_enable_deepep", "moe_shared_expert_overlap"),
)
"""What only mixtures read. `moe_permute_fusion` is not among them: it is decided for any model."""
STAGE_LAYOUTS = (
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)
"""Provider fields that say otherwise how layers are dealt to stages."""
FUSIONS = (
    *("moe_permute_fusion", "apply_rope_fusion"),
    *("bias_activation_fusion", "gradient_accumulation_fusion"),
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Rotary positions that Megatron can compute as transformers does."""
UNREAD_ROPE = (("mistral", "yarn"),)
"""Of them, what Bridge cannot read for a family."""
UNREAD: dict[str, tuple[tuple[str, ...], tuple[Any, ...], str]] = {
    "attention_bias": (
        ("llama", "qwen3", "qwen3_moe"),
        (False,),
        "a bias after the attention, which Core has only together with biases in every layer",
    ),
    "mlp_bias": (
        ("llama",),
        (False,),
        "biases in the MLP, which Core has only together with biases after the attention",
    ),
    "decoder_sparse_step": (("qwen3_moe",), (1,), "layers without experts, which Bridge drops"),
    "mlp_only_layers": (("qwen3_moe",), ([],), "layers without experts, which Bridge drops"),
}
"""Fields of configs by families that Bridge converts without them, with the values that say
nothing and what others mean."""
FP8_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""The oldest GPU that a recipe runs on, as CUDA's compute capability."""


class Machine(NamedTuple):
    """What this machine has."""

    capability: tuple[int, int] | None
    """CUDA's compute capability; None without a GPU."""
    transformer_engine: str | None
    """Its version."""
    deep_ep: bool
    environ: Mapping[str, str]


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import torch

    try:
        engine = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        engine = None
    return Machine(
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        transformer_engine=engine,
        deep_ep=importlib.util.find_spec("deep_ep") is not None,
        environ=os.environ,
    )


# ---- the model ----------------------------------------------------------------------------------


def text_facts(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a Hugging Face config that describes the decoder."""
    return hf_config.get("text_config") or hf_config


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """The experts of a mixture's layer; 0 of a dense model."""
    model = text_facts(hf_config)
    return next((int(model[name]) for name in EXPERTS if model.get(name)), 0)


def check_model_rules(cfg: MegatronConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuses sizes that do not divide the model, and settings of mixtures for a dense model.

    Also models of which Megatron would make another.

    Raises:
        ValueError: names the full key, its value, the model's number and the remedy.
    """
    model, experts = text_facts(hf_config), num_experts(hf_config)
    _check_read(model)
    _check_stages(cfg, model)
    _check_tensor_parallel(cfg, model, moe=experts > 0)
    if not experts:
        _check_dense(cfg)
    else:
        _check_experts(cfg, model, experts)


def _check_read(model: Mapping[str, Any]) -> None:
    rope: Mapping[str, Any] = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    family = model.get("model_type")
    known = [x for x in ROPE_TYPES if (family, x) not in UNREAD_ROPE]
    refuse(
        kind not in known,
        f"policy.model_name: the config's rope_parameters.rope_type is {kind!r}, which Megatron "
        f"does not compute for {family!r}: it has {', '.join(known)}; use "
        "policy.dtensor_cfg.enabled=true",
    )
    for name, (families, neutral, meaning) in UNREAD.items():
        refuse(
            family in families and model.get(name, neutral[0]) not in neutral,
            f"policy.model_name: the config's {name} is {model.get(name)!r}: {meaning}; use "
            "policy.dtensor_cfg.enabled=true",
        )


def _check_stages(cfg: MegatronConfig, model: Mapping[str, Any]) -> None:
    layers = model.get("num_hidden_layers")
    if layers is None or any(cfg.model_overrides.get(name) for name in STAGE_LAYOUTS):
        return
    stages, chunks = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size or 1
    ends = (cfg.num_layers_in_first_pipeline_stage, cfg.num_layers_in_last_pipeline_stage)
    given = [n for n in ends if n is not None]
    rest, others = layers - sum(given), stages - len(given)
    fits = rest == 0 if others == 0 else rest > 0 and rest % (others * chunks) == 0
    stated = (
        f"{KEY}num_layers_in_first_pipeline_stage {ends[0]}, "
        f"{KEY}num_layers_in_last_pipeline_stage {ends[1]}, "
        if given
        else ""
    )
    refuse(
        not fits,
        f"{KEY}pipeline_model_parallel_size is {stages}, {stated}"
        f"{KEY}virtual_pipeline_model_parallel_size "
        f"{cfg.virtual_pipeline_model_parallel_size}: that leaves {rest} of the model's {layers} "
        f"layers to {others} stages x {chunks} chunks, which must be equally many and at least "
        "one each; choose sizes that divide, or give the first or last stage fewer layers",
    )


def _check_tensor_parallel(cfg: MegatronConfig, model: Mapping[str, Any], *, moe: bool) -> None:
    size = cfg.tensor_model_parallel_size
    names = ("num_attention_heads",) if moe else ("num_attention_heads", "intermediate_size")
    for name in names:
        number = model.get(name)
        fit = [n for n in range(1, 65) if number is not None and number % n == 0]
        refuse(
            number is not None and number % size != 0,
            f"{KEY}tensor_model_parallel_size is {size}, which does not divide the model's {name} "
            f"{number}; use a divisor: {fit}",
        )
    groups = model.get("num_key_value_heads")
    refuse(
        groups is not None and groups % size != 0 and size % groups != 0,
        f"{KEY}tensor_model_parallel_size is {size}, neither a multiple nor a divisor of the "
        f"model's num_key_value_heads {groups}; use one",
    )


def _check_dense(cfg: MegatronConfig) -> None:
    given, defaults = structs.asdict(cfg), structs.asdict(MegatronConfig())
    for name in MOE_KEYS:
        refuse(
            given[name] != defaults[name],
            f"{KEY}{name} is {given[name]!r}, but the model is dense: it has no experts; remove it",
        )
    for name, of_moe in (
        ("offload_modules", OFFLOAD_IN_MOE),
        ("recompute_modules", RECOMPUTE_IN_MOE),
        ("cuda_graph_modules", GRAPHS_IN_MOE),
    ):
        wrong = of_moe & set(given[name] or [])
        refuse(
            bool(wrong),
            f"{KEY}{name} holds {listed(wrong)}, but the model is dense: it has no experts; "
            "drop them",
        )


def _check_experts(cfg: MegatronConfig, model: Mapping[str, Any], experts: int) -> None:
    size, tensor = cfg.expert_model_parallel_size, cfg.expert_tensor_parallel_size
    refuse(
        experts % size != 0,
        f"{KEY}expert_model_parallel_size is {size}, which does not divide the model's {experts} "
        "experts; use a divisor",
    )
    width = model.get("moe_intermediate_size") or model.get("intermediate_size")
    refuse(
        width is not None and width % tensor != 0,
        f"{KEY}expert_tensor_parallel_size is {tensor}, which does not divide the width of an "
        f"expert, {width}; use a divisor",
    )
    refuse(
        cfg.tensor_model_parallel_size > 1 and cfg.sequence_parallel is False,
        f"{KEY}sequence_parallel is False, but a mixture of experts with "
        f"{KEY}tensor_model_parallel_size > 1 cannot be trained without; set it to null",
    )


# ---- the machine --------------------------------------------------------------------------------


def check_machine(cfg: MegatronConfig, machine: Machine) -> None:
    """Refuses what this machine cannot do.

    Raises:
        ValueError: names the full key, its value and what is missing.
    """
    for key, needs in _needs_gpu(cfg).items():
        refuse(
            machine.capability is None,
            f"{KEY}{key}, and this machine has no CUDA GPU: {needs}; remove it",
        )
    for key, needs in _needs_transformer_engine(cfg).items():
        refuse(
            machine.transformer_engine is None,
            f"{KEY}{key}, and Transformer Engine is not installed: {needs}; install it, or remove "
            "this",
        )
    refuse(
        (cfg.moe_enable_deepep or cfg.moe_token_dispatcher_type == "flex") and not machine.deep_ep,
        f"{KEY}moe_token_dispatcher_type is {cfg.moe_token_dispatcher_type}, and deep_ep is not "
        "installed; install it, or use alltoall and no moe_enable_deepep",
    )
    _check_offload_variable(cfg, machine)
    oldest = FP8_CAPABILITY[cfg.fp8_cfg.fp8_recipe]
    refuse(
        cfg.fp8_cfg.enabled and machine.capability is not None and machine.capability < oldest,
        f"{KEY}fp8_cfg.fp8_recipe is {cfg.fp8_cfg.fp8_recipe}, which needs a GPU of compute "
        f"capability {oldest[0]}.{oldest[1]} or later; this one has {machine.capability}",
    )


def _needs_gpu(cfg: MegatronConfig) -> dict[str, str]:
    """Settings that need a GPU, and why."""
    offload = "HybridDeviceOptimizer moves state between a GPU and the CPU on CUDA streams"
    graphs = "CUDA graphs record kernels of a GPU"
    tensor = cfg.expert_tensor_parallel_size
    found = {
        "optimizer.optimizer_cpu_offload is True": (cfg.optimizer.optimizer_cpu_offload, offload),
        f"cuda_graph_impl is {cfg.cuda_graph_impl}": (cfg.cuda_graph_impl != "none", graphs),
        f"expert_tensor_parallel_size is {tensor}": (
            tensor > 1,
            "gloo gathers no tensors of unequal sizes",
        ),
        "moe_token_dispatcher_type is flex": (
            cfg.moe_token_dispatcher_type == "flex",
            "its kernels run on GPUs",
        ),
        "bias_activation_fusion is True": (
            cfg.bias_activation_fusion is True,
            "its kernels run on GPUs",
        ),
    }
    return {key: why for key, (on, why) in found.items() if on}


def _needs_transformer_engine(cfg: MegatronConfig) -> dict[str, str]:
    """Settings that need Transformer Engine, and why."""
    given = structs.asdict(cfg)
    optimizer = cfg.optimizer
    found = {
        "fine_grained_activation_offloading is True": (
            cfg.fine_grained_activation_offloading is True,
            "only its layers can offload",
        ),
        "fp8_cfg.enabled is True": (cfg.fp8_cfg.enabled, "only its layers compute in FP8"),
        "cuda_graph_impl is transformer_engine": (
            cfg.cuda_graph_impl == "transformer_engine",
            "it captures the graphs",
        ),
        "optimizer.use_precision_aware_optimizer is True": (
            optimizer.use_precision_aware_optimizer is True and not optimizer.optimizer_cpu_offload,
            "its FusedAdam keeps the masters",
        ),
    } | {
        f"{name} is True": (given[name] is True, "the kernel is its own")
        for name in FUSIONS
        if name != "bias_activation_fusion"
    }
    return {key: why for key, (on, why) in found.items() if on}


def _check_offload_variable(cfg: MegatronConfig, machine: Machine) -> None:
    """Transformer Engine 2.10 would offload weights too (`megatron/bridge/training/config.py`)."""
    name, version = "NVTE_CPU_OFFLOAD_V1", machine.transformer_engine or "0"
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    refuse(
        cfg.fine_grained_activation_offloading is True
        and numbers >= [2, 10]
        and {**machine.environ, **cfg.env_vars}.get(name) != "1",
        f"{KEY}fine_grained_activation_offloading is True with Transformer Engine {version}, which "
        f'then offloads weights too; set {KEY}env_vars.{name}: "1"',
    )
