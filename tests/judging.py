"""Reward functions as a user would write them, most of them badly. They run in worker processes."""

import os
import sys
import time
from collections.abc import Mapping

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


def _spawn(value: str) -> object:
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", value)
    time.sleep(3600)
    return 0


def _once(mark: str) -> object:
    """Kills its own process the first time."""
    if os.path.exists(mark):
        return 1
    with open(mark, "x"):
        os.kill(os.getpid(), 9)
    return 0


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
    "spawn": _spawn,
    "once": _once,
    "hash": lambda value: hash(value) % 1000,
    "modules": lambda value: sum(m in sys.modules for m in ("torch", "transformers", "numpy")),
}
