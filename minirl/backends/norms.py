"""The global gradient norm of parameters that are sharded in any way.

`torch.nn.utils.clip_grad_norm_` gives up when gradients live on different meshes, and pays a
DTensor dispatch per operation. Here every tensor contributes the squares of its local shard, which
are summed once over the mesh dimensions that shard it.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(gradients: Sequence[Tensor]) -> float:
    """The L2 norm of all gradients together, equal to that of one process; 0 when there are none.

    Collective: every rank of every tensor's mesh calls this, with the same list.
    """
    layouts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        layouts.setdefault(_sharding_groups(gradient), []).append(local_shard(gradient))
    total = 0.0
    for groups, shards in layouts.items():
        # In float64, so that the sum over shards does not depend on how many there are.
        norms: list[Tensor] = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in shards]
        squares = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += float(squares)
    return math.sqrt(total)


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies every gradient by `factor`."""
    with torch.no_grad():
        for gradient in gradients:
            local_shard(gradient).mul_(factor)


def _sharding_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    # Not `is_shard()`: it is False for the strided shards that FSDP over tensor parallel makes.
    dims = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(tensor.device_mesh.get_group(i) for i in dims)
