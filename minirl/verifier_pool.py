"""A pool of processes that call one function on many arguments and survive whatever it does.

A verifier reads text that a model wrote, so it may loop for ever, hold the interpreter's lock while
it does, exhaust memory or crash. None of that can be stopped from within a process: a timeout by
signal fails off the main thread and inside C code. So each call runs in a worker process with a
deadline on the wall clock; a late worker is killed and another takes its place.

What flows in: a *factory* by import path, its settings, and jobs (tuples of arguments for the
function that the factory returns). What flows out: one `Outcome` per job, in the jobs' order,
whoever computed it. Arguments travel to a worker as pickles; only JSON travels back, because a
worker that has read hostile text is not to be trusted with its parent's unpickler.

This module imports the standard library alone, so that a worker starts in milliseconds. Workers do
not import the parent's main script, hold none of its files, and die with the thread that made them.
"""

import ctypes
import importlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Literal, NamedTuple, TypeAlias, cast

Job: TypeAlias = tuple[object, ...] | None
"""The arguments of one call; None only asks whether a worker can start."""

Function: TypeAlias = Callable[..., object]

START_TIMEOUT_S = 300.0
"""Importing a verifier's libraries takes seconds, many times that on a busy machine."""

MAX_FAILED_STARTS = 3
MAX_REPLY_BYTES = 1 << 16
GROW_AFTER_S = 0.1
"""How long jobs wait before another worker is started: short batches need only one."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from minirl.verifier_pool import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """How one call ended."""

    kind: Literal["returned", "raised", "timed_out", "died"]
    """`died`: the worker vanished during the call, and so did a second one."""
    value: float = math.nan
    """What the function returned, or the sum of its parts; NaN unless `kind` is `returned`."""
    detail: str = ""
    """The traceback if it raised."""
    parts: Mapping[str, float] = {}
    """What the function returned if it returned several numbers by name."""


class _Reply(NamedTuple):
    kind: Literal["ready", "unusable", "returned", "raised", "timed_out", "died"]
    value: float = math.nan
    detail: str = ""
    parts: Mapping[str, float] = {}


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
    workers: list[_Worker]


@contextmanager
def open_pool(
    factory: str, settings: Mapping[str, object], *, num_workers: int, timeout_s: float
) -> Iterator[Pool]:
    """A pool whose workers call `factory(**settings)` once and then serve its result.

    One worker starts at once, in the background; up to `num_workers` follow when jobs queue up.
    `timeout_s` is the wall-clock limit of one call, not counting the start of a worker. On leaving,
    every worker is killed.
    """
    pool = Pool(factory, pickle.dumps(dict(settings)), num_workers, timeout_s, [])
    try:
        _hire_(pool, 1)
        yield pool
    finally:
        for worker in list(pool.workers):
            _dismiss_(pool, worker)


def run_(pool: Pool, jobs: Sequence[Job]) -> list[Outcome]:
    """Calls the function once per job; the outcomes are in the order of the jobs.

    A call that overruns is `timed_out`. A job whose worker dies is given to another worker once.
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
                        raise RuntimeError(f"{failed_starts} verifier workers {_FATE[reply.kind]}")
                else:
                    _finish_(pool, worker, reply, outcomes, (queue, suspects))
    finally:
        for worker in [w for w in pool.workers if w.job is not None]:
            _dismiss_(pool, worker)
    return [outcomes[index] for index in range(len(jobs))]


_FATE = {
    "timed_out": f"did not start within {START_TIMEOUT_S:.0f} s",
    "died": "died while they started; their standard error says why",
}


def _finish_(
    pool: Pool,
    worker: _Worker,
    reply: _Reply,
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
            outcomes[job] = Outcome(reply.kind)
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
    """Doubles the workers while jobs keep waiting; returns since when they wait."""
    now = monotonic()
    if not backlog:
        return now
    if not pool.workers:
        _hire_(pool, 1)
    elif all(w.ready for w in pool.workers) and now - backlog_since >= GROW_AFTER_S:
        _hire_(pool, min(len(pool.workers), pool.num_workers - len(pool.workers), backlog))
        return now
    return backlog_since


def _hire_(pool: Pool, num: int) -> None:
    for _ in range(num):
        ours, theirs = Pipe()
        path = json.dumps([*sys.path, str(os.getcwd())])
        command = [sys.executable, "-P", "-c", _BOOT, path, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Its own session: the terminal's Ctrl-C is ours to handle, and killing the group
                # also ends what the function may have started.
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
    with suppress(ProcessLookupError):  # Nobody of its group is left.
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


def _listen(pool: Pool, patience_s: float) -> list[tuple[_Worker, _Reply]]:
    """What the workers say next: at least one reply, or none after `patience_s`."""
    watched = [w for w in pool.workers if not w.ready or w.job is not None]
    until = min([w.deadline for w in watched], default=math.inf)
    timeout = min(max(until - monotonic(), 0.0), patience_s)
    heard = wait([w.connection for w in watched], None if timeout == math.inf else timeout)
    replies: list[tuple[_Worker, _Reply]] = []
    for worker in watched:
        if worker.connection in heard:
            replies.append((worker, _receive(worker.connection)))
        elif monotonic() >= worker.deadline:
            replies.append((worker, _Reply("timed_out")))
    return replies


def _receive(connection: Connection) -> _Reply:
    try:
        kind, value, detail, parts = json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        return _Reply(kind, float(value), str(detail), cast("dict[str, float]", parts))
    except (EOFError, OSError, ValueError):
        return _Reply("died")


def load_function(path: str) -> Function:
    """The function that `package.module:function` names.

    Raises:
        ValueError: the path has another form, the module lacks the name, or it is no function.
        ImportError: the module cannot be imported.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise ValueError(f"{path!r} does not have the form 'package.module:function'")
    names = vars(importlib.import_module(module_name))
    if name not in names:
        raise ValueError(f"module {module_name!r} has no {name!r}")
    if not callable(names[name]):
        raise ValueError(f"{path!r} is a {type(names[name]).__name__}, not a function")
    return cast(Function, names[name])


def serve(fd: int, parent: int) -> None:
    """The life of a worker: build the function, then answer jobs until the pool hangs up."""
    _die_with(parent)
    os.dup2(2, 1)  # What the function prints must not mix with the run's own output.
    with Connection(fd) as pool:
        try:
            factory, settings = pool.recv()
            function = cast(Function, load_function(factory)(**pickle.loads(settings)))
        except Exception:  # whatever a user's own code raises is told to the pool, which raises it
            _send(pool, _Reply("unusable", detail=traceback.format_exc()))
            return
        _send(pool, _Reply("ready"))
        while True:
            try:
                job = pool.recv_bytes()
            except EOFError:
                return
            _send(pool, _call(function, job))


def _call(function: Function, pickled: bytes) -> _Reply:
    try:
        job = cast(Job, pickle.loads(pickled))
        value = 0.0 if job is None else function(*job)
        if isinstance(value, Mapping):
            several = cast("Mapping[object, object]", value)
            parts = {str(name): _number(part) for name, part in several.items()}
            return _Reply("returned", sum(parts.values()), parts=parts)
        return _Reply("returned", _number(value))
    except (Exception, SystemExit):  # a function that calls sys.exit has failed too
        return _Reply("raised", detail=traceback.format_exc())


def _number(value: object) -> float:
    # numpy's and torch's scalars are numbers too; text that spells a number is a mistake.
    if isinstance(value, str | bytes):
        raise TypeError(f"returned {value!r}, where a number is required")
    return float(cast(float, value))


def _send(pool: Connection, reply: _Reply) -> None:
    # The end of a traceback says most. A character takes at most 12 bytes of JSON.
    short = reply._replace(detail=reply.detail[-4000:])
    pool.send_bytes(json.dumps(short).encode())


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, busy or not (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
