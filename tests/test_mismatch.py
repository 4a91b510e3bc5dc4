import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minirl.config.loss import LossConfig
from minirl.losses.mismatch import (
    Correction,
    ImportanceWeights,
    correction_of,
    importance_weights,
    keep_matching_sequences,
    sequence_errors,
)
from minirl.losses.reduce import select
from minirl.metrics import value, values

LEVELS = ["token", "sequence", "geometric"]
MODES = [None, "truncate", "mask", "sequence_mask"]
IS = {"use_importance_sampling_correction": True}


def case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and engine, poisoned outside the mask; the last row has no token."""
    generator = torch.Generator().manual_seed(seed)
    prev = -torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.5
    engine = prev + 0.5 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    mask[2] = False
    return torch.where(mask, prev, math.nan), torch.where(mask, engine, math.inf), mask


def weigh(prev: Tensor, engine: Tensor, mask: Tensor, correction: Correction) -> ImportanceWeights:
    return importance_weights(select(prev - engine, mask), mask.to(prev.dtype), correction)


@given(st.integers(0, 1000), st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_every_cell_of_the_grid_equals_loops(seed: int, level: Any, mode: Any):
    prev, engine, mask = case(seed)
    low, high = 0.7, 1.3
    weights = weigh(prev, engine, mask, Correction(level, mode, low, high))
    for i in range(3):
        at = [t for t in range(4) if mask[i, t]]
        gaps = [(prev[i, t] - engine[i, t]).item() for t in at]
        geometric = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
        for t, gap in zip(at, gaps, strict=True):
            sums = {"token": gap, "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}
            raw = math.exp(sums[level])
            judged = geometric if mode == "sequence_mask" else raw
            outside = mode is not None and not low <= judged <= high
            clamped = min(max(raw, low), high) if mode == "truncate" else raw
            applied = 0.0 if outside and mode != "truncate" else clamped
            column = t if level == "token" else 0
            assert weights.raw[i, column].item() == pytest.approx(raw)
            assert weights.applied[i, column].item() == pytest.approx(applied)
            assert weights.outside.expand(3, 4)[i, column].item() == outside


# field failure 36
def test_sequence_mask_keeps_raw_token_weights_in_the_sequences_it_keeps():
    prev = torch.zeros(1, 2)
    engine = torch.tensor([[-2.0, 2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = weigh(prev, engine, mask, Correction("token", "sequence_mask", 0.9, 1.1))
    assert weights.applied.flatten().tolist() == pytest.approx([math.exp(2), math.exp(-2)])


def test_bounds_are_inclusive():
    prev, engine = torch.zeros(1, 3), torch.tensor([[0.5, 1.0, 2.0]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    for mode in ("truncate", "mask"):
        ratio = (prev - engine).exp()
        low, high = ratio.min().item(), ratio.max().item()
        weights = weigh(prev, engine, mask, Correction("token", mode, low, high))
        assert not weights.outside.any()
        assert torch.equal(weights.applied, weights.raw)


def test_an_overflowing_weight_is_truncated_to_the_bound_not_to_zero():
    prev, engine = torch.zeros(1, 2), torch.tensor([[-200.0, 200.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = weigh(prev, engine, mask, Correction("token", "truncate", 0.0, 2.0))
    assert weights.applied.tolist() == [[2.0, 0.0]]
    whole = weigh(prev, 2 * engine.abs().neg(), mask, Correction("sequence", None, 0, 0))
    assert whole.raw.isfinite().all()


def test_weights_carry_no_gradient():
    prev, engine, mask = case(0)
    prev.requires_grad_()
    engine.requires_grad_()
    for level in LEVELS:
        weights = weigh(prev, engine, mask, Correction(level, "truncate", 0.5, 2.0))
        assert not weights.raw.requires_grad
        assert not weights.applied.requires_grad
    assert not sequence_errors(prev, engine, mask).requires_grad


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Correction("token", None, 0.0, 0.0)),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
            Correction("sequence", None, 0.0, 0.0),
        ),
        (IS | {"importance_sampling_level": "geometric"}, Correction("geometric", None, 0.0, 0.0)),
        (
            IS
            | {
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            },
            Correction("token", "truncate", 0.0, 2.0),
        ),
        (
            IS
            | {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 5.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            Correction("token", "mask", 0.5, 5.0),
        ),
        (
            IS
            | {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.002,
                "truncated_importance_sampling_ratio_min": 0.999,
            },
            Correction("token", "sequence_mask", 0.999, 1.002),
        ),
    ],
)
def test_nemo_rls_keys_name_a_cell(keys: dict[str, Any], expected: Correction):
    assert correction_of(msgspec.convert(keys, LossConfig)) == expected


@given(st.integers(0, 1000))
def test_sequence_errors_equal_loops(seed: int):
    prev, engine, mask = case(seed)
    expected = []
    for i in range(3):
        row = [math.exp(abs(float(engine[i, t] - prev[i, t]))) for t in range(4) if mask[i, t]]
        expected.append(sum(row) / len(row) if row else 0.0)
    assert sequence_errors(prev, engine, mask).tolist() == pytest.approx(expected)


def test_a_sequence_above_the_threshold_or_without_a_number_is_dropped_and_counted():
    prev = torch.zeros(5, 2)
    engine = torch.tensor([[0.0, 0.0], [1.0, 1.0], [math.nan, 0.0], [9.0, 9.0], [0.1, -0.1]])
    mask = torch.ones(5, 2, dtype=torch.bool)
    samples = torch.tensor([True, True, True, False, True])
    before = samples.clone()
    kept, metrics = keep_matching_sequences(prev, engine, mask, samples, 1.5)
    assert kept.tolist() == [True, False, False, False, True]
    assert torch.equal(samples, before)
    assert values(metrics)["seq_logprob_error_masked"] == 0.5
    clean = torch.tensor([True, True, False, False, True])
    at_the_threshold = sequence_errors(prev, engine, mask)[1].item()
    kept, metrics = keep_matching_sequences(prev, engine, mask, clean, at_the_threshold)
    assert kept.tolist() == clean.tolist()
    assert value(metrics["seq_logprob_error_masked"]) == 0.0
    assert value(metrics["seq_logprob_error_max"]) == pytest.approx(math.e)
    none = torch.zeros(5, dtype=torch.bool)
    _, metrics = keep_matching_sequences(prev, engine, mask, none, 1.5)
    assert value(metrics["seq_logprob_error_max"]) == 0.0
