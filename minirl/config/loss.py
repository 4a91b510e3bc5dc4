"""Settings of the policy loss (`loss_fn`) and of the advantages (`grpo.adv_estimator`).

Key names and defaults are NeMo-RL's; keys that it lacks say so. Settings that contradict each
other are refused here; settings that are merely without effect in a run are refused by
`refuse_inert`, which a run's config calls, so that `policy_loss` computes whatever NeMo-RL's loss
would compute.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from minirl.config.loader import NonNegative, Positive, Section

KlKind: TypeAlias = Literal["k1", "k2", "k3"]
Level: TypeAlias = Literal["token", "sequence", "geometric"]
Unit: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class LossConfig(Section, frozen=True):
    """`loss_fn`: which policy-gradient loss, and its constants."""

    # Which surrogate.
    policy_loss_type: Literal["clip", "sapo", "gmpo", "dppo_tv", "dppo_kl"] = "clip"
    """Not in NeMo-RL. `clip`: the switches below choose among NeMo-RL's losses."""
    disable_ppo_ratio: bool = False
    """REINFORCE: the log-prob takes the place of the ratio."""
    use_cispo: bool = False
    force_on_policy_ratio: bool = False
    """The ratio is 1 with a gradient; `prev_logprobs` is not read."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio, and one importance weight, per sequence."""

    # How tokens are averaged.
    token_level_loss: bool = True
    """True: mean over the tokens of the global batch. False: over its sequences' token means."""
    normalization: Literal["dapo", "bnpo", "grpo", "dr_grpo"] | None = None
    """Not in NeMo-RL: the averaging by its paper's name; None lets `token_level_loss` decide."""
    normalization_length: Annotated[int, Meta(gt=0)] | None = None
    """Not in NeMo-RL: the constant length L of `dr_grpo`."""

    # Bounds of the ratio.
    ratio_clip_min: Unit = 0.2
    ratio_clip_max: NonNegative = 0.2
    """The ratio is clipped to [1 - min, 1 + max]; `gmpo` clips its logarithm to [-min, max]."""
    ratio_clip_c: Annotated[float, Meta(gt=1)] | None = None
    """Dual clip: where the advantage is negative, the ratio counts as at most c."""
    sapo_temperature_positive: Positive = 1.0
    sapo_temperature_negative: Positive = 1.05
    """Not in NeMo-RL: steepness of SAPO's gate for positive advantages, and for the others."""
    divergence_threshold: Positive | None = None
    """Not in NeMo-RL: how far a token may be from the sampler under `dppo_tv` or `dppo_kl`."""

    # Distance to the reference policy.
    reference_policy_kl_penalty: NonNegative = 0.01
    reference_policy_kl_type: KlKind = "k3"
    kl_input_clamp_value: Positive | None = 20.0
    kl_output_clamp_value: Positive | None = 10.0
    """Both act on KL in reward too, where NeMo-RL always has 20 and 10."""
    use_kl_in_reward: bool = False
    """The penalty goes into the advantages (REINFORCE++, GAE) instead of the loss."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL term by exp(logprobs - generation_logprobs)."""

    # Correction for the difference between sampler and trainer.
    use_importance_sampling_correction: bool = False
    importance_sampling_level: Level | None = None
    """Not in NeMo-RL: level of the weights; None is `sequence` for GSPO, else `token`."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: Positive | None = None
    truncated_importance_sampling_ratio_min: NonNegative | None = None

    positive_example_nll_weight: NonNegative = 0.0
    """VAPO: weight of the negative log-likelihood of samples with a positive reward."""

    def __post_init__(self) -> None:
        """Refuses settings that contradict each other."""
        _check_surrogate(self)
        _check_normalization(self)
        _check_correction(self)


def refuse_inert(cfg: LossConfig) -> None:
    """Refuses settings that nothing in a run would read.

    Raises:
        ValueError: naming the key without effect, and why.
    """
    no_penalty = cfg.reference_policy_kl_penalty == 0
    unbounded = [
        name
        for name, value in {
            "force_on_policy_ratio": cfg.force_on_policy_ratio,
            "disable_ppo_ratio": cfg.disable_ppo_ratio,
            f"policy_loss_type {cfg.policy_loss_type}": cfg.policy_loss_type
            in ("sapo", "dppo_tv", "dppo_kl"),
        }.items()
        if value
    ]
    _refuse(
        cfg.disable_ppo_ratio and cfg.force_on_policy_ratio,
        "disable_ppo_ratio has no effect with force_on_policy_ratio, which sets the ratio; set one",
    )
    _refuse(
        cfg.ratio_clip_c is not None and (cfg.disable_ppo_ratio or cfg.force_on_policy_ratio),
        f"ratio_clip_c {cfg.ratio_clip_c} has no effect without a ratio that moves; set it to null",
    )
    _refuse(
        bool(unbounded) and (cfg.ratio_clip_min, cfg.ratio_clip_max) != (0.2, 0.2),
        f"ratio_clip_min {cfg.ratio_clip_min} and ratio_clip_max {cfg.ratio_clip_max} have no"
        f" effect with {', '.join(unbounded)}, which clips no ratio; remove them",
    )
    _refuse(
        no_penalty and (cfg.kl_input_clamp_value, cfg.kl_output_clamp_value) != (20.0, 10.0),
        f"kl_input_clamp_value {cfg.kl_input_clamp_value} and kl_output_clamp_value"
        f" {cfg.kl_output_clamp_value} have no effect with reference_policy_kl_penalty 0;"
        " remove them or set the penalty",
    )
    _refuse(
        cfg.use_kl_in_reward and no_penalty,
        "use_kl_in_reward has no effect with reference_policy_kl_penalty 0; set the penalty",
    )
    _refuse(
        cfg.use_on_policy_kl_approximation and (no_penalty or cfg.use_kl_in_reward),
        "use_on_policy_kl_approximation has no effect without a KL term in the loss; unset it",
    )


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)


def _check_surrogate(cfg: LossConfig) -> None:
    switches = {
        "use_cispo": cfg.use_cispo,
        "disable_ppo_ratio": cfg.disable_ppo_ratio,
        "force_on_policy_ratio": cfg.force_on_policy_ratio,
        "sequence_level_importance_ratios": cfg.sequence_level_importance_ratios,
    }
    on = [name for name, value in switches.items() if value]
    _refuse(
        cfg.use_cispo and len(on) > 1,
        f"use_cispo excludes {', '.join(on[1:])}: it weighs each token by its own ratio; set one",
    )
    _refuse(
        cfg.use_cispo and cfg.ratio_clip_c is not None,
        f"use_cispo excludes ratio_clip_c (is {cfg.ratio_clip_c}): set it to null",
    )
    _refuse(
        cfg.policy_loss_type != "clip" and (bool(on) or cfg.ratio_clip_c is not None),
        f"policy_loss_type {cfg.policy_loss_type} excludes {', '.join(on) or 'ratio_clip_c'},"
        " which belongs to the clipped losses; unset it or set policy_loss_type to clip",
    )
    divergence = cfg.policy_loss_type in ("dppo_tv", "dppo_kl")
    _refuse(
        divergence and cfg.divergence_threshold is None,
        f"policy_loss_type {cfg.policy_loss_type} needs divergence_threshold, for example 0.15",
    )
    _refuse(
        not divergence and cfg.divergence_threshold is not None,
        f"divergence_threshold {cfg.divergence_threshold} is read by dppo_tv and dppo_kl alone, not"
        f" by policy_loss_type {cfg.policy_loss_type}; set it to null",
    )
    _refuse(
        cfg.policy_loss_type != "sapo"
        and (cfg.sapo_temperature_positive, cfg.sapo_temperature_negative) != (1.0, 1.05),
        "sapo_temperature_positive and sapo_temperature_negative are read by sapo alone, not by"
        f" policy_loss_type {cfg.policy_loss_type}; remove them",
    )


def _check_normalization(cfg: LossConfig) -> None:
    whole = [
        name
        for name, value in {
            "sequence_level_importance_ratios (GSPO)": cfg.sequence_level_importance_ratios,
            "policy_loss_type gmpo": cfg.policy_loss_type == "gmpo",
            "normalization grpo": cfg.normalization == "grpo",
        }.items()
        if value
    ]
    _refuse(
        cfg.token_level_loss and bool(whole),
        f"{', '.join(whole)} averages over sequences: set token_level_loss to false",
    )
    tokens = [
        name
        for name, value in {
            "use_cispo": cfg.use_cispo,
            f"normalization {cfg.normalization}": cfg.normalization not in (None, "grpo"),
        }.items()
        if value
    ]
    _refuse(
        not cfg.token_level_loss and bool(tokens),
        f"{', '.join(tokens)} sums over tokens: set token_level_loss to true",
    )
    _refuse(
        (cfg.normalization == "dr_grpo") != (cfg.normalization_length is not None),
        f"normalization is {cfg.normalization} and normalization_length {cfg.normalization_length}:"
        " dr_grpo divides by that constant (the longest response) and nothing else reads it",
    )


def _check_correction(cfg: LossConfig) -> None:
    kind = cfg.truncated_importance_sampling_type
    high = cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min
    _refuse(
        kind is None and (high is not None or low is not None),
        "truncated_importance_sampling_ratio or _ratio_min is set but"
        " truncated_importance_sampling_type is null; set the type or unset the ratios",
    )
    _refuse(
        kind is not None and not cfg.use_importance_sampling_correction,
        f"truncated_importance_sampling_type {kind} needs use_importance_sampling_correction: true",
    )
    _refuse(
        cfg.importance_sampling_level is not None and not cfg.use_importance_sampling_correction,
        f"importance_sampling_level {cfg.importance_sampling_level} needs"
        " use_importance_sampling_correction: true",
    )
    _refuse(
        kind is not None and high is None,
        f"truncated_importance_sampling_type {kind} needs truncated_importance_sampling_ratio > 0",
    )
    _refuse(
        kind in ("icepop", "seq-mask-tis") and low is None,
        f"truncated_importance_sampling_type {kind} needs truncated_importance_sampling_ratio_min",
    )
    _refuse(
        low is not None and high is not None and low > high,
        f"truncated_importance_sampling_ratio_min {low} exceeds the ratio {high}",
    )
    _refuse(
        kind == "seq-mask-tis" and cfg.sequence_level_importance_ratios,
        "seq-mask-tis keeps or drops whole sequences with token weights and excludes"
        " sequence_level_importance_ratios; use icepop or tis with it",
    )


class AdvEstimatorConfig(Section, frozen=True):
    """`grpo.adv_estimator`: how rewards become advantages.

    GRPO is `grpo`; Dr. GRPO is `grpo` without both switches; RLOO is `grpo` with the leave-one-out
    baseline and without the division; REINFORCE is `raw_reward` without the normalisation.
    """

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "raw_reward", "gae", "opd"] = "grpo"
    normalize_rewards: bool = True
    """grpo, gdpo: divide by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """grpo, gdpo: the baseline of a sample is the mean of the group's others."""
    minus_baseline: bool = True
    """reinforce_plus_plus: subtract the group's mean."""
    reward_weights: list[float] | None = None
    """gdpo: one weight per reward component, in the order of their sorted names; null is all 1."""
    normalize_advantages: bool = True
    """raw_reward, gae: whiten over the trained tokens of the global batch."""
    gae_lambda: Unit = 0.95
    gae_gamma: Unit = 1.0
    gae_lambda_value: Unit | None = None
    gae_lambda_policy: Unit | None = None
    """gae: a lambda of their own for the value targets and for the advantages (VAPO)."""
    length_adaptive_alpha: NonNegative = 0.0
    """gae: lambda of the advantages is 1 - 1 / (alpha * length) (VAPO); 0 is off."""

    def __post_init__(self) -> None:
        """Refuses keys that the estimator does not read, and keys that override each other."""
        _refuse(
            self.reward_weights is not None and self.name != "gdpo",
            f"reward_weights is read by gdpo alone, not by {self.name}; remove it",
        )
        gae = (self.gae_lambda, self.gae_gamma, self.length_adaptive_alpha) != (0.95, 1.0, 0.0)
        gae = gae or self.gae_lambda_value is not None or self.gae_lambda_policy is not None
        _refuse(
            gae and self.name != "gae",
            "gae_lambda, gae_gamma, gae_lambda_value, gae_lambda_policy and length_adaptive_alpha"
            f" are read by gae alone, not by {self.name}; remove them",
        )
        _refuse(
            not self.normalize_advantages and self.name not in ("gae", "raw_reward"),
            f"normalize_advantages is read by gae and raw_reward, not by {self.name}; remove it",
        )
        _refuse(
            not self.normalize_rewards and self.name not in ("grpo", "gdpo"),
            f"normalize_rewards is read by grpo and gdpo, not by {self.name}; remove it",
        )
        _refuse(
            not self.use_leave_one_out_baseline and self.name not in ("grpo", "gdpo"),
            f"use_leave_one_out_baseline is read by grpo and gdpo, not by {self.name}; remove it",
        )
        _refuse(
            not self.minus_baseline and self.name != "reinforce_plus_plus",
            f"minus_baseline is read by reinforce_plus_plus alone, not by {self.name}; remove it",
        )
        _refuse(
            self.length_adaptive_alpha > 0 and self.gae_lambda_policy is not None,
            f"length_adaptive_alpha {self.length_adaptive_alpha} replaces gae_lambda_policy"
            f" {self.gae_lambda_policy}; set one",
        )
