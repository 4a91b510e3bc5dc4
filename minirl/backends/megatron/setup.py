"""Builds what the Megatron backend trains: process groups, provider, model chunks, optimizer.

A *provider* is Megatron Bridge's description of a model: Core's configuration, filled in from the
Hugging Face config. Order of what is said about a field: the model's own, `model_overrides`, the
first-class keys of `policy.megatron_cfg`, of which none is open any more (`megatron_auto.decided`).
The finished provider is what checkpoints record.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, NamedTuple, TypeAlias

import torch

from minirl.backends.megatron import cpu as megatron_cpu
from minirl.backends.megatron.bridge import (
    core,
    has_transformer_engine,
    models_own_fields,
    open_bridge,
)
from minirl.backends.megatron.fields import Positions, positions_of, window_fields
from minirl.backends.megatron.overrides import merge_overrides, refuse_decided, refuse_models_own
from minirl.config.megatron import MegatronConfig
from minirl.config.policy import PolicyConfig
from minirl.hf import model_facts
from minirl.rng import Key

Chunk: TypeAlias = Any
"""A part of a model: Core's DistributedDataParallel around a GPTModel, none of them typed."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTER = "mlp.router"
"""What the parameters of a mixture's router have in their names."""
NO_GPU = {
    name: False
    for name in (
        *("persist_layer_norm", "gradient_accumulation_fusion", "bias_dropout_fusion"),
        *("masked_softmax_fusion", "apply_rope_fusion", "bias_activation_fusion"),
        *("cross_entropy_loss_fusion", "moe_permute_fusion", "moe_grouped_gemm"),
    )
}
"""Fields of a provider that choose kernels for GPUs."""


class Described(NamedTuple):
    """A model before it is built."""

    bridge: Any
    """Bridge's converter between Hugging Face and Core."""
    provider: Any
    positions: Positions


@dataclass(frozen=True, slots=True)
class Built:
    """A model in parts, on this rank, and what trains it."""

    bridge: Any
    provider: Any
    chunks: list[Chunk]
    optimizer: Any
    schedule: Any


def prepare_process(cfg: MegatronConfig) -> None:
    """Sets `env_vars`, then makes Megatron importable here; before anything imports it."""
    os.environ.update(cfg.env_vars)
    # Core and Bridge report every parameter, kernel and default, at levels their imports turn on.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # Core's
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # too
    with warnings.catch_warnings():
        # What is missing without a GPU (Transformer Engine, apex ...) is told by our own checks.
        warnings.simplefilter("ignore")
        core("models.gpt.gpt_layer_specs")
        core("optimizer")
        megatron_cpu.install()


def open_groups(cfg: MegatronConfig, key: Key) -> None:
    """Core's process groups for the layout of `cfg`, in place of any it had, and its seeds.

    Collective: every launched rank calls this, after the default group exists.
    """
    parallel_state = core("parallel_state")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cfg.tensor_model_parallel_size,
        pipeline_model_parallel_size=cfg.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=cfg.virtual_pipeline_model_parallel_size,
        context_parallel_size=cfg.context_parallel_size,
        expert_model_parallel_size=cfg.expert_model_parallel_size,
        expert_tensor_parallel_size=cfg.expert_tensor_parallel_size,
        create_gloo_process_groups=not torch.cuda.is_available(),
    )
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(
        int(key) % 2**31, force_reset_rng=True
    )


def describe(cfg: PolicyConfig) -> Described:
    """The provider of `cfg.model_name` with everything that `cfg` says about it, finalised.

    Raises:
        ValueError: Bridge does not know the model, `model_overrides` do not fit its provider, or
            its own checks refuse the result.
    """
    megatron = cfg.megatron_cfg
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Bridge's own deprecated calls
        bridge = open_bridge(cfg.model_name, model_facts(cfg.model_name)["model_type"])
        provider = _provider_of(bridge, cfg.model_name)
    config = bridge.hf_pretrained.config
    positions = positions_of(config, cfg.generation.vllm_cfg.max_model_len, provider)
    own = positions.fields | window_fields(config, provider)
    refuse_models_own(megatron.model_overrides, provider, models_own_fields())
    provider = merge_overrides(provider, megatron.model_overrides, MegatronConfig.__struct_fields__)
    facts = (
        provider_fields(cfg)
        | (moe_fields(megatron) if provider.num_moe_experts else {})
        | (NO_GPU if not torch.cuda.is_available() else {})
        | kernel_fields(megatron)
        | own
    )
    refuse_decided(megatron.model_overrides, facts)
    # Not setattr, which would take a name that a newer Core has dropped.
    provider = replace(provider, **facts)
    if not has_transformer_engine():
        module: Any = importlib.import_module("megatron.bridge.models.gpt_provider")
        provider.transformer_layer_spec = module.local_layer_spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            provider.finalize()
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"policy.megatron_cfg: Megatron refuses these settings for {cfg.model_name!r}: "
                f"{error}"
            ) from error
    return Described(bridge, provider, positions)


def _provider_of(bridge: Any, name: str) -> Any:
    try:
        return bridge.to_megatron_provider(load_weights=False)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"policy.model_name: Megatron Bridge cannot read the config of {name!r}: "
            f"{type(error).__name__}: {error}; use policy.dtensor_cfg.enabled=true"
        ) from error


def provider_fields(cfg: PolicyConfig) -> dict[str, Any]:
    """What a provider must say for `cfg`, whose automatic settings are decided already."""
    megatron, dtype = cfg.megatron_cfg, DTYPES[cfg.precision]
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    virtual = megatron.virtual_pipeline_model_parallel_size
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        "sequence_parallel": megatron.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": DTYPES[str(megatron.pipeline_dtype)],
        "bf16": cfg.precision == "bfloat16",
        "fp16": False,
        "seq_length": cfg.max_total_sequence_length,
        # Micro-batches are as long as their longest row. Interleaved stages get equal ones, and
        # send one way at a time: two stages that exchange in both directions at once, batched,
        # would take each other's activations for gradients.
        "variable_seq_lengths": virtual is None,
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
        # Losses are already divided by the counts of the global batch: gradients only add up.
        "calculate_per_token_loss": True,
        "mtp_num_layers": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The vocabulary is filled up so that it divides, as no model's own size always does.
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "cuda_graph_impl": megatron.cuda_graph_impl,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
    }
    return fields | recompute_fields(megatron) | offload_fields(megatron)


def recompute_fields(cfg: MegatronConfig) -> dict[str, Any]:
    """Activation checkpointing; "full" recomputes each layer on its own."""
    if not cfg.activation_checkpointing:
        return {
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
        }
    full = cfg.recompute_granularity == "full"
    fields: dict[str, Any] = {
        "recompute_granularity": cfg.recompute_granularity,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
    }
    if cfg.recompute_modules is not None:
        fields["recompute_modules"] = cfg.recompute_modules
    return fields


def offload_fields(cfg: MegatronConfig) -> dict[str, Any]:
    """Fine-grained activation offload; `null` leaves what the provider says."""
    match cfg.fine_grained_activation_offloading:
        case None:
            return {}
        case False:
            return {"fine_grained_activation_offloading": False, "offload_modules": []}
        case True:
            return {
                "fine_grained_activation_offloading": True,
                "offload_modules": cfg.offload_modules,
            }


def kernel_fields(cfg: MegatronConfig) -> dict[str, Any]:
    """Fused kernels, what CUDA graphs capture, and FP8."""
    fields: dict[str, Any] = {
        "apply_rope_fusion": cfg.apply_rope_fusion,
        "bias_activation_fusion": cfg.bias_activation_fusion,
        "gradient_accumulation_fusion": cfg.gradient_accumulation_fusion,
    }
    if cfg.cuda_graph_impl != "none":
        fields |= {
            "cuda_graph_modules": cfg.cuda_graph_modules,
            "cuda_graph_warmup_steps": cfg.cuda_graph_warmup_steps,
            "use_te_rng_tracker": True,
        }
    if cfg.fp8_cfg.enabled:
        fields |= {
            "fp8": cfg.fp8_cfg.fp8,
            "fp8_recipe": cfg.fp8_cfg.fp8_recipe,
            "fp8_param": cfg.fp8_cfg.fp8_param,
        }
    return fields


def moe_fields(cfg: MegatronConfig) -> dict[str, Any]:
    """Mixtures of experts: without auxiliary losses, which are refused."""
    fields: dict[str, Any] = {
        "moe_router_load_balancing_type": cfg.moe_router_load_balancing_type,
        "moe_router_bias_update_rate": cfg.moe_router_bias_update_rate,
        "moe_enable_deepep": cfg.moe_enable_deepep,
        "moe_shared_expert_overlap": cfg.moe_shared_expert_overlap,
        "moe_permute_fusion": cfg.moe_permute_fusion,
    }
    fields |= {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    if cfg.moe_router_dtype is not None:
        fields["moe_router_dtype"] = cfg.moe_router_dtype
    return fields


def build(cfg: PolicyConfig, described: Described) -> Built:
    """Model chunks with uninitialised weights, optimizer and schedule; weights come afterwards.

    Collective: every launched rank calls this, after `open_groups`.
    """
    chunks = build_chunks(cfg, described)
    optimizer = build_optimizer(cfg, chunks)
    return Built(
        described.bridge, described.provider, chunks, optimizer, build_schedule(cfg, optimizer)
    )


def build_chunks(cfg: PolicyConfig, described: Described, *, trained: bool = True) -> list[Chunk]:
    """The chunks of this pipeline stage; `trained` wraps them for gradients."""
    provider = described.provider
    groups = core("parallel_state")
    mark = core("tensor_parallel").set_defaults_if_not_set_tensor_model_parallel_attributes
    half = core("transformer.module").Float16Module
    collection = core("process_groups_config").ProcessGroupCollection
    provider._pg_collection = collection.use_mpu_process_groups()
    virtual = provider.virtual_pipeline_model_parallel_size
    chunks: list[Chunk] = []
    for stage in [None] if virtual is None else range(virtual):
        first = groups.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
        last = groups.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
        with redirect_stdout(StringIO()):  # Core prints the size of its vocabulary
            chunk = provider.provide(pre_process=first, post_process=last, vp_stage=stage)
        chunk.model_type = core("enums").ModelType.encoder_or_decoder
        if described.positions.frequencies is not None:
            chunk.rotary_pos_emb.inv_freq = described.positions.frequencies
        if stage is not None:
            chunk.vp_stage = stage
        for name, parameter in chunk.named_parameters():
            mark(parameter)
            if cfg.megatron_cfg.freeze_moe_router and ROUTER in name:
                parameter.requires_grad_(False)
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(half(provider, chunk) if provider.bf16 else chunk)
    return wrap(cfg.megatron_cfg, provider, chunks) if trained else chunks


def wrap(cfg: MegatronConfig, provider: Any, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Core's data parallelism around the chunks, and the schedule's hooks into it."""
    data_parallel = core("distributed")
    keys = cfg.distributed_data_parallel_config
    facts = data_parallel.DistributedDataParallelConfig(
        use_distributed_optimizer=cfg.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=keys.grad_reduce_in_fp32,
        overlap_grad_reduce=keys.overlap_grad_reduce,
        overlap_param_gather=keys.overlap_param_gather,
        average_in_collective=False,
        fp8_param_gather=cfg.fp8_cfg.enabled and cfg.fp8_cfg.fp8_param,
    )
    wrapped = [
        # Core sends buckets early for the first chunk only, the last to run backward.
        data_parallel.DistributedDataParallel(provider, facts, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    provider.finalize_model_grads_func = data_parallel.finalize_model_grads
    provider.grad_scale_func = None
    if keys.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in wrapped]
        provider.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    return wrapped


def build_optimizer(cfg: PolicyConfig, chunks: Sequence[Chunk]) -> Any:
    """Core's optimizer; biases and norms are exempt from weight decay, as Core has it."""
    keys = cfg.megatron_cfg.optimizer
    facts = core("optimizer").OptimizerConfig(
        optimizer=keys.optimizer,
        lr=keys.lr,
        min_lr=keys.min_lr,
        weight_decay=keys.weight_decay,
        adam_beta1=keys.adam_beta1,
        adam_beta2=keys.adam_beta2,
        adam_eps=keys.adam_eps,
        sgd_momentum=keys.sgd_momentum,
        bf16=cfg.precision == "bfloat16",
        fp16=False,
        params_dtype=DTYPES[cfg.precision],
        clip_grad=cfg.max_grad_norm or 0.0,
        use_distributed_optimizer=keys.use_distributed_optimizer,
        use_precision_aware_optimizer=keys.use_precision_aware_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        optimizer_cpu_offload=keys.optimizer_cpu_offload,
        optimizer_offload_fraction=keys.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=keys.overlap_cpu_optimizer_d2h_h2d,
    )
    return core("optimizer").get_megatron_optimizer(
        facts, list(chunks), use_gloo_process_groups=not torch.cuda.is_available()
    )


def build_schedule(cfg: PolicyConfig, optimizer: Any) -> Any:
    """Core's schedule of learning rate and weight decay, in steps of the algorithm."""
    keys, decay = cfg.megatron_cfg.scheduler, cfg.megatron_cfg.optimizer.weight_decay
    # A constant rate has no end of its decay, but Core wants one after the warm-up.
    steps = keys.lr_decay_iters or keys.lr_warmup_iters + 1
    return core("optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer,
        init_lr=keys.lr_warmup_init,
        max_lr=cfg.megatron_cfg.optimizer.lr,
        min_lr=cfg.megatron_cfg.optimizer.min_lr,
        lr_warmup_steps=keys.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=keys.lr_decay_style,
        start_wd=decay if keys.start_weight_decay is None else keys.start_weight_decay,
        end_wd=decay if keys.end_weight_decay is None else keys.end_weight_decay,
        wd_incr_steps=steps,
        wd_incr_style=keys.weight_decay_incr_style,
        wsd_decay_steps=keys.lr_wsd_decay_iters,
        lr_wsd_decay_style=keys.lr_wsd_decay_style,
    )
