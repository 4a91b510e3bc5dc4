"""Policy-gradient surrogates, one function per algorithm, all per token.

Each function takes values that are finite everywhere (masked positions hold zeros) and returns a
`Surrogate`: the loss of every token, before importance weights and before averaging. Gradient
flows through the ratio or the log-prob that is passed in, never through anything else. Which
function a config means is decided in `minirl.losses.policy`.
"""

import math
from typing import Literal, NamedTuple

import torch

from minirl.losses.reduce import bounded_exp, is_positive, row_mean
from minirl.types import TokenLogProbs, TokenWeights


class Surrogate(NamedTuple):
    """A loss per token and how it came about."""

    loss: TokenWeights
    ratio: TokenWeights
    bounded: TokenWeights
    """The ratio after clipping; equal to `ratio` where an algorithm has no bounds."""
    low: TokenWeights
    """1 for tokens whose gradient a lower bound cut off (or changed, for CISPO), else 0."""
    high: TokenWeights
    """The same for an upper bound."""


def token_ratio(logprobs: TokenLogProbs, prev_logprobs: TokenLogProbs) -> TokenWeights:
    """r_t = exp(logprobs_t - prev_t)."""
    return bounded_exp(logprobs - prev_logprobs)


def sequence_ratio(
    logprobs: TokenLogProbs, prev_logprobs: TokenLogProbs, kept: TokenWeights
) -> TokenWeights:
    """GSPO's ratio of a sequence, repeated on its positions: exp(mean_t(logprobs_t - prev_t)).

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    """
    mean = row_mean(logprobs - prev_logprobs, kept)
    return bounded_exp(mean).unsqueeze(-1).expand_as(logprobs)


def clipped_pg_loss(
    ratio: TokenWeights, advantages: TokenWeights, clip_low: float, clip_high: float
) -> Surrogate:
    """Clipped surrogate of PPO and GRPO; of GSPO with `sequence_ratio`.

    l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high))

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Shao et al. 2024 (GRPO),
    arXiv:2402.03300, eq. 3; separate bounds, Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    free, fixed = -advantages * ratio, -advantages * bounded
    cut = is_positive(fixed - free)
    high = cut * is_positive(advantages)
    return Surrogate(torch.maximum(free, fixed), ratio, bounded, low=cut - high, high=high)


def dual_clip(surrogate: Surrogate, advantages: TokenWeights, constant: float) -> Surrogate:
    """Bounds the loss of tokens with a negative advantage: l_t = min(l_t, -A_t c) where A_t < 0.

    Source: Ye et al. 2020, arXiv:1912.09729.
    """
    cap = torch.where(advantages < 0, -advantages * constant, math.inf)
    fixed = is_positive(surrogate.loss - cap)
    loss = torch.minimum(surrogate.loss, cap)
    return surrogate._replace(loss=loss, high=surrogate.high + fixed)


def reinforce_loss(logprobs: TokenLogProbs, advantages: TokenWeights) -> Surrogate:
    """REINFORCE: l_t = -A_t log pi_t. The reported ratio is the log-prob, as in NeMo-RL.

    Source: Williams 1992, doi:10.1007/BF00992696; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    return _unbounded(-advantages * logprobs, logprobs)


def on_policy_loss(logprobs: TokenLogProbs, advantages: TokenWeights) -> Surrogate:
    """The surrogate of the very first update: r_t = exp(logp_t - sg(logp_t)), 1 with a gradient."""
    ratio = token_ratio(logprobs, logprobs.detach())
    return _unbounded(-advantages * ratio, ratio)


def cispo_loss(
    logprobs: TokenLogProbs,
    ratio: TokenWeights,
    advantages: TokenWeights,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """CISPO: l_t = -A_t sg(clip(r_t, 1 - low, 1 + high)) log pi_t. No token loses its gradient.

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eqs. 4-5.
    """
    ratio = ratio.detach()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Surrogate(
        loss=-advantages * bounded * logprobs,
        ratio=ratio,
        bounded=bounded,
        low=is_positive(bounded - ratio),
        high=is_positive(ratio - bounded),
    )


def sapo_loss(
    ratio: TokenWeights, advantages: TokenWeights, positive: float, negative: float
) -> Surrogate:
    """SAPO: a smooth gate in place of the clip.

    l_t = -A_t (4 / tau) sigmoid(tau (r_t - 1)),  tau = `positive` where A_t > 0, else `negative`

    Its derivative in r_t is -A_t at r_t = 1 and falls off on both sides.

    Source: Gao et al. 2025, arXiv:2511.20347.
    """
    tau = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = (tau * (ratio - 1.0)).sigmoid() * 4.0 / tau
    return _unbounded(-advantages * gate, ratio)


def gmpo_loss(
    log_ratio: TokenWeights,
    advantages: TokenWeights,
    kept: TokenWeights,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """GMPO: the geometric mean of clipped token ratios, one loss per sequence on its positions.

    x_t = min(d_t, high) where A_t > 0, else max(d_t, -low);  d_t = log r_t
    l_t = -A_t exp(mean_t x_t)

    Source: Zhao et al. 2025, arXiv:2507.20673; its bounds are 0.4.
    """
    clipped = torch.where(
        advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio = bounded_exp(row_mean(log_ratio, kept)).unsqueeze(-1).expand_as(log_ratio)
    bounded = bounded_exp(row_mean(clipped, kept)).unsqueeze(-1).expand_as(log_ratio)
    return Surrogate(
        loss=-advantages * bounded,
        ratio=ratio,
        bounded=bounded,
        low=is_positive(-clip_low - log_ratio) * is_positive(-advantages),
        high=is_positive(log_ratio - clip_high) * is_positive(advantages),
    )


def dppo_loss(
    logprobs: TokenLogProbs,
    prev_logprobs: TokenLogProbs,
    generation_logprobs: TokenLogProbs,
    advantages: TokenWeights,
    *,
    divergence: Literal["tv", "kl"],
    threshold: float,
) -> Surrogate:
    """DPPO: a token is blocked when it is far from the sampler *and* about to move further away.

    l_t = -M_t A_t r_t;  M_t = 0 where D_t > threshold and (p_t - q_t) A_t > 0, else 1
    D_t = |p_t - q_t| (tv), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (kl)

    p is the policy's probability of the token, q the sampler's: both distributions are reduced to
    "this token" against "any other".

    Source: Qi et al. 2026, arXiv:2602.04879, section 4 (binary TV and binary KL).
    """
    ratio = token_ratio(logprobs, prev_logprobs)
    now, sampler = logprobs.detach(), generation_logprobs.detach()  # the mask has no gradient
    p, q = now.exp(), sampler.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        tiny = torch.finfo(p.dtype).tiny
        other_p, other_q = (-now.expm1()).clamp(min=tiny), (-sampler.expm1()).clamp(min=tiny)
        distance = q * (sampler - now) + other_q * (other_q / other_p).log()
    far = is_positive(distance - threshold)
    low = far * is_positive(q - p) * is_positive(-advantages)
    high = far * is_positive(p - q) * is_positive(advantages)
    bounded = (1.0 - low - high) * ratio
    return Surrogate(loss=-advantages * bounded, ratio=ratio, bounded=bounded, low=low, high=high)


def _unbounded(loss: TokenWeights, ratio: TokenWeights) -> Surrogate:
    """A surrogate without bounds."""
    nowhere = torch.zeros_like(loss)
    return Surrogate(loss=loss, ratio=ratio, bounded=ratio, low=nowhere, high=nowhere)
