"""What the loss's metrics mean: each against a sum in plain Python or a law of its name."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minirl.losses.metrics import (
    approximate_entropy,
    mismatch_metrics,
    overflow_tokens,
    surrogate_metrics,
    weight_metrics,
)
from minirl.losses.mismatch import Correction, importance_weights
from minirl.losses.reduce import bounded_exp, exponent_bound
from minirl.losses.surrogates import Surrogate
from minirl.metrics import Metrics, merge, values

F64 = torch.float64
seeds = st.integers(0, 10**6)


def draw(seed: int, scale: float = 0.5) -> tuple[Tensor, Tensor]:
    """Differences of log-probs, 0 outside the mask; and the mask. Every row keeps a token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=generator) < 0.6
    mask[:, 1] = True
    drawn = torch.randn(3, 4, generator=generator, dtype=F64) * scale
    return torch.where(mask, drawn, 0.0), mask


def chosen(x: Tensor, mask: Tensor) -> list[float]:
    return x[mask].tolist()


def mismatch(gap: Tensor, mask: Tensor, kind: str = "k3") -> dict[str, float]:
    return values(mismatch_metrics(gap, mask.to(F64), kind, int(mask.sum())))


# ---- engine and trainer -------------------------------------------------------------------------


@given(seeds)
def test_the_mismatch_is_what_its_names_say(seed: int):
    gap, mask = draw(seed)
    found = mismatch(gap, mask)
    d = chosen(gap, mask)
    rows = [fmean(math.exp(abs(x)) for x in chosen(gap[i], mask[i])) for i in range(3)]
    expected = {
        "token_mult_prob_error": fmean(math.exp(abs(x)) for x in d),
        "gen_kl_error": fmean(math.expm1(x) - x for x in d),
        "policy_kl_error": fmean(math.expm1(-x) + x for x in d),
        "js_divergence_error": fmean(math.log(math.cosh(x / 2)) for x in d),
        "seq_mult_prob_error_max": max(rows),
    }
    assert found == pytest.approx(expected, rel=1e-6)


@given(seeds, st.sampled_from(["k1", "k2", "k3"]))
def test_trainer_and_engine_swapped_swap_the_two_kl_errors_alone(seed: int, kind: str):
    gap, mask = draw(seed)
    found, swapped = mismatch(gap, mask, kind), mismatch(-gap, mask, kind)
    assert swapped.pop("gen_kl_error") == found.pop("policy_kl_error")
    assert swapped.pop("policy_kl_error") == found.pop("gen_kl_error")
    assert swapped == pytest.approx(found, rel=1e-12)


def test_a_perfect_engine_has_no_error():
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = mismatch(torch.zeros(2, 3, dtype=F64), mask)
    assert found.pop("token_mult_prob_error") == pytest.approx(1.0)
    assert found.pop("seq_mult_prob_error_max") == pytest.approx(1.0)
    assert set(found.values()) == {0.0}


# ---- ratios -------------------------------------------------------------------------------------


def ratios(mask: Tensor, ratio: Tensor) -> Metrics:
    kept, none = mask.to(F64), torch.zeros_like(ratio)
    at = Surrogate(ratio, ratio, ratio.clamp(0.9, 1.1), low=none, high=(ratio > 1.1).to(F64))
    return surrogate_metrics(at, mask, kept, int(mask.sum()))


@given(seeds)
def test_ratios_are_seen_where_tokens_are_trained_and_nowhere_else(seed: int):
    gap, mask = draw(seed)
    ratio = torch.where(mask, gap.exp(), 1e9)
    found = values(ratios(mask, ratio))
    seen = chosen(ratio, mask)
    bounded = [min(max(r, 0.9), 1.1) for r in seen]
    for name, xs in (("probs_ratio", seen), ("probs_ratio_clamped", bounded)):
        assert found[name] == pytest.approx(fmean(xs), rel=1e-6)
        assert (found[f"{name}_min"], found[f"{name}_max"]) == (min(xs), max(xs))
    assert found["clipped_high"] == pytest.approx(fmean(r > 1.1 for r in seen))
    assert found["clipped_low"] == 0.0


def test_a_batch_without_tokens_leaves_the_extremes_of_the_others():
    ratio = torch.full((1, 2), 1.5, dtype=F64)
    full, none = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)
    both = values(merge(ratios(full, ratio), ratios(none, ratio * 9)))
    assert both["probs_ratio_min"] == both["probs_ratio_max"] == 1.5


# ---- importance weights -------------------------------------------------------------------------


def weighed(gap: Tensor, mask: Tensor, correction: Correction) -> dict[str, float]:
    kept = mask.to(F64)
    weights = importance_weights(gap, kept, correction)
    samples = mask.any(-1).to(F64)
    counts = (int(mask.sum()), int(samples.sum()))
    return values(weight_metrics(weights, correction, kept, samples, counts))


@given(seeds, st.sampled_from(["truncate", "mask"]))
def test_token_weights_are_averaged_over_tokens(seed: int, mode: str):
    gap, mask = draw(seed)
    found = weighed(gap, mask, Correction("token", mode, 0.8, 1.3))
    raw = [math.exp(d) for d in chosen(gap, mask)]
    inside = [0.8 <= w <= 1.3 for w in raw]
    kept = [
        min(max(w, 0.8), 1.3) if mode == "truncate" else w * i
        for w, i in zip(raw, inside, strict=True)
    ]
    assert found["importance_ratio_raw"] == pytest.approx(fmean(raw), rel=1e-6)
    assert found["importance_ratio_applied"] == pytest.approx(fmean(kept), rel=1e-6)
    assert found["sampling_importance_ratio"] == found["importance_ratio_applied"]
    assert found["is_oob_ratio"] == pytest.approx(fmean(not i for i in inside))


@given(seeds, st.sampled_from(["sequence", "geometric"]))
def test_sequence_weights_are_averaged_over_sequences_and_judged_over_tokens(seed: int, level: str):
    gap, mask = draw(seed)
    found = weighed(gap, mask, Correction(level, "truncate", 0.8, 1.3))
    mean = fmean if level == "geometric" else sum
    rows = [chosen(gap[i], mask[i]) for i in range(3)]
    raw = [math.exp(mean(row)) for row in rows]
    applied = [min(max(w, 0.8), 1.3) for w in raw]
    outside = [len(row) * (w != a) for row, w, a in zip(rows, raw, applied, strict=True)]
    assert found["importance_ratio_raw"] == pytest.approx(fmean(raw), rel=1e-6)
    assert found["importance_ratio_applied"] == pytest.approx(fmean(applied), rel=1e-6)
    assert found["sampling_importance_ratio"] == found["importance_ratio_applied"]
    assert found["is_oob_ratio"] == pytest.approx(sum(outside) / sum(map(len, rows)))


@given(seeds)
def test_dropped_sequences_are_counted_in_sequences(seed: int):
    gap, mask = draw(seed)
    mask[2] = False  # a sample that is not trained
    gap = torch.where(mask, gap, 0.0)
    found = weighed(gap, mask, Correction("token", "sequence_mask", 0.9, 1.1))
    means = [math.exp(fmean(chosen(gap[i], mask[i]))) for i in range(2)]
    assert found["is_oob_ratio"] == pytest.approx(fmean(not 0.9 <= m <= 1.1 for m in means))


def test_weights_that_nothing_bounds_have_no_share_outside():
    gap, mask = draw(0)
    found = weighed(gap, mask, Correction("token", None, 0.0, 0.0))
    assert "is_oob_ratio" not in found
    assert found["importance_ratio_raw"] == found["importance_ratio_applied"]


# ---- entropy and overflow -----------------------------------------------------------------------


@given(seeds)
def test_the_approximate_entropy_weighs_surprise_by_how_far_the_policy_moved(seed: int):
    moved, mask = draw(seed)
    logprobs = torch.where(mask, -moved.abs() - 0.1, 0.0)
    found = approximate_entropy(logprobs, moved, mask.to(F64), int(mask.sum()))
    pairs = zip(chosen(moved, mask), chosen(logprobs, mask), strict=True)
    assert found.item() == pytest.approx(fmean(-math.exp(d) * p for d, p in pairs), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_overflows_once_however_many_of_its_ratios_do(dtype: torch.dtype):
    at = exponent_bound(dtype)
    below, beyond = at * 0.999, at * 1.001
    first = torch.tensor([[below, beyond, -beyond, beyond, math.inf]], dtype=dtype)
    second = torch.tensor([[0.0, beyond, 0.0, 0.0, 0.0]], dtype=dtype)
    third = torch.tensor([[0.0, 0.0, beyond, 0.0, 0.0]], dtype=dtype)
    kept, none = torch.ones(1, 5, dtype=dtype), torch.zeros(1, 5, dtype=dtype)
    for gaps in ([first, second, third], [third, first, second]):
        assert overflow_tokens(kept, gaps, [none]).item() == 4.0
        ratios = [bounded_exp(gap) for gap in gaps]
        assert overflow_tokens(kept, [none], ratios).item() == 4.0
    whole = bounded_exp(torch.tensor([[beyond]], dtype=dtype))  # one weight of the sequence
    kept[0, 1] = 0.0
    assert overflow_tokens(kept, [none], [whole]).item() == 4.0
