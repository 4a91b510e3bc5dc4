"""Random micro-batches and random valid settings for the tests of the policy loss."""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from minirl.config.loss import LossConfig
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.metrics import Metrics, values

FAMILIES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual": {"ratio_clip_c": 1.5},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce gspo weights": {
        "disable_ppo_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
    },
    "reinforce dual": {"disable_ppo_ratio": True, "ratio_clip_c": 1.5},
    "on policy": {"force_on_policy_ratio": True},
    "on policy gspo weights": {
        "force_on_policy_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
    },
    "on policy reinforce": {"force_on_policy_ratio": True, "disable_ppo_ratio": True},
    "on policy dual": {"force_on_policy_ratio": True, "ratio_clip_c": 1.5},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "gspo dual": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "ratio_clip_c": 2.0,
    },
    "cispo": {"use_cispo": True},
    "sapo": {"policy_loss_type": "sapo", "sapo_temperature_negative": 1.5},
    "gmpo": {"policy_loss_type": "gmpo", "token_level_loss": False},
    "dppo_tv": {"policy_loss_type": "dppo_tv", "divergence_threshold": 0.1},
    "dppo_kl": {"policy_loss_type": "dppo_kl", "divergence_threshold": 0.05},
}

CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"use_importance_sampling_correction": True},
    *[
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": high,
            "truncated_importance_sampling_ratio_min": low,
        }
        for kind, low, high in [
            ("tis", None, 0.8),
            ("tis", 0.9, 1.1),
            ("icepop", 0.8, 1.3),
            ("seq-mask-tis", 0.95, 1.1),
        ]
    ],
]


class Case(NamedTuple):
    """A micro-batch as lists, and the counts of the global batch it is part of."""

    lists: dict[str, Any]
    num_tokens: float
    num_sequences: float


def settings_of(cfg: LossConfig) -> dict[str, Any]:
    """Every setting by name."""
    return {name: getattr(cfg, name) for name in cfg.__struct_fields__}


@st.composite
def loss_settings(draw: st.DrawFn) -> LossConfig:
    """Any valid combination of settings."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    chosen = dict(FAMILIES[family])
    chosen |= {
        "ratio_clip_min": draw(st.sampled_from([0.2, 0.0003, 1.0])),
        "ratio_clip_max": draw(st.sampled_from([0.2, 0.28, 0.0004, 3.0])),
        "reference_policy_kl_penalty": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "reference_policy_kl_type": draw(st.sampled_from(["k1", "k2", "k3"])),
        "kl_input_clamp_value": draw(st.sampled_from([None, 20.0, 0.5])),
        "kl_output_clamp_value": draw(st.sampled_from([None, 10.0, 0.1])),
        "use_kl_in_reward": draw(st.sampled_from([False, False, True])),
        "use_on_policy_kl_approximation": draw(st.booleans()),
        "positive_example_nll_weight": draw(st.sampled_from([0.0, 0.1])),
    }
    corrections = [
        c
        for c in CORRECTIONS
        if "gspo" not in family or c.get("truncated_importance_sampling_type") != "seq-mask-tis"
    ]
    correction = draw(st.sampled_from(corrections))
    if correction:
        level = draw(st.sampled_from([None, None, "token", "sequence", "geometric"]))
        chosen |= correction | {"importance_sampling_level": level}
    if chosen.get("token_level_loss", True):
        names = [None, "dapo", "bnpo", "dr_grpo"] if "cispo" in family else [None, "seq", "dr_grpo"]
        name = draw(st.sampled_from(names))
        if name == "seq":
            chosen["token_level_loss"] = False
        elif name is not None:
            chosen["normalization"] = name
        if name == "dr_grpo":
            chosen["normalization_length"] = 7
    return msgspec.convert(chosen, LossConfig)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A small micro-batch: some ratios within the bounds, some far outside, some exactly 1."""
    rows = draw(st.integers(1, 4))
    columns = draw(st.integers(1, 5))
    return random_case(draw(st.integers(0, 10**6)), rows, columns)


def random_case(seed: int, rows: int = 3, columns: int = 4) -> Case:
    rng = random.Random(seed)

    def grid(of: Callable[[], float]) -> list[list[float]]:
        return [[of() for _ in range(columns)] for _ in range(rows)]

    scale = rng.choice([0.0, 0.05, 0.3, 1.0])
    prev = grid(lambda: -rng.expovariate(1.0) - 0.01)

    def near(spread: float) -> list[list[float]]:
        return [[min(x + rng.gauss(0.0, spread), -1e-3) for x in row] for row in prev]

    lists = {
        "logprobs": near(scale),
        "prev_logprobs": prev,
        "generation_logprobs": near(rng.choice([0.02, 0.3])),
        "reference_logprobs": near(rng.choice([0.1, 0.8])),
        "advantages": grid(lambda: rng.choice([0.0, 1.0, rng.gauss(0, 1), rng.gauss(0, 1)])),
        "token_mask": [[int(rng.random() < 0.8) for _ in range(columns)] for _ in range(rows)],
        "sample_mask": [int(rng.random() < 0.85) for _ in range(rows)],
        "rewards": [rng.choice([0.0, 1.0, -0.5, rng.random()]) for _ in range(rows)],
        "entropy": grid(rng.random),
    }
    tokens = sum(
        s * sum(row) for s, row in zip(lists["sample_mask"], lists["token_mask"], strict=True)
    )
    more = rng.choice([0, 0, 5])
    return Case(lists, float(tokens + more), float(sum(lists["sample_mask"]) + more))


def tensors(case: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
    """The inputs of `policy_loss`, `logprobs` a leaf with a gradient."""
    made = {name: torch.tensor(value, dtype=dtype) for name, value in case.items()}
    made["token_mask"] = made["token_mask"].bool()
    made["sample_mask"] = made["sample_mask"].bool()
    made["logprobs"].requires_grad_()
    return PolicyLossInputs(**made)


def run(
    inputs: PolicyLossInputs, cfg: LossConfig, num_tokens: float, num_sequences: float
) -> tuple[float, Tensor, Metrics]:
    """Loss, gradient, metrics."""
    loss, metrics = policy_loss(inputs, cfg, num_tokens=num_tokens, num_sequences=num_sequences)
    (grad,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.item(), grad, metrics


def config(**keys: Any) -> LossConfig:
    return msgspec.convert(keys, LossConfig)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return a == b or abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def assert_metrics(found: Metrics, expected: dict[str, float], tolerance: float = 1e-9) -> None:
    numbers = values(found)
    assert numbers.keys() == expected.keys()
    wrong = {k: (numbers[k], v) for k, v in expected.items() if not close(numbers[k], v, tolerance)}
    assert not wrong


def pick_rows(lists: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: [value[i] for i in rows] for name, value in lists.items()}


def tokens_of(lists: dict[str, Any]) -> float:
    pairs = zip(lists["token_mask"], lists["sample_mask"], strict=True)
    return float(sum(sum(row) * s for row, s in pairs))
