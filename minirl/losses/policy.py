"""The policy-gradient loss: selects, composes and averages what the modules above define.

In: per-token values of one micro-batch and the counts of the *global* batch. Out: this
micro-batch's share of the loss, so that shares add up to the same number and the same gradient for
any split, padding or row order; and its metrics, which add up too.

    loss = mean(w l) + beta mean(W k) + mu nll

with a surrogate l (`surrogates`), importance weights w (`mismatch`), a KL term k (`kl`) and the
likelihood of rewarded samples. Masked values are replaced by zero on entry and never read.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from minirl.config.loss import LossConfig
from minirl.losses.kl import kl_term
from minirl.losses.metrics import (
    approximate_entropy,
    mismatch_metrics,
    overflow_tokens,
    surrogate_metrics,
    weight_metrics,
)
from minirl.losses.mismatch import ImportanceWeights, correction_of, importance_weights
from minirl.losses.reduce import (
    Count,
    bounded_exp,
    denominator,
    is_positive,
    kept_mean,
    row_mean,
    select,
)
from minirl.losses.surrogates import (
    Surrogate,
    cispo_loss,
    clipped_pg_loss,
    dppo_loss,
    dual_clip,
    gmpo_loss,
    on_policy_loss,
    reinforce_loss,
    sapo_loss,
    sequence_ratio,
    token_ratio,
)
from minirl.metrics import Metrics, Sum
from minirl.types import SampleWeights, Scalar, TokenLogProbs, TokenMask, TokenWeights


class PolicyLossInputs(NamedTuple):
    """A micro-batch: [batch, position], aligned to predicted tokens; masks and rewards as named.

    Masks may have any dtype; what is not 0 is in. Values outside both masks are never read.
    """

    logprobs: Tensor
    """The policy now. The only field a gradient flows through."""
    prev_logprobs: Tensor
    """The trainer's, before the update."""
    generation_logprobs: Tensor
    """The engine's, when it sampled."""
    reference_logprobs: Tensor | None
    """The frozen reference policy's; needed when the loss has a KL term."""
    advantages: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    """[batch]"""
    rewards: Tensor
    """[batch]; read by the likelihood of rewarded samples."""
    entropy: Tensor | None = None
    """The exact entropy at every position, for its metric."""


class _Selected(NamedTuple):
    """The same, with one dtype and zeros outside the mask; no gradient but through `logprobs`."""

    logprobs: TokenLogProbs
    prev: TokenLogProbs
    generation: TokenLogProbs
    gap: TokenLogProbs
    """prev - generation"""
    reference: TokenLogProbs | None
    advantages: TokenWeights
    mask: TokenMask
    kept: TokenWeights
    """The mask as 0 and 1."""
    kept_samples: SampleWeights
    rewards: SampleWeights
    entropy: TokenLogProbs | None


def policy_loss(
    inputs: PolicyLossInputs,
    cfg: LossConfig | Mapping[str, object],
    *,
    num_tokens: Count,
    num_sequences: Count,
) -> tuple[Scalar, Metrics]:
    """This micro-batch's share of the loss that `cfg` (a NeMo-RL `loss_fn`) describes.

    `num_tokens` and `num_sequences` count the trained tokens and the samples of the global batch.

    Raises:
        ValueError: a shape differs, a value that `cfg` needs is missing, or `cfg` is not valid.
    """
    if not isinstance(cfg, LossConfig):
        cfg = loss_config(cfg)
    x = _select(inputs, cfg)
    counts = (num_tokens, num_sequences)
    surrogate = _surrogate(x, cfg)
    correction = correction_of(cfg)
    weights = importance_weights(x.gap, x.kept, correction)
    per_token = surrogate.loss
    if cfg.use_importance_sampling_correction:
        per_token = weights.applied * per_token
    loss = _average(per_token, x.kept, cfg, counts)
    kl = nll = loss.new_zeros(())
    if _has_kl_term(cfg):
        kl = _average(_kl_per_token(x, cfg), x.kept, cfg, counts)
        loss = loss + cfg.reference_policy_kl_penalty * kl
    if cfg.positive_example_nll_weight > 0:
        nll = positive_nll(x.logprobs, x.rewards, x.kept, num_tokens)
        loss = loss + cfg.positive_example_nll_weight * nll
    with torch.no_grad():
        metrics = _metrics(x, surrogate, weights, cfg, num_tokens)
        metrics |= weight_metrics(weights, correction, x.kept, x.kept_samples, counts)
        metrics |= {
            "loss": Sum(loss.detach()),
            "kl_penalty": Sum(kl.detach()),
            "positive_nll_loss": Sum(nll.detach()),
        }
    return loss, metrics


def loss_config(cfg: Mapping[str, object]) -> LossConfig:
    """A NeMo-RL `loss_fn` mapping as a checked record.

    Raises:
        ValueError: an unknown key, a wrong type or range, or a contradiction.
    """
    try:
        return msgspec.convert(dict(cfg), LossConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"loss_fn: {error}") from error


def positive_nll(
    logprobs: TokenLogProbs, rewards: SampleWeights, kept: TokenWeights, num_tokens: Count
) -> Scalar:
    """Negative log-likelihood of samples with a positive reward, over all trained tokens.

    L = - sum_{t: reward > 0} logp_t / N. NeMo-RL divides by the number of such tokens in the
    micro-batch instead, which makes the loss depend on the split.

    Source: Yuan et al. 2025 (VAPO), arXiv:2504.05118, eq. 10.
    """
    return kept_mean(-logprobs, kept * is_positive(rewards).unsqueeze(-1), num_tokens)


def _surrogate(x: _Selected, cfg: LossConfig) -> Surrogate:
    """The algorithm that the config names."""
    low, high = cfg.ratio_clip_min, cfg.ratio_clip_max
    match cfg.policy_loss_type:
        case "clip":
            return _clip_family(x, cfg)
        case "sapo":
            return sapo_loss(
                token_ratio(x.logprobs, x.prev),
                x.advantages,
                cfg.sapo_temperature_positive,
                cfg.sapo_temperature_negative,
            )
        case "gmpo":
            return gmpo_loss(x.logprobs - x.prev, x.advantages, x.kept, low, high)
        case "dppo_tv" | "dppo_kl" as kind:
            assert cfg.divergence_threshold is not None
            return dppo_loss(
                x.logprobs,
                x.prev,
                x.generation,
                x.advantages,
                divergence="tv" if kind == "dppo_tv" else "kl",
                threshold=cfg.divergence_threshold,
            )


def _clip_family(x: _Selected, cfg: LossConfig) -> Surrogate:
    """What NeMo-RL's switches select, in its order of precedence."""
    low, high = cfg.ratio_clip_min, cfg.ratio_clip_max
    if cfg.force_on_policy_ratio:
        surrogate = on_policy_loss(x.logprobs, x.advantages)
    elif cfg.disable_ppo_ratio:
        surrogate = reinforce_loss(x.logprobs, x.advantages)
    elif cfg.use_cispo:
        ratio = token_ratio(x.logprobs, x.prev)
        surrogate = cispo_loss(x.logprobs, ratio, x.advantages, low, high)
    elif cfg.sequence_level_importance_ratios:
        ratio = sequence_ratio(x.logprobs, x.prev, x.kept)
        surrogate = clipped_pg_loss(ratio, x.advantages, low, high)
    else:
        surrogate = clipped_pg_loss(token_ratio(x.logprobs, x.prev), x.advantages, low, high)
    if cfg.ratio_clip_c is not None:
        surrogate = dual_clip(surrogate, x.advantages, cfg.ratio_clip_c)
    return surrogate


def _average(
    x: TokenWeights, kept: TokenWeights, cfg: LossConfig, counts: tuple[Count, Count]
) -> Scalar:
    """Share of the mean over the global batch.

    DAPO and BNPO: over its tokens (BNPO's "batch" is here always the global one). GRPO: over its
    sequences, of the mean over their tokens. Dr. GRPO: the sum over tokens, divided by the number
    of sequences times a constant length.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 12; Shao et al. 2024, arXiv:2402.03300,
    eq. 3; Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    num_tokens, num_sequences = counts
    match cfg.normalization:
        case "dr_grpo":
            assert cfg.normalization_length is not None
            return kept_mean(x, kept, num_sequences * cfg.normalization_length)
        case "dapo" | "bnpo":
            by_token = True
        case "grpo":
            by_token = False
        case None:
            by_token = cfg.token_level_loss
    if by_token:
        return kept_mean(x, kept, num_tokens)
    return row_mean(x, kept).sum() / denominator(num_sequences, x.dtype)


def _has_kl_term(cfg: LossConfig) -> bool:
    return cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward


def _kl_per_token(x: _Selected, cfg: LossConfig) -> TokenWeights:
    """W k(reference - logprobs); W is 1, or exp(logprobs - generation) for another sampler."""
    assert x.reference is not None
    weight = x.kept
    if cfg.use_on_policy_kl_approximation:
        weight = bounded_exp(x.logprobs - x.generation)
    return kl_term(
        x.logprobs,
        x.reference,
        weight,
        kind=cfg.reference_policy_kl_type,
        input_clamp=cfg.kl_input_clamp_value,
        output_clamp=cfg.kl_output_clamp_value,
    )


def _metrics(
    x: _Selected,
    surrogate: Surrogate,
    weights: ImportanceWeights,
    cfg: LossConfig,
    num_tokens: Count,
) -> Metrics:
    moved = x.logprobs - x.generation
    log_ratios, ratios = [x.gap.abs(), moved], [surrogate.ratio, surrogate.bounded, weights.raw]
    if _has_kl_term(cfg) and cfg.reference_policy_kl_type == "k3":
        assert x.reference is not None
        highest = cfg.kl_input_clamp_value or math.inf
        log_ratios.append((x.reference - x.logprobs).clamp(max=highest))
    entropy = approximate_entropy(x.logprobs, moved, x.kept, num_tokens)
    metrics = mismatch_metrics(x.gap, x.kept, cfg.reference_policy_kl_type, num_tokens)
    metrics |= surrogate_metrics(surrogate, x.mask, x.kept, num_tokens)
    metrics["approx_entropy"] = Sum(entropy)
    metrics["num_valid_samples"] = Sum(x.kept_samples.sum())
    metrics["overflow_tokens"] = Sum(overflow_tokens(x.kept, log_ratios, ratios))
    if x.entropy is not None:
        metrics["entropy"] = Sum(kept_mean(x.entropy, x.kept, num_tokens))
    return metrics


def _select(inputs: PolicyLossInputs, cfg: LossConfig) -> _Selected:
    """Checks shapes, detaches, casts, and replaces masked values by zero."""
    _check(inputs, cfg)
    sample_mask = inputs.sample_mask.bool()
    mask = inputs.token_mask.bool() & sample_mask.unsqueeze(-1)
    dtype = torch.float64 if inputs.logprobs.dtype == torch.float64 else torch.float32

    def chosen(x: Tensor) -> Tensor:
        return select(x.to(dtype), mask)

    def constant(x: Tensor) -> Tensor:
        return chosen(x.detach())

    logprobs, generation = chosen(inputs.logprobs), constant(inputs.generation_logprobs)
    reference = inputs.reference_logprobs
    prev = logprobs.detach() if cfg.force_on_policy_ratio else constant(inputs.prev_logprobs)
    return _Selected(
        logprobs=logprobs,
        prev=prev,
        generation=generation,
        gap=prev - generation,
        reference=None if reference is None else constant(reference),
        advantages=constant(inputs.advantages),
        mask=mask,
        kept=mask.to(dtype),
        kept_samples=sample_mask.to(dtype),
        rewards=select(inputs.rewards.to(dtype), sample_mask),
        entropy=None if inputs.entropy is None else constant(inputs.entropy),
    )


def _check(inputs: PolicyLossInputs, cfg: LossConfig) -> None:
    shape = inputs.logprobs.shape
    if len(shape) != 2:
        raise ValueError(f"logprobs has shape {tuple(shape)}; expected [batch, position]")
    if 0 in shape:
        raise ValueError(f"logprobs has shape {tuple(shape)}; a batch has at least one position")
    for name, value in inputs._asdict().items():
        if value is None and name not in ("reference_logprobs", "entropy"):
            raise ValueError(f"{name} is None; give a tensor of the shape that its field documents")
        expected = shape[:1] if name in ("sample_mask", "rewards") else shape
        if value is not None and value.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; expected {tuple(expected)},"
                f" because logprobs is {tuple(shape)}"
            )
    if _has_kl_term(cfg) and inputs.reference_logprobs is None:
        raise ValueError(
            f"reference_policy_kl_penalty is {cfg.reference_policy_kl_penalty} but"
            " reference_logprobs is missing; compute them, or set the penalty to 0"
        )
