"""How much better a sample is than the other samples of its prompt.

Groups are explicit ids, in any order and of any sizes: prompts are never compared. A group whose
rewards are equal teaches nothing: its advantage is exactly 0, also when the reward is a number
such as 0.3 whose sum does not divide back to it.
"""

from collections.abc import Iterator
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minirl.types import SampleWeights

STD_EPSILON = 1e-6
"""Added to a standard deviation that divides, as in NeMo-RL."""


def group_relative(
    rewards: SampleWeights,
    groups: Int[Tensor, " batch"],
    *,
    leave_one_out: bool,
    normalize: bool,
) -> SampleWeights:
    r"""How much better a sample is than its group.

    A_i = (r_i - b_i) / (s_i + 1e-6),  the division only where `normalize` and s_i > 0

    b_i and s_i are the mean and the unbiased standard deviation over the group, or over the
    group's others with `leave_one_out`. Paper by switches (leave_one_out, normalize): GRPO (no,
    yes), Dr. GRPO (no, no), RLOO (yes, no), NeMo-RL's default (yes, yes).

    Edges: values that differ by no more than rounding (four units of the rewards' dtype, relative
    to their root mean square) are equal: such a group has advantage exactly 0, and s_i of such
    values is 0.

    Raises:
        ValueError: a group has one sample, so there is nothing to compare it with.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, section 3.2; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    if rewards.numel() == 0:
        return rewards.clone()
    result = torch.empty_like(rewards)
    rounding = 4 * torch.finfo(rewards.dtype).eps
    for members in _members(groups):
        x = rewards.detach()[members].double()
        # Centred on a member of the group, so that equal rewards become exact zeros.
        d = x - x.median(-1, keepdim=True).values
        flat = d.amax(-1, keepdim=True) - d.amin(-1, keepdim=True) <= rounding * _rms(x)
        baseline, std = _others(d, x, rounding) if leave_one_out else _all(d)
        better = d - baseline
        if normalize:
            better = torch.where(std > 0, better / (std + STD_EPSILON), better)
        result[members] = torch.where(flat, 0.0, better).to(rewards.dtype)
    return result


def _members(groups: Int[Tensor, " batch"]) -> Iterator[Int[Tensor, "group member"]]:
    """The indices of the samples of each group, as one table for each size of group."""
    ids, order = groups.sort(stable=True)
    ends = (ids.diff() != 0).nonzero().flatten() + 1
    first = torch.cat([ends.new_zeros(1), ends])
    sizes = torch.cat([ends, ends.new_full((1,), len(ids))]) - first
    for size in sorted(set(cast("list[int]", sizes.tolist()))):
        starts = first[sizes == size]
        if size == 1:
            raise ValueError(
                f"group {int(ids[starts[0]])} has one sample: there is nothing to compare it with;"
                " sample at least two per prompt (num_generations_per_prompt), or use an estimator"
                " without a baseline"
            )
        yield order[starts.unsqueeze(-1) + torch.arange(size, device=order.device)]


def _all(
    d: Float[Tensor, "group member"],
) -> tuple[Float[Tensor, "group 1"], Float[Tensor, "group 1"]]:
    """Mean and unbiased standard deviation of each row."""
    mean = d.mean(-1, keepdim=True)
    return mean, ((d - mean).square().sum(-1, keepdim=True) / (d.shape[-1] - 1)).sqrt()


def _others(
    d: Float[Tensor, "group member"], x: Float[Tensor, "group member"], rounding: float
) -> tuple[Float[Tensor, "group member"], Float[Tensor, "group member"]]:
    """The same over the row's other cells, for each cell; no deviation where it is rounding."""
    count = d.shape[-1] - 1
    mean = _sum_of_others(d) / count
    if count == 1:
        return mean, torch.zeros_like(mean)
    # Nearly free of cancellation: 0 is within the values that are averaged.
    variance = (_sum_of_others(d.square()) - count * mean.square()) / (count - 1)
    std = variance.clamp(min=0.0).sqrt()
    size = (_sum_of_others(x.square()) / count).sqrt()
    return mean, torch.where(std > rounding * size, std, 0.0)


def _rms(x: Float[Tensor, "group member"]) -> Float[Tensor, "group 1"]:
    return x.square().mean(-1, keepdim=True).sqrt()


def _sum_of_others(x: Float[Tensor, "group member"]) -> Float[Tensor, "group member"]:
    """Row sums without the own cell, added up rather than subtracted from the total.

    A difference would leave a residue of the own value where the others are all 0, and a residue
    as standard deviation makes an advantage of thousands.
    """
    zero = x.new_zeros(x.shape[0], 1)
    before = torch.cat([zero, x[:, :-1].cumsum(-1)], dim=-1)
    after = torch.cat([x[:, 1:].flip(-1).cumsum(-1).flip(-1), zero], dim=-1)
    return before + after
