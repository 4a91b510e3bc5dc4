"""Causal attention within sequences that lie one after the other, also cut over ranks.

Each sequence is attended to on its own, so that packed samples cannot see each other. Under context
parallelism keys and values are gathered: any kernel does, for any number of ranks, also where
sequences are packed. For 4,096 tokens with 2 key heads for 8 that sends 4.2 MB on 2 ranks where an
exchange of heads (Ulysses; no more ranks than heads) sends 10.5 and torch's ring 8.4; from 8 ranks
on the exchange sends as little or less. It takes 1.2 times as long on a CPU as the exchange, since
a CPU's kernel needs the masks of chunks that do not come first in memory, and a GPU's does not. See
tests/bench/context_parallel.py.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import bias
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Iterable[int],
    group: dist.ProcessGroup | None,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attention within each of several sequences that lie one after the other.

    A token attends to itself and to those before it; with a `window`, to so many in all.

    Shapes: [local tokens, batch, heads, width] to [local tokens, batch, heads x width]; `lengths`
    are those of whole sequences, of which a rank holds the chunks r and 2n - 1 - r of 2n.
    Keys and values are gathered. Source: Core's and Transformer Engine's zigzag layout.
    """
    num, rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
    if num == 1 and _has_kernel(query, value):
        return _packed(query, key, value, list(lengths), scale, window)
    gather = cast(Any, _AllGather).apply
    parts = [torch.stack(gather(x, group)) if num > 1 else x[None] for x in (key, value)]
    outputs: list[Tensor] = []
    at = 0
    for length in lengths:
        local = slice(at, at + length // num)
        keys, values = (_in_order(x[:, local]) for x in parts)
        offset = at
        size = length // (2 * num)
        chunks = [(c * size, (c + 1) * size) for c in (rank, 2 * num - 1 - rank)]
        for start, end in chunks if num > 1 else [(0, length)]:
            rows = query[offset : offset + end - start]
            outputs.append(_attend(rows, keys[:end], values[:end], start, scale, window))
            offset += end - start
        at = local.stop
    return torch.cat(outputs).flatten(2)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel for packed sequences takes it: half precision, Ampere or later."""
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= 256
    half = query.dtype in (torch.bfloat16, torch.float16)
    ampere = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return fits and half and ampere


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention within each sequence of the only row, in one launch."""
    from torch.nn.attention.varlen import varlen_attn

    kernel: Any = varlen_attn
    longest = max(lengths)
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
    q, k, v = (x.squeeze(1) for x in (query, key, value))
    reach = (-1 if window is None else window - 1, 0)
    found = kernel(
        q, k, v, ends, ends, longest, longest, scale=scale, window_size=reach, enable_gqa=True
    )
    whole: Tensor = found.unsqueeze(1).flatten(2)
    return whole


def _in_order(parts: Tensor) -> Tensor:
    """The whole sequence from the parts of all ranks, [ranks, local, ...]."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts.chunk(2, dim=1)
    return torch.cat([*first, *second.flip(0)])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of the queries from position `start` on to all keys."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    mask: Any = None
    shared = query.shape[2] != key.shape[2]
    if window is not None and window < len(key):
        shape = (len(query), len(key))
        near = torch.ones(shape, dtype=torch.bool, device=q.device).tril(diagonal=start)
        mask = near.triu(diagonal=start - window + 1)
    elif start and q.is_cuda:
        # Kernels that need no mask in memory take as many heads of keys as of queries.
        mask = cast(Any, bias).causal_lower_right(len(query), len(key))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if shared else x for x in (k, v))
        shared = False
    elif start:
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(diagonal=start)
    found = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )
    return found.permute(2, 0, 1, 3)


class _AllGather(torch.autograd.Function):
    """All ranks' tensors; backward adds up what all ranks ask of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        own = torch.empty_like(grad_outputs[0])
        dist.reduce_scatter_single(own, torch.cat(grad_outputs), group=ctx.group)
        return own, None
