"""Rank processes that stay alive for the whole test session; a test sends them jobs.

Importing torch and transformers takes many seconds, so the pool grows on demand and is reused. A
job is a module-level function of a test module: `run_ranks(2, fn, x)` runs `fn(axis, x)` on two
ranks, inside a gloo group that is made and destroyed for the job, and returns both results. An
exception in a rank is raised here with the rank's traceback; a job that hangs is killed. After
either, the pool starts anew.
"""

import atexit
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from minirl.parallel import Axis

P = ParamSpec("P")
R = TypeVar("R")

PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "jaxtyping",
    "beartype",
    "hypothesis",
    "pytest",
]
"""What nearly every job imports."""

GRACE_S = 15.0
"""How long the other ranks may take after one has failed; they may be waiting for it."""


MAX_THREADS = 300
"""Gloo's loops of groups that are still held wake up for ever: ranks with more begin anew."""


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


patience_s = 1200.0
"""How long a job may take, far more than any needs, since the machine may be busy; half of it, one
exchange between ranks."""

_pool: list[_Worker] = []


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    n: int, fn: Callable[Concatenate[Axis, P], R], *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """The results of `fn(axis, *args, **kwargs)` on ranks 0 to n - 1.

    Raises:
        RankError: a rank raised, died, or did not answer within `patience_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        _grow(n)
        workers = _pool[:n]
        for rank, worker in enumerate(workers):
            job = (rank, n, str(Path(folder) / "store"), patience_s / 2, fn, args, kwargs)
            worker.pipe.send_bytes(pickle.dumps(job))
        answers = _collect(workers, timeout_s=patience_s)
        if any(_num_threads(worker) > MAX_THREADS for worker in workers):
            close_pool()
    failures = [f"rank {rank}: {a[1]}" for rank, a in enumerate(answers) if not a[0]]
    if failures:
        raise RankError("\n".join(failures))
    return [cast("R", a[1]) for a in answers]


def _num_threads(worker: _Worker) -> int:
    folder = Path(f"/proc/{worker.process.pid}/task")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def close_pool() -> None:
    """Ends every rank process, and what it started, by force."""
    for worker in _pool:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.join()
    _pool.clear()


# Before multiprocessing's own exit, which would wait for the workers.
atexit.register(close_pool)


def _grow(n: int) -> None:
    # A server imports the slow packages once; each worker is a fork of it. (A fork of the test
    # process itself would inherit its process groups and their threads.)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    while len(_pool) < n:
        here, there = context.Pipe()
        # Not a daemon: Megatron-Core saves through a process of its own.
        process = context.Process(target=_serve, args=(there, sys.path))
        process.start()
        there.close()
        _pool.append(_Worker(process, here))


def _collect(workers: list[_Worker], timeout_s: float) -> list[tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = monotonic() + timeout_s
    while len(answers) < len(workers):
        open_pipes = {w.pipe: r for r, w in enumerate(workers) if r not in answers}
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - monotonic()))
        for pipe in ready:
            rank = open_pipes[cast("Connection", pipe)]
            try:
                answers[rank] = cast("Connection", pipe).recv()
            except EOFError:
                answers[rank] = (False, "the process died")
            if not answers[rank][0]:
                deadline = min(deadline, monotonic() + GRACE_S)
        if not ready:
            break
    missing = (False, "no answer: it hangs, or waits for a rank that failed")
    complete = [answers.get(rank, missing) for rank in range(len(workers))]
    if not all(answered for answered, _ in complete):
        # Also after a mere exception: half-opened groups change the names of later ones, and torch
        # keeps meshes, by name, in caches.
        close_pool()
    return complete


def _serve(pipe: Connection, path: list[str]) -> None:
    """Runs jobs until the session ends."""
    import faulthandler

    import torch

    os.setsid()
    faulthandler.enable()
    sys.path[:] = path
    torch.set_num_threads(1)
    _check_shapes()
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            answer = (True, _in_group(*pickle.loads(job)))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _in_group(
    rank: int, size: int, store: str, timeout_s: float, fn: Any, args: Any, kwargs: Any
) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        dist.barrier()
        return fn(Axis(rank, size, dist.group.WORLD), *args, **kwargs)
    finally:
        dist.destroy_process_group()


def _check_shapes() -> None:
    """The run-time shape checks that pytest's plugin installs in the main process."""
    from jaxtyping import install_import_hook

    install_import_hook("minirl", "beartype.beartype")
