"""Where a run's numbers and words go: the file, the terminal, and nowhere on the other ranks."""

import contextlib
import io
import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from minirl.log import (
    alarms,
    curve,
    metrics_path,
    open_log,
    prepare_run_dir,
    read_metrics,
    say,
    timed,
    user_errors,
)


def write(run_dir: Path, *steps: int) -> None:
    """The metrics file of a run that took these steps."""
    with open_log(run_dir, 0, 9, rank=0) as log:
        for step in steps:
            log.step(step, {"x": step / 2})


def steps_of(path: Path) -> list[float | None]:
    return [line["step"] for line in read_metrics(path)]


def test_every_step_is_one_json_object_a_line_as_it_is_logged(tmp_path: Path):
    with open_log(tmp_path, 0, 2, rank=0) as log:
        log.step(1, {"a": 0.1, "b": 1e-30})
        first = metrics_path(tmp_path).read_text()
        log.step(2, {"a": -3.0})
    assert json.loads(first) == {"step": 1, "a": 0.1, "b": 1e-30}
    lines = metrics_path(tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(first), {"step": 2, "a": -3.0}]


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, x: float):
    with open_log(tmp_path, 0, 1, rank=0) as log:
        log.step(1, {"a": x, "b": 0.5})
    text = metrics_path(tmp_path).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": 0.5}


def test_without_a_terminal_steps_and_sentences_are_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with open_log(tmp_path, 0, 1, rank=0) as log:
        log.say("two [/INST] [bold]words[/bold] :smile:")
        log.step(1, {"train/loss": 0.25, "unshown": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "two [/INST] [bold]words[/bold] :smile:",
        "step    1  loss 0.2500",
    ]


def test_a_terminal_shows_a_line_a_step_and_text_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    terminal = partial(Console, file=shown, force_terminal=True, width=60)
    monkeypatch.setattr("minirl.log.Console", terminal)
    answer = "[/INST] [bold]answer[/bold] :smile: " + "long " * 30 + "end"
    with open_log(tmp_path, 0, 2, rank=0) as log:
        log.step(1, {"train/loss": 0.25})
        log.say(answer)
        log.step(2, {"train/loss": 0.125})
    lines = [line.removeprefix("\x1b[2K").strip("\r") for line in shown.getvalue().split("\n")]
    for line in ("step    1  loss 0.2500", answer, "step    2  loss 0.1250"):
        assert [seen.endswith(line) for seen in lines].count(True) == 1
    assert "2/2" in lines[-2]
    assert steps_of(metrics_path(tmp_path)) == [1, 2]


def test_ranks_other_than_the_first_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "1")
    prepare_run_dir(tmp_path / "run", "a: 1\n", resumed_step=0)  # not there, and not made
    with open_log(tmp_path / "run", 0, 1, rank=1) as log:
        log.step(1, {"a": 1.0})
        log.say("nothing")
    say("nothing")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_under_torchrun_the_first_rank_of_a_host_that_fails_tells_why_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    waits: list[float] = []
    monkeypatch.setattr("minirl.log.time.sleep", waits.append)
    monkeypatch.setattr("minirl.log.os._exit", lambda status: None)
    # The second rank fails first, and once more while it closes what it opened.
    for rank, waiting in ((1, 0), (0, 1), (1, 1)):
        place = tmp_path / str(rank)
        place.mkdir(exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place / "error.json"))
        with pytest.raises(SystemExit), user_errors():
            raise ValueError(f"rank {rank}")
        assert [f.parent.name for f in tmp_path.glob("*/error.json")] == ["1"]
        assert len(waits) == waiting
    told = json.loads((tmp_path / "1" / "error.json").read_text())["message"]["message"]
    assert told == "error: rank 1"
    assert capsys.readouterr() == ("", "")


def test_a_new_run_keeps_the_metrics_of_earlier_ones_under_rising_numbers(tmp_path: Path):
    for run in range(3):
        prepare_run_dir(tmp_path, f"run: {run}\n", resumed_step=0)
        assert not metrics_path(tmp_path).exists()
        assert (tmp_path / "config.yaml").read_text() == f"run: {run}\n"
        write(tmp_path, run)
    assert steps_of(tmp_path / "metrics-1.jsonl") == [0]
    assert steps_of(tmp_path / "metrics-2.jsonl") == [1]
    (tmp_path / "metrics-1.jsonl").unlink()
    prepare_run_dir(tmp_path, "run: 3\n", resumed_step=0)
    assert steps_of(tmp_path / "metrics-2.jsonl") == [1]
    assert steps_of(tmp_path / "metrics-3.jsonl") == [2]


def test_a_resumed_run_goes_on_behind_its_checkpoint_and_loses_no_line(tmp_path: Path):
    write(tmp_path, 0, 1, 2, 3)
    prepare_run_dir(tmp_path, "", resumed_step=2)
    write(tmp_path, 3, 4)
    assert steps_of(metrics_path(tmp_path)) == [0, 1, 2, 3, 4]
    assert steps_of(tmp_path / "metrics-1.jsonl") == [0, 1, 2, 3]


def test_a_line_that_a_killed_run_left_torn_is_not_read(tmp_path: Path):
    write(tmp_path, 1, 2)
    with metrics_path(tmp_path).open("a") as file:
        file.write('{"step": 3, "x"')
    assert steps_of(metrics_path(tmp_path)) == [1, 2]
    prepare_run_dir(tmp_path, "", resumed_step=2)
    write(tmp_path, 3)
    assert steps_of(metrics_path(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_is_told_by_whoever_has_it_with_its_traceback_in_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    def told(error: BaseException, folder: Path | None) -> list[str]:
        with pytest.raises(SystemExit) as ended, user_errors(folder):
            raise error
        assert ended.value.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
        return capsys.readouterr().err.splitlines()

    assert told(ValueError("grpo.seed"), None) == ["error: grpo.seed"]
    assert told(KeyboardInterrupt(), tmp_path) == []
    own = f"traceback: {tmp_path}/traceback-rank{rank}.txt"
    assert told(ValueError("grpo.seed"), tmp_path) == ["error: grpo.seed", own]
    assert told(KeyError("x"), tmp_path) == ["error: KeyError: 'x'", own]
    trace = (tmp_path / f"traceback-rank{rank}.txt").read_text()
    assert trace.startswith("Traceback")
    assert "raise error" in trace
    for folder in (None, tmp_path / "nowhere"):
        [first, second] = told(KeyError("x"), folder)
        path = Path(second.removeprefix("traceback: "))
        assert (first, path.read_text()[:9]) == ("error: KeyError: 'x'", "Traceback")
        shutil.rmtree(path.parent)
    monkeypatch.setenv("MINIRL_TRACEBACK", "1")
    shown = told(ValueError("grpo.seed"), tmp_path)
    assert (shown[0][:9], shown[-1]) == ("Traceback", "ValueError: grpo.seed")


def test_a_full_disk_is_named_with_the_file_that_had_no_room(tmp_path: Path, capsys, monkeypatch):
    metrics, config = metrics_path(tmp_path), tmp_path / "config.yaml"
    for path in (metrics, config):
        path.symlink_to("/dev/full")
    reason = "cannot be written: No space left on device; make room there"
    with (
        pytest.raises(ValueError, match=f"metrics.jsonl' {reason}"),
        open_log(tmp_path, 0, 1, rank=0) as log,
    ):
        log.step(1, {"train/loss": 1.0})
    metrics.unlink()
    with pytest.raises(ValueError, match=f"config.yaml' {reason}"):
        prepare_run_dir(tmp_path, "a: 1", resumed_step=0)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(ValueError, match=f"'standard output' {reason}"):
            say("a sentence")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()  # it tries again


def test_a_line_of_metrics_that_is_no_json_is_named(tmp_path: Path):
    metrics_path(tmp_path).write_text('{"step": 1}\nnothing\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(metrics_path(tmp_path))


def test_alarms_say_how_often_and_nothing_where_nothing_happened():
    found = alarms({"train/verifier_timeouts": 3.0, "train/overflow_tokens": 0.0, "train/loss": 9})
    assert [line.strip() for line in found] == [
        "warning: 3 answers exceeded env.timeout_s and were worth 0"
    ]


def test_the_curve_draws_every_named_series():
    names = ("first", "second", "third")
    points = {name: [(x, i + x / 9) for x in range(10)] for i, name in enumerate(names)}
    text = curve(points, "a title")
    assert "\x1b" not in text
    for word, marker in zip((*names, "a title", "step"), "ox+", strict=False):
        assert word in text
        assert text.count(marker) > 4  # the legend's one, and points
    again = curve({"other": [(0, 0.0), (1, 1.0)]}, "t")
    assert "other" in again
    assert "first" not in again


def test_times_of_one_stage_add_up_also_of_one_that_fails():
    seconds = {"a": 1.0}
    with timed(seconds, "a"):
        pass
    with pytest.raises(KeyError), timed(seconds, "b"):
        raise KeyError
    assert seconds["a"] > 1.0
    assert seconds["b"] > 0.0
