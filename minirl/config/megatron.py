"""`policy.megatron_cfg`: settings of the Megatron backend, by NeMo-RL's names.

`null` stands for "automatic": code decides by the model, the precision and what is installed. The
model's precision and the clipping of gradients follow `policy.precision` and
`policy.max_grad_norm`, and are no keys here. What one file of settings can tell of its rules is in
config/megatron_rules.py and config/megatron_optim_rules.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from minirl.config.loader import Count, NonNegative, Section, refuse

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
Steps: TypeAlias = Annotated[int, Meta(ge=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
DecayStyle: TypeAlias = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
KEY = "policy.megatron_cfg."
"""What the keys of this file begin with."""
FSDP = "belongs to custom FSDP, which this backend does not use; remove it"
BY_PRECISION = "no key: the optimizer follows policy.precision, and masters are float32; remove it"


class MegatronOptimizerConfig(Section, frozen=True):
    """`policy.megatron_cfg.optimizer`: Megatron Core's own optimizers."""

    moved: ClassVar[Mapping[str, str]] = {
        "bf16": BY_PRECISION,
        "fp16": BY_PRECISION,
        "params_dtype": BY_PRECISION,
        "clip_grad": "no key: gradients are clipped to policy.max_grad_norm; set that, remove this",
    }

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: NonNegative | None = None
    """Must be set: a library's default would be far too large here."""
    min_lr: NonNegative = 0.0
    """Where a decay ends."""
    weight_decay: NonNegative = 0.01
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_eps: Annotated[float, Meta(gt=0)] = 1e-8
    sgd_momentum: Fraction = 0.9
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    use_precision_aware_optimizer: bool | None = None
    """Keep masters and moments in the optimizer of Transformer Engine; null: where there is one."""
    optimizer_cpu_offload: bool = False
    """Keep a fraction of the state, and compute its updates, on the CPU."""
    optimizer_offload_fraction: float = 0.0
    overlap_cpu_optimizer_d2h_h2d: bool = False


class MegatronSchedulerConfig(Section, frozen=True):
    """`policy.megatron_cfg.scheduler`, in steps of the algorithm, not in optimizer updates."""

    start_weight_decay: NonNegative | None = None
    end_weight_decay: NonNegative | None = None
    """null, each: `optimizer.weight_decay`."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_style: DecayStyle = "constant"
    lr_decay_iters: Count | None = None
    """When the rate has decayed to `optimizer.min_lr`, and the weight decay is at its end."""
    lr_warmup_iters: Steps = 0
    lr_warmup_init: NonNegative = 0.0
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    lr_wsd_decay_iters: Count | None = None
    """WSD: how long the decay at the end takes, and its shape."""


class MegatronDdpConfig(Section, frozen=True):
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    moved: ClassVar[Mapping[str, str]] = {
        "use_custom_fsdp": FSDP,
        "data_parallel_sharding_strategy": FSDP,
    }

    grad_reduce_in_fp32: bool | None = None
    """null: true, so that gradients of many ranks add up as they do on one."""
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    """null, each: where there is a GPU."""


class Fp8Config(Section, frozen=True):
    """`policy.megatron_cfg.fp8_cfg`."""

    enabled: bool = False
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    fp8_recipe: Literal["blockwise", "delayed", "tensorwise", "mxfp8"] = "blockwise"
    fp8_param: bool = False
    """Keep the parameters in FP8 too."""


class MegatronConfig(Section, frozen=True, kw_only=True):
    """`policy.megatron_cfg`. Nothing in it counts while `enabled` is false: recipes inherit."""

    moved: ClassVar[Mapping[str, str]] = {
        "fused_linear_logprobs_chunk_size": "the key is policy.logprob_chunk_size; set that",
    }

    enabled: bool = False
    env_vars: dict[str, str] = field(default_factory=dict[str, str])
    """Set in every rank before Megatron is imported."""
    force_reconvert_from_hf: bool = False
    """Convert the Hugging Face checkpoint again where a converted one exists."""
    model_overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of Megatron Bridge's model provider that have no key here, nested as there."""

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Annotated[int, Meta(ge=2)] | None = None
    """Model chunks of a pipeline stage. Not in NeMo-RL."""
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    expert_tensor_parallel_size: Count = 1
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    pipeline_dtype: Literal["float32", "bfloat16"] | None = None
    """Of what stages send each other; null: `policy.precision`."""
    sequence_parallel: bool | None = None
    """null: where `tensor_model_parallel_size` exceeds 1."""

    activation_checkpointing: bool = False
    recompute_granularity: Literal["full", "selective"] = "full"
    recompute_modules: list[str] | None = None

    freeze_moe_router: bool = True
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """null: the model's own."""
    moe_router_load_balancing_type: Literal[
        "none", "aux_loss", "seq_aux_loss", "global_aux_loss"
    ] = "none"
    moe_router_bias_update_rate: NonNegative = 0.0
    moe_per_layer_logging: bool = False
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    moe_enable_deepep: bool = False
    moe_shared_expert_overlap: bool = False
    moe_permute_fusion: bool | None = None
    apply_rope_fusion: bool | None = None
    bias_activation_fusion: bool | None = None
    gradient_accumulation_fusion: bool | None = None

    defer_fp32_logits: bool = False
    """Cast logits to float32 where log-probs are taken, not before."""
    use_fused_linear_logprobs: bool | None = None
    """Log-probs from hidden states, some at a time; logits never exist in full. Of no effect on a
    model that scales or caps its logits. null: unless `defer_fp32_logits` is set."""

    fine_grained_activation_offloading: bool | None = None
    """Move the inputs of `offload_modules` to the CPU until backward; null: as the model's own."""
    offload_modules: list[str] | None = None
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: list[str] = field(default_factory=list[str])
    cuda_graph_warmup_steps: Steps = 3

    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    scheduler: MegatronSchedulerConfig = MegatronSchedulerConfig()
    distributed_data_parallel_config: MegatronDdpConfig = MegatronDdpConfig()
    fp8_cfg: Fp8Config = Fp8Config()


def data_parallel_size(cfg: MegatronConfig, num_ranks: int) -> int:
    """The number of copies of the model: ranks / (tensor x pipeline x context parallel sizes).

    The experts of a mixture are laid out on their own: over the same pipeline stages, by
    `expert_model_parallel_size` and `expert_tensor_parallel_size`.

    Raises:
        ValueError: the ranks are too few or do not divide, with the sum spelled out.

    Source: `initialize_model_parallel` in megatron/core/parallel_state.py (0.19.2).
    """
    tensor, pipeline = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    context, expert = cfg.context_parallel_size, cfg.expert_model_parallel_size
    model = tensor * pipeline * context
    product = (
        f"{KEY}tensor_model_parallel_size {tensor} x {KEY}pipeline_model_parallel_size "
        f"{pipeline} x {KEY}context_parallel_size {context} = {model}"
    )
    refuse(
        num_ranks < model,
        f"{product} ranks hold one copy of the model, and there are {num_ranks}; start at least "
        f"{model} ranks or lower a size",
    )
    refuse(
        num_ranks % model != 0,
        f"{num_ranks} ranks are not a multiple of {product}; use {num_ranks // model * model} or "
        f"{(num_ranks // model + 1) * model} ranks, or other sizes",
    )
    expert_tensor = cfg.expert_tensor_parallel_size
    experts = expert_tensor * expert * pipeline
    refuse(
        num_ranks % experts != 0,
        f"{num_ranks} ranks are not a multiple of {KEY}expert_tensor_parallel_size "
        f"{expert_tensor} x {KEY}expert_model_parallel_size {expert} x "
        f"{KEY}pipeline_model_parallel_size {pipeline} = {experts}; use a multiple of both "
        f"{experts} and {model} ranks, or other sizes",
    )
    return num_ranks // model
