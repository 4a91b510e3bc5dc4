"""Rewards: what each verifier gives, and what becomes of answers that it cannot judge."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minirl.config.data import DatasetConfig
from minirl.config.run import EnvConfig
from minirl.envs.rewards import Answer, RewardFn, open_rewards
from minirl.types import Prompt, Score

UNHURRIED_S = 900.0
"""More than anything that ends takes, however busy the machine."""


def answers(*texts: str, example: dict[str, object] | None = None, truncated: bool = False) -> Any:
    return [
        Answer(Prompt(100 + i, (1,), example or {}), text, truncated)
        for i, text in enumerate(texts)
    ]


def rewards_of(
    env_name: str,
    timeout_s: float = UNHURRIED_S,
    rows: Sequence[Prompt] = (),
    folder: Path | None = None,
    **dataset: Any,
) -> Any:
    source = {} if "dataset_name" in dataset else {"data_path": "a.jsonl"}
    cfg = DatasetConfig(env_name=env_name, **source, **dataset)
    return open_rewards(EnvConfig(num_workers=2, timeout_s=timeout_s), cfg, rows, folder)


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
    with rewards_of("judging:act", timeout_s=0.2) as reward:
        assert reward(answers("spin", "sleep")) == [Score(0.0, timed_out=True)] * 2


def test_a_user_function_is_called_on_a_row_with_its_own_answer():
    rows = [Prompt(7, (1,), {"output": "say four", "bonus": 3}), Prompt(8, (1,), {"bonus": 3})]
    with (
        pytest.raises(ValueError, match=r"function\('say four', row 7\).*it returned 'four'"),
        rewards_of("judging:act", rows=rows),
    ):
        pass
    with rewards_of("judging:length", rows=rows) as reward:
        assert reward(answers("a")) == [Score(1.0)]


@pytest.mark.parametrize(
    ("function", "text", "told"),
    [
        ("short", "", "takes 1 positional argument but 2 were given"),
        ("later", "", "returned <coroutine object later"),
        ("several", "", "returned <generator object several"),
        ("column", "", "KeyError: 'answer'"),
        ("act", "give none", "returned None of type NoneType; a number is required"),
        ("act", "give nothing", "returned {}"),
        ("act", "give number", "returned {1: 1.0}"),
        ("act", "number nan", "the reward nan; a reward must be a finite number"),
        ("parts", "-inf", "the reward -inf; a reward must be a finite number"),
        ("act", "crash", "died on prompt 7, twice: killed by SIGSEGV; what workers printed is in"),
        ("act", "take 5000000000", "it exceeded env.memory_gb=4"),
    ],
)
def test_a_user_function_that_cannot_be_used_is_refused_at_once(function, text, told, tmp_path):
    row = Prompt(7, (1,), {"output": text})
    with (
        pytest.raises(ValueError, match=f"env_name='judging:{function}' cannot be used") as error,
        rewards_of(f"judging:{function}", rows=[row], folder=tmp_path),
    ):
        pass
    assert told in str(error.value)
    assert f"called as function({text!r}, row 7), with the row's columns ['output'], and must" in (
        str(error.value)
    )
    assert str(tmp_path / "verifiers-0.log") in str(error.value) or "printed" not in told


def test_a_user_function_that_hangs_on_a_row_is_refused_at_once():
    row = Prompt(7, (1,), {"output": "sleep"})
    with (
        pytest.raises(ValueError, match=r"row 7\).*took longer than env.timeout_s=0.2"),
        rewards_of("judging:act", timeout_s=0.2, rows=[row]),
    ):
        pass


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
        pytest.raises(RuntimeError, match="died on prompt 100, twice: exited with code 3"),
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
    with rewards_of("math") as reward:
        yield reward


def test_math_answers_are_equal_as_mathematics(math_reward):
    said = ["It is $\\frac{1}{2}$.", "so \\boxed{0.5}", "x = 1/2", "2", "", "{{\\frac"]
    scores = math_reward(answers(*said, example={"output": "\\frac{2}{4}"}))
    assert scores == [RIGHT] * 3 + [WRONG] * 3


def test_a_math_answer_that_cannot_be_computed_is_timed_out():
    # field failure 54
    with rewards_of("math", timeout_s=1.0) as reward:
        scores = reward(answers("\\boxed{9^{9^{9}}}", example={"output": 4}))
    assert scores == [WRONG._replace(timed_out=True)]


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
