"""Updates over global counts: the same gradient for any split over micro-batches and ranks."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backend_cases import GRADIENT, Sample, distance, exported, make_rows, make_samples, split
from hypothesis import given, settings
from hypothesis import strategies as st
from models import policy_config, save_model
from ranks import run_ranks

from minirl.backend import TokenHead, TokenOutput
from minirl.backends.dtensor import backend as dtensor
from minirl.config.policy import PolicyConfig
from minirl.metrics import Max, Metrics, Sum, mean_over, value
from minirl.parallel import SOLO, Axis, world
from minirl.rng import key_of
from minirl.types import Batch, Scalar
from minirl.update import Counts, count, update_

HEAD, KEY = TokenHead(), key_of(0)


@pytest.fixture(scope="module")
def solo():
    with world() as axis:
        yield axis


@pytest.fixture(scope="module")
def cfg(tmp_path_factory) -> PolicyConfig:
    return policy_config(save_model(tmp_path_factory.mktemp("model")), **GRADIENT)


def make_batch(samples: Sequence[Sample], kept: Sequence[bool], padding: int = 0) -> Batch:
    """Tokens of positive weight are trained; every value that must not be read is NaN."""
    rows = make_rows(samples, padding, junk=10**6)
    width = rows.tokens.shape[1] - 1
    weights = torch.tensor([[*s.weights, *[math.nan] * (width - len(s.weights))] for s in samples])
    sample_mask = torch.tensor(list(kept))
    unread = torch.where(weights > 0, 0.0, math.nan)
    return Batch(
        rows=rows,
        token_mask=weights > 0,
        sample_mask=sample_mask,
        generation_logprobs=unread,
        prev_logprobs=unread,
        reference_logprobs=None,
        advantages=torch.where(sample_mask[:, None], weights, math.nan),
        rewards=torch.where(sample_mask, 1.0, math.nan),
    )


def weighted_nll(output: TokenOutput, batch: Batch, counts: Counts) -> tuple[Scalar, Metrics]:
    mask = batch.token_mask & batch.sample_mask[:, None]
    terms = torch.where(mask, batch.advantages, 0.0) * output.logprobs
    loss = -terms.sum() / counts.num_tokens - terms.sum() / counts.num_sequences
    return loss, {
        "loss": Sum(loss.detach()),
        "logprob": mean_over(output.logprobs.detach()[mask]),
        "rows": Sum(torch.tensor(float(len(mask)))),
        "widest": Max(torch.tensor(float(mask.shape[1]))),
    }


def learn(
    axis: Axis,
    cfg: PolicyConfig,
    parts: Sequence[Sequence[int]],
    kept: Sequence[bool],
    padding: int,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights after one plain gradient step on the rank's rows, and its metrics."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    samples = make_samples(8)
    batches = [
        make_batch([samples[i] for i in part], [kept[i] for i in part], padding) for part in parts
    ]
    state, metrics = update_(backend, state, batches, weighted_nll, HEAD)
    return exported(backend, state), {name: value(metric) for name, metric in metrics.items()}


KEPT = (True, True, False, True, True, True, False, True)


@settings(max_examples=10)
@given(
    order=st.permutations(range(8)),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    padding=st.integers(0, 5),
)
def test_an_update_does_not_depend_on_the_split(solo, cfg, order, sizes, padding):
    weights, metrics = learn(solo, cfg, [list(range(8))], KEPT, 0)
    again, metrics_again = learn(solo, cfg, split(order, sizes), KEPT, padding)
    assert distance(again, weights) < 3e-6
    widest = metrics_again.pop("widest")
    assert widest == metrics.pop("widest") + padding
    assert metrics_again == pytest.approx(metrics, rel=1e-5)


def _learn_shares(axis: Axis, cfg: PolicyConfig) -> Any:
    shares = [[[0, 1], [2, 3, 4]], [[5], [6, 7]]]
    return learn(axis, cfg, shares[axis.rank], KEPT, axis.rank)


def test_two_ranks_update_as_one(solo, cfg):
    # field failures 5, 12, 14
    weights, metrics = learn(solo, cfg, [list(range(8))], KEPT, 0)
    first, second = run_ranks(2, _learn_shares, cfg)
    assert first[1] == second[1]
    assert first[1].pop("widest") >= metrics.pop("widest")
    assert first[1] == pytest.approx(metrics, rel=1e-5)
    assert distance(first[0], weights) < 3e-6
    assert distance(second[0], weights) < 3e-6


def test_metrics_are_those_of_the_whole_batch(solo, cfg):
    _, metrics = learn(solo, cfg, [[0, 1, 2], [3, 4, 5, 6, 7]], KEPT, 0)
    assert metrics["rows"] == 8
    assert metrics["nonfinite_updates"] == 0
    assert metrics["grad_norm"] > 0
    assert metrics["lr"] == cfg.optimizer.kwargs["lr"]


@given(
    kept=st.lists(st.booleans(), min_size=8, max_size=8),
    sizes=st.lists(st.integers(1, 8), min_size=1),
)
def test_counts_are_those_of_trained_tokens_and_kept_samples(kept, sizes):  # field failure 2
    samples = make_samples(8)
    batches = [
        make_batch([samples[i] for i in part], [kept[i] for i in part])
        for part in split(range(8), sizes)
    ]
    tokens = sum(w > 0 for s, k in zip(samples, kept, strict=True) if k for w in s.weights)
    assert count(batches, SOLO) == Counts(num_tokens=tokens, num_sequences=sum(kept))


def _count(axis: Axis) -> Counts:
    return count([make_batch(make_samples(3 + axis.rank), [True] * (3 + axis.rank))], axis)


def test_counts_are_summed_over_ranks():
    both = run_ranks(2, _count)
    alone = [sum(w > 0 for s in make_samples(n) for w in s.weights) for n in (3, 4)]
    assert both == [Counts(sum(alone), 7)] * 2


def _uneven(axis: Axis, cfg: PolicyConfig) -> str:
    parts = [[0]] * (2 - axis.rank)
    with pytest.raises(ValueError, match="number of micro-batches") as error:
        learn(axis, cfg, parts, KEPT, 0)
    return str(error.value)


def test_different_numbers_of_micro_batches_are_refused_on_every_rank(cfg):
    first, second = run_ranks(2, _uneven, cfg)
    assert first == second
    assert "[2, 1]" in first
    assert "sample_mask" in first


def _fill_up(axis: Axis, cfg: PolicyConfig) -> Any:
    """Rank 1 has half the work, and fills up with a row that is left out."""
    parts = [[[0, 1], [2, 3]], [[4, 5], [6]]][axis.rank]
    return learn(axis, cfg, parts, (True,) * 6 + (False, False), 0)


def test_rows_left_out_fill_up_micro_batches(solo, cfg):
    # field failure 23
    weights, metrics = learn(solo, cfg, [list(range(6))], (True,) * 8, 0)
    for filled, found in run_ranks(2, _fill_up, cfg):
        assert distance(filled, weights) < 3e-6
        assert found["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_batches_are_not_changed(solo, cfg):
    # field failure 21
    backend, state = dtensor.open_backend(cfg, solo, KEY)
    batch = make_batch(make_samples(3), [True, False, True])
    kept = [x.clone() for x in (*batch.rows, *batch[1:5], *batch[6:])]
    update_(backend, state, [batch], weighted_nll, HEAD)
    after = [*batch.rows, *batch[1:5], *batch[6:]]
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, kept, strict=True)
    )


def test_an_update_without_anything_to_train_is_left_out_and_counted(solo, cfg):
    backend, state = dtensor.open_backend(cfg, solo, KEY)
    before = exported(backend, state)
    batch = make_batch(make_samples(2), [False, False])
    after, seen = update_(backend, state, [batch], weighted_nll, HEAD)
    assert value(seen["empty_updates"]) == 1.0
    assert after is state
    assert distance(exported(backend, after), before) == 0
