"""The outer loop: what happens after which step, and that going on is the same as not stopping."""

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import fresh

from minirl.algos import loop
from minirl.algos.loop import Plan
from minirl.backend import TrainState
from minirl.log import Log

plans = st.builds(
    Plan,
    num_steps=st.integers(0, 9),
    val_period=st.integers(0, 4),
    val_at_start=st.booleans(),
    val_at_end=st.booleans(),
    save_period=st.integers(0, 4),
)


class Seen(NamedTuple):
    """What happened, as (what, step), and the lines of the log."""

    events: list[tuple[str, int]]
    lines: list[tuple[int, dict[str, float]]]
    said: list[str]
    last: TrainState


def go(
    plan: Plan, state: TrainState | None = None, data: int | None = None, **metrics: float
) -> Seen:
    """`data` is the last step that there is enough of it for."""
    events: list[tuple[str, int]] = []
    lines: list[tuple[int, dict[str, float]]] = []
    said: list[str] = []

    def step(at: TrainState) -> tuple[TrainState, dict[str, float]] | None:
        if at.step == data:
            return None
        after = replace(at, step=at.step + 1)
        events.append(("step", after.step))
        return after, {"train/loss": float(after.step), **metrics}

    def evaluate(at: TrainState) -> dict[str, float]:
        events.append(("val", at.step))
        return {"val/accuracy": at.step / 10}

    log = Log(step=lambda number, line: lines.append((number, dict(line))), say=said.append)
    last = loop.run(
        state or fresh(),
        plan,
        step,
        evaluate,
        save=lambda at: events.append(("save", at.step)),
        log=log,
    )
    return Seen(events, lines, said, last)


def expected(plan: Plan, first: int = 1) -> list[tuple[str, int]]:
    """Written from the words of the plan."""
    events = [("val", 0)] if plan.val_at_start and first == 1 else []
    for number in range(first, plan.num_steps + 1):
        last = number == plan.num_steps
        events.append(("step", number))
        on_the_way = plan.val_period > 0 and number % plan.val_period == 0
        if on_the_way or (last and plan.val_at_end):
            events.append(("val", number))
        if plan.save_period > 0 and (last or number % plan.save_period == 0):
            events.append(("save", number))
    return events


@given(plans)
def test_a_run_does_what_its_plan_says_in_order(plan: Plan):
    seen = go(plan)
    assert seen.events == expected(plan)
    assert seen.last.step == plan.num_steps


@given(plans, st.integers(0, 9))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(plan: Plan, at: int):
    at = min(at, plan.num_steps)
    resumed = go(plan, replace(fresh(), step=at))
    assert resumed.events == expected(plan, at + 1)
    assert resumed.lines == [line for line in go(plan).lines if line[0] > at or at == 0]


@given(plans)
def test_every_step_has_one_line_with_the_validation_that_follows_it(plan: Plan):
    seen = go(plan)
    validated = {number for what, number in seen.events if what == "val"}
    first = [0] if plan.val_at_start else []
    assert [number for number, _ in seen.lines] == first + list(range(1, plan.num_steps + 1))
    for number, line in seen.lines:
        assert ("val/accuracy" in line) == (number in validated)
        assert ("train/loss" in line) == (number > 0)


@given(plans, st.data())
def test_data_that_ends_early_ends_the_run_as_its_last_step_would(plan: Plan, draw: st.DataObject):
    data = draw.draw(st.integers(0, plan.num_steps), "last step that there is data for")
    at = draw.draw(st.integers(0, data), "first step")
    seen = go(plan, replace(fresh(), step=at), data=data)
    if at == data:  # nothing was done, so there is nothing to validate or save
        assert seen.events == ([("val", 0)] if plan.val_at_start and at == 0 else [])
    else:
        assert set(seen.events) == set(expected(plan._replace(num_steps=data), at + 1))
        assert len(seen.events) == len(set(seen.events))
    assert seen.last.step == data
    assert len(seen.said) == (data < plan.num_steps)
    validated = {step for what, step in seen.events if what == "val"}
    assert {step for step, line in seen.lines if "val/accuracy" in line} == validated


def test_a_finished_run_does_nothing():
    plan = Plan(3, val_period=1, val_at_start=True, val_at_end=True, save_period=1)
    for done in (3, 5):
        seen = go(plan, replace(fresh(), step=done))
        assert (seen.events, seen.lines, seen.last.step) == ([], [], done)


@pytest.mark.parametrize(("timeouts", "warnings"), [(0.0, 0), (2.0, 2)])
def test_a_step_that_raises_an_alarm_says_so(timeouts: float, warnings: int):
    plan = Plan(2, val_period=0, val_at_start=False, val_at_end=False, save_period=0)
    seen = go(plan, **{"train/verifier_timeouts": timeouts})
    assert len(seen.said) == warnings
    assert all("2 answers exceeded env.timeout_s" in text for text in seen.said)
