"""The policy loss against its slow oracle, and the laws that every algorithm obeys."""

import math
from typing import Any

import msgspec
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    FAMILIES,
    Case,
    cases,
    loss_settings,
    random_case,
    run,
    settings_of,
    tensors,
)

from minirl.loss_config import LossConfig
from minirl.losses import PolicyLossInputs, policy_loss
from minirl.metrics import Metrics, merge, values

IS = {"use_importance_sampling_correction": True}


def config(**keys: Any) -> LossConfig:
    return msgspec.convert(keys, LossConfig)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return a == b or abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def assert_metrics(found: Metrics, expected: dict[str, float], tolerance: float = 1e-9) -> None:
    numbers = values(found)
    assert numbers.keys() == expected.keys()
    wrong = {k: (numbers[k], v) for k, v in expected.items() if not close(numbers[k], v, tolerance)}
    assert not wrong


@settings(max_examples=300)
@given(cases(), loss_settings())
def test_loss_gradient_and_every_metric_equal_the_oracle(case: Case, cfg: LossConfig):
    lists, *counts = case
    loss, grad, metrics = run(tensors(lists), cfg, *counts)
    expected, expected_grad, expected_metrics = oracle.policy_loss(lists, settings_of(cfg), *counts)
    assert close(loss, expected)
    torch.testing.assert_close(
        grad, torch.tensor(expected_grad, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    assert_metrics(metrics, expected_metrics)


# field failures 5, 6, 7, 8, 14
@given(cases(), loss_settings(), st.integers(0, 15))
def test_shares_of_a_split_batch_add_up_to_the_whole(case: Case, cfg: LossConfig, pick: int):
    lists, *counts = case
    whole = tensors(lists)
    loss, grad, metrics = run(whole, cfg, *counts)
    rows = len(lists["sample_mask"])
    first = [i for i in range(rows) if pick >> i & 1]
    parts = [p for p in (first, [i for i in range(rows) if i not in first]) if p]
    shares = [run(tensors(pick_rows(lists, part)), cfg, *counts) for part in parts]
    assert close(sum(share[0] for share in shares), loss)
    together = torch.empty_like(grad)
    for part, share in zip(parts, shares, strict=True):
        together[part] = share[1]
    torch.testing.assert_close(together, grad, rtol=1e-9, atol=1e-12)
    assert_metrics(merge(*(share[2] for share in shares)), values(metrics))


def pick_rows(lists: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: [value[i] for i in rows] for name, value in lists.items()}


# field failures 4, 17, 38
@given(cases(), loss_settings(), st.integers(0, 5))
def test_padding_anywhere_changes_nothing(case: Case, cfg: LossConfig, at: int):
    lists, *counts = case
    at = min(at, len(lists["logprobs"][0]))
    padded = {
        name: value
        if name in ("sample_mask", "rewards")
        else [
            row[:at] + [0.0 if name == "token_mask" else math.nan] * 2 + row[at:] for row in value
        ]
        for name, value in lists.items()
    }
    loss, grad, metrics = run(tensors(lists), cfg, *counts)
    padded_loss, padded_grad, padded_metrics = run(tensors(padded), cfg, *counts)
    assert close(padded_loss, loss)
    kept = [t for t in range(padded_grad.shape[1]) if not at <= t < at + 2]
    torch.testing.assert_close(padded_grad[:, kept], grad, rtol=1e-9, atol=1e-12)
    assert not padded_grad[:, at : at + 2].any()
    assert_metrics(padded_metrics, values(metrics))


@given(cases(), loss_settings())
def test_row_order_changes_nothing(case: Case, cfg: LossConfig):
    lists, *counts = case
    order = list(reversed(range(len(lists["sample_mask"]))))
    loss, grad, metrics = run(tensors(lists), cfg, *counts)
    other_loss, other_grad, other_metrics = run(tensors(pick_rows(lists, order)), cfg, *counts)
    assert close(other_loss, loss)
    torch.testing.assert_close(other_grad[order], grad, rtol=1e-9, atol=1e-12)
    assert_metrics(other_metrics, values(metrics))


# field failures 22, 30, 31
@given(cases(), loss_settings(), st.sampled_from([math.nan, math.inf, -math.inf, 300.0, -300.0]))
def test_masked_values_are_never_read(case: Case, cfg: LossConfig, poison: float):
    lists, *counts = case
    clean = tensors(lists)
    mask = clean.token_mask & clean.sample_mask.unsqueeze(-1)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask if x.ndim == 2 else clean.sample_mask, x.detach(), poison)

    poisoned = PolicyLossInputs(
        logprobs=spoil(clean.logprobs).requires_grad_(),
        prev_logprobs=spoil(clean.prev_logprobs),
        generation_logprobs=spoil(clean.generation_logprobs),
        reference_logprobs=spoil(clean.reference_logprobs),
        advantages=spoil(clean.advantages),
        token_mask=clean.token_mask,
        sample_mask=clean.sample_mask,
        rewards=spoil(clean.rewards),
        entropy=spoil(clean.entropy),
    )
    loss, grad, metrics = run(clean, cfg, *counts)
    assert run(poisoned, cfg, *counts)[0] == loss
    assert torch.equal(run(poisoned, cfg, *counts)[1], grad)
    assert values(run(poisoned, cfg, *counts)[2]) == values(metrics)


# field failure 21
@given(cases(), loss_settings())
def test_inputs_are_not_changed(case: Case, cfg: LossConfig):
    inputs = tensors(case.lists)
    before = [x.detach().clone() for x in inputs]
    run(inputs, cfg, *case[1:])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@given(cases(), loss_settings())
def test_gradient_flows_through_logprobs_alone(case: Case, cfg: LossConfig):
    inputs = tensors(case.lists)
    for x in inputs:
        if x.dtype == torch.float64:
            x.requires_grad_()
    loss, metrics = policy_loss(inputs, cfg, num_tokens=case.num_tokens, num_sequences=3.0)
    loss.backward()
    others = [x for x in inputs if x.dtype == torch.float64 and x is not inputs.logprobs]
    assert inputs.logprobs.grad is not None
    assert all(x.grad is None for x in others)
    assert all(not part.requires_grad for metric in metrics.values() for part in metric)


# field failure 32
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ratio_is_exactly_one_on_the_first_on_policy_step(family: str):
    cfg = config(**FAMILIES[family])
    lists = random_case(3).lists
    lists["prev_logprobs"] = lists["generation_logprobs"] = lists["logprobs"]
    metrics = values(run(tensors(lists, torch.float32), cfg, 9.0, 3.0)[2])
    assert metrics["token_mult_prob_error"] * 9 == pytest.approx(tokens_of(lists))
    if not cfg.disable_ppo_ratio:
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
        assert metrics["probs_ratio_clamped_min"] == metrics["probs_ratio_clamped_max"] == 1.0
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0.0
    assert metrics["gen_kl_error"] == metrics["policy_kl_error"] == 0.0


def tokens_of(lists: dict[str, Any]) -> float:
    pairs = zip(lists["token_mask"], lists["sample_mask"], strict=True)
    return float(sum(sum(row) * s for row, s in pairs))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_small_step_raises_rewarded_tokens_and_lowers_the_others(family: str):
    cfg = config(**FAMILIES[family], reference_policy_kl_penalty=0.0)
    lists = random_case(5).lists
    lists["prev_logprobs"] = lists["generation_logprobs"] = lists["logprobs"]
    lists["token_mask"] = [[1] * 4] * 3
    lists["sample_mask"] = [1] * 3
    lists["advantages"] = [[1.0] * 4, [-0.5] * 4, [0.0] * 4]
    grad = run(tensors(lists), cfg, 12.0, 3.0)[1]
    assert (grad[0] < 0).all()
    assert (grad[1] > 0).all()
    assert (grad[2] == 0).all()


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
        policy_loss(tensors(lists), cfg, num_sequences=3.0)  # pyright: ignore


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
