import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.losses.kl import kl_estimate, kl_term

KINDS = ["k1", "k2", "k3"]
DELTAS = st.lists(st.floats(-30, 30), min_size=1, max_size=5)


@given(DELTAS)
def test_estimates_equal_their_formulas(deltas: list[float]):
    x = torch.tensor(deltas, dtype=torch.float64)
    assert kl_estimate(x, "k1").tolist() == [-d for d in deltas]
    assert kl_estimate(x, "k2").tolist() == pytest.approx([d * d / 2 for d in deltas])
    expected = [math.expm1(d) - d for d in deltas]
    assert kl_estimate(x, "k3").tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_each_estimate_averages_to_the_divergence(kind: Any):
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.45, 0.33, 0.22], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    mean = (p * kl_estimate((q / p).log(), kind)).sum()
    # k2 is biased, by a third-order term.
    assert mean.item() == pytest.approx(exact.item(), rel=0.1 if kind == "k2" else 1e-12)


# field failure 30
def test_k3_of_a_huge_gap_is_finite_in_float32_and_has_no_gradient():
    delta = torch.tensor([200.0, 1e30, 5.0], requires_grad=True)
    kl = kl_estimate(delta, "k3")
    kl.sum().backward()
    assert kl.isfinite().all()
    assert delta.grad is not None
    assert delta.grad.tolist() == pytest.approx([0.0, 0.0, math.expm1(5.0)])


def test_k3_keeps_the_digits_of_a_small_gap_in_float32():
    delta = torch.tensor([1e-3, -1e-3])
    assert kl_estimate(delta, "k3").tolist() == pytest.approx([5e-7, 5e-7], rel=1e-2)
    assert (kl_estimate(torch.linspace(-0.1, 0.1, 1001), "k3") >= 0).all()


@pytest.mark.parametrize("kind", ["k2", "k3"])
@given(DELTAS)
def test_k2_and_k3_are_not_negative(kind: Any, deltas: list[float]):
    assert (kl_estimate(torch.tensor(deltas, dtype=torch.float64), kind) >= 0).all()


@given(st.floats(-15, 15), st.sampled_from(KINDS))
def test_the_gradient_is_that_of_the_divergence(delta: float, kind: Any):
    c = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    kl = kl_term(
        c,
        c.detach() + delta,
        torch.ones_like(c),
        kind=kind,
        input_clamp=None,
        output_clamp=None,
    )
    kl.sum().backward()
    d = delta
    expected = {"k1": 1 - d, "k2": d * d / 2 - d, "k3": -d}[kind]
    assert c.grad is not None
    assert c.grad.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clamps_bound_both_sides(kind: Any, sign: float):
    zero = torch.zeros(1, 1)
    far = zero + sign * 7.0
    ones = torch.ones(1, 1)
    found = kl_term(zero, far, ones, kind=kind, input_clamp=2.0, output_clamp=None)
    torch.testing.assert_close(found, kl_estimate(zero + sign * 2.0, kind))
    found = kl_term(zero, far, ones, kind=kind, input_clamp=None, output_clamp=0.5)
    assert found.item() == math.copysign(0.5, kl_estimate(far, kind).item())


@pytest.mark.parametrize("delta", [2.0, -2.0])
def test_a_gap_exactly_at_the_input_clamp_keeps_its_gradient(delta: float):
    c = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    kl = kl_term(
        c, c.detach() + delta, torch.ones_like(c), kind="k2", input_clamp=2.0, output_clamp=None
    )
    kl.sum().backward()
    assert c.grad is not None
    assert c.grad.item() == 2.0 - delta


def test_a_gap_beyond_k3s_own_bound_has_no_gradient():
    c = torch.full((1, 1), -200.0, requires_grad=True)
    kl = kl_term(
        c,
        torch.zeros(1, 1),
        torch.ones_like(c),
        kind="k3",
        input_clamp=None,
        output_clamp=None,
    )
    kl.sum().backward()
    assert c.grad is not None
    assert c.grad.item() == 0.0


def test_the_weight_and_the_reference_have_no_gradient():
    c, reference, weight = (torch.full((1, 1), x, requires_grad=True) for x in (-1.0, -0.5, 2.0))
    kl = kl_term(c, reference, weight, kind="k3", input_clamp=None, output_clamp=None)
    kl.sum().backward()
    assert c.grad is not None
    assert reference.grad is None
    assert weight.grad is None
