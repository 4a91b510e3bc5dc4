"""What is logged about a policy loss: the metrics of NeMo-RL under its names, and a few more.

Every metric is this micro-batch's share (`Sum`, divided by a count of the global batch) or an
extreme (`Max`, `Min`). Nothing here has a gradient. Masked positions of the inputs hold zeros.
"""

import math

import torch

from minirl.kl import kl_estimate
from minirl.loss_config import KlKind
from minirl.metrics import Max, Metrics, Min, Sum
from minirl.mismatch import Correction, ImportanceWeights, sequence_errors
from minirl.policy_losses import Surrogate
from minirl.reduce import (
    Count,
    bounded_exp,
    exponent_bound,
    masked_max,
    masked_mean,
    masked_min,
)
from minirl.types import SampleMask, TokenLogProbs, TokenMask


def mismatch_metrics(
    prev: TokenLogProbs,
    generation: TokenLogProbs,
    mask: TokenMask,
    kind: KlKind,
    num_tokens: Count,
) -> Metrics:
    """How far trainer (prev) and engine (generation) are apart before the update.

    token_mult_prob_error      mean exp|generation - prev|, 1 is no mismatch
    gen_kl_error               mean k(prev - generation), estimates KL(generation || prev)
    policy_kl_error            mean k(generation - prev)
    js_divergence_error        mean k3 to the mixture, half from either side
    seq_mult_prob_error_max    the largest mean exp|generation - prev| of one sequence
    """
    gap = prev - generation
    mixture = torch.logaddexp(prev, generation) - math.log(2.0)
    divergence = (kl_estimate(prev - mixture, "k3") + kl_estimate(generation - mixture, "k3")) / 2
    return {
        "token_mult_prob_error": Sum(masked_mean(bounded_exp(gap.abs()), mask, num_tokens)),
        "gen_kl_error": Sum(masked_mean(kl_estimate(gap, kind), mask, num_tokens)),
        "policy_kl_error": Sum(masked_mean(kl_estimate(-gap, kind), mask, num_tokens)),
        "js_divergence_error": Sum(masked_mean(divergence, mask, num_tokens)),
        "seq_mult_prob_error_max": Max(sequence_errors(prev, generation, mask).amax()),
    }


def surrogate_metrics(surrogate: Surrogate, mask: TokenMask, num_tokens: Count) -> Metrics:
    """Ratios before and after clipping, their extremes, and the share of tokens at each bound."""
    ratio, bounded = surrogate.ratio.detach(), surrogate.bounded.detach()
    return {
        "probs_ratio": Sum(masked_mean(ratio, mask, num_tokens)),
        "probs_ratio_min": Min(masked_min(ratio, mask)),
        "probs_ratio_max": Max(masked_max(ratio, mask)),
        "probs_ratio_clamped": Sum(masked_mean(bounded, mask, num_tokens)),
        "probs_ratio_clamped_min": Min(masked_min(bounded, mask)),
        "probs_ratio_clamped_max": Max(masked_max(bounded, mask)),
        "clipped_low": Sum(masked_mean(surrogate.low.to(ratio.dtype), mask, num_tokens)),
        "clipped_high": Sum(masked_mean(surrogate.high.to(ratio.dtype), mask, num_tokens)),
    }


def weight_metrics(
    weights: ImportanceWeights,
    correction: Correction,
    mask: TokenMask,
    sample_mask: SampleMask,
    counts: tuple[Count, Count],
) -> Metrics:
    """Importance weights before and after truncation, and the share that it acted on.

    importance_ratio_raw, importance_ratio_applied: means over what a weight belongs to, tokens or
    sequences. `sampling_importance_ratio` is NeMo-RL's number: the applied mean at the token
    level, but the *sum* over sequences where there is one weight per sequence.
    `is_oob_ratio` is a share of tokens, for `sequence_mask` of sequences.
    """
    num_tokens, num_sequences = counts
    whole = sample_mask.unsqueeze(-1)
    metrics: Metrics = {}
    if correction.level == "token":
        applied = masked_mean(weights.applied, mask, num_tokens)
        raw = masked_mean(weights.raw, mask, num_tokens)
        metrics["sampling_importance_ratio"] = Sum(applied)
    else:
        applied = masked_mean(weights.applied, whole, num_sequences)
        raw = masked_mean(weights.raw, whole, num_sequences)
        metrics["sampling_importance_ratio"] = Sum(applied * num_sequences)
    metrics |= {"importance_ratio_raw": Sum(raw), "importance_ratio_applied": Sum(applied)}
    outside = weights.outside.to(weights.raw.dtype)
    match correction.mode:
        case None:
            pass
        case "truncate" | "mask":
            share = masked_mean(outside.expand(mask.shape), mask, num_tokens)
            metrics["is_oob_ratio"] = Sum(share)
        case "sequence_mask":
            metrics["is_oob_ratio"] = Sum(masked_mean(outside, whole, num_sequences))
    return metrics


def policy_metrics(
    logprobs: TokenLogProbs, generation: TokenLogProbs, mask: TokenMask, num_tokens: Count
) -> Metrics:
    """`approx_entropy`: minus the mean of exp(logprobs - generation) logprobs.

    An importance-weighted estimate from sampled tokens. The exact entropy is `entropy`.
    """
    weighted = bounded_exp(logprobs - generation) * logprobs
    return {"approx_entropy": Sum(-masked_mean(weighted, mask, num_tokens))}


def overflow_tokens(*log_ratios: TokenLogProbs, mask: TokenMask) -> Sum:
    """How many tokens have a log-ratio so large that `bounded_exp` stood in for it."""
    beyond = torch.zeros_like(mask)
    for log_ratio in log_ratios:
        beyond = beyond | (log_ratio > exponent_bound(log_ratio.dtype))
    return Sum((beyond & mask).sum())
