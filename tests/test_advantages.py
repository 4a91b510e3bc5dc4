"""Every advantage estimator against its slow oracle, and what they share."""

import math
from typing import Any

import advantages_oracle as oracle
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import kl, num
from torch import Tensor

from minirl.config.loss import AdvEstimatorConfig, LossConfig
from minirl.losses.advantages import (
    Scores,
    TokenInputs,
    advantages,
    clip_advantages,
    distillation_advantages,
    generalized_advantages,
)

F64 = torch.float64
SWITCHES = [(loo, norm) for loo in (True, False) for norm in (True, False)]
NAMES = ["grpo", "gdpo", "reinforce_plus_plus", "raw_reward", "gae", "opd"]


def estimator(name: str, **keys: Any) -> AdvEstimatorConfig:
    return msgspec.convert({"name": name} | keys, AdvEstimatorConfig)


def tokens_case(seed: int = 0) -> tuple[Scores, TokenInputs]:
    """Two groups of three; poison outside the masks; one sample masked, one without tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=F64)

    token_mask = draw(6, 5) < 0.7
    token_mask[4] = False
    sample_mask = torch.tensor([True, True, False, True, True, True])
    mask = token_mask & sample_mask.unsqueeze(-1)

    def spoiled(x: Tensor) -> Tensor:
        return torch.where(mask, x, math.nan)

    prev = -draw(6, 5) - 0.1
    components = {"b": draw(6), "a": draw(6).round()}
    scores = Scores(draw(6), torch.tensor([3, 3, 3, 1, 1, 1]), components)
    tokens = TokenInputs(
        token_mask,
        sample_mask,
        prev_logprobs=spoiled(prev),
        reference_logprobs=spoiled(prev + 0.3 * draw(6, 5)),
        teacher_logprobs=spoiled(prev - 0.3 * draw(6, 5)),
        values=spoiled(draw(6, 5)),
    )
    return scores, tokens


def as_lists(scores: Scores, tokens: TokenInputs) -> tuple[list[float], list[int], Any, Any]:
    mask = (tokens.token_mask & tokens.sample_mask.unsqueeze(-1)).int().tolist()
    width = len(mask[0])
    return scores.rewards.tolist(), scores.groups.tolist(), mask, width


def penalties(loss: LossConfig, tokens: TokenInputs, mask: Any) -> Any:
    out = []
    for i, row in enumerate(mask):
        out.append([0.0] * len(row))
        for t, m in enumerate(row):
            if m and loss.use_kl_in_reward:
                delta = (tokens.reference_logprobs[i, t] - tokens.prev_logprobs[i, t]).item()
                delta = max(min(delta, loss.kl_input_clamp_value), -loss.kl_input_clamp_value)
                k = kl(num(delta), loss.reference_policy_kl_type).value
                k = max(min(k, loss.kl_output_clamp_value), -loss.kl_output_clamp_value)
                out[i][t] = loss.reference_policy_kl_penalty * k
    return out


KL_IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2}


@given(st.integers(0, 500), st.sampled_from(SWITCHES))
def test_grpo_and_raw_reward_spread_over_tokens(seed: int, switch: tuple[bool, bool]):
    scores, tokens = tokens_case(seed)
    rewards, groups, mask, width = as_lists(scores, tokens)
    cfg = estimator("grpo", use_leave_one_out_baseline=switch[0], normalize_rewards=switch[1])
    per_sample = oracle.group_relative(
        rewards, groups, leave_one_out=switch[0], normalize=switch[1]
    )
    for found, expected in (
        (advantages(cfg, LossConfig(), scores, tokens), per_sample),
        (
            advantages(
                estimator("raw_reward", normalize_advantages=False), LossConfig(), scores, tokens
            ),
            rewards,
        ),
    ):
        rows = [[a if m else 0.0 for m in marks] for a, marks in zip(expected, mask, strict=True)]
        torch.testing.assert_close(found, torch.tensor(rows, dtype=F64))
        assert width == found.shape[1]


@given(
    st.integers(0, 500),
    st.booleans(),
    st.sampled_from([{}, KL_IN_REWARD, KL_IN_REWARD | {"kl_input_clamp_value": 0.1}]),
    st.sampled_from(["k1", "k2", "k3"]),
)
def test_reinforce_plus_plus_and_whitened_reward_equal_the_oracle(
    seed: int, baseline: bool, keys: dict[str, Any], kind: str
):
    scores, tokens = tokens_case(seed)
    rewards, groups, mask, width = as_lists(scores, tokens)
    loss = msgspec.convert(keys | {"reference_policy_kl_type": kind}, LossConfig)
    base = rewards
    if baseline:
        base = oracle.group_relative(rewards, groups, leave_one_out=False, normalize=False)
    paid = penalties(loss, tokens, mask)
    rows = [[a - paid[i][t] for t in range(width)] for i, a in enumerate(base)]
    found = advantages(
        estimator("reinforce_plus_plus", minus_baseline=baseline), loss, scores, tokens
    )
    expected = torch.tensor(oracle.standardize(rows, mask), dtype=F64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    raw = advantages(estimator("raw_reward"), LossConfig(), scores, tokens)
    expected = oracle.standardize([[r] * width for r in rewards], mask)
    torch.testing.assert_close(raw, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=1e-9)


@given(st.integers(0, 500), st.sampled_from([None, [1.0, 1.0], [0.5, 2.0]]), st.booleans())
def test_gdpo_equals_the_oracle(seed: int, weights: list[float] | None, loo: bool):
    scores, tokens = tokens_case(seed)
    _, groups, mask, _ = as_lists(scores, tokens)
    cfg = estimator("gdpo", reward_weights=weights, use_leave_one_out_baseline=loo)
    parts = [
        oracle.group_relative(
            scores.components[name].tolist(), groups, leave_one_out=loo, normalize=True
        )
        for name in ("a", "b")
    ]
    by = weights or [1.0, 1.0]
    total = [by[0] * a + by[1] * b for a, b in zip(*parts, strict=True)]
    mean = sum(total) / len(total)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in total) / (len(total) - 1))
    expected = [(x - mean) / deviation for x in total]
    rows = [[x if m else 0.0 for m in marks] for x, marks in zip(expected, mask, strict=True)]
    found = advantages(cfg, LossConfig(), scores, tokens)
    torch.testing.assert_close(found, torch.tensor(rows, dtype=F64), rtol=1e-9, atol=1e-9)


def test_gdpo_leaves_a_constant_group_at_zero_where_the_batch_has_a_mean():
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    split = torch.tensor([0.0, 0.0, 1.0, 0.3, 0.3, 0.3], dtype=F64)
    everyone = TokenInputs(torch.ones(6, 1, dtype=torch.bool), torch.ones(6, dtype=torch.bool))
    found = advantages(
        estimator("gdpo"), LossConfig(), Scores(split, groups, {"a": split, "b": split}), everyone
    )
    assert found[3:].flatten().tolist() == [0.0] * 3
    assert found[:3].sum().abs() > 0.1
    still = Scores(split, groups, {"a": split * 0 + 0.3, "b": split * 0 + 0.1})
    assert not advantages(estimator("gdpo"), LossConfig(), still, everyone).any()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_gdpo_components_that_cancel_leave_zero_and_not_their_rounding(dtype: torch.dtype):
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    first = torch.tensor([0.1, 0.7, 0.2, 0.9, 0.3, 0.3, 0.5], dtype=dtype)
    everyone = TokenInputs(torch.ones(7, 1, dtype=torch.bool), torch.ones(7, dtype=torch.bool))
    for weights, other in ((None, 1.0 - first), ([3.0, -1.0], 3.0 * first)):
        scores = Scores(first, groups, {"a": first, "b": other})
        cfg = estimator("gdpo", reward_weights=weights, normalize_rewards=weights is None)
        assert not advantages(cfg, LossConfig(), scores, everyone).any()


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_gdpo_reads_only_the_proportions_of_the_weights(scale: float):
    scores, tokens = tokens_case(8)
    first = scores.components["a"]
    cancelling = scores._replace(components={"a": first, "b": first})
    for weights, of in (([1.0, 2.0], scores), ([1.0, -1.0], cancelling)):
        one, other = (
            advantages(
                estimator("gdpo", reward_weights=[by * w for w in weights]),
                LossConfig(),
                of,
                tokens,
            )
            for by in (1.0, scale)
        )
        torch.testing.assert_close(other, one)
        assert one.any() == (of is scores)


@given(
    st.integers(0, 500),
    st.sampled_from(
        [
            {},
            {"gae_lambda": 0.5, "gae_gamma": 0.9},
            {"gae_lambda_value": 1.0},
            {"gae_lambda_policy": 0.3, "gae_lambda_value": 0.7},
            {"length_adaptive_alpha": 0.6},
            {"length_adaptive_alpha": 0.05, "gae_lambda_value": 1.0},
        ],
    ),
    st.sampled_from([{}, KL_IN_REWARD]),
    st.booleans(),
)
def test_gae_equals_its_double_sum(
    seed: int, keys: dict[str, Any], loss_keys: dict[str, Any], normalize: bool
):
    scores, tokens = tokens_case(seed)
    rewards, _, mask, _ = as_lists(scores, tokens)
    cfg = estimator("gae", normalize_advantages=normalize, **keys)
    loss = msgspec.convert(loss_keys, LossConfig)
    paid = penalties(loss, tokens, mask)
    table = tokens.values.tolist()
    by_value = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
    by_policy = [cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy] * 6
    if cfg.length_adaptive_alpha:
        by_policy = [1 - 1 / max(cfg.length_adaptive_alpha * sum(row), 1.0) for row in mask]
    plain = oracle.gae(rewards, table, mask, cfg.gae_gamma, by_policy, paid)
    expected = torch.tensor(oracle.whiten(plain, mask) if normalize else plain, dtype=F64)
    targets = oracle.gae(rewards, table, mask, cfg.gae_gamma, [by_value] * 6, paid)
    found, returns = generalized_advantages(cfg, loss, scores.rewards, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    mask_tensor = torch.tensor(mask, dtype=torch.bool)
    goal = torch.where(mask_tensor, torch.tensor(targets, dtype=F64) + tokens.values, 0.0)
    torch.testing.assert_close(returns, goal, rtol=1e-9, atol=1e-9)
    assert torch.equal(found, advantages(cfg, loss, scores, tokens))


def test_distillation_is_the_teachers_logprob_minus_the_students():
    scores, tokens = tokens_case(2)
    found = advantages(estimator("opd"), LossConfig(), scores, tokens)
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    expected = torch.where(mask, tokens.teacher_logprobs - tokens.prev_logprobs, 0.0)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, distillation_advantages(tokens))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keys", [{}, KL_IN_REWARD])
def test_rows_of_two_ranks_equal_those_of_one(name: str, keys: dict[str, Any]):
    if keys and name not in ("reinforce_plus_plus", "gae"):
        return
    scores, tokens = tokens_case(3)
    cfg, loss = estimator(name), msgspec.convert(keys, LossConfig)
    sums: list[Tensor] = []
    whole = advantages(cfg, loss, scores, tokens, sum_over=lambda part: sums.append(part) or part)
    rows = [4, 1]
    part = TokenInputs(*(None if x is None else x[rows] for x in tokens))
    replay = iter(sums)
    found = advantages(cfg, loss, scores, part, rows=rows, sum_over=lambda _: next(replay))
    torch.testing.assert_close(found, whole[rows])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keys", [{}, KL_IN_REWARD])
def test_inputs_are_not_changed_and_no_gradient_comes_out(name: str, keys: dict[str, Any]):
    if keys and name not in ("reinforce_plus_plus", "gae"):
        return
    scores, tokens = tokens_case(4)
    for x in (scores.rewards, *tokens[2:], *scores.components.values()):
        x.requires_grad_()
    leaves = [scores.rewards, scores.groups, *scores.components.values(), *tokens]
    before = [x.detach().clone() for x in leaves]
    found = advantages(estimator(name), msgspec.convert(keys, LossConfig), scores, tokens)
    assert not found.requires_grad
    same = zip(leaves, before, strict=True)
    assert all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in same)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_zero_outside_the_mask_and_finite(name: str):
    scores, tokens = tokens_case(5)
    found = advantages(estimator(name), LossConfig(), scores, tokens)
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    assert found.isfinite().all()
    assert not found[~mask].any()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "raw_reward", "gae"])
def test_a_fully_masked_batch_has_zero_advantages(name: str):
    scores, tokens = tokens_case(6)
    tokens = tokens._replace(sample_mask=torch.zeros(6, dtype=torch.bool))
    assert not advantages(estimator(name), LossConfig(), scores, tokens).any()


@pytest.mark.parametrize(
    ("name", "missing", "keys"),
    [
        ("gae", "values", {}),
        ("opd", "teacher_logprobs", {}),
        ("opd", "prev_logprobs", {}),
        ("reinforce_plus_plus", "prev_logprobs", KL_IN_REWARD),
        ("reinforce_plus_plus", "reference_logprobs", KL_IN_REWARD),
        ("gae", "reference_logprobs", KL_IN_REWARD),
    ],
)
def test_a_missing_input_is_refused_by_name(name: str, missing: str, keys: dict[str, Any]):
    scores, tokens = tokens_case(7)
    with pytest.raises(ValueError, match=f"needs {missing}, which is missing"):
        advantages(
            estimator(name),
            msgspec.convert(keys, LossConfig),
            scores,
            tokens._replace(**{missing: None}),
        )


@pytest.mark.parametrize("name", ["grpo", "gdpo", "raw_reward", "opd"])
def test_a_penalty_that_no_token_would_pay_is_refused(name: str):
    scores, tokens = tokens_case(7)
    loss = msgspec.convert(KL_IN_REWARD, LossConfig)
    with pytest.raises(ValueError, match=f"use_kl_in_reward: estimator {name}"):
        advantages(estimator(name), loss, scores, tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_row(bad: float):
    scores, tokens = tokens_case(7)
    rewards = scores.rewards.clone()
    rewards[4] = bad
    with pytest.raises(ValueError, match=f"the reward of sample 4 is {bad}"):
        advantages(estimator("grpo"), LossConfig(), scores._replace(rewards=rewards), tokens)


def test_tokens_must_belong_to_the_rows():
    scores, tokens = tokens_case(7)
    with pytest.raises(ValueError, match="tokens of 6 samples were given for 2 rows"):
        advantages(estimator("grpo"), LossConfig(), scores, tokens, rows=[0, 1])


def test_gdpo_refuses_a_single_component_and_a_wrong_number_of_weights():
    scores, tokens = tokens_case(7)
    single = scores._replace(components={"a": scores.rewards})
    with pytest.raises(ValueError, match=r"gdpo needs two reward components or more, got \['a'\]"):
        advantages(estimator("gdpo"), LossConfig(), single, tokens)
    with pytest.raises(ValueError, match=r"got \[\].* every answer .* timed out"):
        advantages(estimator("gdpo"), LossConfig(), scores._replace(components={}), tokens)
    cfg = estimator("gdpo", reward_weights=[1.0])
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 components"):
        advantages(cfg, LossConfig(), scores, tokens)


def test_clipping_bounds_advantages_on_the_sides_that_are_set():
    x = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 3.0]])
    assert clip_advantages(x, -2.0, None).tolist() == [[-2.0, -1.0, 0.0, 1.0, 3.0]]
    assert clip_advantages(x, None, 2.0).tolist() == [[-3.0, -1.0, 0.0, 1.0, 2.0]]
    assert clip_advantages(x, -2.0, 2.0).tolist() == [[-2.0, -1.0, 0.0, 1.0, 2.0]]
    unbounded = clip_advantages(x, None, None)
    assert torch.equal(unbounded, x)
    assert unbounded is not x


def test_a_reward_part_that_is_not_finite_or_too_short_is_refused():
    mask = torch.ones(4, 2, dtype=torch.bool)
    tokens = TokenInputs(mask, torch.ones(4, dtype=torch.bool))
    base = Scores(torch.zeros(4), torch.tensor([0, 0, 1, 1]), {"a": torch.rand(4)})
    cfg = AdvEstimatorConfig(name="gdpo")
    for bad, message in ((torch.tensor([0, 1, math.nan, 1]), "the b of"), (torch.rand(3), "b has")):
        scores = base._replace(components={**base.components, "b": bad})
        with pytest.raises(ValueError, match=message):
            advantages(cfg, LossConfig(), scores, tokens)
