"""From verifiers' scores to the rewards that are learnt from, and which groups are worth learning.

One path for every loop: scale, shape, keep or drop whole groups. A sample is one record
(`types.Sample`), so its fields cannot come apart; `score` stays as the verifier gave it, and
`reward` is what is shaped.
"""

from collections.abc import Mapping, Sequence

from minirl.config.rewards import RewardScalingConfig, RewardShapingConfig
from minirl.types import Sample, Score, Trajectory


def rewarded(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    scaling: RewardScalingConfig,
    shaping: RewardShapingConfig,
) -> list[Sample]:
    """Samples whose `reward` is the score's, scaled and then shaped."""
    return [
        Sample(t, s, shaped(scaled(s.reward, scaling), t, shaping))
        for t, s in zip(trajectories, scores, strict=True)
    ]


def scaled(reward: float, cfg: RewardScalingConfig) -> float:
    """The reward clamped to the source range, then mapped linearly onto the target range.

    >>> cfg = RewardScalingConfig(enabled=True, source_min=-2.0, source_max=2.0, target_min=-1.0)
    >>> [scaled(r, cfg) for r in (-2.8, -0.25, 1.5)]
    [-1.0, -0.125, 0.75]

    Source: NeMo-RL, `grpo.reward_scaling`; DAPO's recipes map {0, 1} to {-1, 1}.
    """
    if not cfg.enabled:
        return reward
    clamped = min(max(reward, cfg.source_min), cfg.source_max)
    share = (clamped - cfg.source_min) / (cfg.source_max - cfg.source_min)
    return cfg.target_min + share * (cfg.target_max - cfg.target_min)


def shaped(reward: float, trajectory: Trajectory, cfg: RewardShapingConfig) -> float:
    """The reward less what a long or unfinished answer loses.

    With `stop_properly_penalty_coef` c: c r for a truncated sample, else r. Otherwise

        r + min(0, -(n - (L - B)) / B p)

    for n trained tokens of the sample (all turns), L = `max_response_length`, B and p the
    buffer's length and penalty. Not bounded beyond L.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, its last case continued; Hu et al.
    2025 (ProRL v2) for the penalty on unfinished answers.
    """
    if not cfg.enabled:
        return reward
    if cfg.stop_properly_penalty_coef is not None:
        return reward * cfg.stop_properly_penalty_coef if trajectory.truncated else reward
    excess = sum(trajectory.sampled) - (cfg.max_response_length - cfg.overlong_buffer_length)
    return reward + min(0.0, -excess / cfg.overlong_buffer_length * cfg.overlong_buffer_penalty)


def with_all_parts(scores: Sequence[Score]) -> list[Score]:
    """The scores with the same named parts: 0 where a verifier timed out or failed.

    Raises:
        ValueError: a verdict lacks a part that another has.
    """
    names = sorted({name for s in scores for name in s.components})
    for s in scores:
        if set(s.components) != set(names) and not (s.timed_out or s.failed):
            raise ValueError(
                f"a reward function gave the parts {names} for some answers and "
                f"{sorted(s.components)} for another; it must always give the same"
            )
    return [s._replace(components={n: s.components.get(n, 0.0) for n in names}) for s in scores]


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group, groups in the order of their first sample."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.trajectory.group, []).append(sample)
    return list(groups.values())


def informative(group: Sequence[Sample]) -> bool:
    """Whether the verifier's scores differ within the group: otherwise it teaches nothing.

    Judged by the unshaped reward, so that a length penalty alone keeps no group.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
    """
    rewards = [s.score.reward for s in group]
    return min(rewards) != max(rewards)


def regrouped(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """All samples, with groups numbered from 0 in this order: ids of different draws may clash."""
    return [
        s._replace(trajectory=s.trajectory._replace(group=number))
        for number, group in enumerate(groups)
        for s in group
    ]


def histogram(samples: Sequence[Sample]) -> Mapping[float, int]:
    """How often each score was given."""
    counts: dict[float, int] = {}
    for s in samples:
        counts[s.score.reward] = counts.get(s.score.reward, 0) + 1
    return dict(sorted(counts.items()))
