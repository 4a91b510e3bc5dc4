"""The policy loss at its edges: nothing to average, extreme gaps, counts, shapes and dtypes."""

import math
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    FAMILIES,
    Case,
    cases,
    close,
    config,
    loss_settings,
    pick_rows,
    random_case,
    run,
    settings_of,
    tensors,
    tokens_of,
)

from minirl.config.loss import LossConfig
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.losses.reduce import exponent_bound
from minirl.metrics import values

IS = {"use_importance_sampling_correction": True}


# field failure 23
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("counts", [(12.0, 3.0), (0.0, 0.0)], ids=["micro-batch", "batch"])
def test_a_fully_masked_batch_has_zero_loss_and_a_zero_gradient(
    family: str, counts: tuple[float, float]
):
    cfg = config(**FAMILIES[family], positive_example_nll_weight=0.1)
    lists = random_case(1).lists | {"sample_mask": [0, 0, 0]}
    loss, grad, metrics = run(tensors(lists, torch.float32), cfg, *counts)
    assert loss == 0.0
    assert not grad.any()
    extremes = ("_min", "_max")
    means = {k: v for k, v in values(metrics).items() if not k.endswith(extremes)}
    assert all(v == 0.0 for v in means.values())


# field failure 30
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask-tis", None])
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("moved", ["logprobs", "prev_logprobs", "generation_logprobs"])
def test_gaps_of_200_stay_finite_in_float32(
    family: str, correction: str | None, gap: float, moved: str
):
    keys = dict(FAMILIES[family]) | {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    if correction is not None and not ("gspo" in family and correction == "seq-mask-tis"):
        keys |= IS | {
            "truncated_importance_sampling_type": correction,
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 0.5,
        }
    lists = random_case(7).lists
    lists[moved] = [[x + gap for x in row] for row in lists[moved]]
    lists["advantages"] = [[1e6, -1e6, 1.0, -1.0]] * 3
    loss, grad, metrics = run(tensors(lists, torch.float32), config(**keys), 12.0, 3.0)
    assert math.isfinite(loss)
    assert grad.isfinite().all()
    assert all(map(math.isfinite, values(metrics).values()))


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize(
    "keys",
    [
        {"ratio_clip_c": 3.0},
        {"use_cispo": True},
        {"policy_loss_type": "sapo"},
        {
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
            "ratio_clip_c": 3.0,
            **IS,
        },
        {
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 0.5,
            "ratio_clip_c": 3.0,
            **IS,
        },
    ],
    ids=["dual clip", "cispo", "sapo", "tis", "icepop"],
)
def test_a_bounded_loss_at_a_gap_of_200_equals_the_oracle_in_float32(
    gap: float, keys: dict[str, Any]
):
    lists = random_case(7).lists
    lists["prev_logprobs"] = [[x - gap for x in row] for row in lists["logprobs"]]
    lists["generation_logprobs"] = [[x - 2 * gap for x in row] for row in lists["logprobs"]]
    cfg = config(**keys)
    loss, grad, metrics = run(tensors(lists, torch.float32), cfg, 12.0, 3.0)
    expected, expected_grad, _ = oracle.policy_loss(lists, settings_of(cfg), 12.0, 3.0)
    assert close(loss, expected, 1e-5)
    torch.testing.assert_close(grad, torch.tensor(expected_grad), rtol=1e-5, atol=1e-6)
    assert values(metrics)["overflow_tokens"] == tokens_of(lists)


@settings(max_examples=300)
@given(cases(), loss_settings(), st.sampled_from([8.0, 20.0, 60.0]))
def test_a_token_is_counted_once_where_any_exponential_of_it_or_its_sequence_is_bounded(
    case: Case, cfg: LossConfig, scale: float
):
    lists = {
        name: [[x * scale for x in row] for row in value] if name.endswith("logprobs") else value
        for name, value in case.lists.items()
    }
    metrics = values(run(tensors(lists, torch.float32), cfg, *case[1:])[2])
    largest = exponent_bound(torch.float32)
    expected = oracle.overflow_tokens(lists, settings_of(cfg), largest)
    assert metrics["overflow_tokens"] == expected


@pytest.mark.parametrize("family", ["clip", "gspo"])
def test_a_bounded_weight_of_a_sequence_counts_all_of_its_tokens(family: str):
    keys = FAMILIES[family] | IS | {"importance_sampling_level": "sequence"}
    lists = random_case(0, rows=1, columns=300).lists | {"sample_mask": [1]}
    lists |= {"token_mask": [[1] * 300], "advantages": [[1.0] * 300]}
    for name, x in (("logprobs", -2.0), ("prev_logprobs", -2.0), ("generation_logprobs", -2.1)):
        lists[name] = [[x] * 300]
    metrics = values(run(tensors(lists, torch.float32), config(**keys), 300.0, 1.0)[2])
    assert metrics["overflow_tokens"] == 300
    assert metrics["importance_ratio_raw"] == pytest.approx(math.exp(29.574), rel=1e-3)


@pytest.mark.parametrize(("now", "sampler"), [(-5.0, 0.0), (0.0, -5.0)])
def test_dppo_blocks_a_token_that_moved_away_from_a_certain_policy(now: float, sampler: float):
    lists = random_case(7, rows=1, columns=1).lists | {"token_mask": [[1]], "sample_mask": [1]}
    lists |= {"logprobs": [[now]], "prev_logprobs": [[now]], "generation_logprobs": [[sampler]]}
    keys = {"policy_loss_type": "dppo_kl", "divergence_threshold": 0.05}
    cfg = config(reference_policy_kl_penalty=0.0, **keys)
    away, back = (-1.0, 1.0) if now < sampler else (1.0, -1.0)
    for advantage, blocked in ((away, True), (back, False)):
        inputs = tensors(lists | {"advantages": [[advantage]]}, torch.float32)
        assert (run(inputs, cfg, 1.0, 1.0)[1].item() == 0.0) == blocked


# field failure 20
def test_a_second_update_on_the_same_samples_is_clipped():
    lists = random_case(2).lists | {"token_mask": [[1] * 4] * 3, "sample_mask": [1] * 3}
    lists["advantages"] = [[1.0] * 4, [-1.0] * 4, [1.0] * 4]
    lists["logprobs"] = [
        [p + step for p in row]
        for row, step in zip(lists["prev_logprobs"], [0.5, -0.5, 0.1], strict=True)
    ]
    _, grad, metrics = run(tensors(lists), config(reference_policy_kl_penalty=0.0), 12.0, 3.0)
    assert not grad[:2].any()
    assert (grad[2] < 0).all()
    assert values(metrics)["clipped_high"] == values(metrics)["clipped_low"] == pytest.approx(1 / 3)


# field failures 1, 12
def test_the_counts_are_the_callers_and_have_no_default():
    lists = random_case(4).lists
    cfg = config(reference_policy_kl_penalty=0.0)
    once, twice = (run(tensors(lists), cfg, n, 3.0)[0] for n in (10.0, 20.0))
    assert twice == pytest.approx(once / 2)
    with pytest.raises(TypeError, match="num_tokens"):
        policy_loss(tensors(lists), cfg, num_sequences=3.0)


def test_counts_may_be_numbers_or_tensors_of_any_dtype():
    lists = random_case(4).lists
    for cfg in (config(), config(token_level_loss=False)):
        expected = policy_loss(tensors(lists), cfg, num_tokens=10.0, num_sequences=3.0)[0]
        for kind in (torch.int64, torch.float32, torch.float64):
            counts = torch.tensor([10, 3], dtype=kind)
            found = policy_loss(tensors(lists), cfg, num_tokens=counts[0], num_sequences=counts[1])[
                0
            ]
            assert torch.equal(found, expected)


# field failure 11
def test_dropping_a_sequence_by_its_weight_does_not_change_the_denominator():
    lists = random_case(6).lists | {"token_mask": [[1] * 4] * 3, "sample_mask": [1] * 3}
    lists["generation_logprobs"] = [list(row) for row in lists["prev_logprobs"]]
    lists["generation_logprobs"][1] = [x - 0.5 for x in lists["prev_logprobs"][1]]
    drop = {
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    }
    cfg = config(reference_policy_kl_penalty=0.0, **IS, **drop)
    loss, _, metrics = run(tensors(lists), cfg, 12.0, 3.0)
    survivors = pick_rows(lists, [0, 2])
    assert loss == pytest.approx(run(tensors(survivors), cfg, 12.0, 3.0)[0])
    assert values(metrics)["is_oob_ratio"] == pytest.approx(1 / 3)


# field failure 35
def test_raw_and_applied_importance_ratios_are_both_reported():
    lists = random_case(6).lists | {"token_mask": [[1] * 4] * 3, "sample_mask": [1] * 3}
    lists["generation_logprobs"] = [[x - 1.0 for x in row] for row in lists["prev_logprobs"]]
    keys = {
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    metrics = values(run(tensors(lists), config(**IS, **keys), 12.0, 3.0)[2])
    assert metrics["importance_ratio_raw"] == pytest.approx(math.e)
    assert metrics["importance_ratio_applied"] == pytest.approx(2.0)


# field failure 33
@pytest.mark.parametrize("reference", [None, "nan"])
def test_without_a_penalty_the_reference_is_not_read(reference: str | None):
    inputs = tensors(random_case(8).lists)
    spoiled = None if reference is None else torch.full_like(inputs.advantages, math.nan)
    inputs = inputs._replace(reference_logprobs=spoiled)
    loss, _, metrics = run(inputs, config(reference_policy_kl_penalty=0.0), 12.0, 3.0)
    assert math.isfinite(loss)
    assert values(metrics)["kl_penalty"] == 0.0


def test_with_a_penalty_a_missing_reference_is_refused():
    inputs = tensors(random_case(8).lists)._replace(reference_logprobs=None)
    with pytest.raises(
        ValueError, match=r"reference_policy_kl_penalty is 0\.01 but reference_logprobs"
    ):
        run(inputs, config(), 12.0, 3.0)


# field failure 10
def test_rewards_reach_the_likelihood_term_which_divides_by_the_global_count():
    lists = random_case(8).lists | {"token_mask": [[1] * 4] * 3, "sample_mask": [1] * 3}
    lists["rewards"] = [1.0, 0.0, -1.0]
    with_term, without = (
        run(tensors(lists), config(positive_example_nll_weight=w), 12.0, 3.0)[0] for w in (0.5, 0.0)
    )
    # NeMo-RL would divide by the 4 rewarded tokens of this micro-batch.
    assert with_term - without == pytest.approx(-0.5 * sum(lists["logprobs"][0]) / 12)


# field failure 41
def test_bfloat16_logprobs_are_computed_with_in_float32():
    inputs = tensors(random_case(9).lists, torch.float32)
    half = inputs.logprobs.detach().bfloat16().requires_grad_()
    full = half.detach().float().requires_grad_()
    cfg = config()
    loss, grad, _ = run(inputs._replace(logprobs=half), cfg, 12.0, 3.0)
    expected, expected_grad, _ = run(inputs._replace(logprobs=full), cfg, 12.0, 3.0)
    assert loss == expected
    assert torch.equal(grad, expected_grad.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_masks_may_have_any_dtype(dtype: torch.dtype):
    inputs = tensors(random_case(9).lists)
    other = inputs._replace(
        token_mask=inputs.token_mask.to(dtype), sample_mask=inputs.sample_mask.to(dtype)
    )
    assert run(other, config(), 12.0, 3.0)[0] == run(inputs, config(), 12.0, 3.0)[0]


@pytest.mark.parametrize("name", PolicyLossInputs._fields)
def test_a_wrong_shape_is_refused_by_name(name: str):
    inputs = tensors(random_case(9).lists)
    wrong = inputs._replace(**{name: getattr(inputs, name)[:-1]})
    culprit = "prev_logprobs" if name == "logprobs" else name
    with pytest.raises(ValueError, match=f"^{culprit} has shape"):
        policy_loss(wrong, config(), num_tokens=12.0, num_sequences=3.0)


def test_a_flat_batch_is_refused():
    inputs = tensors(random_case(9).lists)
    with pytest.raises(
        ValueError, match=r"logprobs has shape \(12,\); expected \[batch, position\]"
    ):
        policy_loss(
            inputs._replace(logprobs=inputs.logprobs.flatten()),
            config(),
            num_tokens=12.0,
            num_sequences=3.0,
        )


def test_a_nemo_rl_mapping_is_taken_strictly():
    inputs = tensors(random_case(9).lists)
    found = policy_loss(inputs, {"ratio_clip_max": 1}, num_tokens=12.0, num_sequences=3.0)[0]
    cfg = config(ratio_clip_max=1.0)
    assert torch.equal(found, policy_loss(inputs, cfg, num_tokens=12.0, num_sequences=3.0)[0])
    for bad in ({"ratio_clip": 0.2}, {"ratio_clip_max": "0.2"}, {"ratio_clip_max": -0.2}):
        with pytest.raises(ValueError, match=f"loss_fn: .*{next(iter(bad))}"):
            policy_loss(inputs, bad, num_tokens=12.0, num_sequences=3.0)


def test_dapo_and_bnpo_are_names_of_the_token_mean_and_grpo_of_the_sequence_mean():
    lists = random_case(9).lists
    token, sequence = (
        run(tensors(lists), config(token_level_loss=t), 9.0, 3.0)[0] for t in (True, False)
    )
    for name, expected in (("dapo", token), ("bnpo", token), ("grpo", sequence)):
        cfg = config(normalization=name, token_level_loss=name != "grpo")
        assert run(tensors(lists), cfg, 9.0, 3.0)[0] == expected


@pytest.mark.parametrize("name", ["rewards", "generation_logprobs"])
def test_a_missing_input_is_refused_by_name(name: str):
    inputs = PolicyLossInputs(*(torch.zeros(1, 2) for _ in range(6)), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match=f"{name} is None"):
        policy_loss(inputs._replace(**{name: None}), {}, num_tokens=2, num_sequences=1)


def test_an_empty_batch_is_refused():
    empty = PolicyLossInputs(*(torch.zeros(0, 2) for _ in range(6)), torch.ones(0), torch.ones(0))
    with pytest.raises(ValueError, match="at least one position"):
        policy_loss(empty, {}, num_tokens=0, num_sequences=0)


def test_a_group_without_advantage_still_feels_the_penalty():
    # field failure 53: decided. Only `use_dynamic_sampling` takes such groups out of the loss.
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2)
    constant = PolicyLossInputs(
        logprobs,
        logprobs.detach(),
        logprobs.detach(),
        zero - 3,
        zero,
        mask,
        torch.ones(1),
        mask[0, :1],
    )
    cfg = {"reference_policy_kl_penalty": 0.1}
    loss, _ = policy_loss(constant, cfg, num_tokens=2, num_sequences=1)
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad > 0).all()
