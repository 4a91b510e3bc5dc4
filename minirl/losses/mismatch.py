"""How the engine that sampled differs from the trainer that learns, and what to do about it.

Both ran the same weights, yet their log-probs differ: other kernels, other precision, older
weights. The importance weight prev / generation makes the loss unbiased again, at one of three
levels (what a weight is) and in one of three modes (what becomes of extreme weights):

    level      token      w_t = exp(d_t),               d_t = prev_t - generation_t
               sequence   w_i = exp(sum_t d_t)
               geometric  w_i = exp(mean_t d_t)
    mode       truncate   w clamped to [low, high]                      (NeMo-RL: tis)
               mask       w = 0 outside [low, high]                     (NeMo-RL: icepop)
               sequence_mask  w = 0 for whole sequences whose exp(mean_t d_t) is outside
                          [low, high]; the others keep their w as it is (NeMo-RL: seq-mask-tis)

Weights never carry a gradient. An overflowing weight is bounded (see `reduce.bounded_exp`), so
that truncation turns it into `high`; it is not turned into 0 as in NeMo-RL.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from minirl.config.loss import Level, LossConfig
from minirl.losses.reduce import bounded_exp, is_positive, row_mean, select
from minirl.metrics import Max, Mean, Metrics
from minirl.types import SampleMask, SampleWeights, TokenLogProbs, TokenMask, TokenWeights

Mode: TypeAlias = Literal["truncate", "mask", "sequence_mask"]


class Correction(NamedTuple):
    """A cell of the grid. `mode` None leaves weights as they are; bounds are then not read."""

    level: Level
    mode: Mode | None
    low: float
    high: float


class ImportanceWeights(NamedTuple):
    """Weights before and after the mode acted: one column per token, or one for the sequence."""

    raw: Float[Tensor, "batch column"]
    applied: Float[Tensor, "batch column"]
    outside: Float[Tensor, "batch column"]
    """1 where the mode acted, else 0; one column for `sequence_mask`."""


def correction_of(cfg: LossConfig) -> Correction:
    """The cell that NeMo-RL's keys name."""
    level = cfg.importance_sampling_level
    if level is None:
        level = "sequence" if cfg.sequence_level_importance_ratios else "token"
    modes: dict[str, Mode] = {
        "tis": "truncate",
        "icepop": "mask",
        "seq-mask-tis": "sequence_mask",
    }
    kind = cfg.truncated_importance_sampling_type
    return Correction(
        level=level,
        mode=None if kind is None else modes[kind],
        low=cfg.truncated_importance_sampling_ratio_min or 0.0,
        high=cfg.truncated_importance_sampling_ratio or 0.0,
    )


def importance_weights(
    difference: TokenLogProbs, kept: TokenWeights, correction: Correction
) -> ImportanceWeights:
    """The weights of one cell of the grid in the module's header, from d = prev - generation.

    `kept` is the mask as 0 and 1; d must be finite everywhere.

    Source: truncation, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; masking of
    tokens, Ling team 2025, "IcePop", arXiv:2510.18855; masking of sequences, Liu, Li et al. 2025,
    https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda
    """
    difference = difference.detach()
    match correction.level:
        case "token":
            raw = bounded_exp(difference)
        case "sequence":
            raw = bounded_exp((difference * kept).sum(-1, keepdim=True))
        case "geometric":
            raw = _geometric(difference, kept)
    if correction.mode is None:
        return ImportanceWeights(raw, raw, torch.zeros_like(raw))
    low, high = correction.low, correction.high
    judged = _geometric(difference, kept) if correction.mode == "sequence_mask" else raw
    outside = is_positive(low - judged) + is_positive(judged - high)
    applied = raw.clamp(low, high) if correction.mode == "truncate" else raw * (1.0 - outside)
    return ImportanceWeights(raw, applied, outside)


def sequence_errors(
    prev_logprobs: TokenLogProbs, generation_logprobs: TokenLogProbs, token_mask: TokenMask
) -> SampleWeights:
    """Mean over a sequence's tokens of exp|generation - prev|; 1 is a match, 0 no token."""
    gap = select(generation_logprobs - prev_logprobs, token_mask).detach()
    return row_mean(bounded_exp(gap.abs()), token_mask.to(gap.dtype))


def keep_matching_sequences(
    prev_logprobs: TokenLogProbs,
    generation_logprobs: TokenLogProbs,
    token_mask: TokenMask,
    sample_mask: SampleMask,
    threshold: float,
) -> tuple[SampleMask, Metrics]:
    """The sample mask without sequences whose `sequence_errors` exceeds the threshold.

    The loss must then divide by the counts of the new mask: what is dropped does not dilute the
    rest. The metrics tell the share of samples dropped and the largest error seen before.

    Source: NeMo-RL, `grpo.seq_logprob_error_threshold`.
    """
    errors = sequence_errors(prev_logprobs, generation_logprobs, token_mask)
    # Not `errors > threshold`: a sequence whose error is NaN does not match.
    kept = sample_mask & (errors <= threshold)
    dropped = (sample_mask & ~kept).sum()
    largest = torch.where(sample_mask, errors, 0.0).amax()
    return kept, {
        "seq_logprob_error_masked": Mean(dropped.double(), sample_mask.sum().double()),
        "seq_logprob_error_max": Max(largest.double()),
    }


def _geometric(difference: TokenLogProbs, kept: TokenWeights) -> Float[Tensor, "batch 1"]:
    return bounded_exp(row_mean(difference, kept)).unsqueeze(-1)
