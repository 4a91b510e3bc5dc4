"""Accuracy on held-out problems: one sample for each, scored, averaged over all ranks."""

from collections.abc import Callable, Sequence

from minirl.engine import Engine, Sampling
from minirl.parallel import Axis, gather
from minirl.rng import Key
from minirl.rollout import rollout
from minirl.types import Prompt, Sample, Trajectory

ScoreFn = Callable[[Sequence[Prompt], Sequence[Trajectory]], list[Sample]]
"""Scores trajectories; the prompt of trajectory t is found by its `prompt_id`."""


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    score: ScoreFn,
    axis: Axis,
    key: Key,
) -> list[Sample]:
    """One scored sample for each prompt, in the order of the prompts, on every rank.

    The same samples on any number of ranks: a sample's seed follows from `key` and its prompt.

    Collective: every rank of `axis` calls this with the same prompts.
    """
    each = -(-len(prompts) // axis.size)
    first = min(axis.rank * each, len(prompts))
    mine = prompts[first : first + each]
    trajectories = rollout(
        engine, mine, sampling, num_generations=1, key=key, first_group=first, step=0
    )
    return gather(score(mine, trajectories), axis)


def accuracy(samples: Sequence[Sample]) -> float:
    """The mean score.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("no sample to average: validation needs at least one prompt")
    return sum(s.score.reward for s in samples) / len(samples)
