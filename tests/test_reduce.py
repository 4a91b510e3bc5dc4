import math

import advantages_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.losses.reduce import (
    bounded_exp,
    denominator,
    exponent_bound,
    extremes,
    infinite_outside,
    is_positive,
    kept_mean,
    kept_sum,
    row_mean,
    select,
    standardize,
    whiten,
)

F64 = torch.float64
ROW = st.lists(st.floats(-100, 100), min_size=3, max_size=3)
GRIDS = st.lists(ROW, min_size=1, max_size=4)


def mask_of(rows: list[list[float]], bits: int) -> torch.Tensor:
    size = len(rows) * 3
    return torch.tensor([bool(bits >> i & 1) for i in range(size)]).view(len(rows), 3)


@given(GRIDS, st.integers(0, 2**12 - 1), st.floats(0, 50))
def test_sums_means_and_extremes_equal_loops(rows: list[list[float]], bits: int, count: float):
    x, mask = torch.tensor(rows, dtype=F64), mask_of(rows, bits)
    seen, kept = x[mask].tolist(), mask.double()
    assert kept_sum(x, kept).item() == pytest.approx(math.fsum(seen), abs=1e-9)
    mean = math.fsum(seen) / (count + 1e-8)
    assert kept_mean(x, kept, count).item() == pytest.approx(mean, abs=1e-9, rel=1e-9)
    smallest, largest = extremes(x, infinite_outside(mask))
    assert smallest.item() == min(seen, default=math.inf)
    assert largest.item() == max(seen, default=-math.inf)
    each = [
        math.fsum(row[marks].tolist()) / (int(marks.sum()) + 1e-8)
        for row, marks in zip(x, mask, strict=True)
    ]
    assert row_mean(x, kept).tolist() == pytest.approx(each, abs=1e-9)
    assert is_positive(x).tolist() == [[float(v > 0) for v in row] for row in rows]


# field failure 22
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_mean_over_nothing_is_zero_and_what_is_not_selected_is_never_read(junk: float):
    x = torch.full((2, 3), junk, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    chosen, kept = select(x, nothing), nothing.float()
    total = kept_mean(chosen.exp(), kept, 0.0) + row_mean(chosen, kept).sum()
    total.backward()
    assert total.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_an_integer_count_does_not_lower_the_precision():
    found = denominator(torch.tensor(3), F64)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == F64
    assert found.item() == 3 + 1e-8 == denominator(3.0, F64)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bounded_exp_is_exp_up_to_a_bound_whose_cube_is_finite(dtype: torch.dtype):
    bound = exponent_bound(dtype)
    assert math.isfinite(torch.tensor(bound * 2.999, dtype=dtype).exp().item())
    assert math.isinf(torch.tensor(bound * 3.01, dtype=dtype).exp().item())
    x = torch.tensor([-1e4, -1.0, 0.0, bound - 1, bound + 1, 1e4], dtype=dtype, requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    assert torch.equal(y[:4], x[:4].exp())
    assert y[4:].tolist() == pytest.approx([math.exp(bound)] * 2, rel=1e-5)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cat([x[:4].detach().exp(), torch.zeros(2, dtype=dtype)]))


def test_a_sign_carries_no_gradient():
    assert not is_positive(torch.tensor([1.0, -1.0], requires_grad=True)).requires_grad


@given(GRIDS, st.integers(0, 2**12 - 1))
def test_standardize_and_whiten_equal_the_oracle(rows: list[list[float]], bits: int):
    mask = mask_of(rows, bits)
    x = torch.where(mask, torch.tensor(rows, dtype=F64), math.nan)
    for ours, slow in ((standardize, oracle.standardize), (whiten, oracle.whiten)):
        expected = torch.tensor(slow(rows, mask.int().tolist()), dtype=F64)
        torch.testing.assert_close(ours(x, mask), expected, rtol=1e-7, atol=1e-7)


@given(GRIDS, st.integers(0, 2**12 - 1))
def test_standardize_and_whiten_of_shares_equal_those_of_the_whole(
    rows: list[list[float]], bits: int
):
    x, mask = torch.tensor(rows, dtype=F64), mask_of(rows, bits)
    for function in (standardize, whiten):
        sums: list[torch.Tensor] = []
        whole = function(x, mask, lambda part, seen=sums: seen.append(part) or part)
        # Every rank sees the sums over all ranks, whatever it holds itself.
        replay = iter(sums)
        first = function(x[:1], mask[:1], lambda part, replay=replay: next(replay))
        torch.testing.assert_close(first, whole[:1])


def test_whiten_has_unit_unbiased_variance_and_standardize_unit_biased_variance():
    x, mask = torch.arange(6, dtype=F64).view(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert whiten(x, mask).var(unbiased=True).item() == pytest.approx(1.0, rel=1e-6)
    assert standardize(x, mask).var(unbiased=False).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("function", [standardize, whiten])
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("value", [3.0, 0.0])
def test_one_value_or_none_is_moved_to_zero(function, count: int, value: float):
    mask = torch.tensor([[count > 0, False]])
    found = function(torch.tensor([[value, math.nan]]), mask)
    torch.testing.assert_close(found, torch.zeros(1, 2), atol=1e-3, rtol=0)
