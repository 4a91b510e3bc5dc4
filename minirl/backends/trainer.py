"""What the backends share of an update: which state is valid, what is reported, what is attached.

A trainer changes in place. A state holds a handle with the trainer's stamp, so that one which was
consumed is told apart from the one that followed it.
"""

from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from minirl.backend import TokenOutput, TrainState
from minirl.metrics import Metrics, Sum, mean_of, scalar
from minirl.types import Scalar


@runtime_checkable
class Stamped(Protocol):
    """A trainer, as far as its states are concerned."""

    updates: int
    """Of the only valid state."""
    stamp: int
    """Changes whenever a state is consumed; a handle with another stamp is refused."""


T = TypeVar("T", bound=Stamped)


@dataclass(frozen=True, slots=True)
class Handle(Generic[T]):
    """A trainer as of one moment. Valid until the trainer's next change."""

    trainer: T
    stamp: int


def current(state: TrainState[Handle[T]]) -> T:
    """The state's trainer.

    Raises:
        ValueError: the state was consumed.
    """
    trainer = state.model.trainer
    if state.model.stamp != trainer.stamp:
        raise ValueError(
            f"state of update {state.updates} was consumed; now at {trainer.updates}: "
            "go on with the state that the last update_, end_step_ or load_ returned"
        )
    return trainer


def succeed(changed: TrainState[Handle[T]]) -> TrainState[Handle[T]]:
    """The only valid state from now on, with the values of `changed`."""
    trainer = changed.model.trainer
    trainer.stamp += 1
    trainer.updates = changed.updates
    return replace(changed, model=Handle(trainer, trainer.stamp))


def update_metrics(norm: float, lr: float, *, taken: bool, data_rank: int) -> Metrics:
    """What every update reports; a skipped one is counted on one rank, since ranks are summed."""
    skipped = Sum(scalar(float(not taken and data_rank == 0)))
    return {"grad_norm": mean_of(norm), "lr": mean_of(lr), "nonfinite_updates": skipped}


def attached(loss: Scalar, output: TokenOutput) -> Scalar:
    """The loss, with a zero gradient if it has none: every rank takes part in a backward pass."""
    if loss.requires_grad:
        return loss
    return loss + torch.zeros_like(output.logprobs).mul(output.logprobs).sum()
