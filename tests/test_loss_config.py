"""Settings: defaults are NeMo-RL's, every key has an effect, and contradictions are refused."""

import re
from typing import Any

import msgspec
import pytest
import torch
from loss_cases import random_case, run, settings_of, tensors
from test_advantages import tokens_case

from minirl.config.loss import AdvEstimatorConfig, LossConfig, refuse_inert
from minirl.losses.advantages import Scores, TokenInputs, advantages, generalized_advantages
from minirl.metrics import values

IS = {"use_importance_sampling_correction": True}
ICEPOP = {
    **IS,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.2,
    "truncated_importance_sampling_ratio_min": 0.9,
}
DPPO = {"policy_loss_type": "dppo_tv", "divergence_threshold": 0.1}
NO_KL = {"reference_policy_kl_penalty": 0.0}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}

# For each key: settings around it, one value, another.
LOSS_KEYS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "policy_loss_type": ({}, "clip", "sapo"),
    "disable_ppo_ratio": ({}, False, True),
    "use_cispo": ({}, False, True),
    "force_on_policy_ratio": ({}, False, True),
    "sequence_level_importance_ratios": ({"token_level_loss": False}, False, True),
    "token_level_loss": ({}, True, False),
    "normalization": ({"normalization_length": 5}, "dr_grpo", None),
    "normalization_length": ({"normalization": "dr_grpo"}, 5, 6),
    "ratio_clip_min": ({}, 0.2, 0.1),
    "ratio_clip_max": ({}, 0.2, 0.1),
    "ratio_clip_c": ({}, None, 1.01),
    "sapo_temperature_positive": ({"policy_loss_type": "sapo"}, 1.0, 2.0),
    "sapo_temperature_negative": ({"policy_loss_type": "sapo"}, 1.05, 2.0),
    "divergence_threshold": ({"policy_loss_type": "dppo_tv"}, 0.5, 0.01),
    "reference_policy_kl_penalty": ({}, 0.01, 0.02),
    "reference_policy_kl_type": ({}, "k3", "k1"),
    "kl_input_clamp_value": ({}, 20.0, 0.1),
    "kl_output_clamp_value": ({}, 10.0, 0.01),
    "use_kl_in_reward": ({}, False, True),
    "use_on_policy_kl_approximation": ({}, False, True),
    "use_importance_sampling_correction": ({}, False, True),
    "importance_sampling_level": (IS, "token", "geometric"),
    "truncated_importance_sampling_type": (ICEPOP, "icepop", "tis"),
    "truncated_importance_sampling_ratio": (ICEPOP, 1.2, 1.1),
    "truncated_importance_sampling_ratio_min": (ICEPOP, 0.9, 0.8),
    "positive_example_nll_weight": ({}, 0.0, 0.1),
}


def loss_config(**keys: Any) -> LossConfig:
    return msgspec.convert(keys, LossConfig)


# field failures 10, 76
@pytest.mark.parametrize("key", LossConfig.__struct_fields__)
def test_every_key_of_loss_fn_changes_the_loss(key: str):
    around, one, other = LOSS_KEYS[key]
    lists = random_case(21, rows=6, columns=8).lists
    lists["logprobs"] = [[min(x + 0.3, -0.01) for x in r] for r in lists["prev_logprobs"]]
    for i in (0, 1):
        lists["logprobs"][i] = [x - 0.4 for x in lists["prev_logprobs"][i]]
    lists["generation_logprobs"] = [
        [x + 0.15 * ((i + t) % 3 - 1) for t, x in enumerate(row)]
        for i, row in enumerate(lists["prev_logprobs"])
    ]
    found = []
    for value in (one, other):
        chosen = around | {key: value}
        if key == "normalization" and value is None:
            del chosen["normalization_length"]
        found.append(run(tensors(lists), loss_config(**chosen), 40.0, 6.0))
    assert found[0][0] != found[1][0]


ESTIMATOR_KEYS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "name": ({}, "grpo", "raw_reward"),
    "normalize_rewards": ({}, True, False),
    "use_leave_one_out_baseline": ({}, True, False),
    "minus_baseline": ({"name": "reinforce_plus_plus"}, True, False),
    "reward_weights": ({"name": "gdpo"}, None, [1.0, 2.0]),
    "normalize_advantages": ({"name": "raw_reward"}, True, False),
    "gae_lambda": ({"name": "gae"}, 0.95, 0.9),
    "gae_gamma": ({"name": "gae"}, 1.0, 0.9),
    "gae_lambda_value": ({"name": "gae"}, None, 0.5),
    "gae_lambda_policy": ({"name": "gae"}, None, 0.5),
    "length_adaptive_alpha": ({"name": "gae"}, 0.0, 0.7),
}


@pytest.mark.parametrize("key", AdvEstimatorConfig.__struct_fields__)
def test_every_key_of_adv_estimator_changes_the_advantages(key: str):
    around, one, other = ESTIMATOR_KEYS[key]
    scores, tokens = tokens_case(1)
    found = [outputs(around | {key: value}, scores, tokens) for value in (one, other)]
    assert not torch.equal(*found)


def outputs(keys: dict[str, Any], scores: Scores, tokens: TokenInputs) -> torch.Tensor:
    cfg = msgspec.convert(keys, AdvEstimatorConfig)
    if cfg.name == "gae":
        both = generalized_advantages(cfg, LossConfig(), scores.rewards, tokens)
        return torch.cat(both)
    return advantages(cfg, LossConfig(), scores, tokens)


@pytest.mark.parametrize(
    "key",
    [
        "use_kl_in_reward",
        "reference_policy_kl_penalty",
        "reference_policy_kl_type",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
    ],
)
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_the_penalty_in_the_reward_reads_its_keys(key: str, name: str):
    scores, tokens = tokens_case(1)
    cfg = msgspec.convert({"name": name}, AdvEstimatorConfig)
    around = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1}
    others = {"kl_output_clamp_value": 0.001, "use_kl_in_reward": False}
    other = others.get(key, LOSS_KEYS[key][2])
    found = [
        advantages(cfg, loss_config(**keys), scores, tokens)
        for keys in (around, around | {key: other})
    ]
    assert not torch.equal(*found)


def test_defaults_are_nemo_rls():
    assert {k: v for k, v in settings_of(LossConfig()).items() if k in NEMO_RL_LOSS} == NEMO_RL_LOSS
    added = set(LossConfig.__struct_fields__) - NEMO_RL_LOSS.keys()
    assert added == {
        "policy_loss_type",
        "normalization",
        "normalization_length",
        "sapo_temperature_positive",
        "sapo_temperature_negative",
        "divergence_threshold",
        "importance_sampling_level",
    }
    cfg = AdvEstimatorConfig()
    assert (cfg.name, cfg.normalize_rewards, cfg.use_leave_one_out_baseline) == ("grpo", True, True)
    assert (cfg.gae_lambda, cfg.gae_gamma, cfg.length_adaptive_alpha) == (0.95, 1.0, 0.0)


NEMO_RL_LOSS = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
    "use_kl_in_reward": False,
    "use_cispo": False,
    "disable_ppo_ratio": False,
    "positive_example_nll_weight": 0.0,
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # NeMo-RL's assertions.
        ({"sequence_level_importance_ratios": True}, "GSPO.*set token_level_loss to false"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo excludes disable_ppo_ratio"),
        (
            {"use_cispo": True, "force_on_policy_ratio": True},
            "use_cispo excludes force_on_policy_ratio",
        ),
        (
            {"use_cispo": True} | GSPO,
            "use_cispo excludes sequence_level_importance_ratios",
        ),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, r"use_cispo excludes ratio_clip_c \(is 3.0\)"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo sums over tokens"),
        (
            ICEPOP | {"use_importance_sampling_correction": False},
            "icepop needs use_importance_sampling_correction: true",
        ),
        (
            IS | {"truncated_importance_sampling_type": "tis"},
            "tis needs truncated_importance_sampling_ratio",
        ),
        (
            ICEPOP | {"truncated_importance_sampling_ratio_min": None},
            "icepop needs truncated_importance_sampling_ratio_min",
        ),
        (
            ICEPOP
            | {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio_min": None,
            },
            "seq-mask-tis needs truncated_importance_sampling_ratio_min",
        ),
        (
            ICEPOP | {"truncated_importance_sampling_ratio_min": 1.3},
            "_ratio_min 1.3 exceeds the ratio 1.2",
        ),
        (
            ICEPOP | GSPO | {"truncated_importance_sampling_type": "seq-mask-tis"},
            "seq-mask-tis.*excludes sequence_level_importance_ratios",
        ),
        # Those it lacks.
        (
            {"truncated_importance_sampling_ratio": 2.0},
            "truncated_importance_sampling_type is null",
        ),
        (
            {"truncated_importance_sampling_ratio_min": 0.5},
            "truncated_importance_sampling_type is null",
        ),
        (
            {"importance_sampling_level": "token"},
            "importance_sampling_level token needs use_importance_sampling_correction",
        ),
        ({"policy_loss_type": "sapo", "use_cispo": True}, "sapo excludes use_cispo"),
        ({"policy_loss_type": "sapo", "ratio_clip_c": 3.0}, "sapo excludes ratio_clip_c"),
        ({"policy_loss_type": "gmpo"}, "gmpo averages over sequences"),
        ({"policy_loss_type": "dppo_tv"}, "dppo_tv needs divergence_threshold"),
        ({"policy_loss_type": "dppo_kl"}, "dppo_kl needs divergence_threshold"),
        ({"divergence_threshold": 0.1}, "divergence_threshold 0.1 is read by dppo_tv"),
        ({"sapo_temperature_negative": 2.0}, "are read by sapo alone"),
        ({"sapo_temperature_positive": 2.0}, "are read by sapo alone"),
        ({"normalization": "dr_grpo"}, "normalization is dr_grpo and normalization_length None"),
        ({"normalization_length": 5}, "normalization is None and normalization_length 5"),
        ({"normalization": "grpo"}, "normalization grpo averages over sequences"),
        ({"normalization": "dapo", "token_level_loss": False}, "normalization dapo sums over"),
        ({"normalization": "bnpo", "token_level_loss": False}, "normalization bnpo sums over"),
        (
            {"normalization": "dr_grpo", "normalization_length": 5, "token_level_loss": False},
            "normalization dr_grpo sums over tokens",
        ),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(keys: dict[str, Any], message: str):
    with pytest.raises(msgspec.ValidationError, match=message):
        loss_config(**keys)
    with pytest.raises(ValueError, match=message):
        LossConfig(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"ratio_clip_c": 1.0},
        {"ratio_clip_min": -0.1},
        {"ratio_clip_min": 1.1},
        {"ratio_clip_max": -0.1},
        {"reference_policy_kl_penalty": -0.01},
        {"reference_policy_kl_type": "k4"},
        {"kl_input_clamp_value": 0.0},
        {"kl_output_clamp_value": -1.0},
        {"truncated_importance_sampling_ratio": 0.0},
        {"truncated_importance_sampling_ratio_min": -0.1},
        {"truncated_importance_sampling_type": "TIS"},
        {"positive_example_nll_weight": -0.1},
        {"normalization_length": 0},
        {"sapo_temperature_positive": 0.0},
        {"divergence_threshold": 0.0},
        {"clip_ratio": 0.2},
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(keys: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError, match=re.escape(next(iter(keys)))):
        loss_config(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
            "disable_ppo_ratio has no effect",
        ),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c 3.0 has no effect"),
        ({"force_on_policy_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c 3.0 has no effect"),
        (NO_KL | {"use_kl_in_reward": True}, "use_kl_in_reward has no effect"),
        (NO_KL | {"use_on_policy_kl_approximation": True}, "_approximation has no effect"),
        (
            {"use_on_policy_kl_approximation": True, "use_kl_in_reward": True},
            "use_on_policy_kl_approximation has no effect",
        ),
        ({"policy_loss_type": "sapo", "ratio_clip_max": 0.3}, "ratio_clip_max 0.3 .*_type sapo"),
        (DPPO | {"ratio_clip_min": 0.1}, "ratio_clip_min 0.1 .* with policy_loss_type dppo_tv"),
        (DPPO | {"policy_loss_type": "dppo_kl", "ratio_clip_min": 0.1}, "effect .* dppo_kl"),
        ({"disable_ppo_ratio": True, "ratio_clip_max": 0.3}, "effect with disable_ppo_ratio"),
        ({"force_on_policy_ratio": True, "ratio_clip_min": 0.1}, "effect with force_on_policy"),
        (NO_KL | {"kl_input_clamp_value": 5.0}, "kl_input_clamp_value 5.0 .* have no effect"),
        (NO_KL | {"kl_output_clamp_value": None}, "kl_output_clamp_value None have no effect"),
    ],
)
def test_a_setting_without_effect_is_refused_in_a_run_but_computed_by_the_loss(
    keys: dict[str, Any], message: str
):
    cfg = loss_config(**keys)
    with pytest.raises(ValueError, match=message):
        refuse_inert(cfg)
    run(tensors(random_case(0).lists), cfg, 12.0, 3.0)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"ratio_clip_c": 3.0},
        GSPO,
        ICEPOP,
        {"use_cispo": True, "ratio_clip_min": 1.0},
        {"policy_loss_type": "gmpo", "token_level_loss": False, "ratio_clip_max": 0.4},
        {"policy_loss_type": "sapo"},
        {"disable_ppo_ratio": True},
        {"force_on_policy_ratio": True},
        {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    ],
)
def test_settings_with_an_effect_are_not_refused(keys: dict[str, Any]):
    refuse_inert(loss_config(**keys))
    refuse_inert(loss_config(use_kl_in_reward=True))
    refuse_inert(loss_config(use_on_policy_kl_approximation=True))
    # The type also selects the estimator of `gen_kl_error`.
    refuse_inert(loss_config(**NO_KL, reference_policy_kl_type="k1"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward_weights": [1.0]}, "reward_weights is read by gdpo alone, not by grpo"),
        ({"gae_lambda": 0.9}, "are read by gae alone, not by grpo"),
        ({"gae_gamma": 0.9}, "are read by gae alone"),
        ({"gae_lambda_value": 1.0}, "are read by gae alone"),
        ({"gae_lambda_policy": 1.0}, "are read by gae alone"),
        ({"length_adaptive_alpha": 0.05}, "are read by gae alone"),
        ({"normalize_advantages": False}, "normalize_advantages is read by gae and raw_reward"),
        ({"minus_baseline": False}, "minus_baseline is read by reinforce_plus_plus alone"),
        (
            {"name": "raw_reward", "normalize_rewards": False},
            "normalize_rewards is read by grpo and gdpo, not by raw_reward",
        ),
        *[
            (
                {"name": name, "use_leave_one_out_baseline": False},
                f"use_leave_one_out_baseline is read by grpo and gdpo, not by {name}; remove it",
            )
            for name in ("raw_reward", "reinforce_plus_plus", "gae", "opd")
        ],
        (
            {"name": "gae", "length_adaptive_alpha": 0.05, "gae_lambda_policy": 0.9},
            "length_adaptive_alpha 0.05 replaces gae_lambda_policy 0.9",
        ),
        ({"name": "ppo"}, "name"),
        ({"name": "gae", "gae_lambda": 1.1}, "gae_lambda"),
        ({"name": "gae", "length_adaptive_alpha": -1.0}, "length_adaptive_alpha"),
        ({"normalise_rewards": True}, "normalise_rewards"),
    ],
)
def test_an_estimator_refuses_what_it_does_not_read(keys: dict[str, Any], message: str):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(keys, AdvEstimatorConfig)


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        LossConfig().ratio_clip_min = 0.3
    with pytest.raises(AttributeError):
        AdvEstimatorConfig().name = "opd"


def test_metrics_have_one_set_of_names_per_configuration():
    lists = random_case(0).lists
    empty = lists | {"sample_mask": [0, 0, 0]}
    for keys in ({}, ICEPOP, GSPO):
        names = [
            values(run(tensors(x), loss_config(**keys), 12.0, 3.0)[2]).keys()
            for x in (lists, empty)
        ]
        assert names[0] == names[1]
