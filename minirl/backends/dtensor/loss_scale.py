"""How far a loss is scaled up, so that float16 gradients neither vanish nor overflow.

Gradients below 6e-8 are zero in float16, and those above 65504 infinite. The loss is multiplied by
a power of two before backward, and gradients, in float32 by then, are divided by it again: exactly.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from typing import NamedTuple

LARGEST = 2.0**16
"""Also the first."""
PATIENCE = 100
"""Updates without an overflow before a larger scale is tried. A mistake costs one more backward."""


class LossScale(NamedTuple):
    """A scale, and how many updates in a row it was good for."""

    value: float = LARGEST
    good: int = 0


def after(scale: LossScale, *, finite: bool) -> LossScale:
    """Half of it after an overflow, twice after `PATIENCE` without; from 1 to `LARGEST`.

    >>> after(LossScale(8.0, 5), finite=False), after(LossScale(8.0, 5), finite=True)
    (LossScale(value=4.0, good=0), LossScale(value=8.0, good=6))
    >>> after(LossScale(8.0, PATIENCE - 1), finite=True)
    LossScale(value=16.0, good=0)
    """
    if not finite:
        return LossScale(max(scale.value / 2, 1.0))
    if scale.good + 1 >= PATIENCE:
        return LossScale(min(scale.value * 2, LARGEST))
    return LossScale(scale.value, scale.good + 1)
