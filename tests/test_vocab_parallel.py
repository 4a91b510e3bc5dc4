"""Log-probs, entropy and the top k of a cut vocabulary equal those of a whole one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from minirl.backends.vocab_parallel import AT_ONCE, Shard, vocab_logprobs, vocab_top_k
from minirl.parallel import Axis

WHOLE = Shard(0)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40))


def plain(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logs = (logits.double() / temperature).log_softmax(-1)
    chosen = logs.gather(-1, tokens[..., None])[..., 0]
    return chosen, torch.distributions.Categorical(logits=logs).entropy()


def draw(seed: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=source, dtype=torch.float64) * 5
    tokens = torch.randint(0, shape[2], shape[:2], generator=source)
    return logits, tokens, torch.randn(shape[:2], generator=source, dtype=torch.float64)


@given(seed=st.integers(0, 2**20), shape=shapes, temperature=st.sampled_from([1.0, 0.5, 3.0]))
def test_on_one_rank_values_and_gradient_are_those_of_the_log_softmax(
    seed: int, shape: tuple[int, int, int], temperature: float
) -> None:
    logits, tokens, weights = draw(seed, shape)
    logits.requires_grad_()
    found, entropy = vocab_logprobs(logits, tokens, WHOLE, temperature)
    [gradient] = torch.autograd.grad((found * weights).sum(), logits)
    expected, expected_entropy = plain(logits, tokens, temperature)
    [expected_gradient] = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(gradient, expected_gradient)


def cut(axis: Axis, sizes: list[int], seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What a rank finds that holds the `axis.rank`-th part of the columns."""
    logits, tokens, weights = draw(seed, (2, 3, sum(sizes)))
    start = sum(sizes[: axis.rank])
    own = logits[..., start : start + sizes[axis.rank]].to(dtype).requires_grad_()
    shard = Shard(start, axis.group)
    found, entropy = vocab_logprobs(own, tokens, shard, 0.7)
    (found * weights.to(found.dtype)).sum().backward()
    assert own.grad is not None
    k = min(4, sum(sizes))
    return (found.detach(), entropy, own.grad, *vocab_top_k(own, k, shard, 0.7))


@pytest.mark.parametrize(
    "sizes", [[8, 8], [5, 3], [1, 6], [7, 0]], ids=["even", "ragged", "one column", "no column"]
)
def test_two_ranks_find_what_one_finds(sizes: list[int]) -> None:
    logits, tokens, weights = draw(7, (2, 3, sum(sizes)))
    logits.requires_grad_()
    expected, entropy = plain(logits, tokens, 0.7)
    (expected * weights).sum().backward()
    assert logits.grad is not None
    k = min(4, sum(sizes))
    top = (logits.detach() / 0.7).log_softmax(-1).topk(k)
    ranks = run_ranks(2, cut, sizes, 7, torch.float64)
    for found, found_entropy, _, values, ids in ranks:
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(found_entropy, entropy.detach())
        torch.testing.assert_close(values, top.values)
        assert ids.tolist() == top.indices.tolist()
    torch.testing.assert_close(torch.cat([r[2] for r in ranks], -1), logits.grad)


def cut_long(axis: Axis, rows: int) -> Tensor:
    """Of 3 columns, 2 and 1 a rank, over more rows than are worked on at a time."""
    own = torch.zeros(1, rows, 2 - axis.rank)
    shard = Shard(2 * axis.rank, axis.group)
    return vocab_logprobs(own, torch.zeros(1, rows, dtype=torch.long), shard)[0]


def test_ranks_with_unequal_columns_cut_rows_alike() -> None:
    rows = AT_ONCE["cpu"] // 2 + 5
    for found in run_ranks(2, cut_long, rows):
        torch.testing.assert_close(found, torch.full((1, rows), -math.log(3.0)))


def test_half_precision_logits_give_single_precision_log_probs() -> None:
    logits, tokens, _ = draw(3, (2, 3, 16))
    rounded = logits.bfloat16()
    expected, entropy = plain(rounded, tokens, 0.7)
    for found, found_entropy, gradient, *_ in run_ranks(2, cut, [8, 8], 3, torch.bfloat16):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(found_entropy.double(), entropy, atol=1e-5, rtol=0)
        assert gradient.dtype == torch.bfloat16


def test_a_token_that_cannot_be_sampled_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]])
    found, entropy = vocab_logprobs(logits, torch.tensor([[1]]), WHOLE)
    assert found.item() == pytest.approx(-0.6931472)
    assert entropy.item() == pytest.approx(0.6931472)


# field failure 40
def test_nothing_as_large_as_the_logits_is_kept_beside_them() -> None:
    logits, tokens, _ = draw(5, (2, 8, 512))
    logits.requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found, _ = vocab_logprobs(logits, tokens, WHOLE, 0.7)
    found.sum().backward()
    assert kept.pop(logits.untyped_storage().data_ptr()) == logits.untyped_storage().nbytes()
    assert sum(kept.values()) < logits.untyped_storage().nbytes() / 10


def test_equal_logits_are_taken_in_the_order_of_their_ids() -> None:
    _, ids = vocab_top_k(torch.zeros(1, 1, 5), 3, WHOLE)
    assert ids.tolist() == [[[0, 1, 2]]]


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match="top 4 tokens of a smaller vocabulary"):
        vocab_top_k(torch.zeros(1, 1, 3), 4, WHOLE)


# ---- on one rank --------------------------------------------------------------------------------


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    return vocab_logprobs(logits, tokens, WHOLE, temperature)[0]


def case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return logits, torch.randint(5, (2, 3), generator=generator)


# field failures 25, 27
@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 1.7]))
def test_logprobs_and_entropy_equal_loops(seed: int, temperature: float):
    logits, tokens = case(seed)
    found, entropy = vocab_logprobs(logits, tokens, WHOLE, temperature)
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
    total, entropy = vocab_logprobs(logits, tokens, WHOLE, 2.0)
    total.sum().backward()
    one_hot = torch.nn.functional.one_hot(tokens, 5)
    expected = (one_hot - (logits.detach() / 2.0).softmax(-1)) / 2.0
    torch.testing.assert_close(logits.grad, expected)
    assert not entropy.requires_grad


def test_logits_are_not_changed():
    for dtype in (torch.float32, torch.float64):
        logits, tokens = case(4, dtype)
        before = logits.clone()
        vocab_logprobs(logits, tokens, WHOLE, 0.5)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float):
    logits, tokens = case(5)
    with pytest.raises(ValueError, match=f"temperature {temperature}"):
        token_logprobs(logits, tokens, temperature)
