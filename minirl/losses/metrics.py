"""What is logged about a policy loss: the metrics of NeMo-RL under its names, and a few more.

Every metric is this micro-batch's share (`Sum`, divided by a count of the global batch) or an
extreme (`Max`, `Min`), computed under `torch.no_grad`. Masked positions hold finite values;
`kept` is the mask as 0 and 1.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from minirl.config.loss import KlKind
from minirl.losses.kl import kl_estimate
from minirl.losses.mismatch import Correction, ImportanceWeights
from minirl.losses.reduce import (
    EPSILON,
    Count,
    bounded_exp,
    denominator,
    exponent_bound,
    extremes,
    infinite_outside,
    is_bounded,
    is_positive,
    kept_mean,
    kept_sum,
)
from minirl.losses.surrogates import Surrogate
from minirl.metrics import Max, Metrics, Min, Sum
from minirl.types import SampleWeights, Scalar, TokenLogProbs, TokenMask, TokenWeights


def mismatch_metrics(
    difference: TokenLogProbs, kept: TokenWeights, kind: KlKind, num_tokens: Count
) -> Metrics:
    """How far trainer and engine are apart before the update; d = prev - generation.

    token_mult_prob_error      mean exp|d|, 1 is no mismatch
    gen_kl_error               mean k(d), estimates KL(generation || prev)
    policy_kl_error            mean k(-d)
    js_divergence_error        mean log cosh(d / 2): k3 to the mixture, half from either side
    seq_mult_prob_error_max    the largest mean exp|d| of one sequence
    """
    gap = difference.abs()
    apart = bounded_exp(gap)
    rows = (apart * kept).sum(-1)
    divergence = gap / 2 + apart.reciprocal().log1p() - math.log(2.0)
    return {
        "token_mult_prob_error": Sum(rows.sum() / denominator(num_tokens, rows.dtype)),
        "gen_kl_error": Sum(kept_mean(kl_estimate(difference, kind), kept, num_tokens)),
        "policy_kl_error": Sum(kept_mean(kl_estimate(-difference, kind), kept, num_tokens)),
        "js_divergence_error": Sum(kept_mean(divergence, kept, num_tokens)),
        "seq_mult_prob_error_max": Max((rows / (kept.sum(-1) + EPSILON)).amax()),
    }


def surrogate_metrics(
    surrogate: Surrogate, mask: TokenMask, kept: TokenWeights, num_tokens: Count
) -> Metrics:
    """Ratios before and after clipping, their extremes, and the share of tokens at each bound."""
    outside = infinite_outside(mask)
    metrics: Metrics = {}
    for name, ratio in (
        ("probs_ratio", surrogate.ratio),
        ("probs_ratio_clamped", surrogate.bounded),
    ):
        smallest, largest = extremes(ratio, outside)
        metrics[name] = Sum(kept_mean(ratio, kept, num_tokens))
        metrics |= {f"{name}_min": Min(smallest), f"{name}_max": Max(largest)}
    return metrics | {
        "clipped_low": Sum(kept_mean(surrogate.low, kept, num_tokens)),
        "clipped_high": Sum(kept_mean(surrogate.high, kept, num_tokens)),
    }


def weight_metrics(
    weights: ImportanceWeights,
    correction: Correction,
    kept: TokenWeights,
    kept_samples: SampleWeights,
    counts: tuple[Count, Count],
) -> Metrics:
    """Importance weights before and after truncation, and the share that it acted on.

    importance_ratio_raw, importance_ratio_applied: means over what a weight belongs to, tokens or
    sequences. `sampling_importance_ratio` is NeMo-RL's name of the latter (there it is the *sum*
    over the sequences of a micro-batch where there is one weight per sequence).
    `is_oob_ratio` is a share of tokens, for `sequence_mask` of sequences.
    """
    num_tokens, num_sequences = counts
    whole = kept_samples.unsqueeze(-1)
    by, over = (kept, num_tokens) if correction.level == "token" else (whole, num_sequences)
    raw = kept_mean(weights.raw, by, over)
    applied = raw if correction.mode is None else kept_mean(weights.applied, by, over)
    metrics: Metrics = {
        "importance_ratio_raw": Sum(raw),
        "importance_ratio_applied": Sum(applied),
        "sampling_importance_ratio": Sum(applied),
    }
    match correction.mode:
        case None:
            pass
        case "truncate" | "mask":
            outside = weights.outside.expand(kept.shape)
            metrics["is_oob_ratio"] = Sum(kept_mean(outside, kept, num_tokens))
        case "sequence_mask":
            metrics["is_oob_ratio"] = Sum(kept_mean(weights.outside, whole, num_sequences))
    return metrics


def approximate_entropy(
    logprobs: TokenLogProbs, moved: TokenLogProbs, kept: TokenWeights, num_tokens: Count
) -> Scalar:
    """Minus the mean of exp(logprobs - generation) logprobs; `moved` is that difference.

    An importance-weighted estimate from sampled tokens. The exact entropy is `entropy`.
    """
    return -kept_mean(bounded_exp(moved) * logprobs, kept, num_tokens)


def overflow_tokens(
    kept: TokenWeights, log_ratios: Sequence[TokenLogProbs], ratios: Sequence[Tensor]
) -> Scalar:
    """How many tokens read a ratio, of their own or of their sequence, that was bounded.

    A token counts once. A ratio has one column per token, or one for the sequence.
    """
    bound = exponent_bound(kept.dtype)
    seen = [is_positive(x - bound) for x in log_ratios] + [is_bounded(x) for x in ratios]
    return kept_sum(reduce(torch.maximum, seen).expand(kept.shape), kept)
