"""The one outer loop: step, validate, save, log, until done. It knows no algorithm.

In: a `step` and an `evaluate` function closed over their parts. Out: the last state. Whatever a
run records goes through `log`; what is saved can be resumed.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from minirl.backend import TrainState
from minirl.log import Log, alarms

M = TypeVar("M")


class Plan(NamedTuple):
    """When things happen, in steps."""

    num_steps: int
    val_period: int
    """0: no validation on the way."""
    val_at_start: bool
    val_at_end: bool
    save_period: int
    """0: nothing is saved."""


def validates_after(plan: Plan, step: int) -> bool:
    """Whether step number `step` (from 1) is followed by a validation.

    >>> plan = Plan(10, val_period=4, val_at_start=False, val_at_end=True, save_period=0)
    >>> [step for step in range(1, 11) if validates_after(plan, step)]
    [4, 8, 10]
    """
    periodic = plan.val_period > 0 and step % plan.val_period == 0
    return periodic or (plan.val_at_end and step == plan.num_steps)


def saves_after(plan: Plan, step: int) -> bool:
    """Whether step number `step` (from 1) is followed by a checkpoint; the last one always is.

    >>> plan = Plan(10, val_period=0, val_at_start=False, val_at_end=False, save_period=4)
    >>> [step for step in range(1, 11) if saves_after(plan, step)]
    [4, 8, 10]
    """
    return plan.save_period > 0 and (step % plan.save_period == 0 or step == plan.num_steps)


def run(
    state: TrainState[M],
    plan: Plan,
    step: Callable[[TrainState[M]], tuple[TrainState[M], dict[str, float]] | None],
    evaluate: Callable[[TrainState[M]], dict[str, float]],
    save: Callable[[TrainState[M]], object],
    log: Log,
) -> TrainState[M]:
    """Steps from `state.step` to `plan.num_steps`, or until `step` has too little data for one.

    The metrics of a validation are logged with those of the step that it follows; those of a
    validation at the start are logged as step 0. Where the data ends the run, the step before is
    known to be the last only afterwards: its validation is then a line of its own.

    Consumes: `state`. Collective: every rank calls it.
    """
    if plan.val_at_start and state.step == 0:
        log.step(0, evaluate(state))
    first = state.step
    while state.step < plan.num_steps:
        after = step(state)
        if after is None:
            log.say(f"the data ends here: too few prompts are left for step {state.step + 1}")
            plan, was = plan._replace(num_steps=state.step), plan
            if state.step > first and validates_after(plan, state.step) > validates_after(
                was, state.step
            ):
                log.step(state.step, evaluate(state))
            if state.step > first and saves_after(plan, state.step) > saves_after(was, state.step):
                save(state)
            break
        state, metrics = after
        if validates_after(plan, state.step):
            metrics |= evaluate(state)
        log.step(state.step, metrics)
        for alarm in alarms(metrics):
            log.say(alarm)
        if saves_after(plan, state.step):
            save(state)
    return state
