"""How much better a sample is than the other samples of its prompt.

Groups are explicit ids, in any order and of any sizes: prompts are never compared. A group whose
rewards are equal teaches nothing: its advantage is exactly 0, also when the reward is a number
such as 0.3 whose sum does not divide back to it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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

    Edges: values that differ by no more than rounding (four units of the rewards' dtype, relative
    to their root mean square) are equal: such a group has advantage exactly 0, and s_i of such
    values is 0. With `votes`, only those samples form b and s; the others get advantage 0, and so
    does a lone survivor.

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
    d, x = torch.where(vote, x - center, 0.0), torch.where(vote, x, 0.0)
    epsilon = 4 * torch.finfo(rewards.dtype).eps
    total = _sum_of_others if leave_one_out else _sum_of_all
    count = total(vote.to(d.dtype))
    mean = total(d) / count.clamp(min=1.0)
    result = d - mean
    if normalize:
        # Nearly free of cancellation: the center is within the values that are averaged.
        variance = (total(d.square()) - count * mean.square()) / (count - 1.0).clamp(min=1.0)
        std = torch.where(count > 1, variance.clamp(min=0.0), 0.0).sqrt()
        rounding = epsilon * (total(x.square()) / count.clamp(min=1.0)).sqrt()
        result = torch.where(std > rounding, result / (std + STD_EPSILON), result)
    size = _sum_of_all(vote.to(d.dtype))
    rounding = epsilon * (_sum_of_all(x.square()) / size.clamp(min=1.0)).sqrt()
    # The center's own d is 0, so empty cells do not widen the range.
    flat = d.amax(-1, keepdim=True) - d.amin(-1, keepdim=True) <= rounding
    result = torch.where(flat | (size < 2) | ~vote, 0.0, result)
    return _from_grid(result, cells).to(rewards.dtype)


class _Cells(NamedTuple):
    """Where each sample stands in a [group, member] grid; rows may be of different lengths."""

    flat: Int[Tensor, " batch"]
    """The index of each sample's cell in the flattened grid."""
    num_groups: int
    num_members: int


def _cells(groups: Int[Tensor, " batch"]) -> _Cells:
    ids, order = groups.sort(stable=True)
    row = torch.cat([ids.new_zeros(1), (ids.diff() != 0).cumsum(0)])
    counts = row.bincount()
    first = counts.cumsum(0) - counts
    smallest, largest = (int(count) for count in counts.aminmax())
    if smallest < 2:
        single = int(ids[first[counts.argmin()]])
        raise ValueError(
            f"group {single} has one sample: there is nothing to compare it with; sample at least"
            " two per prompt (num_generations_per_prompt), or use an estimator without a baseline"
        )
    member = torch.arange(len(row), device=row.device) - first.gather(0, row)
    flat = torch.empty_like(order).scatter_(0, order, row * largest + member)
    return _Cells(flat, len(counts), largest)


def _to_grid(x: Tensor, cells: _Cells) -> Tensor:
    """The samples in their cells; empty cells are 0 or False."""
    grid = x.new_zeros(cells.num_groups * cells.num_members).scatter_(0, cells.flat, x)
    return grid.view(cells.num_groups, cells.num_members)


def _from_grid(grid: Tensor, cells: _Cells) -> Tensor:
    return grid.flatten().gather(0, cells.flat)


def _sum_of_all(x: Float[Tensor, "group member"]) -> Float[Tensor, "group 1"]:
    return x.sum(-1, keepdim=True)


def _sum_of_others(x: Float[Tensor, "group member"]) -> Float[Tensor, "group member"]:
    """Row sums without the own cell, added up rather than subtracted from the total.

    A difference would leave a residue of the own value where the others are all 0, and a residue
    as standard deviation makes an advantage of thousands.
    """
    zero = x.new_zeros(x.shape[0], 1)
    before = torch.cat([zero, x[:, :-1].cumsum(-1)], dim=-1)
    after = torch.cat([x[:, 1:].flip(-1).cumsum(-1).flip(-1), zero], dim=-1)
    return before + after
