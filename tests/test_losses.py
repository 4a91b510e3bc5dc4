"""The policy loss against its slow oracle, and the laws that every algorithm obeys."""

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    FAMILIES,
    Case,
    assert_metrics,
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
from minirl.metrics import merge, values


@settings(max_examples=200)
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
@given(cases(), loss_settings(), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_shares_of_any_split_add_up_to_the_whole(case: Case, cfg: LossConfig, places: list[int]):
    lists, *counts = case
    whole = tensors(lists)
    loss, grad, metrics = run(whole, cfg, *counts)
    rows = len(lists["sample_mask"])
    parts = [[i for i in range(rows) if places[i] == place] for place in sorted(set(places[:rows]))]
    shares = [run(tensors(pick_rows(lists, part)), cfg, *counts) for part in parts]
    assert close(sum(share[0] for share in shares), loss)
    together = torch.empty_like(grad)
    for part, share in zip(parts, shares, strict=True):
        together[part] = share[1]
    torch.testing.assert_close(together, grad, rtol=1e-9, atol=1e-12)
    assert_metrics(merge(*(share[2] for share in shares)), values(metrics))


@given(cases(), loss_settings())
def test_every_metric_of_a_batch_twice_is_that_of_the_batch_but_the_counts(
    case: Case, cfg: LossConfig
):
    lists, *counts = case
    once = values(run(tensors(lists), cfg, *counts)[2])
    twice = {name: value * 2 for name, value in lists.items()}
    for name in ("num_valid_samples", "overflow_tokens"):
        once[name] *= 2
    assert_metrics(run(tensors(twice), cfg, *(2 * n for n in counts))[2], once, 1e-7)


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
    found, found_grad, found_metrics = run(poisoned, cfg, *counts)
    assert found == loss
    assert torch.equal(found_grad, grad)
    assert values(found_metrics) == values(metrics)


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
    if cfg.force_on_policy_ratio or not cfg.disable_ppo_ratio:
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
        assert metrics["probs_ratio_clamped_min"] == metrics["probs_ratio_clamped_max"] == 1.0
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0.0
    assert metrics["gen_kl_error"] == metrics["policy_kl_error"] == 0.0


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
