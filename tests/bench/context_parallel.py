"""Attention cut over ranks, three mechanisms: time, bytes sent, and bytes kept for backward.

    .venv/bin/python tests/bench/context_parallel.py

Forward and backward of causal attention, 8 heads and 2 of keys and values of width 64, float32, on
gloo ranks of one thread: one sequence of 4,096 tokens, and 32 packed ones of lognormal lengths that
add up to about as many, each filled up to a multiple of 2n for n ranks.

- gather: `minirl.backends.attention`; every rank gathers keys and values, chunks lie zigzag.
- Ulysses: an all-to-all from parts of the row to heads, minirl's attention over whole sequences on
  1/n of the heads, and back; keys and values are repeated to n heads if n does not divide theirs.
- ring: torch's zigzag ring, for one sequence. Its `context_parallel` refuses a CPU (the kernel has
  no sharding strategy there), so the private templates beneath get that kernel.

Each side is first checked against whole sequences on one rank, values and gradients. Seconds are of
the slowest rank, medians over turns that the sides take one after the other; where ranks share
cores only CPU seconds tell. Bytes sent by a rank are computed: with b those of its keys, the gather
sends 2 (n - 1) b and as much backward, as a ring's all-gather and reduce-scatter do; the ring
2 (n - 1) b and (4 n - 2) b; Ulysses (n - 1) / n of queries, keys, values and output, twice. Bytes
kept are the storages that autograd saves, inputs among them, the most of any rank.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as templates
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import run_ranks

from minirl.backends.attention import causal_attention
from minirl.parallel import Axis

TOKENS, SEQUENCES, HEADS, KV_HEADS, WIDTH, TURNS = 4096, 32, 8, 2, 64, 9
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Side = tuple[Attention, Tensor]
"""A mechanism on this rank, and which tokens of the row the rank holds."""
Cost = tuple[list[tuple[float, float]], int, float]
"""CPU and wall seconds of every turn, bytes kept, error relative to the largest entry."""


def lengths_of(packed: bool, n: int) -> list[int]:
    if not packed:
        return [TOKENS]
    draw = torch.empty(SEQUENCES).log_normal_(0, 0.9, generator=torch.Generator().manual_seed(0))
    unit = 2 * n
    return [unit * -int(-x // unit) for x in (draw * TOKENS / draw.sum()).tolist()]


def whole(lengths: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every sequence by itself through torch's kernel, [tokens, batch, heads, width]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (key, value))
    rows = zip(*(x.permute(1, 2, 0, 3).split(lengths, 2) for x in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in rows]
    return torch.cat(found, 2).permute(2, 0, 1, 3).flatten(2)


class _AllToAll(torch.autograd.Function):
    """Entry r of the first axis goes to rank r; backward sends gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        dist.all_to_all_single(found := torch.empty_like(x), x, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def ulysses(axis: Axis, lengths: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    n = axis.size
    if KV_HEADS % n:
        key, value = (x.repeat_interleave(n // KV_HEADS, 2) for x in (key, value))
    sent = torch.cat([torch.stack(x.chunk(n, 2)) for x in (query, key, value)], dim=3)
    rows = _AllToAll.apply(sent, axis.group).flatten(0, 1)
    q, k, v = rows.split([x.shape[2] // n for x in (query, key, value)], dim=2)
    found = causal_attention(q, k, v, lengths, None, None)
    back = _AllToAll.apply(found.unflatten(0, (n, -1)), axis.group)
    return torch.cat(back.unbind(), dim=2)


class _Ring(torch.autograd.Function):
    """torch's templates around the CPU's kernel, [batch, heads, local tokens, width]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        templates.set_rotate_method("alltoall")  # its default gathers
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = templates._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, *found)
        ctx.group = group
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        backward = templates._templated_ring_attention_backward
        at = (ctx.group, 2, partial(kernel, dropout_p=0.0), grad, "grad_out")
        found = backward(*at, *ctx.saved_tensors, is_causal=True)
        return *found, None


def torch_ring(axis: Axis, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    return _Ring.apply(*rows, axis.group).permute(2, 0, 1, 3).flatten(2)


def sides_of(axis: Axis, lengths: list[int]) -> dict[str, Side]:
    n, rank, row = axis.size, axis.rank, torch.arange(sum(lengths))
    if n == 1:
        return {"whole": (partial(whole, lengths), row)}
    chunks = [x.chunk(2 * n) for x in row.split(lengths)]
    zigzag = torch.cat([x[c] for x in chunks for c in (rank, 2 * n - 1 - rank)])
    gather = partial(causal_attention, lengths=lengths, group=axis.group, scale=None)
    exchange = partial(ulysses, axis, lengths)
    sides = {"gather": (gather, zigzag), "Ulysses": (exchange, row.chunk(n)[rank])}
    return sides | ({"ring": (partial(torch_ring, axis), zigzag)} if len(lengths) == 1 else {})


def run(attend: Attention, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    found = attend(*inputs)
    return [found.detach(), *torch.autograd.grad(found, inputs, grad)]


def kept_by(attend: Attention, inputs: list[Tensor]) -> int:
    sizes = dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _found = attend(*inputs)  # as long as it lives no storage is used again
    return sum(sizes.values())


def measure(axis: Axis, lengths: list[int]) -> dict[str, Cost]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(sum(lengths), 1, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    full = [torch.randn(size, generator=draw, requires_grad=True) for size in sizes]
    weight = torch.randn(sum(lengths), 1, HEADS * WIDTH, generator=draw)
    expected = run(partial(whole, lengths), full, weight)
    sides = sides_of(axis, lengths)
    work = {k: [x.detach()[held].requires_grad_() for x in full] for k, (_, held) in sides.items()}
    costs = dict[str, Cost]()
    for name, (attend, held) in sides.items():
        pairs = zip(run(attend, work[name], weight[held]), expected, strict=True)
        error = max(((x - y[held]).abs().max() / y.abs().max()).item() for x, y in pairs)
        assert error < 1e-5, f"{name} is off by {error:.1e}"
        costs[name] = ([], kept_by(attend, work[name]), error)
    for name in [*sides] * TURNS:
        attend, held = sides[name]
        grad = weight[held]
        dist.barrier(axis.group)
        cpu, wall = time.process_time(), time.perf_counter()
        run(attend, work[name], grad)
        costs[name][0].append((time.process_time() - cpu, time.perf_counter() - wall))
    return costs


def sent_by(side: str, n: int, tokens: int) -> float:
    """MB from one rank to others, forward and backward."""
    head = tokens // n * WIDTH * 4e-6
    repeated = KV_HEADS if KV_HEADS % n == 0 else n
    exchanged = 2 * (2 * HEADS + 2 * repeated) * (n - 1) / n
    gather, ring = 4 * (n - 1) * KV_HEADS, (6 * n - 4) * KV_HEADS
    return {"whole": 0, "gather": gather, "Ulysses": exchanged, "ring": ring}[side] * head


def main() -> None:
    print(f"{os.cpu_count()} cores; CPU s, wall s, MB sent, MB kept, largest relative error")
    for packed, ranks in product((False, True), (1, 2, 4)):
        lengths = lengths_of(packed, ranks)
        found = run_ranks(ranks, measure, lengths)
        print(f"\n{ranks} ranks, sequences: {len(lengths)}, tokens: {sum(lengths)}")
        for name in found[0]:
            turns, kept, error = zip(*(costs[name] for costs in found), strict=True)
            cpu, wall = torch.tensor(turns).amax(0).median(0).values.tolist()
            sent = sent_by(name, ranks, sum(lengths))
            print(
                f"  {name:8}{cpu:8.3f}{wall:8.3f}{sent:8.2f}{max(kept) / 1e6:8.2f}{max(error):9.0e}"
            )


if __name__ == "__main__":
    main()
