"""`policy.dtensor_cfg`: settings of the FSDP2 backend, by NeMo-RL's names."""

from minirl.loader import Count, Section, refuse

KEY = "policy.dtensor_cfg."


class DTensorConfig(Section, frozen=True):
    """`policy.dtensor_cfg`."""

    enabled: bool = True
    dp_replicate_size: Count = 1
    """Copies of the sharded model (HSDP): shards are gathered within a copy, gradients between."""
    tensor_parallel_size: Count = 1
    context_parallel_size: Count = 1
    sequence_parallel: bool = False
    """Between the cut layers hold parts of the sequence, not all of it on every rank."""
    custom_parallel_plan: str | None = None
    """The import path (`package.module:NAME`) of a plan for tensor parallelism."""
    activation_checkpointing: bool = False
    """Keep the inputs of layers only, and compute the rest again in backward."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live in host memory between their uses."""

    def __post_init__(self) -> None:
        """What has an effect under tensor parallelism only."""
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
    return num_ranks // unit
