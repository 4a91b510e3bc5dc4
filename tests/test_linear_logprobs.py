"""Log-probs from hidden states equal those of the logits, tile by tile and rank by rank."""

from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from minirl.backends import linear_logprobs as module
from minirl.backends.linear_logprobs import OutputLayer, linear_logprobs
from minirl.backends.vocab_parallel import Shard, Stats, joined, stats_of
from minirl.parallel import Axis

WHOLE = Shard(0)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias)
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, tokens[..., None])[..., 0], -(logs.exp() * logs).sum(-1)


def draw(seed: int, positions: int, columns: int, width: int = 6) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    tokens = torch.randint(columns, (2, positions), generator=source)
    return normal(2, positions, width), normal(columns, width), normal(columns), tokens


@given(
    seed=st.integers(0, 2**20),
    positions=st.integers(1, 7),
    columns=st.integers(1, 23),
    tile=st.integers(1, 30),
    at_once=st.sampled_from([None, 1, 3]),
    with_bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_values_and_all_gradients_are_those_of_the_logits_for_any_tile(
    seed: int,
    positions: int,
    columns: int,
    tile: int,
    at_once: int | None,
    with_bias: bool,
    temperature: float,
) -> None:
    hidden, weight, bias, tokens = draw(seed, positions, columns)
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    layer = OutputLayer(weight, bias if with_bias else None, WHOLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.COLUMNS, "cpu", tile)
        found, entropy = linear_logprobs(
            hidden, layer, tokens, temperature, positions_at_once=at_once
        )
        upstream = torch.randn(found.shape, dtype=found.dtype)
        upstream[torch.rand(found.shape) < 0.3] = 0.0  # a prompt's
        gradients = torch.autograd.grad((found * upstream).sum(), leaves)
    expected, expected_entropy = plain(hidden, weight, layer.bias, tokens, temperature)
    wanted = torch.autograd.grad((expected * upstream).sum(), leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy.detach())
    for gradient, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, right)


@given(seed=st.integers(0, 2**20), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_statistics_of_columns_join_to_those_of_the_row(seed: int, cuts: list[int]) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 12, generator=source, dtype=torch.float64) * 20
    logits[:, ::5] = -torch.inf
    tokens = torch.tensor([1, 4, 11])
    edges = [0, *sorted(cuts), 12]
    parts = [stats_of(logits[:, a:b].clone(), tokens - a) for a, b in pairwise(edges)]
    whole = stats_of(logits.clone(), tokens)
    for order in (parts, parts[::-1]):
        for found, expected in zip(reduce(joined, order), whole, strict=True):
            torch.testing.assert_close(found, expected)


def cut(axis: Axis, sizes: list[int], seed: int) -> tuple[Tensor, ...]:
    hidden, weight, bias, tokens = draw(seed, 5, sum(sizes))
    start = sum(sizes[: axis.rank])
    own = slice(start, start + sizes[axis.rank])
    hidden.requires_grad_()
    mine = weight[own].clone().requires_grad_()
    layer = OutputLayer(mine, bias[own], Shard(start, axis.group))
    found, entropy = linear_logprobs(hidden, layer, tokens, 0.7, positions_at_once=3)
    found.sum().backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    return found.detach(), entropy, hidden.grad, mine.grad


@pytest.mark.parametrize("sizes", [[8, 8], [5, 3], [7, 0]], ids=["even", "ragged", "no column"])
def test_two_ranks_find_what_one_finds_and_their_parts_of_the_gradient_add_up(
    sizes: list[int],
) -> None:
    hidden, weight, bias, tokens = draw(7, 5, sum(sizes))
    expected, entropy = plain(hidden.requires_grad_(), weight.requires_grad_(), bias, tokens, 0.7)
    expected.sum().backward()
    ranks = run_ranks(2, cut, sizes, 7)
    for found, found_entropy, _, _ in ranks:
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(found_entropy, entropy.detach())
    torch.testing.assert_close(ranks[0][2] + ranks[1][2], hidden.grad)
    torch.testing.assert_close(torch.cat([r[3] for r in ranks]), weight.grad)


# field failure 41
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_products_are_added_up_in_float32_whatever_the_states(dtype: torch.dtype) -> None:
    hidden, weight, _, tokens = draw(1, 64, 500, width=64)
    hidden, weight = (hidden.to(dtype), (weight / 8).to(dtype))
    found, entropy = linear_logprobs(hidden, OutputLayer(weight, None, WHOLE), tokens)
    expected, expected_entropy = plain(hidden, weight, None, tokens, 1.0)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=0, rtol=1e-6)


# field failure 40
def test_nothing_is_kept_for_backward_but_what_was_given_and_a_number_a_position() -> None:
    hidden, weight, _, tokens = draw(5, 32, 4096)
    weight.requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        linear_logprobs(hidden, OutputLayer(weight, None, WHOLE), tokens)
    for given_ in (hidden, weight):
        assert kept.pop(given_.untyped_storage().data_ptr())
    assert sum(kept.values()) <= 2 * 8 * tokens.numel()


def test_a_frozen_weight_gets_no_gradient_and_states_still_do() -> None:
    hidden, weight, _, tokens = draw(3, 4, 9)
    hidden.requires_grad_()
    linear_logprobs(hidden, OutputLayer(weight, None, WHOLE), tokens)[0].sum().backward()
    expected = hidden.grad
    hidden.grad = None
    plain(hidden, weight, None, tokens, 1.0)[0].sum().backward()
    torch.testing.assert_close(expected, hidden.grad)
    assert weight.grad is None


def test_the_entropy_is_zero_unless_asked_for_and_log_probs_are_the_same() -> None:
    hidden, weight, bias, tokens = draw(4, 4, 9)
    layer = OutputLayer(weight, bias, WHOLE)
    found, entropy = linear_logprobs(hidden, layer, tokens, with_entropy=False)
    assert torch.equal(found, linear_logprobs(hidden, layer, tokens)[0])
    assert not entropy.any()


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    hidden, weight, bias, tokens = draw(4, 4, 9)
    with pytest.raises(ValueError, match="temperature 0"):
        linear_logprobs(hidden, OutputLayer(weight, bias, WHOLE), tokens, 0.0)


def test_a_product_that_a_gpu_adds_up_in_float32_exists() -> None:
    overloads = torch.ops.aten.mm.overloads()
    assert "dtype" in overloads
    assert "out_dtype" in str(torch.ops.aten.mm.dtype._schema)


def test_statistics_of_no_column_change_nothing() -> None:
    own = stats_of(torch.randn(2, 3), torch.tensor([0, 2]))
    none = stats_of(torch.empty(2, 0), torch.tensor([-1, -1]))
    assert all(map(torch.equal, joined(own, none), own))
    assert isinstance(none, Stats)
