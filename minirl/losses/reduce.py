"""Sums and means over masked values, and the rules that keep NaN and overflow out of them.

Three rules hold everywhere in the arithmetic. A value outside the mask is replaced by zero
(`select`) *before* anything is computed from it, because 0 * inf is NaN and so is its gradient.
From then on every value is finite there, and a sum multiplies by `kept`, the mask as 0 and 1. A
mean divides by a count that is passed in (a fact about the global batch), so shares of a batch add
up; the count of nothing is 0 and the mean of nothing is 0.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from minirl.types import SampleWeights, Scalar, TokenMask, TokenWeights

EPSILON = 1e-8
"""Added to every count, as NeMo-RL does: a mean over nothing is 0."""

Count: TypeAlias = int | float | Num[Tensor, ""]
"""How many there are in the global batch."""

SumOver: TypeAlias = Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]]
"""Elementwise sums over the ranks that hold different samples."""


def alone(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The `SumOver` of a single process."""
    return x


def select(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x where the mask is true, else 0. Other values are never read, nor is their gradient."""
    return torch.where(mask, x, 0.0)


def kept_sum(x: Float[Tensor, "*shape"], kept: Float[Tensor, "*shape"]) -> Scalar:
    """Sum of x where `kept` is 1. x must be finite everywhere: see `select`."""
    return (x * kept).sum()


def kept_mean(x: Float[Tensor, "*shape"], kept: Float[Tensor, "*shape"], count: Count) -> Scalar:
    """This batch's share of a mean over `count` values of the global batch.

    sum_i kept_i x_i / (count + 1e-8)
    """
    return kept_sum(x, kept) / denominator(count, x.dtype)


def denominator(count: Count, dtype: torch.dtype) -> Count:
    """count + 1e-8, in the precision of what it divides (an integer count would mean float32)."""
    return (count.to(dtype) if isinstance(count, Tensor) else count) + EPSILON


def row_mean(x: TokenWeights, kept: TokenWeights) -> SampleWeights:
    """Mean of each row over its own kept positions; 0 for a row without any."""
    return (x * kept).sum(-1) / (kept.sum(-1) + EPSILON)


def infinite_outside(mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 where the mask is true, else infinity."""
    return torch.where(mask, 0.0, math.inf)


def extremes(x: Float[Tensor, "*shape"], outside: Float[Tensor, "*shape"]) -> tuple[Scalar, Scalar]:
    """Smallest and largest value where `infinite_outside` is 0; +inf and -inf if nowhere."""
    return (x + outside).amin(), (x - outside).amax()


def is_positive(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 where x > 0, else 0: `(x > 0).to(x.dtype)` in a fifth of its time on a CPU."""
    return x.detach().sign().relu()


def exponent_bound(dtype: torch.dtype) -> float:
    """The largest x whose exp can be cubed: 29.6 in float32, 236.6 in float64."""
    return math.log(torch.finfo(dtype).max) / 3


def bounded_exp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(min(x, bound)) with the bound of the dtype: finite, and without a gradient beyond it.

    A ratio of probabilities is at most 7e12 in float32. Larger ones say that two log-probs do not
    belong together; the losses count them as `overflow_tokens`.
    """
    return x.clamp(max=exponent_bound(x.dtype)).exp()


def is_bounded(ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 where a ratio is the largest that `bounded_exp` gives, but for rounding; else 0."""
    return is_positive(ratio - (1.0 - 1e-5) * math.exp(exponent_bound(ratio.dtype)))


def standardize(x: TokenWeights, mask: TokenMask, sum_over: SumOver = alone) -> TokenWeights:
    """(x - mean) / sqrt(max(variance, 1e-8)) over the masked values of all ranks; 0 elsewhere.

    The variance is the biased one; the moments are taken in float64.

    Source: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262; the floor is NeMo-RL's.
    """
    mean, variance, _ = _moments(x, mask, sum_over, epsilon=0.0)
    scale = variance.clamp(min=EPSILON).rsqrt()
    return select((x.double() - mean) * scale, mask).to(x.dtype)


def whiten(x: TokenWeights, mask: TokenMask, sum_over: SumOver = alone) -> TokenWeights:
    """(x - mean) / sqrt(variance + 1e-8) over the masked values of all ranks; 0 elsewhere.

    The variance is the unbiased one, 0 for a single value; the moments are taken in float64.

    Source: PPO as in Stiennon et al. 2020, arXiv:2009.01325; the constants are NeMo-RL's.
    """
    mean, variance, count = _moments(x, mask, sum_over, epsilon=EPSILON)
    unbiased = variance * count / (count - 1.0).clamp(min=1.0)
    scale = (unbiased + EPSILON).rsqrt()
    return select((x.double() - mean) * scale, mask).to(x.dtype)


def _moments(
    x: TokenWeights, mask: TokenMask, sum_over: SumOver, epsilon: float
) -> tuple[Scalar, Scalar, Scalar]:
    """Mean, biased variance and count over all ranks, in float64; all 0 for an empty mask."""
    x, kept = select(x, mask).double(), mask.double()
    count, total = sum_over(torch.stack([kept.sum(), x.sum()])).unbind()
    by = count.clamp(min=1.0) + epsilon
    mean = total / by
    squares = sum_over(kept_sum((x - mean).square(), kept).reshape(1))[0]
    return mean, squares / by, count
