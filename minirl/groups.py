"""How much better a sample is than the other samples of its prompt.

Groups are explicit ids, in any order and of any sizes: prompts are never compared. A group whose
rewards are equal teaches nothing: its advantage is exactly 0, also when the reward is a number
such as 0.3 whose sum does not divide back to it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minirl.types import SampleMask, SampleWeights

STD_EPSILON = 1e-6
"""Added to a standard deviation that divides, as in NeMo-RL."""


def group_relative(
    rewards: SampleWeights,
    groups: Int[Tensor, " batch"],
    *,
    leave_one_out: bool,
    normalize: bool,
    votes: SampleMask | None = None,
) -> SampleWeights:
    r"""How much better a sample is than its group.

    A_i = (r_i - b_i) / (s_i + 1e-6),  the division only where `normalize` and s_i > 0

    b_i and s_i are the mean and the unbiased standard deviation over the group, or over the
    group's others with `leave_one_out`. Paper by switches (leave_one_out, normalize): GRPO (no,
    yes), Dr. GRPO (no, no), RLOO (yes, no), NeMo-RL's default (yes, yes).

    Edges: differences within four units of rounding of the rewards' dtype are none, relative to
    the group's largest reward: such a group has advantage exactly 0, and such others have s_i = 0.
    With `votes`, only those samples form b and s; the others get 0, and so does a lone survivor.

    Raises:
        ValueError: a group has one sample, so there is nothing to compare it with.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, eq. 3; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, eq. 9.
    """
    if rewards.numel() == 0:
        return rewards.clone()
    cells = _cells(groups)
    voters = torch.ones_like(groups, dtype=torch.bool) if votes is None else votes
    x, vote = _to_grid(rewards.detach().double(), cells), _to_grid(voters, cells)
    # Centred on a member of the group, so that equal rewards become exact zeros.
    center = torch.where(vote, x, torch.nan).nanmedian(-1, keepdim=True).values
    d = torch.where(vote, x - center, 0.0)
    low = torch.where(vote, d, torch.inf).amin(-1, keepdim=True)
    high = torch.where(vote, d, -torch.inf).amax(-1, keepdim=True)
    rounding = torch.where(vote, x, 0.0).abs().amax(-1, keepdim=True)
    rounding = rounding * (4 * torch.finfo(rewards.dtype).eps)
    baseline, std = _others_moments(d, vote) if leave_one_out else _group_moments(d, vote)
    result = d - baseline
    if normalize:
        result = torch.where(std > rounding, result / (std + STD_EPSILON), result)
    silent = (high - low <= rounding) | (vote.sum(-1, keepdim=True) < 2) | ~vote
    return _from_grid(torch.where(silent, 0.0, result), cells).to(rewards.dtype)


class _Cells(NamedTuple):
    """Where each sample stands in a [group, member] grid; rows may be of different lengths."""

    group: Int[Tensor, " batch"]
    member: Int[Tensor, " batch"]
    shape: tuple[int, int]


def _cells(groups: Int[Tensor, " batch"]) -> _Cells:
    order = groups.argsort(stable=True)
    sorted_groups = groups[order]
    starts = torch.cat([order.new_ones(1), (sorted_groups.diff() != 0).to(order.dtype)])
    group_of_sorted = starts.cumsum(0) - 1
    counts = group_of_sorted.bincount()
    first = counts.cumsum(0) - counts
    smallest, largest = (int(count) for count in counts.aminmax())
    if smallest < 2:
        single = int(sorted_groups[first[counts.argmin()]])
        raise ValueError(
            f"group {single} has one sample: there is nothing to compare it with; sample at least"
            " two per prompt (num_generations_per_prompt), or use an estimator without a baseline"
        )
    group, member = torch.empty_like(order), torch.empty_like(order)
    group[order] = group_of_sorted
    member[order] = torch.arange(len(order), device=order.device) - first[group_of_sorted]
    return _Cells(group, member, (len(counts), largest))


def _to_grid(x: Tensor, cells: _Cells) -> Tensor:
    """The samples in their cells; empty cells are 0 or False."""
    grid = x.new_zeros(cells.shape)
    grid[cells.group, cells.member] = x
    return grid


def _from_grid(grid: Tensor, cells: _Cells) -> Tensor:
    return grid[cells.group, cells.member]


def _group_moments(
    d: Float[Tensor, "group member"], vote: Bool[Tensor, "group member"]
) -> tuple[Float[Tensor, "group 1"], Float[Tensor, "group 1"]]:
    """Mean and unbiased standard deviation of a row's voters; of less than two, 0."""
    count = vote.sum(-1, keepdim=True).to(d.dtype)
    mean = d.sum(-1, keepdim=True) / count.clamp(min=1.0)
    squares = torch.where(vote, (d - mean).square(), 0.0).sum(-1, keepdim=True)
    return mean, (squares / (count - 1.0).clamp(min=1.0)).sqrt()


def _others_moments(
    d: Float[Tensor, "group member"], vote: Bool[Tensor, "group member"]
) -> tuple[Float[Tensor, "group member"], Float[Tensor, "group member"]]:
    """The same over a row's other voters, for each cell."""
    count = vote.sum(-1, keepdim=True).to(d.dtype) - vote.to(d.dtype)
    mean = _sum_of_others(d) / count.clamp(min=1.0)
    squares = _sum_of_others(d.square()) - count * mean.square()
    variance = squares.clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    return mean, torch.where(count > 1, variance, 0.0).sqrt()


def _sum_of_others(x: Float[Tensor, "group member"]) -> Float[Tensor, "group member"]:
    """Row sums without the own cell, added up rather than subtracted from the total.

    A difference would leave a residue of the own value where the others are all 0, and a residue
    as standard deviation makes an advantage of thousands.
    """
    zero = x.new_zeros(x.shape[0], 1)
    before = torch.cat([zero, x[:, :-1].cumsum(-1)], dim=-1)
    after = torch.cat([x[:, 1:].flip(-1).cumsum(-1).flip(-1), zero], dim=-1)
    return before + after
