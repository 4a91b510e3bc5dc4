"""The pool of verifiers: outcomes keep their order, and nothing a function does can wedge a run."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import NUM_ESCAPED

from minirl.envs import pool as verifier_pool
from minirl.envs import worker as verifier_worker
from minirl.envs.pool import GROW_AFTER_S, Outcome, Pool, num_to_hire, open_pool, run_

UNHURRIED_S = 900.0
"""More than anything that ends takes, however busy the machine."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "not" / "yet" / "printed.log"


@pytest.fixture(scope="module")
def act(printed: Path) -> Iterator[Pool]:
    """Two workers, whose calls may take any time and half a GB."""
    with pool_of("judging:act", memory_gb=0.5, printed=printed) as pool:
        yield pool


def pool_of(path: str, num_workers: int = 2, timeout_s: float = UNHURRIED_S, **more: Any) -> Any:
    settings = {"num_workers": num_workers, "timeout_s": timeout_s, **more}
    return open_pool("minirl.envs.verifiers:user_verifier", {"path": path}, **settings)


def impatient(pool: Pool) -> Pool:
    """The same workers for calls that never end."""
    return replace(pool, timeout_s=0.1)


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
    until = time.monotonic() + UNHURRIED_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@settings(max_examples=20)
@given(numbers=st.lists(st.floats(allow_nan=False), max_size=40))
def test_outcomes_are_in_the_order_of_the_jobs(act, numbers):
    outcomes = call(act, *(f"number {number!r}" for number in numbers))
    assert outcomes == [Outcome("returned", number) for number in numbers]


def test_order_does_not_depend_on_who_is_faster():
    with pool_of("judging:act", num_workers=3) as pool:
        texts = [f"{'slow' if i % 3 == 0 else 'number'} {i}" for i in range(12)]
        assert [o.value for o in call(pool, *texts)] == list(range(12))
        # As many as had started before the last job was taken: on a busy machine not all.
        assert 1 < len(pool.workers) <= 3


@pytest.mark.parametrize(
    ("ready", "backlog", "waited_s", "num"),
    [
        ([], 9, 0.0, 1),
        ([], 0, 9.0, 0),
        ([True], 9, GROW_AFTER_S / 2, 0),
        ([True], 9, GROW_AFTER_S, 1),
        ([True, True], 9, GROW_AFTER_S, 2),
        ([True, False], 9, GROW_AFTER_S, 0),
        ([True] * 4, 1, 1.0, 1),
        ([True] * 4, 9, 1.0, 2),
        ([True] * 6, 9, 1.0, 0),
    ],
)
def test_workers_double_while_jobs_wait(ready, backlog, waited_s, num):
    assert num_to_hire(ready, backlog, waited_s, 6) == num


def test_jobs_that_never_wait_long_need_one_worker(monkeypatch):
    monkeypatch.setattr(verifier_pool, "GROW_AFTER_S", float("inf"))
    with pool_of("judging:act", num_workers=8) as pool:
        call(pool, *["number 1"] * 50)
        assert len(pool.workers) == 1


def test_a_hang_is_timed_out_and_its_process_killed(act):
    # field failure 54
    call(act, "number 0")
    before = pids(act)
    assert [o.kind for o in call(impatient(act), "sleep", "spin", "power")] == ["timed_out"] * 3
    assert all(is_running(pid) == (pid in pids(act)) for pid in before)
    assert call(act, "number 1") == [Outcome("returned", 1.0)]


def test_hangs_of_all_workers_delay_the_rest_but_lose_nothing(act):
    # Only here must calls be faster than a limit: by far.
    patient = replace(act, timeout_s=4.0)
    outcomes = call(patient, *["sleep"] * 2, *[f"number {i}" for i in range(10)])
    assert [o.kind for o in outcomes[:2]] == ["timed_out"] * 2
    assert [o.value for o in outcomes[2:]] == list(range(10))


class Escaped:
    """Processes that left their worker's session and group in every way that `judging` knows."""

    def __init__(self, fifo: Path) -> None:
        os.mkfifo(fifo)
        self.job = f"escape {fifo}"
        self.reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def read(self) -> bytes:
        """What some of them say; nothing when none is left."""
        assert select.select([self.reading], [], [], UNHURRIED_S)[0]
        return os.read(self.reading, 1)

    def are_up(self) -> bool:
        return all(self.read() for _ in range(NUM_ESCAPED))

    def are_gone(self) -> bool:
        gone = self.read() == b""
        os.close(self.reading)
        return gone


@pytest.fixture
def escaped(tmp_path: Path) -> Escaped:
    return Escaped(tmp_path / "fifo")


@pytest.mark.parametrize("end", ["sleep", "exit", "suicide", "crash"])
def test_what_a_function_started_ends_with_its_worker(escaped, end):
    with pool_of("judging:act", num_workers=1) as pool:
        call(pool, escaped.job)
        assert escaped.are_up()
        call(impatient(pool) if end == "sleep" else pool, end)
        assert escaped.are_gone()


def test_what_a_function_started_ends_with_the_pool(escaped):
    with pool_of("judging:act", num_workers=1) as pool:
        call(pool, escaped.job)
        assert escaped.are_up()
    assert escaped.are_gone()


def test_a_function_that_works_off_the_main_thread(act):
    found: list[Outcome] = []
    with pool_of("judging:act") as pool:
        jobs = [(impatient(pool), "spin"), (pool, "number 2")]
        thread = threading.Thread(target=lambda: [found.extend(call(*job)) for job in jobs])
        thread.start()
        thread.join()
    assert [o.kind for o in found] == ["timed_out", "returned"]


def test_an_error_comes_back_with_its_traceback(act):
    [outcome] = call(act, "fail here")
    assert outcome.kind == "raised"
    assert "judging.py" in outcome.detail
    assert "KeyError: 'here'" in outcome.detail


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("say hello", "it returned 'hello' of type str; a number is required"),
        ("say 7", "it returned '7' of type str; a number is required"),
        ("give text", "it returned '7777"),
        ("give none", "it returned None of type NoneType; a number is required"),
        ("give nothing", "it returned {}; a number is required, or a mapping from at least one"),
        ("give list", "it returned [1.0] of type list; a number"),
        ("give complex", "it returned 1j of type complex; a number"),
        ("give number", "it returned {1: 1.0}; a number is required, or a mapping from at least"),
        ("give part", "its part 'b' is None of type NoneType; a number is required"),
        ("give spelt", "its part 'a' is '1.0' of type str; a number is required"),
        ("give huge", "of type int (int too large to convert to float); a number is required"),
        ("give parts", "it returned 5000 parts of 88916 bytes as JSON, more than 65536; return"),
    ],
)
def test_what_is_no_number_is_named(act, text, told):
    [outcome] = call(act, text)
    assert (outcome.kind, told in outcome.detail) == ("raised", True), outcome.detail
    assert len(outcome.detail) < 500


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("exit", "exited with code 3"),
        ("crash", "killed by SIGSEGV"),
        ("suicide", "killed by SIGKILL"),
        ("hoard 1000", "MemoryError"),
        ("hoard 90000000", "it exceeded env.memory_gb=0.5"),
        ("take 600000000", "it exceeded env.memory_gb=0.5"),
    ],
)
def test_a_job_that_kills_two_workers_is_given_up_and_its_end_named(act, text, told):
    given_up, other = call(act, text, "number 1")
    assert (given_up.kind, told in given_up.detail) == ("died", True), given_up.detail
    assert other == Outcome("returned", 1.0)


def test_a_job_pays_for_its_own_memory_alone(act):
    """The fourth in one process would exceed the limit; it is done in a new one."""
    outcomes = call(act, *["leak 120000000"] * 12)
    assert {o.kind for o in outcomes} == {"returned"}
    assert max(o.value for o in outcomes) <= 4


def test_a_worker_that_dies_is_replaced_and_its_job_done_again(act, tmp_path):
    outcomes = call(act, f"once {tmp_path / 'mark'}", "number 2")
    assert [o.value for o in outcomes] == [1, 2]


def test_workers_killed_from_outside_in_a_batch_lose_no_verdict():
    with pool_of("judging:act", num_workers=2) as pool:
        call(pool, "number 0")
        victims = set[int]()

        def kill_all_once() -> None:
            eventually(lambda: any(worker.job is not None for worker in pool.workers))
            for pid in pids(pool):
                victims.add(pid)
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_all_once)
        killer.start()
        outcomes = call(pool, *[f"slow {i}" for i in range(8)])
        killer.join()
        assert [o.value for o in outcomes] == list(range(8))
        call(pool, "number 0")
        assert victims
        assert not victims & pids(pool)


def test_workers_killed_while_idle_are_replaced_without_blame():
    with pool_of("judging:act", num_workers=4) as pool:
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
        call(pool, "number 1")
        started = pids(pool)
        assert started
    assert not any(map(is_running, started))


@pytest.mark.parametrize("busy", ["number 0", "spin"])
def test_workers_die_with_their_parent_even_while_busy(busy, escaped):
    program = f"""
import sys; sys.path[:] = {sys.path!r}
from minirl.envs.pool import open_pool, run_
settings = {{"path": "judging:act"}}
factory = "minirl.envs.verifiers:user_verifier"
with open_pool(factory, settings, num_workers=1, timeout_s=3600) as pool:
    run_(pool, [({escaped.job!r}, {{}})])
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
        assert escaped.are_up()
        assert is_running(worker)
        parent.kill()
    assert escaped.are_gone()
    assert eventually(lambda: not is_running(worker))


def test_a_worker_imports_nothing_heavy_and_hashes_alike(act):
    values = [o.value for o in call(act, "modules", "hash a text")]
    program = "print(hash('a text') % 1000)"
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    hashed = subprocess.check_output([sys.executable, "-c", program], env=fixed)
    assert values == [0, int(hashed)]


def test_what_a_function_prints_goes_to_a_file_that_a_death_names(tmp_path, capfd):
    file = tmp_path / "new" / "printed.log"
    with pool_of("judging:act", num_workers=1, printed=file) as pool:
        [silent] = call(pool, "exit")
        assert silent.detail == "exited with code 3"
        assert not file.exists()
        [crash] = call(pool, "crash")
        assert crash.detail == f"killed by SIGSEGV; what workers printed is in {file}"
        call(pool, "shout hello")
    assert "in act\n" in file.read_text()  # the line of the crash
    assert file.read_text().endswith("hello\n")
    assert capfd.readouterr() == ("", "")


def test_the_file_of_what_is_printed_is_bounded(tmp_path):
    file, size = tmp_path / "printed.log", verifier_worker.MAX_PRINTED_BYTES
    with pool_of("judging:act", num_workers=1, printed=file) as pool:
        call(pool, *["flood"] * 5, "shout hello")
    sizes = [(tmp_path / name).stat().st_size for name in ("printed.log", "printed.log.old")]
    assert size < max(sizes)
    assert max(sizes) <= size + 2**16
    assert file.read_text().endswith("hello\n")


def test_without_a_name_the_file_is_among_the_temporary_ones(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pool_of("judging:act", num_workers=1) as pool:
        call(pool, "shout hello")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["hello\n"]


def test_workers_that_cannot_start_are_an_error_not_a_loop():
    factory = "os:_exit"
    with (
        open_pool(factory, {"status": 1}, num_workers=2, timeout_s=1.0) as pool,
        pytest.raises(
            RuntimeError, match="3 verifier workers died while they started: exited with code 1"
        ),
    ):
        run_(pool, [("text", {})])
