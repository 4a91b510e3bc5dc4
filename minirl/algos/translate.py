"""The settings of one training backend as those of the other: sizes and Adam.

What has no counterpart is refused, not dropped. Schedules are not carried over: the learning rate
is constant.
"""

from collections.abc import Collection
from typing import Any, cast

from msgspec import structs

from minirl.config.dtensor import DTensorConfig, LoraConfig
from minirl.config.loader import refuse
from minirl.config.megatron import Fp8Config, MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import OptimizerConfig, PolicyConfig

DTENSOR, MEGATRON, ADAM = "policy.dtensor_cfg.", "policy.megatron_cfg.", "policy.optimizer."
REMEDY = "set it to its default, or give a recipe for each backend and leave out --backend"

SAME = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "activation_checkpointing": "activation_checkpointing",
    "freeze_moe_router": "freeze_moe_router",
}
"""Keys of `policy.dtensor_cfg` and the keys of `policy.megatron_cfg` that mean the same.
`sequence_parallel` is one too, but for Megatron's null."""

HOW = frozenset(
    {
        "env_vars", "force_reconvert_from_hf", "pipeline_dtype", "moe_router_dtype",
        "moe_token_dispatcher_type", "moe_enable_deepep", "moe_shared_expert_overlap",
        "moe_permute_fusion", "moe_per_layer_logging", "apply_rope_fusion",
        "bias_activation_fusion", "gradient_accumulation_fusion", "defer_fp32_logits",
        "use_fused_linear_logprobs", "cuda_graph_impl", "cuda_graph_modules",
        "cuda_graph_warmup_steps", "distributed_data_parallel_config", "scheduler",
    }
)  # fmt: skip
"""Keys of either section that say how its backend computes what the other computes in its own way;
they stay where they are."""
ADAM_KEYS = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
KERNELS = ("fused", "foreach")
"""Arguments of torch's optimizers that change only how fast they are."""


def section_of(backend: str) -> set[str]:
    """The keys that `translated` sets of a backend other than the recipe's own."""
    if backend == "dtensor":
        keys = (*SAME, "enabled", "sequence_parallel")
        return {"policy.optimizer", "policy.scheduler", *(f"{DTENSOR}{key}" for key in keys)}
    optimizer = (f"optimizer.{key}" for key in ("optimizer", "min_lr", *ADAM_KEYS))
    keys = (*SAME.values(), "enabled", "sequence_parallel", "scheduler", *optimizer)
    return {f"{MEGATRON}{key}" for key in keys}


def translated(policy: PolicyConfig, backend: str) -> dict[str, Any]:
    """Overrides (dotted key: value) with which a recipe of `policy` runs on `backend`.

    Enables it, carries over the sizes and the settings of Adam, and makes the learning rate
    constant; for the backend that is enabled already, only the latter. Further keys of the other
    backend's section stay what the recipe says.

    Raises:
        ValueError: a setting has no counterpart; names its key, value and the remedy.
    """
    if backend == "dtensor":
        return _to_dtensor(policy) if policy.megatron_cfg.enabled else {"policy.scheduler": None}
    constant: dict[str, Any] = {f"{MEGATRON}scheduler": {}, f"{MEGATRON}optimizer.min_lr": 0.0}
    return constant if policy.megatron_cfg.enabled else constant | _to_megatron(policy)


def _to_megatron(policy: PolicyConfig) -> dict[str, Any]:
    given, optimizer = structs.asdict(policy.dtensor_cfg), policy.optimizer
    _refuse_rest(policy.dtensor_cfg, {*SAME, *HOW, "enabled", "sequence_parallel"}, DTENSOR)
    refuse(
        policy.offload_optimizer_for_logprob,
        f"policy.offload_optimizer_for_logprob is True, which Megatron's backend lacks; {REMEDY}",
    )
    assert optimizer is not None  # a rule of PolicyConfig
    return {
        f"{DTENSOR}enabled": False,
        f"{MEGATRON}enabled": True,
        **{f"{MEGATRON}{there}": given[here] for here, there in SAME.items()},
        f"{MEGATRON}sequence_parallel": given["sequence_parallel"],
        "policy.optimizer": None,
        "policy.scheduler": None,
        f"{MEGATRON}optimizer.optimizer": "adam",
        **{f"{MEGATRON}optimizer.{name}": x for name, x in _adam(optimizer).items()},
    }


def _to_dtensor(policy: PolicyConfig) -> dict[str, Any]:
    cfg, adam = policy.megatron_cfg, policy.megatron_cfg.optimizer
    _refuse_rest(cfg, {*SAME.values(), *HOW, "enabled", "sequence_parallel", "optimizer"}, MEGATRON)
    kept = {*ADAM_KEYS, "min_lr", "use_precision_aware_optimizer"}
    _refuse_rest(adam, kept, f"{MEGATRON}optimizer.")
    given, automatic = structs.asdict(cfg), cfg.tensor_model_parallel_size > 1
    return {
        f"{MEGATRON}enabled": False,
        f"{DTENSOR}enabled": True,
        **{f"{DTENSOR}{there}": given[here] for there, here in SAME.items()},
        f"{DTENSOR}sequence_parallel": (
            automatic if cfg.sequence_parallel is None else cfg.sequence_parallel
        ),
        "policy.optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {
                "lr": adam.lr,
                "betas": [adam.adam_beta1, adam.adam_beta2],
                "eps": adam.adam_eps,
                "weight_decay": adam.weight_decay,
                "fused": True,
            },
        },
        "policy.scheduler": None,
    }


def _refuse_rest(
    section: DTensorConfig | MegatronConfig | MegatronOptimizerConfig,
    kept: Collection[str],
    key: str,
) -> None:
    """Refuses values, other than defaults, of keys that are not `kept`."""
    usual = structs.asdict(type(section)())
    for name, value in structs.asdict(section).items():
        if isinstance(value, LoraConfig | Fp8Config):
            refuse(
                value.enabled,
                f"{key}{name}.enabled is True, which the other backend lacks; {REMEDY}",
            )
        else:
            refuse(
                name not in kept and value != usual[name],
                f"{key}{name} is {value!r}, which has no counterpart in the other backend; "
                f"{REMEDY}",
            )


def _adam(optimizer: OptimizerConfig) -> dict[str, Any]:
    """A torch Adam's arguments by Megatron's names, whose Adam decays weights as AdamW does."""
    name, kwargs = optimizer.name, optimizer.kwargs
    refuse(
        name not in ("torch.optim.AdamW", "torch.optim.Adam"),
        f"{ADAM}name is {name}, and only torch.optim.AdamW and torch.optim.Adam have a counterpart "
        f"in Megatron; use one, or {REMEDY}",
    )
    for key, value in kwargs.items():
        refuse(
            key not in ("lr", "betas", "eps", "weight_decay", *KERNELS),
            f"{ADAM}kwargs.{key} is {value!r}, which has no counterpart in Megatron; {REMEDY}",
        )
    decay = kwargs.get("weight_decay", 0.01 if name == "torch.optim.AdamW" else 0.0)
    refuse(
        name == "torch.optim.Adam" and decay != 0,
        f"{ADAM}kwargs.weight_decay is {decay} with {ADAM}name torch.optim.Adam, which adds it to "
        "the gradient, and Megatron does not; use torch.optim.AdamW or 0",
    )
    betas = cast("list[float]", kwargs.get("betas", [0.9, 0.999]))
    pair = isinstance(cast(Any, betas), list) and len(betas) == 2
    refuse(not pair, f"{ADAM}kwargs.betas is {betas!r}; expected two numbers")
    values = (kwargs["lr"], decay, *betas, kwargs.get("eps", 1e-8))
    return dict(zip(ADAM_KEYS, values, strict=True))
