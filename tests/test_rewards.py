"""Rewards: what each verifier gives, and what becomes of answers that it cannot judge."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from minirl.config import EnvConfig
from minirl.data_config import DatasetConfig
from minirl.rewards import Answer, RewardFn, open_rewards
from minirl.types import Prompt, Score


def answers(*texts: str, example: dict[str, object] | None = None, truncated: bool = False) -> Any:
    return [
        Answer(Prompt(100 + i, (1,), example or {}), text, truncated)
        for i, text in enumerate(texts)
    ]


def rewards_of(env_name: str, timeout_s: float = 20.0, **dataset: Any) -> Any:
    source = {} if "dataset_name" in dataset else {"data_path": "a.jsonl"}
    cfg = DatasetConfig(env_name=env_name, **source, **dataset)
    return open_rewards(EnvConfig(num_workers=2, timeout_s=timeout_s), cfg)


RIGHT = Score(1.0)
WRONG = Score(0.0)


def test_a_user_function_sees_completion_and_example():
    with rewards_of("judging:length") as reward:
        assert reward(answers("", "four", example={"bonus": 3})) == [Score(3.0), Score(7.0)]
        assert reward([]) == []


def test_named_parts_add_up_to_the_reward():
    with rewards_of("judging:parts") as reward:
        assert reward(answers("0.25")) == [Score(4.25, {"length": 4.0, "share": 0.25})]
        with pytest.raises(ValueError, match="prompt 100 the reward inf"):
            reward(answers("inf"))


def test_a_user_function_that_hangs_gives_nothing_and_is_counted():
    with rewards_of("judging:act", timeout_s=0.5) as reward:
        scores = reward(answers("spin", "number 2", "sleep"))
    assert scores == [Score(0.0, timed_out=True), Score(2.0), Score(0.0, timed_out=True)]


def test_an_error_of_a_user_function_names_the_first_prompt_that_failed():
    with (
        rewards_of("judging:act") as reward,
        pytest.raises(
            RuntimeError, match=r"(?s)act' raised on prompt 101.*KeyError.*has the columns \["
        ),
    ):
        reward(answers("number 1", "fail x", "fail y"))


def test_a_user_function_that_kills_its_process_is_an_error():
    with (
        rewards_of("judging:act") as reward,
        pytest.raises(RuntimeError, match="died on prompt 100, twice"),
    ):
        reward(answers("exit"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_refused(value):
    with (
        rewards_of("judging:act") as reward,
        pytest.raises(ValueError, match=f"prompt 101 the reward {value}"),
    ):
        reward(answers("number 1", f"number {value}"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere:judge", "No module named 'nowhere'"),
        ("judging:nothing", "module 'judging' has no 'nothing'"),
        ("judging:not_a_function", "is a int, not a function"),
    ],
)
def test_a_wrong_path_is_refused_at_once(path, reason):
    with (
        pytest.raises(ValueError, match=f"(?s)env_name='{path}' cannot be loaded.*{reason}"),
        rewards_of(path),
    ):
        pass


def test_a_module_that_fails_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(ValueError, match=r"(?s)broken:judge.*No module named 'no_such_package'"),
        rewards_of("broken:judge"),
    ):
        pass


@pytest.fixture(scope="module")
def math_reward() -> Iterator[RewardFn]:
    with rewards_of("math", timeout_s=3.0) as reward:
        yield reward


def test_math_answers_are_equal_as_mathematics(math_reward):
    said = ["It is $\\frac{1}{2}$.", "so \\boxed{0.5}", "x = 1/2", "2", "", "{{\\frac"]
    scores = math_reward(answers(*said, example={"output": "\\frac{2}{4}"}))
    assert scores == [RIGHT] * 3 + [WRONG] * 3


def test_a_math_answer_that_cannot_be_computed_is_timed_out(math_reward):
    # field failure 54
    scores = math_reward(answers("4", "\\boxed{9^{9^{9}}}", "4.0", example={"output": 4}))
    assert scores == [RIGHT, WRONG._replace(timed_out=True), RIGHT]


def test_a_reference_that_is_no_mathematics_is_a_counted_error(math_reward):
    scores = math_reward(answers("4", example={"output": ""}))
    assert scores == [Score(0.0, failed=True)]


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_a_reasoning_gym_task_scores_its_own_answers(partial):
    entry = {"question": "Spell", "answer": "nus", "metadata": {}}
    task = {
        "dataset_name": "reasoning_gym",
        "task": "spell_backward",
        "task_kwargs": {"seed": 1},
        "partial_credit": partial,
    }
    with rewards_of("reasoning_gym", **task) as reward:
        scores = reward(answers("nus", "NUS", "nub", "", example=entry))
        cut = reward(answers("nus", "nus", example=entry, truncated=True))
        mixed = reward(
            answers("nus", example=entry, truncated=True) + answers("nus", example=entry)
        )
    close = Score(2 / 3) if partial else WRONG
    assert [s.reward for s in scores] == pytest.approx([1.0, 1.0, close.reward, 0.0])
    assert cut == [WRONG, WRONG]
    assert mixed == [WRONG, RIGHT]
    assert math.isclose(scores[2].reward, close.reward)
