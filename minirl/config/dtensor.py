"""`policy.dtensor_cfg`: settings of the FSDP2 backend, by NeMo-RL's names."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import field

from minirl.config.loader import Count, NonNegative, Section, refuse

KEY = "policy.dtensor_cfg."


class LoraConfig(Section, frozen=True):
    """`policy.dtensor_cfg.lora_cfg`: train low-rank matrices beside frozen linear layers.

    Nothing else in it counts while `enabled` is false: recipes inherit.
    """

    moved: ClassVar[Mapping[str, str]] = {
        "dropout_position": "no key: there is no dropout; remove it",
        "use_triton": "no key: adapters are plain matrix products; remove it",
    }

    enabled: bool = False
    dim: Count = 8
    """The rank of the matrices."""
    alpha: Count = 32
    """What they add is multiplied by alpha / dim."""
    dropout: NonNegative = 0.0
    """Zero: the same weights give the same log-probs before an update and in it."""
    target_modules: list[str] = field(default_factory=list[str])
    """Layers by the ends of their names (`q_proj`, `layers.0.*`), if not all of them."""
    exclude_modules: list[str] = field(default_factory=list[str])
    """Layers that are left as they are, by the same names."""
    match_all_linear: bool = True
    """Every linear layer but the output embedding; experts of a mixture are none."""
    lora_A_init: Literal["xavier", "uniform"] = "xavier"  # noqa: N815 (NeMo-RL's name)
    """Normal (Glorot & Bengio 2010) or uniform (He et al. 2015, with a = sqrt 5)."""

    def __post_init__(self) -> None:
        """Layers are named in one way, and nothing is random in a forward pass."""
        if not self.enabled:
            return
        refuse(
            self.dropout > 0,
            f"dropout {self.dropout} would give an update other log-probs than those computed "
            "before it, so that the first ratio were not 1; set it to 0",
        )
        refuse(
            bool(self.target_modules) and self.match_all_linear,
            f"target_modules {self.target_modules} have no effect with match_all_linear: true; set "
            "the latter to false, or remove the former (exclude_modules takes layers away)",
        )
        refuse(
            not self.target_modules and not self.match_all_linear,
            "target_modules is empty and match_all_linear false, so no layer is adapted; name "
            "layers or set the latter to true",
        )


class DTensorConfig(Section, frozen=True):
    """`policy.dtensor_cfg`."""

    enabled: bool = True
    dp_replicate_size: Count = 1
    """Copies of the sharded model (HSDP): weights are gathered within one, gradients also add up
    between."""
    tensor_parallel_size: Count = 1
    context_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    """Ranks that hold the experts of a mixture between them."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers each rank holds a part of the sequence, not all of it."""
    custom_parallel_plan: str | None = None
    """The import path (`package.module:NAME`) of a plan for tensor parallelism."""
    freeze_moe_router: bool = True
    """Leave a mixture's routers as they were loaded, as Megatron's backend does."""
    use_fused_linear_logprobs: bool = True
    """Log-probs from hidden states, some at a time; logits never exist in full. Of no effect on a
    model that scales or caps its logits."""
    activation_checkpointing: bool = False
    """Keep the inputs of layers only, and compute the rest again in backward."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live in host memory between their uses."""
    lora_cfg: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        """What excludes what, and what has no effect."""
        refuse(
            self.expert_parallel_size > 1 and self.tensor_parallel_size > 1,
            f"expert_parallel_size {self.expert_parallel_size} and tensor_parallel_size "
            f"{self.tensor_parallel_size} exclude each other here: tensor parallelism deals out "
            "experts as well, so set one to 1; or use policy.megatron_cfg, which has both",
        )
        refuse(
            self.expert_parallel_size > 1 and self.dp_replicate_size > 1,
            f"expert_parallel_size {self.expert_parallel_size} and dp_replicate_size "
            f"{self.dp_replicate_size} exclude each other; set one to 1",
        )
        refuse(
            self.lora_cfg.enabled and not self.enabled,
            "lora_cfg.enabled is true, but enabled is false; LoRA is of this backend only: enable "
            "it, or switch LoRA off",
        )
        refuse(
            self.lora_cfg.enabled and not self.freeze_moe_router,
            "freeze_moe_router: false has no effect with lora_cfg.enabled, which freezes whatever "
            "is no adapter; set one of the two to its default",
        )
        for name, given in (
            ("sequence_parallel", self.sequence_parallel),
            ("custom_parallel_plan", self.custom_parallel_plan is not None),
        ):
            refuse(
                given and self.tensor_parallel_size == 1,
                f"{name} has no effect with tensor_parallel_size 1; remove it or raise the latter",
            )


def data_parallel_size(cfg: DTensorConfig, num_ranks: int) -> int:
    """Ranks that see different samples: ranks / (tensor x context parallel sizes).

    Raises:
        ValueError: the ranks do not hold whole copies, or the copies no whole groups.
    """
    tensor, context, copies = (
        cfg.tensor_parallel_size,
        cfg.context_parallel_size,
        cfg.dp_replicate_size,
    )
    unit = tensor * context
    product = f"{KEY}tensor_parallel_size {tensor} x {KEY}context_parallel_size {context} = {unit}"
    refuse(
        num_ranks % unit != 0,
        f"{num_ranks} ranks are not a multiple of {product}; start a multiple of {unit}, or "
        "choose other sizes",
    )
    refuse(
        num_ranks // unit % copies != 0,
        f"{num_ranks} ranks / ({product}) = {num_ranks // unit} data-parallel ranks, which "
        f"{KEY}dp_replicate_size {copies} does not divide; choose a divisor",
    )
    experts = cfg.expert_parallel_size
    refuse(
        num_ranks % experts != 0,
        f"{num_ranks} ranks are not a multiple of {KEY}expert_parallel_size {experts}; choose a "
        "divisor",
    )
    return num_ranks // unit
