"""Group statistics: the slow oracle, exact zeros, and no residue in a leave-one-out deviation."""

import math
from typing import Any

import advantages_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minirl.losses.groups import group_relative

F64 = torch.float64
SWITCHES = [(loo, norm) for loo in (True, False) for norm in (True, False)]
REWARD = st.sampled_from([0.0, 1.0, 0.3, -1.0, 0.1, 2.0, 1e6])


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Groups of 2 to 5 samples with any ids, shuffled together."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    ids = draw(st.permutations(range(-2, 8)))[: len(sizes)]
    rows = [group for group, size in zip(ids, sizes, strict=True) for _ in range(size)]
    rows = list(draw(st.permutations(rows)))
    return [draw(REWARD) for _ in rows], rows


def relative(
    rewards: list[float], groups: list[int], dtype: torch.dtype = F64, **keys: Any
) -> Tensor:
    return group_relative(
        torch.tensor(rewards, dtype=dtype), torch.tensor(groups, dtype=torch.int64), **keys
    )


@settings(max_examples=200)
@given(grouped(), st.sampled_from(SWITCHES))
def test_group_advantages_equal_the_oracle(
    case: tuple[list[float], list[int]], switch: tuple[bool, bool]
):
    keys = {"leave_one_out": switch[0], "normalize": switch[1]}
    expected = oracle.group_relative(*case, **keys)
    found = relative(*case, **keys)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=1e-9)


@settings(max_examples=100)
@given(grouped(), st.sampled_from(SWITCHES))
def test_group_advantages_in_float32_equal_the_oracle(
    case: tuple[list[float], list[int]], switch: tuple[bool, bool]
):
    rewards = torch.tensor(case[0]).tolist()
    keys = {"leave_one_out": switch[0], "normalize": switch[1]}
    found = relative(rewards, case[1], torch.float32, **keys)
    expected = torch.tensor(oracle.group_relative(rewards, case[1], **keys))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# field failure 44
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("reward", [0.3, 0.2, 0.1, 1e6 / 3, -7.7, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_constant_group_has_advantage_exactly_zero(
    switch: tuple[bool, bool], reward: float, size: int, dtype: torch.dtype
):
    keys = {"leave_one_out": switch[0], "normalize": switch[1]}
    found = relative([reward] * size + [0.0, 1.0], [5] * size + [2, 2], dtype, **keys)
    assert (found[:size] == 0).all()
    assert (found[size:] != 0).all()


# field failure 44
@pytest.mark.parametrize("switch", SWITCHES)
def test_rewards_that_differ_by_rounding_alone_are_constant(switch: tuple[bool, bool]):
    keys = {"leave_one_out": switch[0], "normalize": switch[1]}
    assert 0.1 + 0.2 != 0.3
    assert (relative([0.1 + 0.2, 0.3, 0.3], [0] * 3, **keys) == 0).all()


# field failure 45
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("odd", [0, 3, 7])
@pytest.mark.parametrize("common", [0.3, 0.7, 1e6 / 3])
def test_others_without_variance_do_not_blow_up_the_odd_one(
    dtype: torch.dtype, odd: int, common: float
):
    rewards = [common] * 8
    rewards[odd] = common + 1.0
    found = relative(rewards, [0] * 8, dtype, leave_one_out=True, normalize=True)
    # No deviation among the others: the difference stands undivided.
    assert found[odd].item() == pytest.approx(1.0, rel=1e-6 if dtype == F64 else 0.2)
    assert found.abs().max() <= 1.2


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize(("units", "equal"), [(0, True), (2, True), (4, True), (5, False)])
def test_equal_means_within_four_units_of_rounding_at_any_scale(
    scale: float, units: int, equal: bool
):
    # A power of two, where a unit of rounding is exactly epsilon times the value.
    base = 2.0 ** round(math.log2(scale))
    rewards = [base, base * (1 + units * torch.finfo(torch.float32).eps)]
    found = relative(rewards, [0, 0], torch.float32, leave_one_out=False, normalize=False)
    assert bool((found == 0).all()) == equal


@pytest.mark.parametrize(("units", "divided"), [(0, False), (4, False), (7, True)])
def test_a_deviation_of_the_others_beyond_rounding_divides(units: int, divided: bool):
    small = 2.0**-10
    rewards = [small, small * (1 + units * torch.finfo(torch.float32).eps), 5.0]
    found = relative(rewards, [0] * 3, torch.float32, leave_one_out=True, normalize=True)
    expected = oracle.group_relative(rewards, [0] * 3, leave_one_out=True, normalize=divided)
    assert found[2].item() == pytest.approx(expected[2], rel=1e-5)


def test_advantages_of_a_group_carry_no_gradient():
    rewards = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    groups = torch.zeros(3, dtype=torch.int64)
    assert not group_relative(rewards, groups, leave_one_out=True, normalize=True).requires_grad


def test_small_differences_beside_a_large_reward_are_kept():
    rewards = [1e6, 1e6 + 1, 1e6 - 1, 0.0]
    keys = {"leave_one_out": True, "normalize": True}
    expected = torch.tensor(oracle.group_relative(rewards, [0] * 4, **keys))
    found = relative(rewards, [0] * 4, torch.float32, **keys)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[3] < -9e5


# field failure 44
def test_a_group_of_one_is_refused_by_its_id():
    for loo, norm in SWITCHES:
        with pytest.raises(ValueError, match="group 9 has one sample"):
            relative([1.0, 2.0, 3.0], [4, 9, 4], leave_one_out=loo, normalize=norm)


# field failures 47, 52
@given(grouped(), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_the_names_of_groups_do_not_matter(
    case: tuple[list[float], list[int]], rng: Any
):
    rewards, groups = case
    order = list(range(len(groups)))
    rng.shuffle(order)
    keys = {"leave_one_out": True, "normalize": True}
    found = relative([rewards[i] for i in order], [groups[i] * 7 + 1 for i in order], **keys)
    torch.testing.assert_close(found, relative(rewards, groups, **keys)[order], rtol=0, atol=1e-12)


def test_no_samples_have_no_advantages():
    assert relative([], [], leave_one_out=True, normalize=True).shape == (0,)
