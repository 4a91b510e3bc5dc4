"""One optimizer update from micro-batches: global counts first, then additive losses.

A loss is a sum over trained tokens (or sequences) divided by a fact about the *global* batch. That
fact is counted here, over all ranks, before any micro-batch runs; so micro-batches and ranks
simply add up, and the gradient does not depend on how the batch was split.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Work
from minirl.metrics import Metrics, Sum, scalar
from minirl.parallel import Axis, reduce_metrics, require_equal, sum_over
from minirl.types import Batch, Rows, Scalar

M = TypeVar("M")


class Counts(NamedTuple):
    """What a loss may divide by: the counts of the global batch of one update, over all ranks."""

    num_tokens: int
    """Trained tokens: those in `token_mask` of samples in `sample_mask`."""
    num_sequences: int
    """Samples in `sample_mask`."""


BatchLoss: TypeAlias = Callable[[TokenOutput, Batch, Counts], tuple[Scalar, Metrics]]
"""From the view of one micro-batch to its share of the loss of the global batch."""


def update_(
    backend: Backend[M],
    state: TrainState[M],
    batches: Sequence[Batch],
    loss: BatchLoss,
    head: TokenHead,
) -> tuple[TrainState[M], Metrics]:
    """One optimizer update on the global batch: `batches` of every rank together.

    The metrics are those of the loss and of `Backend.update_`, added up over all ranks, and
    `empty_updates`: 1 when nothing was trained, so that the gradient is 0. `loss` is given its
    batch on the device of the output.

    Consumes: the state. Collective: every rank of the data axis calls this with the same number
    of micro-batches.

    Raises:
        ValueError: the numbers of micro-batches differ between ranks.
    """
    axis = backend.data_axis
    require_equal(
        "the number of micro-batches",
        len(batches),
        axis,
        "fill up with rows whose sample_mask is False",
    )
    counts = count(batches, axis)
    if counts.num_tokens == 0:
        return state, {"empty_updates": Sum(scalar(1))}
    works = [
        Work(b.rows, head, partial(_loss_on, loss=loss, batch=b, counts=counts)) for b in batches
    ]
    state, metrics = backend.update_(state, works)
    metrics = reduce_metrics(metrics, axis)
    tokens = Sum(scalar(counts.num_tokens))
    return state, {**metrics, "empty_updates": Sum(scalar(0)), "num_valid_tokens": tokens}


def count(batches: Sequence[Batch], axis: Axis) -> Counts:
    """The counts of all batches of all ranks.

    Collective: every rank of `axis` calls this, in the same order.
    """
    tokens = sum(int((b.token_mask & b.sample_mask[:, None]).sum()) for b in batches)
    sequences = sum(int(b.sample_mask.sum()) for b in batches)
    num_tokens, num_sequences = sum_over([float(tokens), float(sequences)], axis)
    return Counts(int(num_tokens), int(num_sequences))


def _loss_on(
    output: TokenOutput, *, loss: BatchLoss, batch: Batch, counts: Counts
) -> tuple[Scalar, Metrics]:
    return loss(output, _to(batch, output.logprobs.device), counts)


def _to(batch: Batch, device: torch.device) -> Batch:
    if batch.sample_mask.device == device:
        return batch

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return Batch(
        rows=Rows(batch.rows.tokens.to(device), batch.rows.lengths.to(device)),
        token_mask=batch.token_mask.to(device),
        sample_mask=batch.sample_mask.to(device),
        generation_logprobs=batch.generation_logprobs.to(device),
        prev_logprobs=moved(batch.prev_logprobs),
        reference_logprobs=moved(batch.reference_logprobs),
        advantages=batch.advantages.to(device),
        rewards=batch.rewards.to(device),
    )
