"""What each surrogate promises, token by token; their numbers are in test_losses.py."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minirl.losses.surrogates import (
    Surrogate,
    cispo_loss,
    clipped_pg_loss,
    dppo_loss,
    dual_clip,
    gmpo_loss,
    on_policy_loss,
    reinforce_loss,
    sapo_loss,
    sequence_ratio,
    token_ratio,
)

F64 = torch.float64
LOW, HIGH = 0.2, 0.3
WIDE = 50.0


class Tokens(NamedTuple):
    """Rows of tokens; every one is trained."""

    now: Tensor
    prev: Tensor
    generation: Tensor
    advantages: Tensor


def draw(seed: int, spread: float = 0.5, columns: int = 4) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(3, columns, generator=generator, dtype=F64) * scale

    prev = -normal(1.0).abs() - 0.1
    now = torch.minimum(prev + normal(spread), torch.tensor(-0.01, dtype=F64))
    advantages = normal(1.0)
    advantages[0, 0] = 0.0
    return Tokens(now.requires_grad_(), prev, prev - normal(0.1).abs(), advantages)


def kept(x: Tokens) -> Tensor:
    return torch.ones_like(x.prev)


def gspo(x: Tokens, low: float = LOW, high: float = HIGH) -> Surrogate:
    return clipped_pg_loss(sequence_ratio(x.now, x.prev, kept(x)), x.advantages, low, high)


def dppo(x: Tokens, divergence: str = "tv", threshold: float = 0.1) -> Surrogate:
    return dppo_loss(*x, divergence=divergence, threshold=threshold)


def cispo(x: Tokens) -> Surrogate:
    return cispo_loss(x.now, token_ratio(x.now, x.prev), x.advantages, LOW, HIGH)


ALGORITHMS: dict[str, Callable[[Tokens], Surrogate]] = {
    "clip": lambda x: clipped_pg_loss(token_ratio(x.now, x.prev), x.advantages, LOW, HIGH),
    "gspo": gspo,
    "reinforce": lambda x: reinforce_loss(x.now, x.advantages),
    "on policy": lambda x: on_policy_loss(x.now, x.advantages),
    "cispo": cispo,
    "sapo": lambda x: sapo_loss(token_ratio(x.now, x.prev), x.advantages, 1.0, 1.05),
    "gmpo": lambda x: gmpo_loss(x.now - x.prev, x.advantages, kept(x), LOW, HIGH),
    "dppo tv": dppo,
    "dppo kl": lambda x: dppo(x, "kl"),
}

seeds = st.integers(0, 10**6)


def gradient(surrogate: Surrogate, x: Tokens) -> Tensor:
    return torch.autograd.grad(surrogate.loss.sum(), x.now)[0]


@pytest.mark.parametrize("name", ALGORITHMS)
@given(seeds)
def test_before_any_update_every_gradient_is_that_of_reinforce(name: str, seed: int):
    x = draw(seed, spread=0.0)
    same = x._replace(
        prev=x.now.detach(),
        generation=x.now.detach(),
        advantages=x.advantages[:, 1:2].expand_as(x.prev),  # GSPO and GMPO spread over a row
    )
    torch.testing.assert_close(gradient(ALGORITHMS[name](same), same), -same.advantages)


@pytest.mark.parametrize("name", ["clip", "gspo"])
@given(seeds)
def test_the_clip_never_promises_more_than_the_ratio(name: str, seed: int):
    x = draw(seed)
    found = ALGORITHMS[name](x)
    assert (found.loss >= -x.advantages * found.ratio - 1e-12).all()
    assert found.bounded.min() >= 1 - LOW
    assert found.bounded.max() <= 1 + HIGH


@pytest.mark.parametrize("name", ["clip", "dppo tv", "dppo kl"])
@given(seeds)
def test_a_token_loses_its_gradient_exactly_where_a_bound_is_reported(name: str, seed: int):
    x = draw(seed)
    found = ALGORITHMS[name](x)
    cut = found.low + found.high
    assert not (found.low * found.high).any()
    assert torch.equal(gradient(found, x) == 0, (cut == 1) | (x.advantages == 0))


@given(seeds)
def test_bounds_cut_good_tokens_above_and_bad_tokens_below(seed: int):
    x = draw(seed)
    for name in ("clip", "gspo", "dppo tv", "dppo kl", "gmpo"):
        found = ALGORITHMS[name](x)
        assert (x.advantages[found.high == 1] > 0).all()
        assert (x.advantages[found.low == 1] < 0).all()


@given(seeds, st.floats(1.01, 3.0))
def test_dual_clip_bounds_bad_tokens_alone(seed: int, constant: float):
    x = draw(seed, spread=1.5)
    before = ALGORITHMS["clip"](x)
    after = dual_clip(before, x.advantages, constant)
    bad = x.advantages < 0
    assert torch.equal(after.loss[~bad], before.loss[~bad])
    assert (after.loss[bad] <= -constant * x.advantages[bad]).all()
    changed = after.loss != before.loss
    assert torch.equal(after.high - before.high, changed.to(F64))
    assert not gradient(after, x)[changed].any()


@given(seeds)
def test_gspo_s_ratio_is_the_geometric_mean_of_its_row(seed: int):
    x = draw(seed)
    found = sequence_ratio(x.now, x.prev, kept(x))
    mean = token_ratio(x.now, x.prev).log().mean(-1, keepdim=True).exp()
    torch.testing.assert_close(found, mean.expand_as(found), rtol=1e-7, atol=1e-7)


@given(seeds)
def test_no_token_loses_its_gradient_under_cispo(seed: int):
    x = draw(seed)
    found = cispo(x)
    torch.testing.assert_close(gradient(found, x), -x.advantages * found.bounded)
    assert not found.bounded.requires_grad
    assert torch.equal(found.low == 1, found.ratio < 1 - LOW)
    assert torch.equal(found.high == 1, found.ratio > 1 + HIGH)


@given(st.floats(0.2, 4.0), st.floats(0.2, 4.0), st.floats(0.0, 5.0))
def test_sapo_s_slope_is_largest_at_one_alike_on_both_sides_and_steeper_when_hot(
    positive: float, negative: float, away: float
):
    for sign, tau in ((1.0, positive), (-1.0, negative)):
        ratio = torch.tensor([[1.0, 1.0 + away, 1.0 - away]], dtype=F64, requires_grad=True)
        advantages = torch.full_like(ratio, sign).detach()
        found = sapo_loss(ratio, advantages, positive, negative)
        slope = torch.autograd.grad(found.loss.sum(), ratio)[0][0]
        expected = -sign / math.cosh(tau * away / 2) ** 2
        torch.testing.assert_close(slope, torch.tensor([-sign, expected, expected], dtype=F64))
        assert found.loss[0].abs().max() <= 4 / tau


@given(seeds)
def test_gmpo_without_bounds_is_gspo_without_bounds(seed: int):
    x = draw(seed)
    one = gmpo_loss(x.now - x.prev, x.advantages, kept(x), WIDE, WIDE)
    other = gspo(x, 1.0, WIDE)
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(gradient(one, x), gradient(other, x))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@given(seeds)
def test_dppo_blocks_what_is_far_and_moves_away(divergence: str, seed: int):
    x = draw(seed)
    found = dppo(x, divergence, 0.05)
    p, q = x.now.detach().exp(), x.generation.exp()
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    far = ((p - q).abs() if divergence == "tv" else kl) > 0.05
    assert torch.equal(found.loss == 0, far & ((p - q) * x.advantages > 0) | (x.advantages == 0))


@given(seeds)
def test_dppo_with_a_threshold_beyond_reach_is_the_plain_ratio(seed: int):
    x = draw(seed)
    torch.testing.assert_close(dppo(x, "tv", 1.0).loss, -x.advantages * token_ratio(x.now, x.prev))
