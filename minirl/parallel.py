"""Process groups: opening and closing the world, and sums and gathers over an axis.

The only module besides the backends that may talk to `torch.distributed`. An axis
is passed as an argument; there is no ambient group.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.metrics import Max, Mean, Metric, Metrics, Min, Sum, merge, scalar

T = TypeVar("T")

KINDS: dict[str, Callable[..., Metric]] = {kind.__name__: kind for kind in (Sum, Mean, Max, Min)}


@dataclass(frozen=True, slots=True)
class Axis:
    """A set of ranks that share work. `group` is None for a single process without groups."""

    rank: int
    size: int
    group: dist.ProcessGroup | None


SOLO = Axis(rank=0, size=1, group=None)
"""The axis of a single process that opened no process group."""


def launched_size() -> int:
    """How many processes torchrun started (1 without it). Known before any group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def world(timeout_s: float = 1800.0) -> Iterator[Axis]:
    """Opens the default process group (NCCL and gloo with CUDA, else gloo) and closes it.

    Without torchrun it is a world of one. An in-process vLLM destroys the group when it shuts
    down, so an already closed group is fine.

    Collective: every launched process calls this.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend, timeout = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    try:
        yield Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def gather(items: Sequence[T], axis: Axis) -> list[T]:
    """The items of all ranks, rank by rank, on every rank.

    Collective: every rank of `axis` calls this, in the same order.
    """
    if axis.group is None or axis.size == 1:
        return list(items)
    parts: list[Sequence[T] | None] = [None] * axis.size
    dist.all_gather_object(parts, items, group=axis.group)
    return [item for part in cast("list[Sequence[T]]", parts) for item in part]


def sum_over(values: Sequence[float], axis: Axis) -> list[float]:
    """Elementwise float64 sums over the ranks.

    Collective: every rank of `axis` calls this, in the same order.
    """
    if axis.group is None:
        return [float(x) for x in values]
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=axis.group)
    return cast("list[float]", total.tolist())


def sum_tensor(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise sum over the ranks, as a new tensor.

    Collective: every rank of `axis` calls this, in the same order.
    """
    total = x.clone()
    if axis.group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=axis.group)
    return total


def require_equal(what: str, count: int, axis: Axis, remedy: str) -> None:
    """Refuses, on every rank, work that would make the ranks wait for each other forever.

    Collective: every rank of `axis` calls this, in the same order.

    Raises:
        ValueError: `count` differs between ranks; the message lists it rank by rank.
    """
    counts = gather([count], axis)
    if len(set(counts)) > 1:
        raise ValueError(f"{what} must be equal on all ranks, not {counts} (by rank); {remedy}")


def reduce_metrics(metrics: Metrics, axis: Axis) -> Metrics:
    """The metrics of all ranks added up, on every rank; ranks may know different names.

    The results are float64 and live on the CPU.

    Collective: every rank of `axis` calls this, in the same order.
    """
    # As plain numbers: tensors are slow to pickle one by one.
    plain = {name: (type(m).__name__, [float(x) for x in m]) for name, m in metrics.items()}
    return merge(
        *(
            {name: KINDS[kind](*map(scalar, numbers)) for name, (kind, numbers) in seen.items()}
            for seen in gather([plain], axis)
        )
    )


def barrier(axis: Axis) -> None:
    """Waits for every rank of `axis`. Collective."""
    if axis.group is not None:
        dist.barrier(group=axis.group)


def share_of(items: Sequence[T], axis: Axis) -> list[T]:
    """This rank's contiguous share.

    >>> share_of("abcd", Axis(rank=1, size=2, group=None))
    ['c', 'd']

    Raises:
        ValueError: the number of items is not a multiple of the number of ranks.
    """
    if len(items) % axis.size:
        raise ValueError(f"{len(items)} items cannot be shared equally by {axis.size} ranks")
    each = len(items) // axis.size
    return list(items[axis.rank * each : (axis.rank + 1) * each])
