"""Laws of the reward path, and of the samples that a step collects."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import fresh, parts, trajectory

from minirl.config.rewards import RewardScalingConfig, RewardShapingConfig
from minirl.config.run import GrpoConfig
from minirl.envs.shaping import (
    by_group,
    histogram,
    informative,
    regrouped,
    rewarded,
    scaled,
    shaped,
    with_all_parts,
)
from minirl.rollout.collect import collect
from minirl.types import Sample, Score

PLAIN = RewardShapingConfig(max_response_length=25)
DAPO = RewardShapingConfig(
    enabled=True, overlong_buffer_length=5, overlong_buffer_penalty=0.5, max_response_length=25
)
STOP = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.5, max_response_length=25)


def sample(reward: float, group: int) -> Sample:
    return Sample(trajectory(group=group), Score(reward), reward)


def test_scaling_clamps_and_maps():
    cfg = RewardScalingConfig(enabled=True, source_min=-2.0, source_max=2.0, target_min=-1.0)
    given_rewards = [-2.8, -0.25, 1.5, 0.5, 2.0, 2.5]
    assert [scaled(r, cfg) for r in given_rewards] == [-1.0, -0.125, 0.75, 0.25, 1.0, 1.0]


def test_overlong_answers_lose_linearly_and_without_bound():
    rewards = [
        shaped(r, trajectory(n), DAPO)
        for r, n in zip([1.0, 0.8, 0.6, 0.4], [10, 22, 25, 30], strict=True)
    ]
    assert rewards == pytest.approx([1, 0.6, 0.1, -0.6])


def test_unfinished_answers_lose_their_share():
    cut = [False, True, False, True]
    rewards = [
        shaped(r, trajectory(30, truncated=t), STOP)
        for r, t in zip([1.0, 0.8, 0.6, 0.4], cut, strict=True)
    ]
    assert rewards == pytest.approx([1, 0.4, 0.6, 0.2])


@given(st.floats(-1e6, 1e6), st.integers(1, 40), st.booleans())
def test_nothing_happens_where_nothing_is_enabled(reward: float, length: int, truncated: bool):
    [found] = rewarded(
        [trajectory(length, truncated=truncated)], [Score(reward)], RewardScalingConfig(), PLAIN
    )
    assert found.reward == found.score.reward == reward


@given(st.floats(-3, 3), st.integers(1, 40))
def test_the_verifiers_score_survives_scaling_and_shaping(reward: float, length: int):
    scaling = RewardScalingConfig(enabled=True, target_min=-1.0)
    [found] = rewarded([trajectory(length)], [Score(reward)], scaling, DAPO)
    assert found.score.reward == reward
    assert found.reward == shaped(scaled(reward, scaling), found.trajectory, DAPO)


def test_a_group_is_judged_by_its_unshaped_scores():  # field failure 50
    long_and_short = [
        Sample(trajectory(n), Score(1.0), shaped(1.0, trajectory(n), DAPO)) for n in (3, 24)
    ]
    assert long_and_short[0].reward != long_and_short[1].reward
    assert not informative(long_and_short)


@pytest.mark.parametrize("rewards", [[0.0] * 15 + [1.0], [1.0] * 15 + [0.0], [0.0, 1.0]])
def test_one_success_or_one_failure_keeps_the_whole_group(rewards: list[float]):
    # field failure 49
    assert informative([sample(r, 0) for r in rewards])


@pytest.mark.parametrize("constant", [0.3, 0.2, 1e6, 0.0])
def test_a_constant_group_is_not_kept(constant: float):
    assert not informative([sample(constant, 0) for _ in range(7)])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=20))
def test_grouping_loses_nothing_and_renumbers_in_order(pairs: list[tuple[int, float]]):
    samples = [sample(reward, group) for group, reward in pairs]
    groups = by_group(samples)
    assert sorted(s.reward for g in groups for s in g) == sorted(r for _, r in pairs)
    again = regrouped(groups)
    assert [s.trajectory.prompt_id for s in again] == [
        s.trajectory.group for g in groups for s in g
    ]
    assert sorted({s.trajectory.group for s in again}) == list(range(len(groups)))


def test_the_histogram_counts_scores():
    assert histogram([sample(r, 0) for r in (1.0, 0.0, 1.0)]) == {0.0: 1, 1.0: 2}


def test_a_timeout_counts_as_zero_in_every_named_part():
    late, right = Score(0.0, timed_out=True), Score(2.0, {"answer": 1.0, "length": 1.0})
    assert with_all_parts([late, right]) == [
        late._replace(components={"answer": 0.0, "length": 0.0}),
        right,
    ]


def test_parts_that_come_and_go_are_refused():
    with pytest.raises(ValueError, match=r"\['answer', 'length'\] for some answers and \[\]"):
        with_all_parts([Score(1.0), Score(1.0, {"answer": 1.0, "length": 0.0})])


# ---- what a step collects -----------------------------------------------------------------------


def config(**fields: object) -> GrpoConfig:
    sizes = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
    return GrpoConfig(**{**sizes, "reward_shaping": PLAIN, **fields})


def prompts_of(samples: list[Sample]) -> list[int]:
    return [s.trajectory.prompt_id for s in samples]


def test_without_dynamic_sampling_a_step_draws_once():
    state, samples, seen = collect(fresh(), parts(), config(), {})
    assert prompts_of(samples) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (state.cursor, state.surplus) == (4, ())
    assert seen["sampled_groups"].total == 4


def test_dynamic_sampling_draws_until_enough_groups_differ_and_keeps_the_rest():
    cfg = config(use_dynamic_sampling=True, batch_multiplier=1.5)
    state, samples, seen = collect(fresh(), parts(), cfg, {})
    # Prompts 0, 3, 6, 9 are constant: draws of six give 1 2 4 5, then nothing is left over.
    assert prompts_of(samples) == [1, 1, 2, 2, 4, 4, 5, 5]
    assert (state.cursor, state.surplus) == (6, ())
    cfg = config(use_dynamic_sampling=True, batch_multiplier=2)
    state, samples, seen = collect(fresh(), parts(), cfg, {})
    assert prompts_of(samples) == [1, 1, 2, 2, 4, 4, 5, 5]
    assert prompts_of(list(state.surplus)) == [7, 7]
    assert state.cursor == 8
    assert seen["sampled_groups"].total == 8


def test_the_surplus_comes_first_in_the_next_step_and_groups_stay_apart():
    cfg = config(use_dynamic_sampling=True, batch_multiplier=2, max_num_epochs=2)
    state, _, _ = collect(fresh(), parts(), cfg, {})
    _, samples, _ = collect(state, parts(), cfg, {})
    assert prompts_of(samples) == [7, 7, 8, 8, 10, 10, 11, 11]
    assert [s.trajectory.group for s in samples] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_surplus_that_fills_a_step_draws_nothing():
    cfg = config(use_dynamic_sampling=True, batch_multiplier=2)
    state, _, _ = collect(fresh(), parts(), cfg, {})
    small = config(num_prompts_per_step=1, use_dynamic_sampling=True)
    after, samples, seen = collect(state, parts(), small, {})
    assert prompts_of(samples) == [7, 7]
    assert after.cursor == state.cursor
    assert seen["sampled_tokens"].total == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("epochs", "steps"), [(1, (3, 1)), (2, (6, 3)), (3, (9, 5))])
def test_no_prompt_is_drawn_beyond_the_last_pass_over_the_data(dynamic, epochs, steps):
    # 8 of 12 prompts differ; draws of 5: 10 of 12 prompts (1 2 4 | 5 7 8), 20 of 24, 35 of 36.
    fields = {"use_dynamic_sampling": True, "batch_multiplier": 1.25} if dynamic else {}
    cfg, state, taken = config(max_num_epochs=epochs, **fields), fresh(), 0
    while (collected := collect(state, parts(), cfg, {})) is not None:
        state, taken = collected[0], taken + 1
        assert state.cursor <= epochs * 12
    assert taken == steps[dynamic]


def test_tokens_without_text_are_counted():
    found = collect(fresh(), parts(), config(), {})
    assert found is not None
    tokens = [t for s in found[1] for t in s.trajectory.tokens]
    for size in (None, 0, 50, 97):
        _, _, seen = collect(fresh(), replace(parts(), vocabulary=size), config(), {})
        expected = 0 if size is None else sum(t >= size for t in tokens)
        assert seen["tokens_without_text"].total == expected


def test_too_few_groups_that_differ_are_an_error_with_the_scores_seen():  # field failure 51
    cfg = config(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1)
    with pytest.raises(ValueError, match=r"missing whose scores differ. Scores seen: \{0.0: 6, 1"):
        collect(fresh(), parts(), cfg, {})
