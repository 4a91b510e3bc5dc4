"""Sums over many elements are right: torch's float32 norm on a CPU is not, from millions on.

2^25 elements are 128 MB in float32; the tests make a few such tensors, one after the other.
"""

import math
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from minirl.backends import hf_generate
from minirl.backends.linear_logprobs import OutputLayer, linear_logprobs
from minirl.backends.megatron.moe import watch_routers
from minirl.backends.norms import global_norm
from minirl.backends.vocab_parallel import Shard, vocab_logprobs
from minirl.engine import Sampling
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.losses.reduce import kept_mean, row_mean, standardize, whiten
from minirl.metrics import Mean, Metric, Sum, add, mean_over, value
from minirl.parallel import Axis

LARGE = 2**25
CLOSE = 1e-6


@pytest.fixture(scope="module")
def large() -> Tensor:
    """Normal numbers, the worst case: sums of squares grow without ever cancelling."""
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(0))


def exact_norm(x: Tensor) -> float:
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in x.chunk(64)))


def exact_sum(x: Tensor) -> float:
    return math.fsum(float(part.double().sum()) for part in x.chunk(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_norm_of_fsdp2(large: Tensor, dtype: torch.dtype):
    gradient = large.to(dtype)
    assert global_norm([gradient, gradient[:3]]) == pytest.approx(exact_norm(gradient), rel=CLOSE)


def megatron_norms(axis: Axis) -> tuple[float, float, list[float]]:
    """The norm, what clipping to half leaves, and norms of sizes that float32 cannot square."""
    from minirl.backends.megatron import setup as megatron_setup
    from minirl.backends.megatron.bridge import core
    from minirl.config.megatron import MegatronConfig

    megatron_setup.prepare_process(MegatronConfig())
    steps = core("optimizer.optimizer")
    draw = torch.Generator().manual_seed(axis.rank)
    parameter = torch.nn.Parameter(torch.empty(LARGE // axis.size))
    parameter.grad = torch.randn(LARGE // axis.size, generator=draw)

    def norm(*grads: Tensor) -> float:
        return float(steps.get_grad_norm_fp32([*grads], grad_stats_parallel_group=axis.group))

    found = norm(parameter.grad)
    steps.clip_grad_by_total_norm_fp32([parameter], found / 2, found)
    half, extremes = norm(parameter.grad), [norm(torch.full((3,), x)) for x in (1e-30, 1e30)]
    return found, half, [*extremes, norm()]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Core's own norm is used where CUDA is")
def test_the_gradient_norm_of_megatron_without_cuda_and_what_it_clips():
    whole = [
        exact_norm(torch.randn(LARGE // 2, generator=torch.Generator().manual_seed(rank)))
        for rank in range(2)
    ]
    expected = math.hypot(*whole)
    for norm, half, extremes in run_ranks(2, megatron_norms):
        assert norm == pytest.approx(expected, rel=CLOSE)
        assert half == pytest.approx(expected / 2, rel=CLOSE)
        assert extremes == pytest.approx([math.sqrt(6) * 1e-30, math.sqrt(6) * 1e30, 0.0])


MEANS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "kept_mean": lambda x: kept_mean(x, torch.ones(LARGE), LARGE),
    "row_mean": lambda x: row_mean(x[None], torch.ones(1, LARGE))[0],
    "mean_over": lambda x: value(mean_over(x)),
}
"""Every mean of the losses and metrics goes through one of these."""


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_many_tokens(large: Tensor, name: str):
    x = large.abs()
    assert float(MEANS[name](x)) == pytest.approx(exact_sum(x) / LARGE, rel=CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_of_half_precision(large: Tensor, dtype: torch.dtype):
    x = large.to(dtype).abs_()
    assert value(mean_over(x)) == pytest.approx(exact_sum(x) / LARGE, rel=CLOSE)


@pytest.mark.parametrize("scaled", [standardize, whiten])
def test_moments_over_many_tokens(large: Tensor, scaled: Callable[..., Tensor]):
    # An offset makes the variance small beside the squares.
    found = scaled(large[None] + 100.0, torch.ones(1, LARGE, dtype=torch.bool))
    assert abs(exact_sum(found[0]) / LARGE) < CLOSE
    assert exact_norm(found[0]) / math.sqrt(LARGE) == pytest.approx(1.0, rel=CLOSE)


@pytest.mark.parametrize("through", ["logits", "hidden states"])
def test_log_probs_and_entropy_of_a_large_vocabulary(large: Tensor, through: str):
    logits, token = large[: LARGE if through == "logits" else LARGE // 16], torch.tensor([[5]])
    if through == "logits":
        found, entropy = vocab_logprobs(logits[None, None], token, Shard(0))
    else:
        layer = OutputLayer(logits[:, None], None, Shard(0))
        found, entropy = linear_logprobs(torch.ones(1, 1, 1), layer, token)
    level = math.log(exact_sum(logits.double().exp()))
    mean = exact_sum(logits.double().exp() * logits) / math.exp(level)
    assert float(found) == pytest.approx(float(logits[5]) - level, rel=CLOSE)
    assert float(entropy) == pytest.approx(level - mean, rel=CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probs_of_the_oracle_engine(large: Tensor, temperature: float):
    sampling = Sampling(temperature, max_tokens=1, stop_token_ids=())
    token, logprob = hf_generate._draw(large, sampling, torch.Generator().manual_seed(0))
    expected = float(large[token]) - math.log(exact_sum(large.double().exp()))
    assert logprob == pytest.approx(expected, rel=1e-7)


def test_every_metric_of_the_policy_loss_at_many_tokens(large: Tensor):
    # One position in float64 is the mean of all of them in float32.
    position = [-1.0, -1.1, -0.9, -1.05, 0.7]
    found, expected = (
        policy_loss(
            PolicyLossInputs(
                *(torch.full(shape, x, dtype=dtype) for x in position),
                token_mask=torch.ones(shape),
                sample_mask=torch.ones(shape[0]),
                rewards=torch.ones(shape[0]),
                entropy=torch.full(shape, 0.5, dtype=dtype),
            ),
            {"reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.1},
            num_tokens=shape[0] * shape[1],
            num_sequences=shape[0],
        )
        for shape, dtype in (((2**8, 2**14), torch.float32), ((1, 1), torch.float64))
    )
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=CLOSE)
    means = {name: value(m) for name, m in expected[1].items() if name != "num_valid_samples"}
    assert {name: value(found[1][name]) for name in means} == pytest.approx(means, rel=1e-5)
    assert value(found[1]["num_valid_samples"]) == 2**8


@pytest.mark.parametrize("kind", [Sum, Mean])
def test_many_micro_batches_in_float32_lose_nothing(kind: type[Sum] | type[Mean]):
    shares, one = 20_000, torch.tensor(1.0)
    part: Metric = Sum(one / shares) if kind is Sum else Mean(one / 3, one)
    total = part
    for _ in range(shares - 1):
        total = add(total, part)
    assert value(total) == pytest.approx(1.0 if kind is Sum else 1 / 3, rel=CLOSE)


class _Router(torch.nn.Module):
    """Deals every token to the first of two experts, in a given number of tokens a pass."""

    layer_number = 1

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, torch.stack([torch.ones_like(tokens), torch.zeros_like(tokens)], -1).bool()


def test_tokens_of_an_expert_are_counted_past_what_float32_holds():
    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": _Router()})})
    loads = watch_routers([layer])
    for tokens in (LARGE, 1, 1, 1):
        layer["mlp"]["router"](torch.ones(tokens))
    assert loads.counts[1].tolist() == [LARGE + 3, 0]
