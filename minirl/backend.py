"""What training offers: a frozen record of functions over an opaque handle.

Megatron's pipeline schedule owns forward and backward, so the contract cannot be "forward, then
autograd". A micro-batch of work is therefore *rows* (what the model reads), a *head* (which view
of the output the loss wants) and a *loss* (a pure function of that view, already divided by the
counts of the global batch). Sharding of parameters, sequences and vocabulary stays inside.

Functions whose name ends in `_` change the model in place and consume the state they were given:
the state they return is the only valid one afterwards, and a consumed one is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from minirl.metrics import Metrics
from minirl.parallel import Axis
from minirl.rng import Key
from minirl.types import Rows, Sample, Scalar, TokenLogProbs

M = TypeVar("M")

Weights: TypeAlias = Literal["policy", "reference"]
"""The two weight sets of a backend. The reference is the policy as it was first loaded."""


class TokenHead(NamedTuple):
    """View the output as the log-prob of every next token: log softmax(logits / temperature)."""

    temperature: float = 1.0
    entropy: bool = False
    """Also give the exact entropy of the distribution at every position."""


class TokenOutput(NamedTuple):
    """What a `TokenHead` shows, in float32, whole rows; padding positions hold finite junk."""

    logprobs: TokenLogProbs
    entropy: TokenLogProbs | None


LossFn: TypeAlias = Callable[[TokenOutput], tuple[Scalar, Metrics]]
"""From the view of one micro-batch to its share of the loss of the global batch."""


class Work(NamedTuple):
    """One micro-batch: its gradient is the gradient of `loss(head(model(rows)))`."""

    rows: Rows
    head: TokenHead
    loss: LossFn


@dataclass(frozen=True, slots=True)
class TrainState(Generic[M]):
    """What a checkpoint holds."""

    model: M
    """A handle: parameters, optimizer, schedule. The rest are values."""
    step: int
    """Steps of the algorithm taken: one rollout and its updates."""
    updates: int
    """Optimizer updates taken; also the version of the weights."""
    cursor: int
    """Prompts drawn from the data stream so far."""
    key: Key
    """The root of the run's randomness."""
    surplus: tuple[Sample, ...] = ()
    """Scored samples, in whole groups, that were drawn and not yet trained on; on every rank."""


@dataclass(frozen=True, slots=True)
class Backend(Generic[M]):
    """Functions over `TrainState[M]`.

    Collective: every rank of the backend's world calls each of them, in the same order, with the
    same number of micro-batches (pad with rows whose loss is zero).
    """

    axis: Axis
    """All ranks of the backend: each has an engine, and samples and scores its own prompts."""

    data_axis: Axis
    """Ranks that train different rows. The others cooperate with one of these on its rows: they
    hold other layers, parts of layers or parts of sequences."""

    logprobs: Callable[[TrainState[M], Sequence[Rows], TokenHead, Weights], list[TokenOutput]]
    """Without gradient; one output per micro-batch, through the same code path as `update_`."""

    update_: Callable[[TrainState[M], Sequence[Work]], tuple[TrainState[M], Metrics]]
    """One optimizer update on the sum of all losses of all ranks (gradients add, never average).

    The metrics are this rank's losses' metrics added up, plus `grad_norm` (global, before
    clipping), `lr`, and `nonfinite_updates`: 1 when the gradient was not finite and the update
    was therefore skipped. Consumes: the state.
    """

    end_step_: Callable[[TrainState[M]], TrainState[M]]
    """Ends a step of the algorithm: the learning-rate schedule advances once.

    Consumes: the state.
    """

    export: Callable[[TrainState[M]], Iterator[tuple[str, Tensor]]]
    """Policy weights as (Hugging Face name, full tensor), each valid until the next one."""

    save: Callable[[TrainState[M], Path], None]
    """Writes parameters, optimizer, schedule and the state's values into an existing folder."""

    load_: Callable[[TrainState[M], Path], TrainState[M]]
    """Reads what `save` wrote, under any number of ranks. Consumes: the state."""


def after_draw(state: TrainState[M], cursor: int, surplus: Sequence[Sample] = ()) -> TrainState[M]:
    """The same state after prompts up to `cursor` were drawn. Does not consume it."""
    return replace(state, cursor=cursor, surplus=tuple(surplus))
