"""Rewards and their processes: verdicts keep their order, and no verifier can wedge a run."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.config import EnvConfig
from minirl.data_config import DatasetConfig
from minirl.rewards import Answer, RewardFn, open_rewards
from minirl.types import Prompt, Score
from minirl.verifier_pool import Outcome, Pool, open_pool, run_

FUNCTIONS = '''
import os, sys, time

def length(completion, example):
    return len(completion) + example.get("bonus", 0)

def act(completion, example):
    """Does what it reads."""
    word, _, value = completion.partition(" ")
    if word == "sleep":
        time.sleep(3600)
    if word == "spin":
        while True:
            pass
    if word == "power":
        return 9 ** 9 ** 9 > 0  # One operation, which holds the interpreter's lock.
    if word == "exit":
        os._exit(3)
    if word == "fail":
        raise KeyError(value)
    if word == "slow":
        time.sleep(0.3)
    if word == "print":
        print("printed", flush=True)
    if word == "say":
        return value
    if word == "pid":
        return os.getpid()
    if word == "hash":
        return hash("a text") % 1000
    if word == "modules":
        return sum(name in sys.modules for name in ("torch", "transformers", "vllm", "numpy"))
    if word == "spawn":
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", value)
        time.sleep(3600)
    if word == "once":  # Kills its own process the first time.
        try:
            open(value, "x").close()
        except FileExistsError:
            return 1
        os.kill(os.getpid(), 9)
    return float(value)

not_a_function = 3
'''


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module `judging` on the path, as a user's would be."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "judging.py").write_text(FUNCTIONS)
    (folder / "broken.py").write_text("import no_such_package\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def act() -> Iterator[Pool]:
    """Two workers and a limit of one second."""
    with pool_of("judging:act") as pool:
        yield pool


def pool_of(path: str, num_workers: int = 2, timeout_s: float = 1.0) -> Any:
    return open_pool(
        "minirl.verifiers:user_verifier",
        {"path": path},
        num_workers=num_workers,
        timeout_s=timeout_s,
    )


def call(pool: Pool, *texts: str) -> list[Outcome]:
    return run_(pool, [(text, {}) for text in texts])


def pids(pool: Pool) -> set[int]:
    return {worker.process.pid for worker in pool.workers}


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


# The pool


@settings(max_examples=20)
@given(numbers=st.lists(st.floats(allow_nan=False), max_size=40))
def test_outcomes_are_in_the_order_of_the_jobs(act, numbers):
    outcomes = call(act, *(f"number {number!r}" for number in numbers))
    assert outcomes == [Outcome("returned", number) for number in numbers]


def test_order_does_not_depend_on_who_is_faster():
    with pool_of("judging:act", num_workers=3, timeout_s=20.0) as pool:
        texts = [f"{'slow' if i % 3 == 0 else 'number'} {i}" for i in range(12)]
        assert [o.value for o in call(pool, *texts)] == list(range(12))
        assert len(pool.workers) == 3


def test_a_quick_batch_needs_one_worker():
    with pool_of("judging:act", num_workers=8) as pool:
        call(pool, *["number 1"] * 50)
        assert len(pool.workers) == 1


@pytest.mark.parametrize("hang", ["sleep", "spin", "power"])
def test_a_hang_is_timed_out_and_its_process_killed(act, hang):
    # field failure 54
    call(act, "number 0")
    before = pids(act)
    kinds = [o.kind for o in call(act, hang, "number 1", hang, "number 2")]
    assert kinds == ["timed_out", "returned", "timed_out", "returned"]
    assert all(is_running(pid) == (pid in pids(act)) for pid in before)


def test_hangs_of_all_workers_delay_the_rest_but_lose_nothing(act):
    outcomes = call(act, *["sleep"] * 4, *[f"number {i}" for i in range(10)])
    assert [o.kind for o in outcomes[:4]] == ["timed_out"] * 4
    assert [o.value for o in outcomes[4:]] == list(range(10))


def test_what_a_hanging_call_started_dies_with_it(act):
    mark = "98765.4321"
    call(act, f"spawn {mark}")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"sleep {mark}" not in listed.stdout


def test_a_function_that_works_off_the_main_thread(act):
    found: list[Outcome] = []
    with pool_of("judging:act") as pool:
        thread = threading.Thread(target=lambda: found.extend(call(pool, "spin", "number 2")))
        thread.start()
        thread.join()
    assert [o.kind for o in found] == ["timed_out", "returned"]


def test_an_error_comes_back_with_its_traceback(act):
    [outcome] = call(act, "fail here")
    assert outcome.kind == "raised"
    assert "judging.py" in outcome.detail
    assert "KeyError: 'here'" in outcome.detail


@pytest.mark.parametrize("text", ["say hello", "say 7"])
def test_text_is_no_number(act, text):
    [outcome] = call(act, text)
    assert (outcome.kind, "a number is required" in outcome.detail) == ("raised", True)


def test_a_worker_that_dies_is_replaced_and_its_job_done_again(act, tmp_path):
    outcomes = call(act, f"once {tmp_path / 'mark'}", "number 2")
    assert [o.value for o in outcomes] == [1, 2]


def test_a_job_that_kills_two_workers_is_given_up(act):
    assert [o.kind for o in call(act, "exit", "number 1")] == ["died", "returned"]


def test_workers_killed_from_outside_in_a_batch_lose_no_verdict():
    with pool_of("judging:act", num_workers=2, timeout_s=30.0) as pool:
        call(pool, "number 0")
        victims = set[int]()

        def kill_all_once() -> None:
            time.sleep(0.5)
            for pid in pids(pool):
                victims.add(pid)
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_all_once)
        killer.start()
        outcomes = call(pool, *[f"slow {i}" for i in range(8)])
        killer.join()
        assert [o.value for o in outcomes] == list(range(8))
        assert victims
        assert not victims & pids(pool)


def test_workers_killed_while_idle_are_replaced_without_blame():
    with pool_of("judging:act", num_workers=4, timeout_s=30.0) as pool:
        call(pool, *["slow 1"] * 8)
        for pid in pids(pool):
            os.kill(pid, signal.SIGKILL)
        assert [o.value for o in call(pool, "number 1", "number 2")] == [1, 2]


def test_a_call_that_is_interrupted_leaves_nothing_running(act):
    call(act, "number 0")
    with pytest.raises(Exception, match="pickle"):
        run_(act, [("spin", {}), ("number 1", {"cannot": lambda: None})])
    assert [o.value for o in call(act, "number 5")] == [5]


def test_workers_end_with_the_pool():
    with pool_of("judging:act") as pool:
        call(pool, "sleep", "number 1")
        started = pids(pool)
        assert started
    assert not any(map(is_running, started))


@pytest.mark.parametrize("busy", ["number 0", "spin"])
def test_workers_die_with_their_parent_even_while_busy(busy):
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from minirl.verifier_pool import open_pool, run_
settings = {{"path": "judging:act"}}
with open_pool("minirl.verifiers:user_verifier", settings, num_workers=1, timeout_s=3600) as pool:
    run_(pool, [None])
    print(pool.workers[0].process.pid, flush=True)
    run_(pool, [({busy!r}, {{}})])
    sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.2)
        assert is_running(worker)
        parent.kill()
    assert eventually(lambda: not is_running(worker))


def test_a_worker_imports_nothing_heavy_and_hashes_alike(act):
    values = [o.value for o in call(act, "modules", "hash")]
    program = "print(hash('a text') % 1000)"
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    hashed = subprocess.check_output([sys.executable, "-c", program], env=fixed)
    assert values == [0, int(hashed)]


def test_what_a_function_prints_stays_out_of_the_runs_output(act, capfd):
    with pool_of("judging:act") as pool:
        call(pool, "print 1")
    assert capfd.readouterr().out == ""


def test_workers_that_cannot_start_are_an_error_not_a_loop():
    factory = "os:_exit"
    with (
        open_pool(factory, {"status": 1}, num_workers=2, timeout_s=1.0) as pool,
        pytest.raises(RuntimeError, match="3 verifier workers died while they started"),
    ):
        run_(pool, [("text", {})])


# Reward functions


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


def test_a_user_function_that_hangs_gives_nothing_and_is_counted():
    with rewards_of("judging:act", timeout_s=0.5) as reward:
        scores = reward(answers("spin", "number 2", "sleep"))
    assert scores == [Score(0.0, timed_out=True), Score(2.0), Score(0.0, timed_out=True)]


def test_an_error_of_a_user_function_names_the_first_prompt_that_failed():
    with (
        rewards_of("judging:act") as reward,
        pytest.raises(RuntimeError, match=r"(?s)'judging:act' raised on prompt 101.*KeyError"),
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
        ("broken:judge", "No module named 'no_such_package'"),
        ("judging:nothing", "module 'judging' has no 'nothing'"),
        ("judging:not_a_function", "is a int, not a function"),
    ],
)
def test_a_wrong_path_is_refused_at_once(path, reason):
    with pytest.raises(ValueError, match=f"(?s)env_name='{path}' cannot be loaded.*{reason}"):  # noqa: SIM117 - the error comes from the inner context
        with rewards_of(path):
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
