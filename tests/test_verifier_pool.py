"""The pool of verifiers: outcomes keep their order, and nothing a function does can wedge a run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.verifier_pool import Outcome, Pool, open_pool, run_


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


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@settings(max_examples=20)
@given(numbers=st.lists(st.floats(allow_nan=False), max_size=40))
def test_outcomes_are_in_the_order_of_the_jobs(act, numbers):
    outcomes = call(act, *(f"number {number!r}" for number in numbers))
    assert outcomes == [Outcome("returned", number) for number in numbers]


def test_order_does_not_depend_on_who_is_faster():
    with pool_of("judging:act", num_workers=3, timeout_s=20.0) as pool:
        texts = [f"{'slow' if i % 3 == 0 else 'number'} {i}" for i in range(12)]
        assert [o.value for o in call(pool, *texts)] == list(range(12))
        # As many as had started before the last job was taken: on a busy machine not all.
        assert 1 < len(pool.workers) <= 3


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
    mark = f"98765.{time.monotonic_ns()}"

    def is_sleeping(process: Path) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            return (process / "cmdline").read_bytes() == f"sleep\0{mark}\0".encode()
        return False

    call(act, f"spawn {mark}")
    assert eventually(lambda: not any(map(is_sleeping, Path("/proc").glob("[0-9]*"))))


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
        victims = pids(pool)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(is_running, victims)))
        assert [o.value for o in call(pool, "number 1", "number 2")] == [1, 2]


def test_no_verdict_of_an_interrupted_call_reaches_the_next_one(act):
    call(act, "number 0")
    with pytest.raises(Exception, match="pickle"):
        run_(act, [("slow 1", {}), ("number 1", {"cannot": lambda: None})])
    assert [o.value for o in call(act, "slow 5")] == [5]


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
    values = [o.value for o in call(act, "modules", "hash a text")]
    program = "print(hash('a text') % 1000)"
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    hashed = subprocess.check_output([sys.executable, "-c", program], env=fixed)
    assert values == [0, int(hashed)]


def test_what_a_function_prints_stays_out_of_the_runs_output(act, capfd):
    with pool_of("judging:act") as pool:
        call(pool, "shout hello")
    assert capfd.readouterr().out == ""


def test_workers_that_cannot_start_are_an_error_not_a_loop():
    factory = "os:_exit"
    with (
        open_pool(factory, {"status": 1}, num_workers=2, timeout_s=1.0) as pool,
        pytest.raises(RuntimeError, match="3 verifier workers died while they started"),
    ):
        run_(pool, [("text", {})])
