"""A pool of processes that call one function on many arguments and survive whatever it does.

A verifier reads text that a model wrote, so it may loop for ever, hold the interpreter's lock while
it does, exhaust memory or crash. None of that can be stopped from within a process: a timeout by
signal fails off the main thread and inside C code. So each call runs in a worker process with a
deadline on the wall clock; a late worker is killed and another takes its place.

What flows in: a *factory* by import path, its settings, and jobs (tuples of arguments for the
function that the factory returns). What flows out: one `Outcome` per job, in the jobs' order,
whoever computed it. Arguments travel to a worker as pickles; only JSON travels back, because a
worker that has read hostile text is not to be trusted with its parent's unpickler.

Workers (`minirl.envs.worker`) do not import the parent's main script, hold none of its files,
and die with the thread that made them, as does whatever their function started.
"""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Literal, NamedTuple, cast

from minirl.envs.worker import MAX_REPLY_BYTES, Job, Reply

START_TIMEOUT_S = 300.0
"""Importing a verifier's libraries takes seconds, many times that on a busy machine."""

MAX_FAILED_STARTS = 3
STOP_TIMEOUT_S = 60.0
"""A worker's guard that takes longer to end everything is killed itself."""

GROW_AFTER_S = 0.1
"""How long jobs wait before another worker is started: short batches need only one."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from minirl.envs.worker import work; work(*json.loads(sys.argv[2]))"
)


class Outcome(NamedTuple):
    """How one call ended."""

    kind: Literal["returned", "raised", "timed_out", "died"]
    """`died`: the worker vanished during the call, and so did a second one."""
    value: float = math.nan
    """What the function returned, or the sum of its parts; NaN unless `kind` is `returned`."""
    detail: str = ""
    """The traceback if it raised, why its return is no number, or how its last worker died."""
    parts: Mapping[str, float] = {}
    """What the function returned if it returned several numbers by name."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    """Of its start, then of its job; infinite while it is idle."""
    ready: bool = False
    job: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """A handle on running workers. One thread at a time may use it."""

    factory: str
    settings: bytes
    num_workers: int
    timeout_s: float
    memory_gb: float
    printed: Path
    workers: list[_Worker]


@contextmanager
def open_pool(
    factory: str,
    settings: Mapping[str, object],
    *,
    num_workers: int,
    timeout_s: float,
    memory_gb: float = math.inf,
    printed: Path | None = None,
) -> Iterator[Pool]:
    """A pool whose workers call `factory(**settings)` once and then serve its result.

    One worker starts at once, in the background; up to `num_workers` follow when jobs queue up.
    `timeout_s` is the wall-clock limit of one call, not counting the start of a worker;
    `memory_gb` limits the private memory of each process. What workers print is appended to the
    file `printed`, by default one in the folder of temporary files; it is made when they do. On
    leaving, every worker is killed with whatever it started.
    """
    file = printed or Path(tempfile.gettempdir(), f"minirl-verifiers-{os.urandom(8).hex()}.log")
    settled = pickle.dumps(dict(settings))
    pool = Pool(factory, settled, num_workers, timeout_s, memory_gb, file, [])
    try:
        _hire_(pool, 1)
        yield pool
    finally:
        for worker in list(pool.workers):
            _dismiss_(pool, worker)


def run_(pool: Pool, jobs: Sequence[Job]) -> list[Outcome]:
    """Calls the function once per job; the outcomes are in the order of the jobs.

    A call that overruns is `timed_out`. A job whose worker dies (or meets its
    limit of memory) is given to another worker once.
    After an exception no call is left running.

    Raises:
        RuntimeError: the factory raised (the message holds its traceback), or workers die or hang
            while they start, `MAX_FAILED_STARTS` times in a row.
    """
    outcomes: dict[int, Outcome] = {}
    queue = deque(range(len(jobs)))
    suspects: set[int] = set()
    failed_starts = 0
    backlog_since = monotonic()
    for worker in [w for w in pool.workers if w.process.poll() is not None]:
        _dismiss_(pool, worker)
    try:
        while len(outcomes) < len(jobs):
            _assign_(pool, queue, jobs)
            backlog_since = _grow_(pool, len(queue), backlog_since)
            for worker, reply in _listen(pool, GROW_AFTER_S if queue else math.inf):
                if reply.kind == "unusable":
                    raise RuntimeError(reply.detail)
                if reply.kind == "ready":
                    worker.ready, worker.deadline = True, math.inf
                    failed_starts, backlog_since = 0, monotonic()
                elif worker.job is None:
                    _dismiss_(pool, worker)
                    failed_starts += 1
                    if failed_starts == MAX_FAILED_STARTS:
                        fate = _FATE[reply.kind] + _cause(pool, reply)
                        raise RuntimeError(f"{failed_starts} verifier workers {fate}")
                else:
                    _finish_(pool, worker, reply, outcomes, (queue, suspects))
    finally:
        for worker in [w for w in pool.workers if w.job is not None]:
            _dismiss_(pool, worker)
    return [outcomes[index] for index in range(len(jobs))]


_FATE = {
    "timed_out": f"did not start within {START_TIMEOUT_S:.0f} s",
    "died": "died while they started: ",
}


def _cause(pool: Pool, reply: Reply) -> str:
    said = f"; what workers printed is in {pool.printed}" if pool.printed.exists() else ""
    return reply.detail + said


def _finish_(
    pool: Pool,
    worker: _Worker,
    reply: Reply,
    outcomes: dict[int, Outcome],
    again: tuple[deque[int], set[int]],
) -> None:
    """Books the end of a worker's job, which may be to try it again."""
    queue, suspects = again
    job = cast(int, worker.job)
    match reply.kind:
        case "returned" | "raised":
            worker.job, worker.deadline = None, math.inf
            outcomes[job] = Outcome(reply.kind, reply.value, reply.detail, reply.parts)
        case "died" if job not in suspects:
            # The job may be innocent: somebody else may have killed the worker.
            _dismiss_(pool, worker)
            suspects.add(job)
            queue.appendleft(job)
        case "died" | "timed_out":
            _dismiss_(pool, worker)
            outcomes[job] = Outcome(reply.kind, detail=_cause(pool, reply))
        case "ready" | "unusable":
            raise AssertionError(f"a working verifier said {reply.kind!r}")


def _assign_(pool: Pool, queue: deque[int], jobs: Sequence[Job]) -> None:
    """Gives a job to every idle worker; drops workers that died while they were idle."""
    for worker in [w for w in pool.workers if w.ready and w.job is None]:
        if not queue:
            return
        try:
            worker.connection.send(jobs[queue[0]])
        except (BrokenPipeError, ConnectionResetError):
            _dismiss_(pool, worker)
            continue
        worker.job, worker.deadline = queue.popleft(), monotonic() + pool.timeout_s


def _grow_(pool: Pool, backlog: int, backlog_since: float) -> float:
    """Starts workers while jobs keep waiting; returns since when they wait."""
    now = monotonic()
    ready = [worker.ready for worker in pool.workers]
    num = num_to_hire(ready, backlog, now - backlog_since, pool.num_workers)
    _hire_(pool, num)
    return now if num or not backlog else backlog_since


def num_to_hire(ready: Sequence[bool], backlog: int, waited_s: float, most: int) -> int:
    """How many workers to start beside those that are ready, or are about to be.

    Jobs that wait double them after `GROW_AFTER_S`, but not while a worker starts.
    """
    if not ready:
        return min(backlog, 1)
    if not all(ready) or waited_s < GROW_AFTER_S:
        return 0
    return min(len(ready), most - len(ready), backlog)


def _hire_(pool: Pool, num: int) -> None:
    for _ in range(num):
        ours, theirs = Pipe()
        path = [*sys.path, os.getcwd()]
        life = [theirs.fileno(), os.getpid(), pool.memory_gb, str(pool.printed)]
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(path), json.dumps(life)]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Its own session: the terminal's Ctrl-C is ours to handle.
                start_new_session=True,
                # String hashes order sets; a verdict must not depend on their seed.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        worker = _Worker(process, ours, monotonic() + START_TIMEOUT_S)
        pool.workers.append(worker)
        # If it died already, `_listen` reads the end of its stream.
        with suppress(BrokenPipeError, ConnectionResetError):
            ours.send((pool.factory, pool.settings))


def _dismiss_(pool: Pool, worker: _Worker) -> None:
    pool.workers.remove(worker)
    worker.connection.close()
    worker.process.terminate()
    worker.process.send_signal(signal.SIGCONT)  # Somebody may have stopped it.
    try:
        worker.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()


def _listen(pool: Pool, patience_s: float) -> list[tuple[_Worker, Reply]]:
    """What the workers say next: at least one reply, or none after `patience_s`."""
    watched = [w for w in pool.workers if not w.ready or w.job is not None]
    until = min([w.deadline for w in watched], default=math.inf)
    timeout = min(max(until - monotonic(), 0.0), patience_s)
    heard = wait([w.connection for w in watched], None if timeout == math.inf else timeout)
    replies: list[tuple[_Worker, Reply]] = []
    for worker in watched:
        if worker.connection in heard:
            replies.append((worker, _receive(worker.connection)))
        elif monotonic() >= worker.deadline:
            replies.append((worker, Reply("timed_out")))
    return replies


def _receive(connection: Connection) -> Reply:
    try:
        kind, value, detail, parts = json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        return Reply(kind, float(value), str(detail), cast("dict[str, float]", parts))
    except (EOFError, OSError, ValueError):
        return Reply("died", detail="its guard was killed")
