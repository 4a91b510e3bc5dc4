"""Numbers computed with NeMo-RL's own functions in float64, and the cases its own tests assert.

Where minirl differs on purpose another test says so: the likelihood term's denominator
(test_losses.py), and constant groups (test_advantages.py).
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from minirl.config.loss import AdvEstimatorConfig, LossConfig
from minirl.losses.advantages import Scores, TokenInputs, advantages
from minirl.losses.groups import group_relative
from minirl.losses.kl import kl_estimate, kl_term
from minirl.losses.mismatch import keep_matching_sequences, sequence_errors
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.metrics import values

HERE = Path(__file__).parent / "golden"
LOSS: dict[str, Any] = json.loads((HERE / "policy_loss.json").read_text())
ADVANTAGES: dict[str, Any] = json.loads((HERE / "advantages.json").read_text())
INPUTS = LOSS.pop("inputs")
PRINTED = 5e-7
"""advantages.json holds six digits."""
IS = {"use_importance_sampling_correction": True}


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", LOSS)
def test_loss_gradient_and_metrics_equal_nemo_rl(name: str):
    case = LOSS[name]
    sample_mask, logprobs = f64(case["sample_mask"]), f64(INPUTS["curr"]).requires_grad_()
    token_mask = f64(INPUTS["token_mask"])[:, 1:]
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        prev_logprobs=f64(INPUTS["prev"]),
        generation_logprobs=f64(INPUTS["gen"]),
        reference_logprobs=f64(INPUTS["ref"]),
        advantages=f64(INPUTS["adv"]).unsqueeze(-1).expand(token_mask.shape),
        token_mask=token_mask,
        sample_mask=sample_mask,
        rewards=torch.zeros(3),
    )
    num_tokens = (token_mask * sample_mask.unsqueeze(-1)).sum()
    loss, metrics = policy_loss(
        inputs, case["cfg"], num_tokens=num_tokens, num_sequences=sample_mask.sum()
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(logprobs.grad, f64(case["grad"]), rtol=1e-9, atol=1e-9)
    found, expected = values(metrics), dict(case["metrics"])
    if "GSPO" in name:  # NeMo-RL's is the sum over sequences; ours is a mean whatever the split
        expected["sampling_importance_ratio"] /= 3
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-8, abs=1e-9)


REWARDS, GROUPS = f64(ADVANTAGES["rewards"]), torch.tensor(ADVANTAGES["groups"])


@pytest.mark.parametrize("loo", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_group_advantages_equal_nemo_rl(loo: bool, norm: bool):
    found = group_relative(REWARDS, GROUPS, leave_one_out=loo, normalize=norm)
    expected = ADVANTAGES[f"grpo loo={loo} norm={norm}"]
    torch.testing.assert_close(found, f64(expected), rtol=0, atol=PRINTED)


@pytest.mark.parametrize("kl", [True, False])
def test_reinforce_plus_plus_equals_nemo_rl(kl: bool):
    given = ADVANTAGES["rpp inputs"]
    mask = torch.tensor(given["token_mask"], dtype=torch.bool)
    loss = LossConfig(
        use_kl_in_reward=kl, reference_policy_kl_penalty=0.1, reference_policy_kl_type="k2"
    )
    prev = torch.full(mask.shape, -1.0, dtype=torch.float64)
    found = advantages(
        AdvEstimatorConfig(name="reinforce_plus_plus"),
        loss,
        Scores(REWARDS, GROUPS),
        TokenInputs(
            mask,
            torch.ones(8, dtype=torch.bool),
            prev_logprobs=prev,
            reference_logprobs=prev + f64(given["delta"]),
        ),
    )
    expected = f64(ADVANTAGES[f"rpp mb=True kl={kl}"]).view(8, 4)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=2 * PRINTED)


def small(**keys: Any) -> float:
    """NeMo-RL's three-token case: loss without a KL term unless `keys` has one."""
    keys = {"reference_policy_kl_penalty": 0.0} | keys
    c = keys.pop("c", [[-1.69315, -1.0, -0.59453]])
    rows = len(c)
    inputs = PolicyLossInputs(
        logprobs=f64(c),
        prev_logprobs=f64(keys.pop("p", [[-1.0] * 3])),
        generation_logprobs=f64([[-0.5, -1.5, -0.8]] * rows),
        reference_logprobs=torch.full((rows, 3), -1.0, dtype=torch.float64),
        advantages=f64(keys.pop("a", [[1.0, -1.0, 2.0]])).expand(rows, 3),
        token_mask=torch.ones(rows, 3),
        sample_mask=torch.ones(rows),
        rewards=torch.zeros(rows),
    )
    return policy_loss(inputs, keys, num_tokens=3.0 * rows, num_sequences=float(rows))[0].item()


GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
TIS = {
    **IS,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 0.8,
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, -0.6333),
        ({"disable_ppo_ratio": True, "c": [[-0.5, -1.0, -1.5]]}, 0.8333),
        ({"force_on_policy_ratio": True}, -0.6667),
        (
            {
                "c": [[0.0, -1.0, -2.0]],
                "a": [[0.0] * 3],
                "reference_policy_kl_penalty": 0.1,
            },
            0.0362,
        ),
        (IS, -0.2065),
        (TIS, -0.4744),
        (TIS | GSPO, -0.4846),
        (GSPO, -0.6057),
        (GSPO | {"c": [[-1.69315, -1.0, -0.59453]] * 2, "p": [[-1.0] * 3, [-2.0] * 3]}, -0.4912),
        (GSPO | IS, -0.4959),
        (
            {
                "ratio_clip_c": 3.0,
                "a": [[1.0, -1.0, -4.0]],
                "p": [[-1.0, -1.0, -3.0]],
                "c": [[-1.69315, -1.0, -0.69741]],
            },
            4.1667,
        ),
    ],
)
def test_loss_equals_the_cases_of_nemo_rls_tests(keys: dict[str, Any], expected: float):
    tolerance = 1.5e-4 if "p" in keys else 6e-5
    assert small(**keys) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [0.7183, 13, 28])],
)
def test_kl_estimates_equal_the_cases_of_nemo_rls_tests(kind: Any, expected: list[float]):
    delta = f64([0.0, -15.0, -30.0]) + 1.0
    torch.testing.assert_close(kl_estimate(delta, kind), f64(expected), rtol=0, atol=1e-4)
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    clamped = kl_term(
        zeros, zeros + delta, zeros + 1.0, kind=kind, input_clamp=20.0, output_clamp=10.0
    )
    assert torch.equal(clamped[0, 1:], torch.full((2,), 10.0, dtype=torch.float64))


def test_a_clamped_input_has_no_gradient():
    c = f64([[-3.0, -1.0]]).requires_grad_()
    kl = kl_term(
        c,
        torch.zeros_like(c),
        torch.ones_like(c),
        kind="k3",
        input_clamp=2.0,
        output_clamp=None,
    )
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), f64([[4.389056, 0.7182818]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(c.grad, f64([[0.0, -1.0]]))


def test_a_clamped_output_has_no_gradient():
    c = f64([[-1.0]]).requires_grad_()
    weight = torch.full_like(c, 100.0)
    kl = kl_term(c, torch.zeros_like(c), weight, kind="k3", input_clamp=None, output_clamp=1.0)
    kl.sum().backward()
    assert kl.item() == 1.0
    assert c.grad is not None
    assert c.grad.item() == 0.0


def test_leave_one_out_baseline_and_deviation():
    rewards, groups = f64([1, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 1, 1, 1])
    baseline = f64([2.5, 2, 1.5, 5.5, 5, 4.5])
    std = f64([0.7071068, 1.4142136, 0.7071068] * 2)
    plain = group_relative(rewards, groups, leave_one_out=True, normalize=False)
    torch.testing.assert_close(plain, rewards - baseline)
    found = group_relative(rewards, groups, leave_one_out=True, normalize=True)
    torch.testing.assert_close(found, (rewards - baseline) / (std + 1e-6), rtol=1e-6, atol=1e-6)


def test_gdpo_of_two_samples():
    scores = Scores(
        f64([1, 1]), torch.tensor([0, 0]), {"correct": f64([1, 0]), "format": f64([0, 0])}
    )
    cfg = AdvEstimatorConfig(name="gdpo", use_leave_one_out_baseline=False)
    tokens = TokenInputs(torch.ones(2, 1, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    found = advantages(cfg, LossConfig(), scores, tokens)
    torch.testing.assert_close(found, f64([[math.sqrt(0.5)], [-math.sqrt(0.5)]]))


def test_sequence_errors_equal_the_case_of_nemo_rls_tests():
    off = f64([0.1, 0.1, 0.5, 1.0]).unsqueeze(-1)
    gap = torch.cat([off.expand(4, 4), torch.zeros(4, 5, dtype=torch.float64)], dim=1)
    prev, mask = torch.full((4, 9), -2.0, dtype=torch.float64), torch.ones(4, 9, dtype=torch.bool)
    everyone = torch.ones(4, dtype=torch.bool)
    expected = f64([1.047, 1.047, 1.288, 1.764])
    torch.testing.assert_close(sequence_errors(prev, prev + gap, mask), expected, rtol=0, atol=1e-3)
    kept, metrics = keep_matching_sequences(prev, prev + gap, mask, everyone, 1.2)
    assert kept.tolist() == [True, True, False, False]
    assert values(metrics)["seq_logprob_error_masked"] == 0.5


@pytest.mark.parametrize(("low", "share"), [(None, 1 / 3), (0.5, 2 / 3)])
def test_is_oob_ratio_counts_weights_outside_the_bounds(low: float | None, share: float):
    weights = f64([[0.1, 1.0, 3.0]])
    cfg = {
        **IS,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": low,
        "reference_policy_kl_penalty": 0.0,
    }
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    inputs = PolicyLossInputs(
        zeros, zeros, -weights.log(), None, zeros + 1.0, zeros + 1.0, torch.ones(1), torch.ones(1)
    )
    loss, metrics = policy_loss(
        inputs, msgspec.convert(cfg, LossConfig), num_tokens=3.0, num_sequences=1.0
    )
    assert values(metrics)["is_oob_ratio"] == pytest.approx(share)
    assert loss.item() == pytest.approx(-(3.0 + (low or 0.1)) / 3)
