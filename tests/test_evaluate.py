"""Accuracy on held-out problems: every prompt once, in order, on any number of ranks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from toy import PROMPTS, parts, trajectory

from minirl.algos.evaluate import Judged, accuracy, answer
from minirl.engine import Sampling
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of
from minirl.types import Prompt, Score, Trajectory

SAMPLING = Sampling(1.0, 4, (0,))


def by_prompt(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
    """Refuses trajectories of other prompts; every third verifier breaks, without parts."""
    assert {t.prompt_id for t in trajectories} == {p.id for p in prompts}
    return [
        Score(0.0, failed=True)
        if t.prompt_id % 3 == 2
        else Score(float(t.prompt_id), {"half": t.prompt_id / 2})
        for t in trajectories
    ]


def answers(axis: Axis, num: int, seed: int = 0) -> list[Judged]:
    return answer(parts().engine, PROMPTS[:num], SAMPLING, by_prompt, axis, key_of(seed))


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_every_prompt_is_answered_once_in_order_on_any_number_of_ranks(num: int):
    alone = answers(SOLO, num)
    assert [j.trajectory.prompt_id for j in alone] == list(range(num))
    assert [j.score.reward for j in alone] == [0.0 if i % 3 == 2 else i for i in range(num)]
    assert run_ranks(2, answers, num) == [alone, alone]


def test_another_key_gives_other_samples_and_the_same_key_the_same():
    one, again, other = (answers(SOLO, 5, seed) for seed in (0, 0, 1))
    assert one == again
    assert [j.trajectory.tokens for j in one] != [j.trajectory.tokens for j in other]


def test_the_sampling_that_is_asked_for_reaches_the_engine():
    asked: list[Sampling] = []
    engine = parts().engine

    def generate(requests, sampling):
        asked.append(sampling)
        return engine.generate(requests, sampling)

    greedy = SAMPLING._replace(temperature=0.0)
    spying = replace(engine, generate=generate)
    answer(spying, PROMPTS[:2], greedy, by_prompt, SOLO, key_of(0))
    assert asked == [greedy]


def test_a_part_that_a_broken_verifier_lacks_counts_as_zero():
    found = answers(SOLO, 6)
    assert accuracy(found) == (0 + 1 + 0 + 3 + 4 + 0) / 6
    assert accuracy(found, "half") == accuracy(found) / 2


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=9))
def test_accuracy_is_the_mean_reward(rewards: list[float]):
    judged = [Judged(trajectory(), Score(r, {"part": 1 - r})) for r in rewards]
    mean = sum(rewards) / len(rewards)
    assert accuracy(judged) == pytest.approx(mean)
    assert accuracy(judged, "part") == pytest.approx(1 - mean)


def test_accuracy_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        accuracy([])
