"""Log-probs and entropy straight from hidden states: the logits of all positions never exist.

The output layer runs on a tile of some columns and some positions at a time, forward and, once
more, backward; what tiles say of a position joins (`Stats`), as do the parts of ranks. The largest
part of an update's memory (positions x vocabulary) is so traded for one more product of matrices.
Products are added up in float32 whatever the weights' dtype: no logit is rounded to bfloat16 (on a
GPU, where weights are bfloat16, the gradient of a logit is, as in any training with them). A
position whose log-prob has no gradient (of a prompt, of padding) costs nothing backward.

Source: what is saved and what is made again is that of Wijmans et al. 2024 (Cut Cross-Entropy),
arXiv:2411.09009, section 4, without its filter.
"""

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minirl.backends.vocab_parallel import (
    Shard,
    Stats,
    check_temperature,
    joined,
    over_ranks,
    pull_,
    stats_of,
)
from minirl.types import TokenLogProbs

COLUMNS = {"cpu": 1024, "cuda": 32_768}
POSITIONS = 1024
"""Of a tile, unless told otherwise: 4 MB of logits on a CPU, 128 MB on a GPU. Backward on a GPU
also holds the gradient of its columns' weights, twice."""


class OutputLayer(NamedTuple):
    """The columns of the vocabulary that are this rank's."""

    weight: Float[Tensor, "columns width"]
    bias: Float[Tensor, " columns"] | None
    shard: Shard


class _How(NamedTuple):
    """What no gradient passes through."""

    shard: Shard
    temperature: float
    with_entropy: bool
    positions: int


def linear_logprobs(
    hidden: Float[Tensor, "batch position width"],
    layer: OutputLayer,
    tokens: Int[Tensor, "batch position"],
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    positions_at_once: int | None = None,
) -> tuple[TokenLogProbs, TokenLogProbs]:
    """`vocab_logprobs` of the logits `hidden @ weight.T + bias`.

    The gradient with respect to `hidden` is the part that comes through this rank's columns; all
    ranks' parts add up to the whole.

    Collective: every rank of the group calls this with the same tokens and hidden states.

    Raises:
        ValueError: the temperature is not positive.
    """
    check_temperature(temperature)
    how = _How(layer.shard, temperature, with_entropy, positions_at_once or POSITIONS)
    found, entropy = cast(Any, _LinearLogProbs).apply(
        hidden.flatten(0, 1), layer.weight, layer.bias, tokens.reshape(-1), how
    )
    return found.view(tokens.shape), entropy.view(tokens.shape)


class _LinearLogProbs(torch.autograd.Function):
    """Saves the hidden states and a number for each."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        states, local = _exact(hidden), chosen - how.shard.start
        by_position: dict[int, Stats] = {}
        for columns in _columns(weight):
            matrix, added = _tile(weight, bias, columns)
            for rows in _slices(len(states), how.positions):
                logits = _logits(states[rows], matrix, added, how.temperature)
                inside = local[rows] - columns.start
                seen = stats_of(logits, inside, with_entropy=how.with_entropy)
                before = by_position.get(rows.start)
                by_position[rows.start] = seen if before is None else joined(before, seen)
        parts = zip(*by_position.values(), strict=True)
        whole = over_ranks(Stats(*map(torch.cat, parts)), how.shard.group)
        entropy = whole.entropy if how.with_entropy else torch.zeros_like(whole.most)
        ctx.save_for_backward(hidden, weight, bias, local, whole.level)
        ctx.how = how
        ctx.mark_non_differentiable(entropy)
        return whole.logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, level = ctx.saved_tensors
        how: _How = ctx.how
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wanted = grad_outputs[0].nonzero().squeeze(-1)
        states, local, level = _exact(hidden[wanted]), local[wanted], level[wanted]
        weights = grad_outputs[0][wanted] / how.temperature
        precise = _precise_dtype(hidden)
        to_states = torch.zeros_like(states, dtype=precise) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if needs_bias else None
        for columns in _columns(weight):
            matrix, added = _tile(weight, bias, columns)
            to_matrix = torch.zeros_like(matrix, dtype=precise) if needs_weight else None
            to_added = None if added is None else torch.zeros_like(added, dtype=precise)
            for rows in _slices(len(states), how.positions):
                logits = _logits(states[rows], matrix, added, how.temperature)
                inside = local[rows] - columns.start
                pulled = pull_(logits, logits, inside, level[rows], weights[rows])
                if to_added is not None:
                    to_added += pulled.sum(0)
                pulled = pulled.to(matrix.dtype)
                if to_states is not None:
                    _add_product_(to_states[rows], pulled, matrix)
                if to_matrix is not None:
                    _add_product_(to_matrix, pulled.t(), states[rows])
            if to_weight is not None and to_matrix is not None:
                to_weight[columns] = to_matrix.to(weight.dtype)
            if to_bias is not None and to_added is not None:
                to_bias[columns] = to_added.to(bias.dtype)
        to_hidden = None
        if to_states is not None:
            to_hidden = torch.zeros_like(hidden)
            to_hidden[wanted] = to_states.to(hidden.dtype)
        return to_hidden, to_weight, to_bias, None, None


def _slices(number: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, number)) for at in range(0, max(number, 1), size)]


def _columns(weight: Tensor) -> list[slice]:
    return _slices(len(weight), COLUMNS[weight.device.type])


def _tile(weight: Tensor, bias: Tensor | None, columns: slice) -> tuple[Tensor, Tensor | None]:
    return _exact(weight[columns]), None if bias is None else bias[columns]


def _precise_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _exact(x: Tensor) -> Tensor:
    """In a dtype whose products are added up in float32, and that holds any gradient of a logit."""
    return x if x.is_cuda and x.dtype == torch.bfloat16 else x.to(_precise_dtype(x))


def _logits(states: Tensor, matrix: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = _product(states, matrix.t())
    logits = logits if bias is None else logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, in float32 (float64 stays)."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _add_product_(into: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    else:
        into.add_(_product(a, b))
