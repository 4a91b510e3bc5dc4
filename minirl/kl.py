"""Estimators of the KL divergence between two policies, per token, from log-probs of one sample.

All of them read delta = log q - log p of a token that p drew, and estimate KL(p || q).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from minirl.loss_config import KlKind
from minirl.reduce import exponent_bound
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


def weighted_kl(
    logprobs: TokenLogProbs,
    reference: TokenLogProbs,
    weight: TokenWeights,
    *,
    kind: KlKind,
    input_clamp: float | None,
    output_clamp: float | None,
) -> TokenWeights:
    r"""The estimator times a weight, clamped on both sides.

    clamp(w k(clamp(delta, +-input)), +-output),  delta = reference - logprobs

    Where the first clamp acts, or k3's own bound, the weight is detached too, so that no gradient
    remains: a weight that kept its gradient there would push away from the reference.
    """
    delta = reference - logprobs
    low, high = (-math.inf, math.inf) if input_clamp is None else (-input_clamp, input_clamp)
    if kind == "k3":
        high = min(high, exponent_bound(delta.dtype))
    weight = torch.where((low <= delta) & (delta <= high), weight, weight.detach())
    delta = delta.clamp(low, high)
    kl = weight * kl_estimate(delta, kind)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
