"""Accuracy on held-out problems: one sample for each, scored, averaged over all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from minirl.engine import Engine, Sampling
from minirl.envs.shaping import with_all_parts
from minirl.parallel import Axis, gather
from minirl.rng import Key
from minirl.rollout.collect import ScoreFn
from minirl.rollout.sample import rollout
from minirl.types import Prompt, Score, Trajectory


class Judged(NamedTuple):
    """An answer and its score."""

    trajectory: Trajectory
    score: Score


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    score: ScoreFn,
    axis: Axis,
    key: Key,
) -> list[Judged]:
    """One judged answer to each prompt, in the order of the prompts, on every rank.

    The same on any number of ranks: a sample's seed follows from `key` and its prompt.

    Collective: every rank of `axis` calls this with the same prompts.
    """
    each = -(-len(prompts) // axis.size)
    first = axis.rank * each
    mine = prompts[first : first + each]
    trajectories = rollout(
        engine, mine, sampling, num_generations=1, key=key, first_group=first, step=0
    )
    scores = score(mine, trajectories)
    judged = gather([Judged(*pair) for pair in zip(trajectories, scores, strict=True)], axis)
    complete = with_all_parts([j.score for j in judged])
    return [Judged(j.trajectory, score) for j, score in zip(judged, complete, strict=True)]


def accuracy(answers: Sequence[Judged], part: str | None = None) -> float:
    """The mean reward, or the mean of the named part of it.

    Raises:
        ValueError: there is no answer.
    """
    if not answers:
        raise ValueError("no answer to average: validation needs at least one prompt")
    scores = [a.score.reward if part is None else a.score.components[part] for a in answers]
    return sum(scores) / len(answers)
