"""Which rank trains which rows, and how a rank's rows are cut into micro-batches.

All samples of a step stand in one global order. Each update takes the next slice of it, and each
rank a contiguous part of that slice: so an update sees the same rows on any number of ranks.
"""

from collections.abc import Iterator

from minirl.parallel import Axis
from minirl.types import Batch, Rows


def rows_of_rank(num_rows: int, global_batch_size: int, axis: Axis) -> list[int]:
    """The rows that this rank trains, update by update.

    >>> rows_of_rank(8, 4, Axis(rank=1, size=2, group=None))
    [2, 3, 6, 7]

    Raises:
        ValueError: the rows do not divide into updates, or an update into ranks.
    """
    if num_rows % global_batch_size or global_batch_size % axis.size:
        raise ValueError(
            f"{num_rows} rows must be whole updates of policy.train_global_batch_size "
            f"{global_batch_size}, and these whole shares of {axis.size} ranks"
        )
    each = global_batch_size // axis.size
    starts = range(axis.rank * each, num_rows, global_batch_size)
    return [row for start in starts for row in range(start, start + each)]


def slices(num_rows: int, size: int) -> Iterator[slice]:
    """Runs of `size` rows; the last may be shorter.

    >>> list(slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size))


def cut_rows(rows: Rows, part: slice) -> Rows:
    """Some rows, without the padding that none of them needs.

    >>> import torch
    >>> rows = Rows(torch.tensor([[7, 8, 0], [7, 8, 9]]), torch.tensor([2, 3]))
    >>> cut_rows(rows, slice(0, 1)).tokens.tolist()
    [[7, 8]]
    """
    lengths = rows.lengths[part]
    return Rows(rows.tokens[part, : int(lengths.max())], lengths)


def cut(batch: Batch, part: slice) -> Batch:
    """The same of a whole batch: one micro-batch."""
    rows = cut_rows(batch.rows, part)
    positions = rows.tokens.shape[1] - 1
    reference = batch.reference_logprobs
    return Batch(
        rows=rows,
        token_mask=batch.token_mask[part, :positions],
        sample_mask=batch.sample_mask[part],
        generation_logprobs=batch.generation_logprobs[part, :positions],
        prev_logprobs=batch.prev_logprobs[part, :positions],
        reference_logprobs=None if reference is None else reference[part, :positions],
        advantages=batch.advantages[part, :positions],
        rewards=batch.rewards[part],
    )
