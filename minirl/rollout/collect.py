"""The samples of a step: draw prompts, sample a group for each, score, shape, keep what teaches.

Under dynamic sampling only groups whose scores differ are kept, and prompts are drawn until there
are enough; what is left over waits in the state for the next step, and is then a little stale (the
metric `staleness_max` counts the updates in between). No prompt is drawn beyond the last pass over
the data. Every rank samples its own
share of the prompts and ends up with all samples, so that everything after is a pure function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from minirl.backend import Backend, TrainState, after_draw
from minirl.config.run import GrpoConfig
from minirl.cost import TOKENS_ONLY, Cost
from minirl.data.datasets import Dataset, draw
from minirl.engine import Engine, Sampling
from minirl.envs.shaping import (
    by_group,
    histogram,
    informative,
    regrouped,
    rewarded,
    with_all_parts,
)
from minirl.log import timed
from minirl.metrics import Max, Metrics, Sum, mean_over, scalar
from minirl.parallel import gather, share_of
from minirl.rollout.sample import rollout
from minirl.types import Prompt, Sample, Score, Trajectory

M = TypeVar("M")
ScoreFn = Callable[[Sequence[Prompt], Sequence[Trajectory]], list[Score]]
"""Judges trajectories; the prompt of trajectory t is found by its `prompt_id`."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[M]):
    """What a step uses and never changes."""

    backend: Backend[M]
    engine: Engine
    dataset: Dataset
    score: ScoreFn
    sampling: Sampling
    cost: Cost = TOKENS_ONLY
    """The work that a sample is for the model."""
    peak_flops: float | None = None
    """FLOP/s that one rank could do, if known."""
    vocabulary: int | None = None
    """Tokens from here on have no text; None: all have one."""


def prompts_per_draw(cfg: GrpoConfig) -> int:
    """How many prompts are sampled at once; a step without dynamic sampling draws once."""
    return int(cfg.num_prompts_per_step * cfg.batch_multiplier)


def collect(
    state: TrainState[M], on: Parts[M], cfg: GrpoConfig, seconds: dict[str, float]
) -> tuple[TrainState[M], list[Sample], Metrics] | None:
    """The samples of this step, group by group, the same on every rank.

    None: `max_num_epochs` passes over the data end before there are enough.

    Collective: every rank calls it. Does not consume the state.

    Raises:
        ValueError: dynamic sampling found too few groups whose scores differ.
    """
    kept = by_group(state.surplus)
    seen: list[Sample] = []
    for attempt in range(cfg.dynamic_sampling_max_gen_batches):
        if len(kept) >= cfg.num_prompts_per_step:
            break
        if state.cursor + prompts_per_draw(cfg) > len(on.dataset.prompts) * cfg.max_num_epochs:
            return None
        state, samples = _draw_and_sample(state, on, cfg, attempt, seconds)
        groups = by_group(samples)
        kept += [g for g in groups if informative(g)] if cfg.use_dynamic_sampling else groups
        seen += samples
    missing = cfg.num_prompts_per_step - len(kept)
    if missing > 0:
        raise ValueError(
            f"grpo.use_dynamic_sampling: {cfg.dynamic_sampling_max_gen_batches} draws of "
            f"{prompts_per_draw(cfg)} prompts left {missing} of {cfg.num_prompts_per_step} groups "
            f"missing whose scores differ. Scores seen: {histogram(seen)}. Are the problems too "
            "hard or too easy? Raise dynamic_sampling_max_gen_batches or "
            "num_generations_per_prompt, or change the data"
        )
    now, later = kept[: cfg.num_prompts_per_step], kept[cfg.num_prompts_per_step :]
    state = after_draw(state, state.cursor, regrouped(later))
    drawn = _seen(seen, on.vocabulary)
    return state, regrouped(now), drawn | {"staleness_max": _staleness(now, state.updates)}


def _seen(samples: Sequence[Sample], vocabulary: int | None) -> Metrics:
    """What was sampled in this step, also what is not trained."""
    tokens = (t for s in samples for t in s.trajectory.tokens)
    totals = {
        "tokens_without_text": sum(vocabulary is not None and t >= vocabulary for t in tokens),
        "sampled_groups": len(by_group(samples)),
        "sampled_tokens": sum(sum(s.trajectory.sampled) for s in samples),
        "verifier_timeouts": sum(s.score.timed_out for s in samples),
        "verifier_failures": sum(s.score.failed for s in samples),
    }
    metrics: Metrics = {name: Sum(scalar(total)) for name, total in totals.items()}
    if samples:
        metrics["sampled_reward_mean"] = mean_over(torch.tensor([s.score.reward for s in samples]))
    return metrics


def _staleness(groups: Sequence[Sequence[Sample]], updates: int) -> Max:
    """Updates between the weights that sampled and those that are trained."""
    return Max(scalar(max(updates - s.trajectory.version for g in groups for s in g)))


def _draw_and_sample(
    state: TrainState[M],
    on: Parts[M],
    cfg: GrpoConfig,
    attempt: int,
    seconds: dict[str, float],
) -> tuple[TrainState[M], list[Sample]]:
    """One draw of prompts, a scored group for each. Collective."""
    axis, num_prompts = on.backend.axis, prompts_per_draw(cfg)
    prompts, cursor = draw(on.dataset, state.cursor, num_prompts)
    mine = share_of(prompts, axis)
    with timed(seconds, "generation"):
        trajectories = rollout(
            on.engine,
            mine,
            on.sampling,
            num_generations=cfg.num_generations_per_prompt,
            key=state.key,
            first_group=attempt * num_prompts + axis.rank * len(mine),
            step=state.step,
        )
    with timed(seconds, "reward"):
        scores = on.score(mine, trajectories)
    samples = gather(rewarded(trajectories, scores, cfg.reward_scaling, cfg.reward_shaping), axis)
    complete = with_all_parts([s.score for s in samples])
    samples = [s._replace(score=score) for s, score in zip(samples, complete, strict=True)]
    return after_draw(state, cursor, state.surplus), samples
