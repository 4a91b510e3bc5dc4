"""Advantages once more, slowly: Python floats and loops, written from the formulas."""

import math
from collections.abc import Sequence

Grid = list[list[float]]
EPS = 1e-8


def group_relative(
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    leave_one_out: bool,
    normalize: bool,
) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        group = [j for j, g in enumerate(groups) if g == groups[i]]
        members = [rewards[j] for j in group]
        others = [rewards[j] for j in group if j != i] if leave_one_out else members
        if max(members) == min(members):
            out.append(0.0)
            continue
        mean = math.fsum(others) / len(others)
        deviation = 0.0
        if len(others) > 1 and max(others) != min(others):
            squares = math.fsum((x - mean) ** 2 for x in others)
            deviation = math.sqrt(squares / (len(others) - 1))
        advantage = reward - mean
        out.append(advantage / (deviation + 1e-6) if normalize and deviation > 0 else advantage)
    return out


def standardize(rows: Grid, mask: list[list[int]]) -> Grid:
    """Zero mean and unit (biased) variance over the mask; 0 outside it."""
    seen = [x for row, m in zip(rows, mask, strict=True) for x, k in zip(row, m, strict=True) if k]
    mean = math.fsum(seen) / max(len(seen), 1)
    variance = math.fsum((x - mean) ** 2 for x in seen) / max(len(seen), 1)
    scale = 1.0 / math.sqrt(max(variance, 1e-8))
    return _masked([[(x - mean) * scale for x in row] for row in rows], mask)


def whiten(rows: Grid, mask: list[list[int]]) -> Grid:
    """The same with the unbiased variance."""
    seen = [x for row, m in zip(rows, mask, strict=True) for x, k in zip(row, m, strict=True) if k]
    mean = math.fsum(seen) / (len(seen) + EPS)
    variance = math.fsum((x - mean) ** 2 for x in seen) / (len(seen) + EPS)
    variance *= len(seen) / max(len(seen) - 1, 1)
    scale = 1.0 / math.sqrt(variance + EPS)
    return _masked([[(x - mean) * scale for x in row] for row in rows], mask)


def gae(
    rewards: Sequence[float],
    values: Grid,
    mask: list[list[int]],
    gamma: float,
    lambdas: Sequence[float],
    penalties: Grid,
) -> Grid:
    """Advantages by the definition, a double sum over the sample's trained tokens."""
    out = [[0.0] * len(row) for row in values]
    for i, reward in enumerate(rewards):
        at = [t for t, m in enumerate(mask[i]) if m]
        deltas = []
        for n, t in enumerate(at):
            last = n == len(at) - 1
            r = (reward if last else 0.0) - penalties[i][t]
            deltas.append(r + (0.0 if last else gamma * values[i][at[n + 1]]) - values[i][t])
        for n, t in enumerate(at):
            powers = 1.0
            for delta in deltas[n:]:
                out[i][t] += powers * delta
                powers *= gamma * lambdas[i]
    return out


def _masked(rows: Grid, mask: list[list[int]]) -> Grid:
    return [
        [x if m else 0.0 for x, m in zip(row, marks, strict=True)]
        for row, marks in zip(rows, mask, strict=True)
    ]
