"""Rewards: from answers to scores, whatever the policy wrote.

`open_rewards` gives a function of answers alone; the verifier behind it runs in this rank's own
pool of processes (`minirl.envs.pool`), so an answer that makes it hang costs its time limit,
is worth 0 and is counted. Scores are in the answers' order and do not depend on which process was
faster. Answers are text here; which tokens were sampled is known elsewhere.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from minirl.config.data import DatasetConfig
from minirl.config.run import EnvConfig
from minirl.envs.pool import Outcome, Pool, open_pool, run_
from minirl.files import shorten
from minirl.types import Prompt, Score


class Answer(NamedTuple):
    """A completion as text, and what it answers."""

    prompt: Prompt
    text: str
    truncated: bool
    """It ran out of tokens. Under `reasoning_gym` such an answer is worth 0."""


RewardFn: TypeAlias = Callable[[Sequence[Answer]], list[Score]]


@contextmanager
def open_rewards(
    cfg: EnvConfig,
    dataset: DatasetConfig,
    rows: Sequence[Prompt] = (),
    folder: Path | None = None,
) -> Iterator[RewardFn]:
    """The reward function of `dataset`, and its worker processes while the context is open.

    By `env_name`:

    - `reasoning_gym`: the task's own `score_answer` on the text as it is; 1 if it gives 1, else 0,
      or what it gives if `partial_credit` is set. A truncated answer is worth 0.
    - `math`: 1 if the answer equals the example's `output_key` (`envs/math_answers.py`), else 0.
    - `package.module:function`: what `function(completion, example)` returns: a number, or several
      by name, which are the score's components and whose sum is its reward. It is loaded here, in
      a worker, and called on `rows`, each with its own `output_key` as the completion ("" without
      one), so one that is wrong fails before any model is loaded.

    An answer that exceeds `env.timeout_s` is worth 0 and marked `timed_out`. Where a built-in
    verifier fails (raises, as it does for an answer that cannot be read, or takes down two
    processes, or exceeds `env.memory_gb` in both), the reward is 0, marked `failed`. What verifiers
    print goes to a file in `folder`, one a rank.

    Raises:
        ValueError: a user function cannot be loaded, or fails on `rows` in any way; or (from the
            reward function) a reward is not finite.
        RuntimeError: (from the reward function) a user function failed; the message names the
            prompt. Or verifiers cannot be started.
    """
    factory, settings = _factory(dataset)
    with open_pool(
        f"minirl.envs.verifiers:{factory}",
        settings,
        num_workers=cfg.num_workers,
        timeout_s=cfg.timeout_s,
        memory_gb=cfg.memory_gb,
        printed=folder and folder / f"verifiers-{os.environ.get('RANK', '0')}.log",
    ) as pool:
        if factory == "user_verifier":
            _try_out_(pool, cfg, dataset, rows)
        yield partial(_scores, pool, dataset)


def _try_out_(pool: Pool, cfg: EnvConfig, dataset: DatasetConfig, rows: Sequence[Prompt]) -> None:
    """Loads the user's function and calls it on some rows."""
    name = f"env_name={dataset.env_name!r}"
    try:
        run_(pool, [None])
    except RuntimeError as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    for row in rows:
        text = str(row.example.get(dataset.output_key, ""))
        try:
            if _scores(pool, dataset, [Answer(row, text, truncated=False)])[0].timed_out:
                raise ValueError(f"took longer than env.timeout_s={cfg.timeout_s:g}")
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{name} cannot be used. It was called as function({text!r:.200}, row {row.id}), "
                f"with the row's columns {sorted(row.example)}, and must return a finite number, "
                f"or several by name; but {error}"
            ) from error


def _factory(dataset: DatasetConfig) -> tuple[str, Mapping[str, object]]:
    match dataset.env_name:
        case "math":
            return "math_verifier", {"answer_key": dataset.output_key}
        case "reasoning_gym":
            settings = {"task": dataset.task, "task_kwargs": dataset.task_kwargs}
            return "reasoning_gym_verifier", settings
        case path:
            return "user_verifier", {"path": path}


def _scores(pool: Pool, dataset: DatasetConfig, answers: Sequence[Answer]) -> list[Score]:
    def is_lost(answer: Answer) -> bool:
        return answer.truncated and dataset.env_name == "reasoning_gym"

    judged = [(a.text, a.prompt.example) for a in answers if not is_lost(a)]
    outcomes = iter(run_(pool, judged))
    return [
        Score(0.0) if is_lost(answer) else _score(next(outcomes), answer.prompt, dataset)
        for answer in answers
    ]


def _score(outcome: Outcome, prompt: Prompt, dataset: DatasetConfig) -> Score:
    built_in = dataset.env_name in ("math", "reasoning_gym")
    match outcome.kind:
        case "timed_out":
            return Score(0.0, timed_out=True)
        case "raised" | "died" if built_in:
            return Score(0.0, failed=True)
        case "raised" | "died":
            columns = shorten(str(sorted(prompt.example)))
            missing = f"\nits row has the columns {columns}" if "KeyError" in outcome.detail else ""
            raise RuntimeError(
                f"reward function {dataset.env_name!r} {outcome.kind} on prompt {prompt.id}"
                f"{', twice' if outcome.kind == 'died' else ''}: {outcome.detail}" + missing
            )
        case "returned":
            reward = outcome.value
    if not math.isfinite(reward):
        raise ValueError(
            f"env_name={dataset.env_name!r} gave prompt {prompt.id} the reward {reward}; "
            "a reward must be a finite number"
        )
    exact = built_in and not dataset.partial_credit
    return Score(float(reward >= 1.0) if exact else reward, outcome.parts)
