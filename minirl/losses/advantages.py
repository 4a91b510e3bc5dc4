"""From rewards to advantages: how much better than expected each sampled token was.

Two stages. Rewards are judged per sample, over the whole global batch and by explicit group ids
(never by comparing prompts). Tokens are judged on the rank that holds them; what must be averaged
over all tokens of the batch is summed by the `sum_over` that is passed in. No gradient anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from minirl.config.loss import AdvEstimatorConfig, LossConfig
from minirl.losses.groups import group_relative
from minirl.losses.kl import kl_term
from minirl.losses.reduce import SumOver, alone, standardize, whiten
from minirl.types import SampleMask, SampleWeights, TokenLogProbs, TokenMask, TokenWeights


class Scores(NamedTuple):
    """The rewards of every sample of the global batch, in one order."""

    rewards: SampleWeights
    groups: Int[Tensor, " batch"]
    """Equal for samples of the same prompt of this step."""
    components: Mapping[str, SampleWeights] = {}
    """The named parts of the reward, for `gdpo`."""


class TokenInputs(NamedTuple):
    """The tokens of the samples that this rank holds. Values outside the masks are never read."""

    token_mask: TokenMask
    sample_mask: SampleMask
    prev_logprobs: TokenLogProbs | None = None
    """The trainer's, before the update: for `opd`, and for KL in the reward."""
    reference_logprobs: TokenLogProbs | None = None
    """The frozen reference's: for KL in the reward."""
    teacher_logprobs: TokenLogProbs | None = None
    """The teacher's: for `opd`."""
    values: TokenWeights | None = None
    """The value model's: for `gae`."""


def advantages(
    cfg: AdvEstimatorConfig,
    loss: LossConfig,
    scores: Scores,
    tokens: TokenInputs,
    *,
    rows: Sequence[int] | None = None,
    sum_over: SumOver = alone,
) -> TokenWeights:
    """Token advantages of this rank's samples; 0 outside their masks.

    `rows` are the samples of `scores` that `tokens` holds, in its order; None is all. Every sample
    votes in its group's statistics, also one that the sample mask keeps out of the loss. `loss` is
    read for the KL penalty in the reward.

    Collective where the estimator averages over tokens (reinforce_plus_plus, raw_reward, gae):
    every rank calls it, because `sum_over` does.

    Raises:
        ValueError: the estimator lacks an input, a reward is not finite, or a group has one sample.
    """
    for name, part in {"reward": scores.rewards, **scores.components}.items():
        _check_rewards(part, name, scores.groups)
    if loss.use_kl_in_reward and cfg.name not in ("reinforce_plus_plus", "gae"):
        raise ValueError(
            f"use_kl_in_reward: estimator {cfg.name} has no token rewards, so the penalty would be"
            " dropped; use reinforce_plus_plus or gae, or put the penalty into the loss"
        )
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    mine = list(range(len(scores.rewards)) if rows is None else rows)
    if len(mine) != len(mask):
        raise ValueError(f"tokens of {len(mask)} samples were given for {len(mine)} rows of scores")
    match cfg.name:
        case "grpo":
            return _spread(_grpo(cfg, scores)[mine], mask)
        case "gdpo":
            return _spread(_gdpo(cfg, scores)[mine], mask)
        case "reinforce_plus_plus":
            return _reinforce_plus_plus(cfg, loss, scores, tokens, mine, sum_over)
        case "raw_reward":
            spread = _spread(scores.rewards[mine], mask)
            return standardize(spread, mask, sum_over) if cfg.normalize_advantages else spread
        case "gae":
            return generalized_advantages(cfg, loss, scores.rewards[mine], tokens, sum_over)[0]
        case "opd":
            return distillation_advantages(tokens)


def clip_advantages(
    advantages: TokenWeights, low: float | None, high: float | None
) -> TokenWeights:
    """Advantages within [low, high]; None is no bound. Source: NeMo-RL, `grpo.advantage_clip_*`."""
    return advantages.clone() if low is None and high is None else advantages.clamp(low, high)


def generalized_advantages(
    cfg: AdvEstimatorConfig,
    loss: LossConfig,
    rewards: SampleWeights,
    tokens: TokenInputs,
    sum_over: SumOver = alone,
) -> tuple[TokenWeights, TokenWeights]:
    r"""GAE: token advantages, and returns as targets for the value model; 0 outside the mask.

    A_t = delta_t + gamma lambda A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t,  R_t = A_t + V_t

    t runs over the trained tokens of a sample, skipping what lies between turns. The reward stands
    at the last one; with `use_kl_in_reward` every token pays beta times its KL. Returns use
    `gae_lambda_value`, advantages `gae_lambda_policy` or, with alpha > 0,
    lambda = 1 - 1 / max(alpha length, 1). Advantages are whitened last if `normalize_advantages`.

    Raises:
        ValueError: `values` (or the log-probs of the penalty) are missing.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; Yuan et al. 2025 (VAPO),
    arXiv:2504.05118, section 4.
    """
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    values = _required(tokens.values, "values", "gae").detach()
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    token_rewards = _spread(rewards, last).to(values.dtype)
    if loss.use_kl_in_reward:
        token_rewards = token_rewards - _kl_penalty(loss, tokens)
    by_value = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
    by_policy = cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy
    lambda_policy = values.new_full(rewards.shape, by_policy)
    if cfg.length_adaptive_alpha > 0:
        lengths = mask.sum(-1).to(values.dtype)
        lambda_policy = 1.0 - 1.0 / (cfg.length_adaptive_alpha * lengths).clamp(min=1.0)
    lambda_value = torch.full_like(lambda_policy, by_value)
    found = _discounted(token_rewards, values, mask, cfg.gae_gamma, lambda_policy)
    targets = _discounted(token_rewards, values, mask, cfg.gae_gamma, lambda_value) + values
    targets = torch.where(mask, targets, 0.0)
    return (whiten(found, mask, sum_over) if cfg.normalize_advantages else found), targets


def distillation_advantages(tokens: TokenInputs) -> TokenWeights:
    """On-policy distillation: A_t = log pi_teacher - log pi_prev; 0 outside the mask.

    Raises:
        ValueError: the log-probs of teacher or student are missing.

    Source: Xiao et al. 2026 (MOPD), arXiv:2601.02780, eq. 8.
    """
    teacher = _required(tokens.teacher_logprobs, "teacher_logprobs", "opd")
    student = _required(tokens.prev_logprobs, "prev_logprobs", "opd")
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    return torch.where(mask, teacher - student, 0.0).detach()


def _grpo(cfg: AdvEstimatorConfig, scores: Scores) -> SampleWeights:
    return group_relative(
        scores.rewards,
        scores.groups,
        leave_one_out=cfg.use_leave_one_out_baseline,
        normalize=cfg.normalize_rewards,
    )


def _gdpo(cfg: AdvEstimatorConfig, scores: Scores) -> SampleWeights:
    """GDPO: each reward component judged on its own, summed, then standardized over the batch.

    A = (S - mean S) / std S,  S = sum_n w_n A_n;  0 where std S is rounding

    A group that is constant in every component keeps 0.

    Raises:
        ValueError: fewer than two components, or not one weight for each.

    Source: Liu et al. 2026, arXiv:2601.05242.
    """
    names = sorted(scores.components)
    if len(names) < 2:
        raise ValueError(
            f"adv_estimator gdpo needs two reward components or more, got {names};"
            " use grpo for a single reward (where every answer of a step timed out there is none:"
            " raise env.timeout_s)"
        )
    weights = cfg.reward_weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(names)} components {names};"
            " give one per component, in this order"
        )
    parts = torch.stack(
        [
            weight * _grpo(cfg, scores._replace(rewards=scores.components[name]))
            for weight, name in zip(weights, names, strict=True)
        ]
    )
    combined = parts.double().sum(0)
    centred = combined - combined.mean()
    std = combined.std() if combined.numel() > 1 else combined.new_zeros(())
    # A sum that cancels leaves rounding, which must not be blown up to a standard deviation of 1.
    rounding = parts.abs().amax() * (8 * torch.finfo(parts.dtype).eps)
    result = torch.where(std > rounding, centred / std, 0.0)
    return torch.where((parts == 0).all(0), 0.0, result).to(scores.rewards.dtype)


def _reinforce_plus_plus(
    cfg: AdvEstimatorConfig,
    loss: LossConfig,
    scores: Scores,
    tokens: TokenInputs,
    rows: list[int],
    sum_over: SumOver,
) -> TokenWeights:
    """REINFORCE++: rewards (minus the group's mean) minus beta KL, standardized over all tokens.

    Being standardized over the batch, a constant group is not at 0 but at minus the batch's mean.
    A token pays for its own KL alone, as in NeMo-RL; the paper sums the KL of all later tokens.

    Source: Hu et al. 2025, arXiv:2501.03262, and its variant with a baseline.
    """
    mask = tokens.token_mask & tokens.sample_mask.unsqueeze(-1)
    per_sample = scores.rewards
    if cfg.minus_baseline:
        per_sample = group_relative(
            scores.rewards, scores.groups, leave_one_out=False, normalize=False
        )
    spread = _spread(per_sample[rows], mask)
    if loss.use_kl_in_reward:
        spread = spread - _kl_penalty(loss, tokens).to(spread.dtype)
    return standardize(spread, mask, sum_over)


def _kl_penalty(loss: LossConfig, tokens: TokenInputs) -> TokenWeights:
    """beta k(reference - prev) per token; anything outside the mask."""
    why = "use_kl_in_reward"
    prev = _required(tokens.prev_logprobs, "prev_logprobs", why).detach()
    kl = kl_term(
        prev,
        _required(tokens.reference_logprobs, "reference_logprobs", why),
        torch.ones_like(prev),
        kind=loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    return loss.reference_policy_kl_penalty * kl


def _discounted(
    rewards: TokenWeights,
    values: TokenWeights,
    mask: TokenMask,
    gamma: float,
    lambdas: SampleWeights,
) -> TokenWeights:
    """GAE's recursion, backwards over positions; what is masked is skipped, not a zero reward."""
    next_value = next_advantage = torch.zeros_like(lambdas)
    found: list[Tensor] = []
    for t in reversed(range(mask.shape[1])):
        real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(real, delta + gamma * lambdas * next_advantage, next_advantage)
        next_value = torch.where(real, values[:, t], next_value)
        found.append(torch.where(real, next_advantage, 0.0))
    return torch.stack(found[::-1], dim=1)


def _spread(per_sample: SampleWeights, mask: TokenMask) -> TokenWeights:
    return torch.where(mask, per_sample.detach().unsqueeze(-1), 0.0)


def _required(x: Tensor | None, name: str, why: str) -> Tensor:
    if x is None:
        raise ValueError(f"{why} needs {name}, which is missing; compute it before the advantages")
    return x


def _check_rewards(rewards: SampleWeights, name: str, groups: Int[Tensor, " samples"]) -> None:
    if rewards.shape != groups.shape:
        raise ValueError(
            f"{name} has shape {tuple(rewards.shape)} for groups of shape {tuple(groups.shape)}"
        )
    finite = rewards.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"the {name} of sample {row} is {float(rewards[row])}; a reward must be finite"
        )
