"""Reward functions as a user would write them, most of them badly. They run in worker processes."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

Example = Mapping[str, float]

not_a_function = 3


def length(completion: str, example: Example) -> float:
    return len(completion) + example.get("bonus", 0)


def parts(completion: str, example: Example) -> dict[str, float]:
    return {"length": len(completion), "share": float(completion)}


def act(completion: str, example: Example) -> object:
    """Does what it reads."""
    word, _, value = completion.partition(" ")
    return ACTIONS[word](value)


def _spin(value: str) -> object:
    while True:
        pass


def _fail(value: str) -> object:
    raise KeyError(value)


def _slow(value: str) -> object:
    time.sleep(0.3)
    return float(value)


def _shout(value: str) -> object:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()
    return 0


def _setsid(hold: int) -> None:
    os.setsid()
    _stay(hold)


def _daemon(hold: int) -> None:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    _stay(hold)


def _bomb(hold: int) -> None:
    """16 processes, each in a session of its own."""
    for _ in range(4):
        os.fork()
    os.setsid()
    _stay(hold)


def _comet(hold: int) -> None:
    """One process that is never the same for long."""
    os.setsid()
    os.write(hold, b".")
    while True:
        if os.fork():
            os._exit(0)


def _stay(hold: int) -> None:
    os.write(hold, b".")
    while True:
        time.sleep(3600)


def _escape(fifo: str) -> object:
    """Leaves processes behind that hold the file open, and say one byte each when they are up."""
    for flee in (_setsid, _daemon, _bomb, _comet):
        if os.fork() == 0:
            try:
                flee(os.open(fifo, os.O_WRONLY))
            finally:
                os._exit(1)
    return 0


NUM_ESCAPED = 1 + 1 + 16 + 1

HELD: list[object] = []


def _hoard(size: str) -> object:
    """Takes memory in pieces, to the last one."""
    pieces: list[bytes] = []
    while True:
        pieces.append(b"x" * int(size))


def _leak(size: str) -> object:
    HELD.append(b"x" * int(size))
    return len(HELD)


def _once(mark: str) -> object:
    """Kills its own process the first time."""
    if os.path.exists(mark):
        return 1
    with open(mark, "x"):
        os.kill(os.getpid(), 9)
    return 0


async def later(completion: str, example: Example) -> float:
    return 1.0


def several(completion: str, example: Example) -> Iterator[float]:
    yield 1.0


def short(completion: str) -> float:
    return 1.0


def column(completion: str, example: Example) -> float:
    return example["answer"]


GIVEN: dict[str, Any] = {
    "none": lambda: None,
    "nothing": dict,
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "number": lambda: {1: 1.0},
    "part": lambda: {"a": 1.0, "b": None},
    "spelt": lambda: {"a": "1.0"},
    "huge": lambda: 10**400,
    "text": lambda: "7" * 10**6,
    "parts": lambda: {f"part {i}": 1.0 for i in range(5000)},
}

ACTIONS = {
    "number": float,
    "say": str,
    "sleep": lambda value: time.sleep(3600),
    "spin": _spin,
    "power": lambda value: 9**9**9 > 0,  # one operation, which holds the interpreter's lock
    "exit": lambda value: os._exit(3),
    "fail": _fail,
    "slow": _slow,
    "shout": _shout,
    "flood": lambda value: sys.stdout.write("x" * 700_000),
    "escape": _escape,
    "hoard": _hoard,
    "leak": _leak,
    "take": lambda size: len(b"x" * int(size)),
    "crash": lambda value: ctypes.string_at(0),
    "suicide": lambda value: os.killpg(0, 9),
    "give": lambda what: GIVEN[what](),
    "once": _once,
    "hash": lambda value: hash(value) % 1000,
    "modules": lambda value: sum(m in sys.modules for m in ("torch", "transformers", "numpy")),
}
