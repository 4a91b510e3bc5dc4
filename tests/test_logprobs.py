import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.logprobs import token_logprobs, token_logprobs_and_entropy


def case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return logits, torch.randint(5, (2, 3), generator=generator)


# field failures 25, 27
@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 1.7]))
def test_logprobs_and_entropy_equal_loops(seed: int, temperature: float):
    logits, tokens = case(seed)
    found, entropy = token_logprobs_and_entropy(logits, tokens, temperature)
    assert torch.equal(found, token_logprobs(logits, tokens, temperature))
    for i in range(2):
        for t in range(3):
            weights = [math.exp(z / temperature) for z in logits[i, t].tolist()]
            p = [w / sum(weights) for w in weights]
            assert found[i, t].item() == pytest.approx(math.log(p[int(tokens[i, t])]))
            assert entropy[i, t].item() == pytest.approx(-sum(q * math.log(q) for q in p))


# field failure 37
def test_each_position_reads_its_own_logits_and_its_own_token():
    logits, tokens = case(1)
    whole = token_logprobs(logits, tokens)
    for i in range(2):
        for t in range(3):
            part = token_logprobs(logits[i : i + 1, t : t + 1], tokens[i : i + 1, t : t + 1])
            torch.testing.assert_close(part[0, 0], whole[i, t])


# field failure 41
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_softmax_is_in_float32_whatever_the_logits(dtype: torch.dtype):
    logits, tokens = case(2, dtype)
    found = token_logprobs(logits, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, token_logprobs(logits.double(), tokens).float())
    assert token_logprobs(logits.double(), tokens).dtype == torch.float64


def test_the_gradient_is_one_hot_minus_softmax_over_temperature():
    logits, tokens = case(3)
    logits.requires_grad_()
    total, entropy = token_logprobs_and_entropy(logits, tokens, 2.0)
    total.sum().backward()
    one_hot = torch.nn.functional.one_hot(tokens, 5)
    expected = (one_hot - (logits.detach() / 2.0).softmax(-1)) / 2.0
    torch.testing.assert_close(logits.grad, expected)
    assert not entropy.requires_grad


def test_logits_are_not_changed():
    for dtype in (torch.float32, torch.float64):
        logits, tokens = case(4, dtype)
        before = logits.clone()
        token_logprobs_and_entropy(logits, tokens, 0.5)
        assert torch.equal(logits, before)


def test_a_token_that_cannot_be_sampled_leaves_the_entropy_finite():
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]])
    found, entropy = token_logprobs_and_entropy(logits, torch.tensor([[0]]))
    assert entropy.item() == pytest.approx(math.log(2))
    assert found.item() == pytest.approx(-math.log(2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float):
    logits, tokens = case(5)
    for function in (token_logprobs, token_logprobs_and_entropy):
        with pytest.raises(ValueError, match=f"temperature {temperature}"):
            function(logits, tokens, temperature)
