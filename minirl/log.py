"""Where a run's numbers and words go: a file, the terminal; on rank 0 only.

The only module that prints. `metrics.jsonl` gets one JSON object a step; a number that is not
finite is written as null, which JSON can hold. The terminal shows one line a step over a progress
bar, and plain lines where it is not a terminal.
"""

import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minirl.files import parse_json, shorten, writing


@dataclass(frozen=True, slots=True)
class Log:
    """Functions of an open log. On ranks other than 0 they do nothing."""

    step: Callable[[int, Mapping[str, float]], None]
    """Record the metrics of a step and show its line."""
    say: Callable[[str], None]
    """Show a sentence."""


SILENT = Log(step=lambda step, metrics: None, say=lambda text: None)
"""The log of every rank but the first."""

SHOWN = {
    "train/reward_mean": "reward",
    "train/loss": "loss",
    "train/grad_norm": "grad",
    "train/token_mult_prob_error": "mult_err",
    "val/accuracy": "val",
    "val/accuracy_greedy": "val_greedy",
    "time/total_s": "s",
}
"""Metric names of the line a step, with their short names."""


def metrics_path(run_dir: Path) -> Path:
    """The file of one JSON object a step."""
    return run_dir / "metrics.jsonl"


def prepare_folder(folder: Path, key: str) -> None:
    """Makes the folder that `key` names, and tries whether it can be written.

    Raises:
        ValueError: it cannot.
    """
    shown = shorten(str(folder))
    if shown.startswith("~"):
        raise ValueError(f"{key}: '~' is not expanded; write {str(folder.expanduser())!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{key}: {shown!r} cannot be written ({error.strerror}); "
            "name a folder that you may write to"
        ) from error


def prepare_run_dir(run_dir: Path, config_yaml: str, *, resumed_step: int) -> None:
    """Writes the resolved config into the run folder, which exists, on the first rank.

    An earlier `metrics.jsonl` is kept under a numbered name; the new one begins with its lines up
    to `resumed_step` (0: none), since the steps after that are taken again.
    """
    if not is_first_rank():
        return
    with writing(run_dir / "config.yaml"):
        (run_dir / "config.yaml").write_text(config_yaml, encoding="utf-8")
    path = metrics_path(run_dir)
    if not path.exists():
        return
    names = (re.fullmatch(r"metrics-(\d+)\.jsonl", p.name) for p in run_dir.iterdir())
    numbers = [int(name[1]) for name in names if name]
    kept = path.rename(run_dir / f"metrics-{max(numbers, default=0) + 1}.jsonl")
    lines = [json.dumps(x) for x in read_metrics(kept) if (x["step"] or 0) <= resumed_step]
    if resumed_step > 0:
        with writing(path):
            path.write_text("".join(f"{line}\n" for line in lines))


@contextmanager
def open_log(run_dir: Path, first_step: int, last_step: int, rank: int) -> Iterator[Log]:
    """Rank 0 appends to `<run_dir>/metrics.jsonl` and shows progress; other ranks are silent."""
    if rank != 0:
        yield SILENT
        return
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    # Around the file, because closing it writes again what it could not take.
    with writing(metrics_path(run_dir)), metrics_path(run_dir).open("a") as file:
        if not console.is_terminal:
            yield Log(
                step=lambda step, metrics: _plain(file, step, metrics),
                say=lambda text: _print(text),
            )
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("steps", total=last_step, completed=first_step)

            def show(step: int, metrics: Mapping[str, float]) -> None:
                _write(file, step, metrics)
                progress.console.print(_line(step, metrics))
                progress.update(task, completed=step)

            yield Log(step=show, say=progress.console.print)


def _write(file: TextIO, step: int, metrics: Mapping[str, float]) -> None:
    clean = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
    file.write(json.dumps({"step": step, **clean}) + "\n")
    file.flush()


def _plain(file: TextIO, step: int, metrics: Mapping[str, float]) -> None:
    _write(file, step, metrics)
    _print(_line(step, metrics))


def _print(text: str) -> None:
    with writing("standard output"):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _line(step: int, metrics: Mapping[str, float]) -> str:
    """The line of one step.

    >>> _line(3, {"train/loss": 0.25, "time/total_s": 1.5})
    'step    3  loss 0.2500  s 1.5000'
    """
    shown = [f"{short} {metrics[name]:.4f}" for name, short in SHOWN.items() if name in metrics]
    return "  ".join([f"step {step:>4}", *shown])


def read_metrics(path: Path) -> list[dict[str, int | float | None]]:
    """The lines of a `metrics.jsonl`, in order; a last one that a killed run left torn is not."""
    lines = path.read_text().splitlines(keepends=True)
    whole = enumerate((line for line in lines if line.endswith("\n")), 1)
    return [parse_json(line, f"{path}, line {number}") for number, line in whole]


ALARMS = {
    "train/empty_updates": "updates had nothing to train on and were left out",
    "train/nonfinite_updates": "updates had a gradient that is not finite and were left out",
    "train/overflow_tokens": "tokens had log-probs too far apart for their ratio",
    "train/without_advantage": "step had nothing but advantages of 0 (every group got one reward "
    "throughout) and taught nothing; use problems that are neither too hard nor too easy, more "
    "grpo.num_generations_per_prompt, or grpo.use_dynamic_sampling",
    "train/tokens_without_text": "sampled tokens are beyond the tokenizer's vocabulary and have no "
    "text; was policy.model_name trained with policy.tokenizer.name?",
    "train/verifier_timeouts": "answers exceeded env.timeout_s and were worth 0",
    "train/verifier_failures": "answers broke the verifier and were worth 0",
}
"""Metrics that count what should not happen often, and what to say when it did."""


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """A sentence for each alarm that a step's metrics raise.

    >>> alarms({"train/empty_updates": 1.0, "train/verifier_timeouts": 0.0})
    ['  warning: 1 updates had nothing to train on and were left out']
    """
    found = {name: metrics.get(name, 0.0) for name in ALARMS}
    return [f"  warning: {n:.0f} {ALARMS[name]}" for name, n in found.items() if n > 0]


def curve(
    points: Mapping[str, Sequence[tuple[int, float]]], title: str, label: str = "step"
) -> str:
    """A chart of named curves for a terminal, in plain characters; `label` says what x is."""
    import plotext

    figure = plotext.figure.clear()
    figure.theme("colorless").plot_size(72, 18).title(title).label(label)
    for marker, (name, pairs) in zip(cycle("ox+*"), points.items(), strict=False):
        xs, ys = zip(*pairs, strict=True)
        figure.draw(figure.signal(list(xs), list(ys), marker=marker).label(name))
    return str(plotext.uncolorize(figure.build().string()))  # pyright: ignore[reportUnknownArgumentType] # plotext is untyped


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds that the block took to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def is_first_rank() -> bool:
    """Whether this process is torchrun's first, or the only one. Known before any group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Shows a sentence, on the first rank."""
    if is_first_rank():
        _print(text)


def run_command(app: Callable[..., object]) -> None:
    """Runs a command line to its end; a wrong argument is told as any other error."""
    import typer

    with user_errors():
        try:
            status = app(standalone_mode=False)
        except typer.TyperException as error:
            raise ValueError(f"{error.format_message()} (--help shows the command)") from error
    raise SystemExit(status)


GRACE_S = 30.0
"""How long a rank that failed may take to close what it opened."""


@contextmanager
def user_errors(folder: Path | None = None) -> Iterator[None]:
    """Ends the process with status 2 and a message: the last that the terminal shows, and once.

    Of ValueErrors it is all there is to say until a run has its `folder`. Of the rest the traceback
    goes to a file, there if it is given, which the message names; MINIRL_TRACEBACK=1 shows it
    instead. Ctrl-C ends the process without a word.

    To be entered last, so that the message is out before anything is closed.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        _tell(_message(error, folder))
        raise SystemExit(2) from error


def _message(error: Exception, folder: Path | None) -> str:
    trace = "".join(traceback.format_exception(error))
    if os.environ.get("MINIRL_TRACEBACK"):
        return trace.rstrip()
    text = str(error).rstrip()
    if not isinstance(error, ValueError):
        return f"error: {type(error).__name__}: {text}\ntraceback: {_kept(trace, folder)}"
    return f"error: {text}" + (f"\ntraceback: {_kept(trace, folder)}" if folder else "")


def _kept(trace: str, folder: Path | None) -> str:
    """Where the traceback was written: not into the folder if that is what failed."""
    name = f"traceback-rank{os.environ.get('RANK', '0')}.txt"
    for place in (folder, None):
        try:
            path = (place or Path(tempfile.mkdtemp(prefix="minirl-"))) / name
            path.write_text(trace, errors="backslashreplace")
        except OSError as problem:
            reason = problem.strerror
        else:
            return str(path)
    return f"lost ({reason})"


def _tell(text: str) -> None:
    """Shows why this process ends.

    Under torchrun the message goes into the file that torchrun's report shows at the very end, by
    one rank of a host: the first that fails. The others fail because of it, and wait to be ended.

    Source: torch/distributed/elastic/multiprocessing/errors (2.13), `ProcessFailure`.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    report = Path(place) if place else None
    try:
        if report is None:
            sys.stderr.write(f"{text}\n")
        elif not report.exists():  # else this rank has told why, and then failed to close
            (report.parents[1] / "told").touch(exist_ok=False)
            told = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
            report.write_text(json.dumps({"message": told}))
            # Closing may wait for ranks that wait for this one.
            late = threading.Timer(GRACE_S, os._exit, [2])
            late.daemon = True
            late.start()
    except FileExistsError:
        time.sleep(2 * GRACE_S)
    except OSError:
        sys.stderr.write(f"{text}\n")
