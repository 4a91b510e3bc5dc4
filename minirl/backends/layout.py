"""From padded rows to what a rank's model reads, and from its output back to whole rows.

A layout says which token of the micro-batch stands where on this rank. Rows are either *padded*
(one model row a sample) or *packed* (all samples one after the other in a single row, told apart by
their ends: "thd"). Under context parallelism every sequence is cut into 2n chunks, of which rank r
of n holds the chunks r and 2n - 1 - r, so that causal attention is equal work for all.

Which token follows is looked up before anything is cut: the last token of a chunk knows its
successor. Losses see whole rows again, on every rank.

Source: Core's zigzag layout, `megatron.core.utils.get_batch_on_this_cp_rank`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from minirl.backend import TokenOutput
from minirl.types import Rows, TokenLogProbs

Local = Int[Tensor, "model_batch local"]


class Layout(NamedTuple):
    """How rows are cut for the ranks that share a sample."""

    packed: bool
    unit: int
    """Lengths of sequences are filled up to a multiple of this."""
    rank: int = 0
    size: int = 1
    """Of context parallelism."""


class ModelRows(NamedTuple):
    """What this rank's model reads of a micro-batch."""

    tokens: Local
    positions: Local
    following: Local
    """The token that comes next; 0 where there is none."""
    place: Local
    """Where the prediction belongs, batch * position + t; -1 where nothing is predicted."""
    ends: Int[Tensor, " bounds"] | None
    """Of packed rows: 0 and the end of every (filled up) sequence, before it was cut."""


def layout_of(tp: int, cp: int, cp_rank: int, *, packed: bool, sequence_parallel: bool) -> Layout:
    """The layout for these sizes of tensor and context parallelism."""
    unit = 2 * cp if cp > 1 else 1
    return Layout(packed, unit * tp if sequence_parallel else unit, cp_rank, cp)


def size_of(rows: Rows, layout: Layout) -> tuple[int, int]:
    """Rows and columns of what all ranks together read of a micro-batch, filled up."""
    if layout.packed:
        return 1, sum(_round_up(int(n), layout.unit) for n in rows.lengths)
    return len(rows.lengths), _round_up(rows.tokens.shape[1], layout.unit)


def to_model(rows: Rows, layout: Layout, size: tuple[int, int] | None = None) -> ModelRows:
    """Cuts the rows, filled up to `size` (default `size_of`); what is not in them reads as 0.

    >>> rows = Rows(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]))
    >>> packed = to_model(rows, Layout(packed=True, unit=2))
    >>> packed.tokens.tolist(), packed.following.tolist()
    ([[5, 6, 7, 0, 8, 9]], [[6, 7, 0, 0, 9, 0]])
    >>> packed.place.tolist(), packed.ends.tolist()
    ([[0, 1, -1, -1, 2, -1]], [0, 4, 6])
    """
    height, width = size or size_of(rows, layout)
    if not layout.packed:
        at = _own(width, layout).expand(height, -1)
        return _look_up(rows, torch.arange(height)[:, None].expand_as(at), at, None)
    lengths = [_round_up(int(n), layout.unit) for n in rows.lengths]
    if sum(lengths) < width:
        lengths.append(width - sum(lengths))  # a sequence of nothing
    owned = [_own(n, layout) for n in lengths]
    row = torch.cat([torch.full_like(o, i) for i, o in enumerate(owned)])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return _look_up(rows, row, torch.cat(owned)[None], ends)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _own(length: int, layout: Layout) -> Tensor:
    """The positions of a sequence that this rank holds."""
    at = torch.arange(length)
    if layout.size == 1:
        return at
    chunks = at.chunk(2 * layout.size)
    return torch.cat([chunks[layout.rank], chunks[2 * layout.size - 1 - layout.rank]])


def _look_up(rows: Rows, row: Tensor, at: Tensor, ends: Tensor | None) -> ModelRows:
    """`row` and `at` say which token of which row stands where; rows beyond the last are empty."""
    height, width = rows.tokens.shape
    tokens, inside = rows.tokens.cpu(), row < height
    row = row.clamp(max=height - 1)
    lengths = torch.where(inside, rows.lengths.cpu()[row], 0)
    here, after = at.clamp(max=width - 1), (at + 1).clamp(max=width - 1)
    predicts = at + 1 < lengths
    return ModelRows(
        tokens=torch.where(at < lengths, tokens[row, here], 0),
        positions=at.contiguous(),
        following=torch.where(predicts, tokens[row, after], 0),
        place=torch.where(predicts, row * (width - 1) + at, -1),
        ends=ends,
    )


def document_lengths(rows: ModelRows, layout: Layout) -> list[int]:
    """Of the sequences that stand one after the other in a model's row, before they were cut."""
    if rows.ends is None:
        return [rows.tokens.shape[1] * layout.size]
    return [int(n) for n in rows.ends.diff()]


def to_rows(
    local: Float[Tensor, "model_batch local"],
    place: Local,
    shape: tuple[int, int],
    group: dist.ProcessGroup | None,
) -> TokenLogProbs:
    """What the ranks found, as whole rows on every rank; zeros where nothing is predicted.

    Backward hands every rank the gradient of its own positions: each rank computes the loss of the
    whole rows, so a rank's gradient is already that of the loss.

    Collective: every rank of the group calls this.
    """
    keep = place >= 0
    rows = local.new_zeros(shape[0] * shape[1])
    rows = rows.index_put((place[keep],), local[keep])
    if group is not None:
        rows = cast(Any, _SumOnce).apply(rows, group)
    return rows.view(shape)


def to_output(
    found: Sequence[Tensor],
    place: Local,
    rows: Rows,
    group: dist.ProcessGroup | None,
    *,
    entropy: bool,
) -> TokenOutput:
    """`to_rows` of log-probs and, if asked for, entropies. Collective over the group."""
    place, (batch, length) = place.to(found[0].device), rows.tokens.shape
    whole = [to_rows(x, place, (batch, length - 1), group) for x in found[: 1 + entropy]]
    return TokenOutput(whole[0], whole[1] if entropy else None)


class _SumOnce(torch.autograd.Function):
    """The sum over ranks, whose gradient each rank keeps as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
