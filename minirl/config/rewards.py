"""Settings of the reward path (`grpo.reward_scaling`, `grpo.reward_shaping`), NeMo-RL's names."""

from typing import Annotated

from msgspec import Meta

from minirl.config.loader import Section, default, refuse


class RewardScalingConfig(Section, frozen=True):
    """`grpo.reward_scaling`: rewards clamped to the source range, then mapped onto the target's."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        """The source is a range; a disabled section sets nothing."""
        refuse(
            self.source_min >= self.source_max,
            f"source_min {self.source_min} must be less than source_max {self.source_max}",
        )
        bounds = (self.source_min, self.source_max, self.target_min, self.target_max)
        refuse(
            not self.enabled and bounds != (0.0, 1.0, 0.0, 1.0),
            "enabled is false, so the ranges have no effect; set enabled: true or remove them",
        )
        refuse(
            self.target_min == self.target_max,
            f"target_min and target_max are both {self.target_min}: all rewards would be equal",
        )


class RewardShapingConfig(Section, frozen=True, kw_only=True):
    """`grpo.reward_shaping`: what long and unfinished answers lose.

    With `stop_properly_penalty_coef` the overlong penalty is not applied.
    """

    enabled: bool = False
    overlong_buffer_length: Annotated[int, Meta(gt=0)] = 128
    """DAPO: the last so many tokens of `max_response_length` are penalised, linearly."""
    overlong_buffer_penalty: Annotated[float, Meta(ge=0)] = 1.0
    """DAPO: the penalty at `max_response_length`; beyond, it goes on growing."""
    max_response_length: Annotated[int, Meta(gt=0), default("${policy.max_total_sequence_length}")]
    stop_properly_penalty_coef: Annotated[float, Meta(ge=0, le=1)] | None = None
    """ProRL: the reward of an unfinished answer is multiplied by this."""

    def __post_init__(self) -> None:
        """The buffer lies within the response; keys that nothing reads are refused."""
        changed = (self.overlong_buffer_length, self.overlong_buffer_penalty) != (128, 1.0)
        coef = self.stop_properly_penalty_coef
        refuse(
            not self.enabled and (changed or coef is not None),
            "enabled is false, so the other keys have no effect; set enabled: true or remove them",
        )
        refuse(
            changed and coef is not None,
            f"stop_properly_penalty_coef {coef} takes the place of the overlong penalty; remove it "
            "or the overlong_buffer_* keys",
        )
        refuse(
            self.enabled
            and coef is None
            and self.overlong_buffer_length > self.max_response_length,
            f"overlong_buffer_length {self.overlong_buffer_length} exceeds max_response_length "
            f"{self.max_response_length}",
        )
