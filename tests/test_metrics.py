"""Metrics add up: in any order and any grouping, to the number of the whole."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.metrics import (
    Max,
    Mean,
    Metric,
    Min,
    Sum,
    add,
    mean_of,
    mean_over,
    merge,
    scalar,
    value,
    values,
)

KINDS: dict[str, Callable[[int], Metric]] = {
    "sum": lambda x: Sum(scalar(x)),
    "mean": lambda x: mean_of(float(x)),
    "max": lambda x: Max(scalar(x)),
    "min": lambda x: Min(scalar(x)),
}
OF_ALL: dict[str, Callable[[Sequence[int]], float]] = {
    "sum": sum,
    "mean": lambda xs: sum(xs) / len(xs),
    "max": max,
    "min": min,
}
# Whole numbers, so that sums are exact in any order.
numbers = st.lists(st.integers(-1000, 1000), min_size=1, max_size=12)


def together(parts: Sequence[Metric]) -> Metric:
    return merge(*({"x": part} for part in parts))["x"]


@pytest.mark.parametrize("kind", KINDS)
@given(numbers, st.data())
def test_any_order_and_any_grouping_gives_the_number_of_the_whole(
    kind: str, xs: list[int], data: st.DataObject
):
    parts = [KINDS[kind](x) for x in data.draw(st.permutations(xs))]
    cuts = sorted({0, len(xs), *data.draw(st.lists(st.integers(0, len(xs)), max_size=3))})
    groups = [together(parts[a:b]) for a, b in pairwise(cuts)]
    assert value(together(groups)) == OF_ALL[kind](xs)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 9)), min_size=1))
def test_a_mean_weighs_what_it_adds(pairs: list[tuple[int, int]]):
    found = value(together([mean_of(float(x), float(w)) for x, w in pairs]))
    assert found == pytest.approx(sum(x * w for x, w in pairs) / sum(w for _, w in pairs))


@given(numbers, st.integers(1, 11))
def test_a_mean_over_parts_of_different_sizes_is_the_mean_over_all(xs: list[int], at: int):
    parts = [torch.tensor(part, dtype=torch.float32) for part in (xs[:at], xs[at:])]
    assert value(add(*(mean_over(part) for part in parts))) == pytest.approx(sum(xs) / len(xs))


def test_a_mean_of_nothing_is_nan_and_adds_nothing():
    empty = mean_over(torch.zeros(0))
    assert math.isnan(value(empty))
    assert value(add(empty, mean_of(3.0))) == 3.0


def test_extremes_of_nothing_are_neutral():
    assert value(add(Max(scalar(-math.inf)), Max(scalar(-5)))) == -5
    assert value(add(Min(scalar(math.inf)), Min(scalar(5)))) == 5


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_metrics_of_different_kinds_do_not_add(one: str, other: str):
    if one == other:
        return
    parts = KINDS[one](1), KINDS[other](2)
    with pytest.raises(TypeError, match=f"{type(parts[0]).__name__} and {type(parts[1]).__name__}"):
        add(*parts)


def test_merging_keeps_what_only_one_part_knows_and_changes_no_part():
    one = {"a": mean_of(1.0), "b": Sum(scalar(2))}
    other = {"b": Sum(scalar(3)), "c": Max(scalar(4))}
    kept = values(one), values(other)
    assert values(merge(one, other)) == {"a": 1.0, "b": 5.0, "c": 4.0}
    assert (values(one), values(other)) == kept
    assert merge() == {}


def test_numbers_are_logged_under_a_prefix_in_full_precision():
    small = torch.tensor(1.0, dtype=torch.float32)
    assert values({"x": Sum(small), "y": Mean(small, small * 3)}, "train/") == {
        "train/x": 1.0,
        "train/y": 1 / 3,
    }
    big = mean_over(torch.full((3,), 2.0**24 + 2, dtype=torch.float32))
    assert value(big) == 2.0**24 + 2
