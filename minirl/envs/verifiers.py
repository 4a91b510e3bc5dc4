"""What runs in a worker of `minirl.envs.pool`: factories of functions that judge one answer.

Every factory returns `(completion, example) -> number`; `spelling_parts` is such a function itself.
The verifying libraries are imported here and in `minirl.envs.math_values`, inside functions; torch
and its kin are never imported, so that workers start fast.
"""

import difflib
import importlib
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from minirl.envs.math_answers import check_reference, judge
from minirl.envs.math_values import expression
from minirl.envs.worker import load_function
from minirl.files import writing

Verifier: TypeAlias = Callable[[str, Mapping[str, object]], float]


@runtime_checkable
class Task(Protocol):
    """A reasoning-gym dataset: generated rows and their judge."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, index: int) -> dict[str, object]:
        """Row `index`: question, answer, metadata."""
        ...

    def score_answer(self, answer: str | None, entry: Mapping[str, object]) -> float:
        """From 0 (wrong) to 1 (right)."""
        ...


def math_verifier(answer_key: str) -> Verifier:
    """Judges whether the completion states the example's answer: 1, else 0 (`math_answers`).

    Raises:
        ValueError: (from the verifier) the two cannot be compared.
    """
    _load_math_verify()
    return lambda completion, example: float(judge(completion, str(example[answer_key])))


def reference_checker() -> Callable[[str], float]:
    """A function that raises ValueError, saying why, unless its argument can be a reference."""
    _load_math_verify()

    def check(reference: str) -> float:
        check_reference(reference)
        return 1.0

    return check


def _load_math_verify() -> None:
    """Imports it and has it read once, so that no answer's deadline counts for that."""
    # It warns that its own timeouts are off. They rely on signals; the pool's deadline does not.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expression("x")


def reasoning_gym_verifier(task: str, task_kwargs: Mapping[str, Any]) -> Verifier:
    """The task's own `score_answer`, from 0 to 1."""
    return _reasoning_gym(task, task_kwargs).score_answer


def user_verifier(path: str) -> Verifier:
    """A function of the user's, by import path."""
    return cast(Verifier, load_function(path))


def reasoning_gym_writer(task: str, task_kwargs: Mapping[str, Any]) -> Callable[[str], int]:
    """A function that writes the task's rows, pickled, into a file and returns their number."""
    dataset = _reasoning_gym(task, task_kwargs)

    def write(path: str) -> int:
        # Some tasks also draw from the interpreter's own generator.
        random.seed(int(task_kwargs["seed"]))
        rows = [dataset[index] for index in range(len(dataset))]
        with writing(path):
            Path(path).write_bytes(pickle.dumps(rows))
        return len(rows)

    return write


def _reasoning_gym(task: str, task_kwargs: Mapping[str, Any]) -> Task:
    with warnings.catch_warnings():
        # A dependency of it has a questionable comparison, reported whenever it is first compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        factory: Any = importlib.import_module("reasoning_gym.factory")
    known = cast("dict[str, object]", factory.DATASETS)
    if task not in known:
        near = difflib.get_close_matches(task, known)
        raise ValueError(f"it has no such task; the nearest names are {near}")
    return cast(Task, factory.create_dataset(task, **task_kwargs))


def spelling_parts(completion: str, example: Mapping[str, object]) -> dict[str, float]:
    """Two rewards for a word to be spelled: the right answer, and the right number of letters."""
    answer = str(example["answer"])
    return {
        "answer": float(completion.lower() == answer.lower()),
        "length": float(len(completion) == len(answer)),
    }
