"""Supervised fine-tuning: next-token loss on the demonstrated tokens. Read this algorithm first.

In: demonstrations as token rows with a mask. Out: a trained state. Left out, for now: a command
of its own, validation, multi-turn chats.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Work
from minirl.config.policy import PolicyConfig
from minirl.cost import Cost
from minirl.data.packing import round_up
from minirl.data.plan import plan_step
from minirl.losses.supervised import nll_loss
from minirl.metrics import Metrics
from minirl.parallel import Axis, reduce_metrics, sum_over
from minirl.rng import Key
from minirl.types import Rows, Scalar, TokenMask

M = TypeVar("M")


class Demonstration(NamedTuple):
    """A prompt and the answer to imitate."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Shown(NamedTuple):
    """A micro-batch of demonstrations."""

    rows: Rows
    token_mask: TokenMask
    """True on positions that predict a token of an answer."""


def collate(demonstrations: Sequence[Demonstration], pad_id: int, width: int = 1) -> Shown:
    """Right-padded rows, and the positions that predict an answer's token.

    Rows are padded to a multiple of `width`. Of no demonstrations: a row that trains nothing.

    Raises:
        ValueError: a prompt has no token, so that nothing predicts the answer's first; or an
            answer has none.

    >>> rows, mask = collate([Demonstration((5, 6), (7, 8)), Demonstration((5,), (9,))], 0)
    >>> rows.tokens.tolist(), rows.lengths.tolist()
    ([[5, 6, 7, 8], [5, 9, 0, 0]], [4, 2])
    >>> mask.int().tolist()
    [[0, 1, 1], [1, 0, 0]]
    """
    lengths = torch.tensor([length_of(d) for d in demonstrations] or [1])
    tokens = torch.full((len(lengths), round_up(max(2, int(lengths.max())), width)), pad_id)
    mask = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
    for row, d in enumerate(demonstrations):
        if not (d.prompt and d.answer):
            raise ValueError(f"demonstration {row} has an empty prompt or answer: {d}")
        tokens[row, : lengths[row]] = torch.tensor(d.prompt + d.answer)
        mask[row, len(d.prompt) - 1 : int(lengths[row]) - 1] = True
    return Shown(Rows(tokens, lengths), mask)


def length_of(demonstration: Demonstration) -> int:
    """Tokens of prompt and answer."""
    return len(demonstration.prompt) + len(demonstration.answer)


def cut(
    demonstrations: Sequence[Demonstration],
    pad_id: int,
    policy: PolicyConfig,
    axis: Axis,
    cost: Cost,
    key: Key,
) -> list[list[Shown]]:
    """This rank's micro-batches of every update, as `policy` packs, pads and shares them.

    An update takes `policy.train_global_batch_size` demonstrations.

    Raises:
        ValueError: there are none, or one is longer than `policy.max_total_sequence_length`; or
            they do not divide into updates, or into ranks.
    """
    longest = policy.max_total_sequence_length
    for row, d in enumerate(demonstrations):
        if length_of(d) > longest:
            raise ValueError(
                f"demonstration {row} has {length_of(d)} tokens, and "
                f"policy.max_total_sequence_length is {longest}; shorten it, or raise the latter"
            )
    plan = plan_step([length_of(d) for d in demonstrations], policy, axis, cost, key)
    own = [demonstrations[row] for row in plan.rows]
    return [
        [collate([own[i] for i in part], pad_id, plan.width) for part in update]
        for update in plan.updates
    ]


def step(
    state: TrainState[M],
    micro_batches: Sequence[Shown],
    backend: Backend[M],
) -> tuple[TrainState[M], Metrics]:
    """One update on the mean loss over all demonstrated tokens of all ranks.

    Consumes: `state`. Collective: every rank calls it with its own micro-batches.
    """
    trained = float(sum(int(shown.token_mask.sum()) for shown in micro_batches))
    [num_tokens] = sum_over([trained], backend.data_axis)

    def work(shown: Shown) -> Work:
        def loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
            return nll_loss(output.logprobs, shown.token_mask, num_tokens=num_tokens)

        return Work(shown.rows, TokenHead(), loss)

    state, metrics = backend.update_(state, [work(shown) for shown in micro_batches])
    return backend.end_step_(state), reduce_metrics(metrics, backend.data_axis)
