"""Next-token likelihood: the shares of a batch add up, and what is masked is never read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.losses.supervised import nll_loss
from minirl.metrics import merge, values

F64 = torch.float64
logprobs = st.lists(
    st.lists(st.tuples(st.floats(-9, 0), st.booleans()), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)
Grid = list[list[tuple[float, bool]]]


def tensors(rows: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    values_, mask = ([[cell[i] for cell in row] for row in rows] for i in (0, 1))
    return torch.tensor(values_, dtype=F64, requires_grad=True), torch.tensor(mask)


@given(logprobs, st.integers(1, 9))
def test_it_is_the_masked_sum_over_the_global_count(rows: Grid, num_tokens: int):
    x, mask = tensors(rows)
    loss, metrics = nll_loss(x, mask, num_tokens=float(num_tokens))
    total = -math.fsum(p for row in rows for p, trained in row if trained)
    assert loss.item() == pytest.approx(total / num_tokens)
    assert values(metrics) == {"loss": loss.item()}
    assert not any(part.requires_grad for metric in metrics.values() for part in metric)
    [grad] = torch.autograd.grad(loss, x)
    assert torch.equal(grad, -mask.to(F64) / num_tokens)


@given(logprobs, st.integers(0, 4))
def test_shares_of_a_split_batch_add_up_to_the_whole(rows: Grid, at: int):
    parts = [part for part in (rows[:at], rows[at:]) if part]
    whole, metrics = nll_loss(*tensors(rows), num_tokens=7.0)
    shares = [nll_loss(*tensors(part), num_tokens=7.0) for part in parts]
    assert sum(loss.item() for loss, _ in shares) == pytest.approx(whole.item())
    assert values(merge(*(seen for _, seen in shares))) == pytest.approx(values(metrics))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_is_never_read_nor_is_its_gradient(poison: float):
    x = torch.tensor([[-1.0, poison]], requires_grad=True)
    loss, _ = nll_loss(x, torch.tensor([[True, False]]), num_tokens=1.0)
    [grad] = torch.autograd.grad(loss, x)
    assert loss.item() == 1.0
    assert grad.tolist() == [[-1.0, 0.0]]
