"""The times of whole runs in one table: how NeMo-RL publishes its own.

For each recipe `planned` gives one run of bin/grpo.py without validation and checkpoints, `start`
starts it under torchrun in a folder of its own, `averages` reads its `metrics.jsonl`, and `table`
shows the means over a window of steps. Recipes of both backends in one table hold these against
each other.

Source: the columns, and the window of steps 22 to 29, of the tables in "Reinforcement Learning with
NVIDIA NeMo-RL: Megatron-Core Support for Optimized Training Throughput" (NVIDIA, 2025).
"""

import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from minirl.config.loader import load, refuse
from minirl.config.run import GrpoRun, check_launch
from minirl.log import metrics_path, prepare_folder, read_metrics

SET_HERE = {
    "grpo.val_period": 0,
    "grpo.val_at_start": False,
    "grpo.val_at_end": False,
    "grpo.val_greedy": False,
    "logger.num_val_samples_to_print": 0,
    "checkpointing.enabled": False,
}
"""What every run has: nothing but steps."""

COLUMNS = {
    "step, s": ("time/total_s",),
    "training, s": ("time/training_s",),
    "refit, s": ("time/refit_s",),
    "generation, s": ("time/generation_s",),
    "log-probs, s": ("time/logprobs_s",),
    "tokens/sample": ("train/prompt_tokens", "train/response_tokens"),
    "tokens/s/rank": ("perf/tokens_per_s_per_rank",),
    "non-padding": ("perf/training_non_padding",),
    "imbalance": ("perf/rank_imbalance",),
    "MFU": ("perf/training_mfu",),
}
"""Headings, and the metrics whose sum stands under each."""
SPEED = "tokens/s/rank"


class Window(NamedTuple):
    """Steps from `first` to `last`, both included."""

    first: int
    last: int


class Run(NamedTuple):
    """One run to be timed."""

    label: str
    folder: Path
    arguments: tuple[str, ...]
    """Of bin/grpo.py."""


# ------------------------------------------------------------------------------- what is to be run


def window_of(text: str, steps: int) -> Window:
    """The window that `text` names, within a run of `steps` steps.

    >>> window_of("22-29", steps=30)
    Window(first=22, last=29)

    Raises:
        ValueError: it is no window, or not within the run.
    """
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if found is None:
        raise ValueError(f"--window is {text!r}; expected its first and last step, as 22-29")
    window = Window(int(found[1]), int(found[2]))
    refuse(
        not 1 <= window.first <= window.last <= steps,
        f"--window is {text!r}, which is not within steps 1-{steps} of --steps {steps}; raise the "
        "latter, or name steps that are",
    )
    return window


def planned(
    recipes: Sequence[Path], overrides: Sequence[str], steps: int, num_ranks: int | None
) -> list[Run]:
    """All runs, in the order of the table, each with a config that loads.

    `num_ranks` is None where it is not known; then it is checked by the runs.

    Raises:
        ValueError: an override is of a key that is set here, or a recipe does not load or does not
            suit the number of ranks.
    """
    _refuse_overlap(overrides, {*SET_HERE, "grpo.max_num_steps"})
    runs: list[Run] = []
    for recipe in recipes:
        asked = load(recipe, overrides, GrpoRun)
        folder = Path(asked.logger.log_dir) / "benchmark" / f"{len(runs) + 1}-{recipe.stem}"
        own = {
            **SET_HERE,
            "grpo.max_num_steps": steps,
            # Every pass over the data has at least one step.
            "grpo.max_num_epochs": max(asked.grpo.max_num_epochs, steps),
            "logger.log_dir": str(folder),
        }
        added = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in own.items())
        texts = (*overrides, *added)
        run = load(recipe, texts, GrpoRun)
        if num_ranks is not None:
            check_launch(run, num_ranks)
        runs.append(Run(recipe.stem, folder, ("--config", str(recipe), *texts)))
    return runs


def _refuse_overlap(overrides: Sequence[str], keys: Collection[str]) -> None:
    """Refuses overrides that a benchmark would undo, as keys, their sections or their parts."""
    for text in overrides:
        key = text.partition("=")[0]
        both = sorted(k for k in keys if f"{k}.".startswith(f"{key}.") or key.startswith(f"{k}."))
        refuse(
            bool(both),
            f"override {text!r}: a benchmark sets {', '.join(both)} itself; remove it (--steps "
            "sets steps)",
        )


# --------------------------------------------------------------------------------- runs and figures


def command_of(run: Run, program: Path, torchrun: Sequence[str]) -> list[str]:
    """The command line of a run: `program` is bin/grpo.py, `torchrun` the launcher's arguments."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(*torchrun, str(program), *run.arguments),
    ]


def stderr_path(run: Run) -> Path:
    """Where a run's warnings and errors on this machine go; what else it shows is shown."""
    return run.folder / f"stderr-{platform.node()}.txt"


def start(run: Run, command: Sequence[str]) -> int:
    """Runs `command` to its end, and returns its status.

    Raises:
        ValueError: the run's folder cannot be written.
    """
    prepare_folder(run.folder, "logger.log_dir")
    with stderr_path(run).open("w") as errors:
        return subprocess.run(command, stderr=errors, check=False).returncode


def failure(run: Run, status: int, num_lines: int = 60) -> str:
    """What to say of a run that failed: the end of its stderr, where torchrun's report stands."""
    lines = stderr_path(run).read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join([*lines, f"{run.label} failed with status {status}; see {stderr_path(run)}"])


def measured(run: Run, window: Window) -> dict[str, float]:
    """The means of a finished run; see `averages`."""
    path = metrics_path(run.folder)
    try:
        return averages(read_metrics(path), window)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: {error}") from error


def averages(lines: Sequence[Mapping[str, int | float | None]], window: Window) -> dict[str, float]:
    """The mean of each metric over the steps of the window that have it.

    A number that was not finite (null) counts as absent.

    Raises:
        ValueError: a step of the window is missing.
    """
    steps = range(window.first, window.last + 1)
    chosen = [line for line in lines if line["step"] in steps]
    missing = sorted(set(steps) - {line["step"] for line in chosen})
    refuse(
        bool(missing),
        f"steps {missing} of the window {window.first}-{window.last} are missing; the run must "
        "take them all",
    )
    found: dict[str, list[float]] = {}
    for line in chosen:
        for name, x in line.items():
            if x is not None and name != "step":
                found.setdefault(name, []).append(x)
    return {name: math.fsum(xs) / len(xs) for name, xs in found.items()}


def table(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Markdown: a row for each (label, means); the last column is the speed over the first row's.

    A figure whose metrics a run lacks is `-`.
    """
    cells = [["run", *COLUMNS, "ratio"], ["---", *["---:"] * (len(COLUMNS) + 1)]]
    figures = [
        {heading: _sum(means, names) for heading, names in COLUMNS.items()} for _, means in rows
    ]
    for (label, _), found in zip(rows, figures, strict=True):
        mine, first = found[SPEED], figures[0][SPEED]
        ratio = mine / first if mine is not None and first else None
        cells.append([label, *(shown(x) for x in found.values()), shown(ratio)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _sum(means: Mapping[str, float], names: Sequence[str]) -> float | None:
    if any(name not in means for name in names):
        return None
    return math.fsum(means[name] for name in names)


def shown(x: float | None) -> str:
    """A number with three digits, or all before the point where these are more.

    >>> [shown(x) for x in (12345.6, 28.04, 0.00312, 0.0, None)]
    ['12346', '28.0', '0.00312', '0', '-']
    """
    if x is None:
        return "-"
    if x == 0:
        return "0"
    return f"{x:.{max(0, 2 - math.floor(math.log10(abs(x))))}f}"
