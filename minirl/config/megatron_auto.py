"""What `policy.megatron_cfg` leaves to code: every `null`, decided by layout and machine."""

from msgspec import structs

from minirl.config.megatron_fit import Machine
from minirl.config.policy import PolicyConfig


def decided(policy: PolicyConfig, machine: Machine) -> PolicyConfig:
    """The same settings with nothing left open that code decides; what is set stays.

    Fused kernels and the optimizer that keeps its own masters come with Transformer Engine;
    communication overlaps computation where there is a GPU. Left to the model's own provider:
    stages of uneven size, modules to recompute or to offload, the router's precision.
    """
    cfg = policy.megatron_cfg
    optimizer, ddp = cfg.optimizer, cfg.distributed_data_parallel_config
    gpu, engine = machine.capability is not None, machine.transformer_engine is not None
    sharded = optimizer.use_distributed_optimizer
    kept_by_optimizer = (
        engine
        and sharded
        and policy.precision == "bfloat16"
        and optimizer.optimizer == "adam"
        and not optimizer.optimizer_cpu_offload
    )
    overlap = _or(ddp.overlap_grad_reduce, gpu)
    found = structs.replace(
        cfg,
        sequence_parallel=_or(cfg.sequence_parallel, cfg.tensor_model_parallel_size > 1),
        use_fused_linear_logprobs=_or(cfg.use_fused_linear_logprobs, not cfg.defer_fp32_logits),
        pipeline_dtype=cfg.pipeline_dtype or policy.precision,
        moe_permute_fusion=_or(cfg.moe_permute_fusion, gpu and engine),
        apply_rope_fusion=_or(cfg.apply_rope_fusion, gpu and engine),
        bias_activation_fusion=_or(cfg.bias_activation_fusion, gpu and engine),
        gradient_accumulation_fusion=_or(cfg.gradient_accumulation_fusion, False),
        optimizer=structs.replace(
            optimizer,
            use_precision_aware_optimizer=_or(
                optimizer.use_precision_aware_optimizer, kept_by_optimizer
            ),
        ),
        distributed_data_parallel_config=structs.replace(
            ddp,
            grad_reduce_in_fp32=_or(ddp.grad_reduce_in_fp32, True),
            overlap_grad_reduce=overlap,
            overlap_param_gather=_or(ddp.overlap_param_gather, gpu and sharded and overlap),
        ),
    )
    return structs.replace(policy, megatron_cfg=found)


def _or(chosen: bool | None, automatic: bool) -> bool:
    return automatic if chosen is None else chosen
