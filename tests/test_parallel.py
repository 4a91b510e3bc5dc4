"""Sums, gathers and refusals over ranks; and the pool of rank processes itself."""

import os
import signal
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankError, run_ranks

from minirl.metrics import Max, Mean, Metrics, Min, Sum, mean_of, scalar, values
from minirl.parallel import (
    SOLO,
    Axis,
    barrier,
    gather,
    launched_size,
    reduce_metrics,
    require_equal,
    share_of,
    sum_over,
    world,
)


def _everything(axis: Axis) -> dict[str, Any]:
    metrics: Metrics = {
        "sum": Sum(torch.tensor(1.0 + axis.rank)),
        "mean": Mean(scalar(2.0 * axis.rank), scalar(1.0 + axis.rank)),
        "max": Max(scalar(axis.rank)),
        "min": Min(scalar(axis.rank)),
        f"only_{axis.rank}": mean_of(5.0),
    }
    barrier(axis)
    reduced = reduce_metrics(metrics, axis)
    return {
        "gather": gather([f"{axis.rank}a", f"{axis.rank}b"], axis),
        "ragged": gather(["x"] * axis.rank, axis),
        "sum": sum_over([float(axis.rank), 0.5], axis),
        "metrics": values(reduced),
        "dtypes": {str(x.dtype) for metric in reduced.values() for x in metric},
        "share": share_of(range(6), axis),
    }


def test_every_rank_sees_all_items_in_the_order_of_ranks():
    first, second = run_ranks(2, _everything)
    assert first.pop("share") == [0, 1, 2]
    assert second.pop("share") == [3, 4, 5]
    assert first == second
    assert first["gather"] == ["0a", "0b", "1a", "1b"]
    assert first["ragged"] == ["x"]
    assert first["sum"] == [1.0, 1.0]
    assert first["dtypes"] == {"torch.float64"}
    assert first["metrics"] == {
        "sum": 3.0, "mean": 2 / 3, "max": 1.0, "min": 0.0, "only_0": 5.0, "only_1": 5.0,
    }  # fmt: skip


def test_a_world_of_one_needs_no_group():
    assert gather([1, 2], SOLO) == [1, 2]
    assert sum_over([1.0, 2.0], SOLO) == [1.0, 2.0]
    assert values(reduce_metrics({"a": mean_of(3.0)}, SOLO)) == {"a": 3.0}
    barrier(SOLO)
    require_equal("sizes", 3, SOLO, "")


def test_the_world_opens_and_closes_a_group():
    for _ in range(2):
        with world() as axis:
            assert (axis.rank, axis.size) == (0, 1)
            assert gather([7], axis) == [7]
        assert not dist.is_initialized()


def test_a_group_that_something_else_closed_is_fine():
    with world():
        dist.destroy_process_group()


def test_the_launched_size_is_known_without_a_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launched_size() == 8


@given(st.integers(1, 6), st.integers(1, 5))
def test_shares_are_a_partition_in_order(size, each):
    items = list(range(size * each))
    assert [x for r in range(size) for x in share_of(items, Axis(r, size, None))] == items


def test_items_that_cannot_be_shared_equally_are_refused():
    with pytest.raises(ValueError, match="5 items cannot be shared equally by 2 ranks"):
        share_of(range(5), Axis(0, 2, None))


def _require(axis: Axis) -> str:
    require_equal("sizes", 3, axis, "no remedy")
    with pytest.raises(ValueError, match="sizes must be equal on all ranks") as error:
        require_equal("sizes", axis.rank, axis, "do this")
    return str(error.value)


def test_unequal_counts_are_refused_on_every_rank_with_all_counts():
    first, second = run_ranks(2, _require)
    assert first == second
    assert "[0, 1] (by rank); do this" in first


# ---- the pool -----------------------------------------------------------------------------------


def _pid(axis: Axis) -> int:
    return os.getpid()


def _fail_on_one(axis: Axis) -> None:
    if axis.rank == 1:
        raise KeyError("the cause")


def _fail_while_the_other_hangs(axis: Axis) -> None:
    time.sleep(0.0 if axis.rank == 1 else 600.0)
    raise KeyError("the cause")


def _die(axis: Axis) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_are_used_again():
    first = run_ranks(2, _pid)
    assert run_ranks(2, _pid) == first
    assert run_ranks(1, _pid) == first[:1]


def test_an_exception_in_a_rank_is_raised_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1: Traceback[\s\S]*_fail_on_one[\s\S]*the cause"):
        run_ranks(2, _fail_on_one)


@pytest.mark.slow
def test_ranks_that_hang_or_die_are_reported_and_replaced(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    before = run_ranks(2, _pid)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: no answer[\s\S]*rank 1: Traceback"):
        run_ranks(2, _fail_while_the_other_hangs)
    assert time.monotonic() - start < 300
    with pytest.raises(RankError, match="rank 0: the process died"):
        run_ranks(1, _die)
    assert set(run_ranks(2, _pid)).isdisjoint(before)
