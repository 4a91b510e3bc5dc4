"""Estimators of the KL divergence between two policies, per token, from log-probs of one sample.

All of them read delta = log q - log p of a token that p drew, and estimate KL(p || q).
"""

import math

from jaxtyping import Float
from torch import Tensor

from minirl.config.loss import KlKind
from minirl.losses.reduce import exponent_bound, is_positive
from minirl.types import TokenLogProbs, TokenWeights


def kl_estimate(delta: Float[Tensor, "*shape"], kind: KlKind) -> Float[Tensor, "*shape"]:
    r"""One of Schulman's estimators; k2 and k3 are never negative.

    k1 = -delta,  k2 = delta^2 / 2,  k3 = exp(delta) - 1 - delta

    k3 treats a delta beyond `exponent_bound` as that bound, so that it stays finite.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    match kind:
        case "k1":
            return -delta
        case "k2":
            return delta.square() / 2
        case "k3":
            # expm1: exp(delta) - 1 loses every digit of a small delta in float32.
            bounded = delta.clamp(max=exponent_bound(delta.dtype))
            return bounded.expm1() - bounded


def kl_term(
    logprobs: TokenLogProbs,
    reference: TokenLogProbs,
    weight: TokenWeights,
    *,
    kind: KlKind,
    input_clamp: float | None,
    output_clamp: float | None,
) -> TokenWeights:
    r"""A weighted estimate, clamped on both sides, whose gradient is that of the divergence.

    value     clamp(w k(clamp(delta, +-input)), +-output),  delta = reference - logprobs
    gradient  w g(delta), 0 where a clamp acts (or k3's own bound);
              g = 1 - delta (k1), delta^2 / 2 - delta (k2), -delta (k3)

    g = k + dk / d logprobs: to the derivative of the estimate comes the score-function term, which
    accounts for p being what draws the tokens. It is what autograd gives for a weight
    w exp(logprobs - sg(logprobs)), or for w = exp(logprobs - generation).

    Source: Tang and Munos 2025, arXiv:2506.09477.
    """
    delta, weight = (reference - logprobs).detach(), weight.detach()
    low, high = (-math.inf, math.inf) if input_clamp is None else (-input_clamp, input_clamp)
    if kind == "k3":
        high = min(high, exponent_bound(delta.dtype))
    clamped = delta.clamp(low, high)
    estimate = kl_estimate(clamped, kind)
    kl = weight * estimate
    free = 1.0 - is_positive((delta - clamped).abs())
    if output_clamp is not None:
        free = free * (1.0 - is_positive(kl.abs() - output_clamp))
        kl = kl.clamp(-output_clamp, output_clamp)
    match kind:
        case "k1":
            slope = 1.0 + estimate
        case "k2":
            slope = estimate - clamped
        case "k3":
            slope = -clamped
    return kl + free * weight * slope * (logprobs - logprobs.detach())
