"""Metrics that add up: over micro-batches, over updates, over ranks, in any order.

A metric is a small record whose `add` is associative and commutative, so the logged number does
not depend on how the work was split. Division happens once, in `value`.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from minirl.types import Scalar


class Sum(NamedTuple):
    """A total; adding two gives the total over both."""

    total: Scalar


class Mean(NamedTuple):
    """A weighted mean before its division. Empty (weight 0) is NaN: there was nothing to average.

    >>> value(add(Mean(torch.tensor(6.0), torch.tensor(2.0)), mean_of(0.0, 1.0)))
    2.0
    """

    total: Scalar
    weight: Scalar


class Max(NamedTuple):
    """The largest value seen; -inf when there was none."""

    largest: Scalar


class Min(NamedTuple):
    """The smallest value seen; +inf when there was none."""

    smallest: Scalar


Metric: TypeAlias = Sum | Mean | Max | Min
Metrics: TypeAlias = dict[str, Metric]


def scalar(x: float | int) -> Scalar:
    """A 0-dimensional float64 tensor."""
    return torch.tensor(x, dtype=torch.float64)


def mean_of(x: float, weight: float = 1.0) -> Mean:
    """The mean of `weight` observations that all equal `x`."""
    return Mean(scalar(x * weight), scalar(weight))


def mean_over(xs: Tensor) -> Mean:
    """The mean over all elements of `xs`."""
    return Mean(xs.double().sum(), scalar(float(xs.numel())))


def add(a: Metric, b: Metric) -> Metric:
    """Both observations together. Totals are float64: of many small shares none is lost.

    Raises:
        TypeError: the two are different kinds of metric.
    """
    match a, b:
        case Sum(x), Sum(y):
            return Sum(x.double() + y.double())
        case Mean(x, w), Mean(y, v):
            return Mean(x.double() + y.double(), w.double() + v.double())
        case Max(x), Max(y):
            return Max(torch.maximum(x, y))
        case Min(x), Min(y):
            return Min(torch.minimum(x, y))
        case _:
            raise TypeError(f"cannot add {type(a).__name__} and {type(b).__name__}")


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """All metrics of `parts`; those with one name are added."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = add(merged[name], metric) if name in merged else metric
    return merged


def value(metric: Metric) -> float:
    """The number to log."""
    match metric:
        case Mean(total, weight):
            return (total.double() / weight.double()).item()
        case Sum(x) | Max(x) | Min(x):
            return x.double().item()


def values(metrics: Mapping[str, Metric], prefix: str = "") -> dict[str, float]:
    """The numbers to log, each under `prefix` + its name."""
    return {prefix + name: value(metric) for name, metric in metrics.items()}
