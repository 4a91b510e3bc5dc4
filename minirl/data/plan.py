"""Which rank trains which rows, and which rows form a micro-batch: pure functions of lengths.

All samples of a step stand in one global order. Each update takes the next slice of it, so an
update sees the same rows on any number of ranks. Micro-batches hold either a fixed number of rows,
and ranks contiguous shares of an update; or as many rows as some number of tokens has room for,
and ranks shares of equal work. Every rank computes the plan of all, and takes its own part.
"""

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from minirl.config.policy import PolicyConfig, has_fixed_rows, length_unit
from minirl.cost import Cost
from minirl.data.packing import balance, pack, round_up
from minirl.parallel import Axis
from minirl.rng import Key
from minirl.types import Batch, Rows

Parts: TypeAlias = list[list[int]]
"""Micro-batches, as lists of rows. An empty one only takes part in what all ranks do."""
Stage: TypeAlias = Literal["training", "logprobs"]


class Plan(NamedTuple):
    """What one rank does in a step."""

    rows: list[int]
    """The samples that this rank trains, update by update."""
    logprobs: Parts
    """Micro-batches without a gradient, in positions of `rows`; as many on every rank."""
    updates: list[Parts]
    """The same for each update."""
    width: int
    """Rows are padded to a multiple of this."""
    efficiency: dict[str, float]
    """Over all ranks. `<stage>_non_padding`: the share of real tokens in what models read;
    `rank_imbalance`: work of the busiest rank of each update over the mean."""


def plan_step(
    lengths: Sequence[int], policy: PolicyConfig, axis: Axis, cost: Cost, key: Key
) -> Plan:
    """This rank's plan for the samples of a step, given the lengths of all.

    `key` is read by the packer that shuffles.

    Raises:
        ValueError: the samples do not divide into updates, or an update into ranks.
    """
    size = policy.train_global_batch_size
    if not lengths or len(lengths) % size:
        raise ValueError(
            f"{len(lengths)} samples are no whole updates of policy.train_global_batch_size {size}"
        )
    slices_of_updates = [range(s.start, s.stop) for s in slices(len(lengths), size)]
    shares = [shares_of(rows, lengths, policy, axis.size, cost) for rows in slices_of_updates]
    ranks = [[row for update in shares for row in update[r]] for r in range(axis.size)]

    def cut(share: list[int], stage: Stage) -> Parts:
        return cut_share(share, lengths, policy, stage, key)

    updates = [equal_numbers([cut(share, "training") for share in update]) for update in shares]
    passes = equal_numbers([cut(rows, "logprobs") for rows in ranks])
    place = {row: i for i, row in enumerate(ranks[axis.rank])}

    def local(parts: Parts) -> Parts:
        return [[place[row] for row in part] for part in parts]

    return Plan(
        rows=ranks[axis.rank],
        logprobs=local(passes[axis.rank]),
        updates=[local(update[axis.rank]) for update in updates],
        width=_width(policy) if policy.dynamic_batching.enabled else 1,
        efficiency={
            "training_non_padding": non_padding(
                [part for update in updates for parts in update for part in parts], lengths, policy
            ),
            "logprobs_non_padding": non_padding(
                [part for parts in passes for part in parts], lengths, policy
            ),
            "rank_imbalance": _imbalance(shares, lengths, cost),
        },
    )


def shares_of(
    rows: Sequence[int], lengths: Sequence[int], policy: PolicyConfig, num_ranks: int, cost: Cost
) -> Parts:
    """The rows of an update, rank by rank.

    Raises:
        ValueError: micro-batches have a fixed number of rows, and ranks would not.
    """
    if not has_fixed_rows(policy):
        shares = balance([cost.of(lengths[row]) for row in rows], num_ranks)
        return [[rows[i] for i in share] for share in shares]
    if len(rows) % num_ranks:
        raise ValueError(
            f"the {len(rows)} rows of policy.train_global_batch_size cannot be shared equally by "
            f"{num_ranks} ranks"
        )
    return [list(rows[part]) for part in slices(len(rows), len(rows) // num_ranks)]


def cut_share(
    rows: Sequence[int], lengths: Sequence[int], policy: PolicyConfig, stage: Stage, key: Key
) -> Parts:
    """The micro-batches of one rank; those with the longest rows first, if numbers of rows vary.

    Ranks that wait for each other in every micro-batch then wait for their like.
    """
    packing, dynamic, training = (
        policy.sequence_packing,
        policy.dynamic_batching,
        stage == "training",
    )
    size = policy.train_micro_batch_size if training else policy.logprob_batch_size
    if has_fixed_rows(policy):
        return [list(rows[part]) for part in slices(len(rows), size)]
    multiple = _width(policy)
    tokens = size * round_up(policy.max_total_sequence_length, multiple)
    if packing.enabled:
        tokens = (packing.train_mb_tokens if training else packing.logprob_mb_tokens) or tokens
        given = [lengths[row] for row in rows]
        bins = pack(given, tokens, packing.algorithm, multiple=multiple, key=key)
        bins.sort(key=lambda b: -max(given[i] for i in b))
        return [[rows[i] for i in b] for b in bins]
    tokens = (dynamic.train_mb_tokens if training else dynamic.logprob_mb_tokens) or tokens
    return by_length(rows, lengths, tokens, multiple)


def by_length(rows: Sequence[int], lengths: Sequence[int], tokens: int, multiple: int) -> Parts:
    """Rows by falling length; as many in each part as fit when padded to its longest.

    No other way to cut rows needs fewer parts.

    >>> by_length([0, 1, 2, 3], [3, 9, 2, 8], tokens=20, multiple=1)
    [[1, 3], [0, 2]]
    """
    left = sorted(rows, key=lambda row: -lengths[row])
    parts: Parts = []
    while left:
        number = tokens // round_up(lengths[left[0]], multiple)
        if number == 0:
            raise ValueError(
                f"sample {left[0]} has {lengths[left[0]]} tokens, and a micro-batch has at most "
                f"{tokens}: shorten it, or allow more"
            )
        parts.append(left[:number])
        left = left[number:]
    return parts


def equal_numbers(ranks: Sequence[Parts]) -> list[Parts]:
    """The micro-batches of every rank, filled up with empty ones to equally many.

    >>> equal_numbers([[[0], [1, 2]], [[3]]])
    [[[0], [1, 2]], [[3], []]]
    """
    number = max(len(parts) for parts in ranks)
    return [parts + [[] for _ in range(number - len(parts))] for parts in ranks]


def slices(num_rows: int, size: int) -> Iterator[slice]:
    """Runs of `size` rows; the last may be shorter.

    >>> list(slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size))


def non_padding(
    parts: Sequence[Sequence[int]], lengths: Sequence[int], policy: PolicyConfig
) -> float:
    """The share of real tokens in what models read of these micro-batches."""
    multiple = _width(policy)
    real = read = 0
    for part in parts:
        filled = [round_up(lengths[row], multiple) for row in part]
        real += sum(lengths[row] for row in part)
        packed = policy.sequence_packing.enabled
        read += sum(filled) if packed else len(part) * max(filled, default=0)
    return real / read


def _imbalance(shares: Sequence[Parts], lengths: Sequence[int], cost: Cost) -> float:
    loads = [[sum(cost.of(lengths[row]) for row in rows) for rows in update] for update in shares]
    return sum(map(max, loads)) / (sum(map(sum, loads)) / len(loads[0]))


def _width(policy: PolicyConfig) -> int:
    """What lengths (of packed samples, or of padded rows) are filled up to a multiple of."""
    dynamic = policy.dynamic_batching
    return lcm(length_unit(policy), dynamic.sequence_length_round if dynamic.enabled else 1)


# ---- tensors ------------------------------------------------------------------------------------


def take_rows(rows: Rows, part: Sequence[int], width: int = 1) -> Rows:
    """Some rows, without the padding that none of them needs, up to a multiple of `width`.

    Of no rows: a single one of which nothing is predicted.

    >>> rows = Rows(torch.tensor([[7, 8, 0], [7, 8, 9]]), torch.tensor([2, 3]))
    >>> take_rows(rows, [0]).tokens.tolist(), take_rows(rows, [], width=4).tokens.tolist()
    ([[7, 8]], [[7, 8, 0, 0]])
    """
    at = list(part) or [0]
    lengths = rows.lengths[at] if part else torch.ones_like(rows.lengths[:1])
    # Two tokens at least: losses and models see at least one position.
    return Rows(_fitted(rows.tokens[at], round_up(max(2, int(lengths.max())), width)), lengths)


def take(batch: Batch, part: Sequence[int], width: int = 1) -> Batch:
    """The same of a whole batch: one micro-batch. Of no rows: a row that is left out."""
    rows = take_rows(batch.rows, part, width)
    at, positions = list(part) or [0], rows.tokens.shape[1] - 1

    def some(x: Tensor | None) -> Tensor | None:
        return None if x is None else _fitted(x[at], positions)

    return Batch(
        rows=rows,
        token_mask=_fitted(batch.token_mask[at], positions),
        sample_mask=batch.sample_mask[at] & bool(part),
        generation_logprobs=_fitted(batch.generation_logprobs[at], positions),
        prev_logprobs=some(batch.prev_logprobs),
        reference_logprobs=some(batch.reference_logprobs),
        advantages=_fitted(batch.advantages[at], positions),
        rewards=batch.rewards[at],
    )


def put_back(
    parts: Sequence[Sequence[int]], values: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """What was found for each micro-batch, as whole rows in their own order."""
    whole = values[0].new_zeros(tuple(shape))
    for part, found in zip(parts, values, strict=True):
        if part:
            whole[list(part)] = _fitted(found, shape[1])
    return whole


def _fitted(x: Tensor, width: int) -> Tensor:
    """Its first `width` columns, with zeros where there are fewer."""
    return pad(x[:, :width], (0, max(0, width - x.shape[1])))
