"""What a worker of `minirl.envs.pool` is: a process that calls one function, and its guard.

The pool starts the *guard*, which forks the process that calls the function and outlives it. The
guard is a subreaper: whatever the function starts, in whatever session, becomes the guard's child
as soon as its own parent is gone. When the function's process ends, when the pool asks for it, or
when the pool itself is gone, the guard kills until it has no child left. This needs no privileges.
(A namespace of processes would, in most containers; and in it all workers would have the same
process ids, by which functions name their temporary files.)

The function's process has a limit on its memory. What it prints goes through the guard into a
file. A function still runs as the user, who may kill the guard and the run: this holds accidents,
not attackers.

This module imports the standard library alone, so that a worker starts in milliseconds.
"""

import ctypes
import faulthandler
import importlib
import json
import math
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Literal, NamedTuple, NoReturn, SupportsFloat, SupportsIndex, TypeAlias, cast

Job: TypeAlias = tuple[object, ...] | None
"""The arguments of one call; None only asks whether a worker can start."""

Function: TypeAlias = Callable[..., object]

MAX_REPLY_BYTES = 1 << 16
MAX_PRINTED_BYTES = 1 << 20
"""A longer file of what workers printed is renamed, over the one renamed before, and begun anew."""

_WANTED = "a number is required, or a mapping from at least one name to numbers"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EVENTS = {signal.SIGTERM, signal.SIGCHLD}


class Reply(NamedTuple):
    """What a worker tells the pool; `timed_out` is what the pool tells itself."""

    kind: Literal["ready", "unusable", "returned", "raised", "timed_out", "died"]
    value: float = math.nan
    detail: str = ""
    parts: Mapping[str, float] = {}


def work(connection: int, parent: int, memory_gb: float, printed: str) -> None:
    """The life of a worker: forks, guards, and returns only in the process that served."""
    os.set_inheritable(connection, False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _hear_of_the_end_of(parent, signal.SIGTERM)
    guard, (reading, writing) = os.getpid(), os.pipe()
    if worker := os.fork():
        os.close(writing)
        _guard(worker, connection, reading, Path(printed))
    # A session of its own: a function that kills its process group spares the guard.
    os.setsid()
    _hear_of_the_end_of(guard, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)
    faulthandler.enable()  # A crash in C code names the line of Python that led to it.
    _serve(connection, memory_gb)


def _guard(worker: int, connection: int, reading: int, printed: Path) -> NoReturn:
    """Waits for the end of the worker, the pool's signal or the pool's end; leaves nothing alive.

    It holds its end of the connection to the last, so the pool hears of the end when all is over.
    """
    keeper = Thread(target=_keep, args=(reading, printed), daemon=True)
    keeper.start()
    fate = ""
    while not fate and signal.sigwait(_EVENTS) == signal.SIGCHLD:
        fate = _reap(worker)
    _end_children()
    keeper.join(60.0)
    with suppress(OSError):  # The pool hung up.
        _send(Connection(connection), Reply("died", detail=fate or "ended from outside"))
    os._exit(0)


def _reap(worker: int) -> str:
    """Buries whoever has ended; how the worker did if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            names = {-s.value: f"killed by {s.name}" for s in signal.Signals}
            by_signal = names.get(code, f"killed by signal {-code}")
            return by_signal if code < 0 else f"exited with code {code}"
        if pid == 0:
            return ""


def _end_children() -> None:
    """Kills children until none is left; the children of the killed become children meanwhile."""
    while True:
        found = _kill_children()
        with suppress(ChildProcessError):
            pid, _ = os.waitpid(-1, 0 if found else os.WNOHANG)
            while pid:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            continue
        return


def _kill_children() -> int:
    """Kills every child that it sees, with its group; returns how many it saw.

    A child that forks and exits again and again is gone before it is killed, but what it was is
    seen until it is reaped, and its group is what it is now.
    """
    found = 0
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True):
        with suppress(OSError):  # It has ended, or has become another user's.
            # The name, in brackets, may hold anything.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == os.getpid():
                found += 1
                if (group := int(fields[2])) != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
    return found


def _keep(reading: int, printed: Path) -> None:
    while chunk := os.read(reading, 1 << 16):
        # A full disk, or a worker that renames the file first, must not stop the verdicts.
        with suppress(OSError):
            printed.parent.mkdir(parents=True, exist_ok=True)
            with printed.open("ab") as file:
                file.write(chunk)
                if file.tell() > MAX_PRINTED_BYTES:
                    printed.replace(f"{printed}.old")


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


def _serve(connection: int, memory_gb: float) -> None:
    """Builds the function, then answers jobs until the pool hangs up."""
    _limit_memory(memory_gb)
    with Connection(connection) as pool:
        try:
            factory, settings = pool.recv()
            function = cast(Function, load_function(factory)(**pickle.loads(settings)))
        except Exception as error:  # whatever a user's own code raises is for the pool to raise
            _send(pool, Reply("unusable", detail=_told(error, memory_gb)))
            return
        _send(pool, Reply("ready"))
        while True:
            try:
                job = pool.recv_bytes()
            except EOFError:
                return
            _send(pool, _call(function, job, memory_gb))


def _call(function: Function, pickled: bytes, memory_gb: float) -> Reply:
    try:
        job = cast(Job, pickle.loads(pickled))
        value = 0.0 if job is None else function(*job)
    except MemoryError as error:
        # Perhaps it is earlier calls that hold the memory: the pool tries again in a new process.
        return Reply("died", detail=_told(error, memory_gb))
    except (Exception, SystemExit) as error:  # a function that calls sys.exit has failed too
        return Reply("raised", detail=_told(error, memory_gb))
    try:
        return _returned(value)
    except TypeError as error:
        return Reply("raised", detail=str(error))


def _returned(value: object) -> Reply:
    if not isinstance(value, Mapping):
        return Reply("returned", _number(value, "it returned"))
    several = cast("Mapping[object, object]", value)
    if not (several and all(isinstance(name, str) for name in several)):
        raise TypeError(f"it returned {_short(several)}; {_WANTED}")
    parts = {str(n): _number(part, f"its part {n!r} is") for n, part in several.items()}
    return Reply("returned", sum(parts.values()), parts=parts)


def _number(value: object, what: str) -> float:
    # numpy's and torch's scalars are numbers too; text that spells a number is a mistake.
    try:
        if isinstance(value, SupportsFloat | SupportsIndex):
            return float(value)
        reason = ""
    except Exception as error:  # whatever the value's own conversion raises
        reason = f" ({error})"
    raise TypeError(f"{what} {_short(value)} of type {type(value).__name__}{reason}; {_WANTED}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _told(error: BaseException, memory_gb: float) -> str:
    """The traceback, and the limit if it is what was met."""
    lack = ""
    if isinstance(error, MemoryError):
        resource.setrlimit(resource.RLIMIT_DATA, (hard := _hard_limit(), hard))  # room to tell
        limit = f"exceeded env.memory_gb={memory_gb:g}, or " if memory_gb < math.inf else ""
        lack = f"it {limit}asked for more than there is\n"
    return lack + "".join(traceback.format_exception(error))


def _send(pool: Connection, reply: Reply) -> None:
    # The end of a traceback says most.
    first, detail = reply.detail[:200], reply.detail[-4000:]
    short = detail if len(reply.detail) <= 4200 else f"{first} [...] {detail}"
    message = json.dumps(reply._replace(detail=short)).encode()
    if len(message) > MAX_REPLY_BYTES:
        size = f"{len(reply.parts)} parts of {len(message)} bytes as JSON"
        facts = f"it returned {size}, more than {MAX_REPLY_BYTES}; return fewer, of shorter names"
        message = json.dumps(Reply("raised", detail=facts)).encode()
    pool.send_bytes(message)


def _hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[1]


def _limit_memory(memory_gb: float) -> None:
    """Limits what may be written, not addresses: libraries reserve far more of those than they use.

    So 64 threads of torch are 2.2 GB here and 5.5 GB of addresses; sympy 0.05, numpy 0.05.
    """
    if memory_gb < math.inf:
        wanted, hard = int(memory_gb * 1e9), _hard_limit()
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _hear_of_the_end_of(parent: int, number: signal.Signals) -> None:
    """Asks the kernel for a signal when the parent dies, even if it died just now (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
