"""bin/benchmark.py: what it averages and shows, and the runs that it starts."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, run
from configs import MINIMAL, edited
from hypothesis import given
from hypothesis import strategies as st

from minirl.algos import benchmark, tiny
from minirl.algos.benchmark import Window, averages, planned, table, window_of
from minirl.config.loader import load
from minirl.config.run import GrpoRun
from minirl.log import read_metrics

RECIPES = ROOT / "bin" / "recipes"
RECIPE = RECIPES / "grpo_tiny_cpu.yaml"
FINITE = st.floats(-1e6, 1e6)

# ---- the window and the means -------------------------------------------------------------------


@given(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_window_within_the_run_is_read_back(first: int, more: int, after: int):
    last = first + more
    assert window_of(f"{first}-{last}", last + after) == Window(first, last)


@pytest.mark.parametrize("text", ["", "22", "22-", "-3", "a-b", "22:29", "0-3", "9-8", "25-31"])
def test_any_other_window_is_refused(text: str):
    with pytest.raises(ValueError, match=f"--window is {text!r}"):
        window_of(text, 30)


@given(st.lists(FINITE, min_size=1, max_size=8), st.lists(FINITE, max_size=4), st.data())
def test_a_mean_is_of_the_steps_of_the_window_only(xs: list[float], rest: list[float], data: Any):
    first = 1 + len(rest)
    lines = [{"step": n, "x": x} for n, x in enumerate(rest + xs + rest, start=1)]
    lines = data.draw(st.permutations(lines))
    mean = averages(lines, Window(first, first + len(xs) - 1))["x"]
    assert mean == pytest.approx(sum(xs) / len(xs), abs=1e-6)


def test_a_mean_is_over_the_steps_that_have_the_metric():
    lines = [{"step": 1, "x": 2.0, "y": None}, {"step": 2, "x": 4.0, "z": 6.0, "y": None}]
    assert averages(lines, Window(1, 2)) == {"x": 3.0, "z": 6.0}


def test_a_step_that_was_not_taken_is_refused():
    with pytest.raises(ValueError, match=r"steps \[3, 4\] of the window 2-4 are missing"):
        averages([{"step": 1}, {"step": 2}], Window(2, 4))


# ---- the table ----------------------------------------------------------------------------------


def cells_of(text: str) -> list[list[str]]:
    """The cells of the Markdown tables in a text."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=4))
def test_the_last_column_is_the_speed_over_the_first_rows(speeds: list[float]):
    rows = [(f"run {i}", {"perf/tokens_per_s_per_rank": x}) for i, x in enumerate(speeds)]
    head, rule, *body = cells_of(table(rows))
    assert len({len(row) for row in (head, rule, *body)}) == 1
    assert [row[0] for row in body] == [label for label, _ in rows]
    for row, x in zip(body, speeds, strict=True):
        assert float(row[-1]) == pytest.approx(x / speeds[0], rel=6e-3)


def test_every_figure_stands_under_its_heading_and_absent_ones_are_a_dash():
    names = [name for names in benchmark.COLUMNS.values() for name in names]
    means = {name: float(i + 100) for i, name in enumerate(names)}
    head, _, full, bare = cells_of(table([("full", means), ("bare", {})]))
    shown = dict(zip(head, full, strict=True))
    assert shown["step, s"] == "100"
    assert shown["tokens/sample"] == str(105 + 106)
    assert shown["MFU"] == str(100 + names.index("perf/training_mfu"))
    assert shown["ratio"] == "1.00"
    assert bare == ["bare", *["-"] * (len(head) - 1)]


def test_a_part_of_a_sum_is_not_shown_as_the_sum():
    head, _, row = cells_of(table([("run", {"train/response_tokens": 7.0})]))
    assert dict(zip(head, row, strict=True))["tokens/sample"] == "-"


# ---- the runs -----------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(yaml.safe_dump(edited(MINIMAL, {"logger.log_dir": "some/logs"})))
    return path


def test_runs_load_have_folders_of_their_own_and_do_nothing_but_steps(recipe: Path):
    runs = planned([recipe, recipe], ["grpo.seed=7"], 30, num_ranks=1)
    assert [r.label for r in runs] == ["minimal"] * 2
    assert len({r.folder for r in runs}) == 2
    for r in runs:
        named, path, *overrides = r.arguments
        cfg = load(path, overrides, GrpoRun)
        assert (named, path) == ("--config", str(recipe))
        assert (cfg.grpo.seed, cfg.grpo.max_num_steps) == (7, 30)
        assert cfg.grpo.max_num_epochs >= 30
        assert (cfg.grpo.val_period, cfg.grpo.val_at_start, cfg.grpo.val_at_end) == (
            0,
            False,
            False,
        )
        assert not cfg.checkpointing.enabled
        assert Path(cfg.logger.log_dir) == r.folder
        assert r.folder.is_relative_to("some/logs")


@pytest.mark.parametrize(
    ("overrides", "ranks", "told"),
    [
        (["grpo.max_num_steps=5"], 1, "grpo.max_num_steps"),
        (["checkpointing.enabled=true"], 1, "checkpointing.enabled"),
        (["checkpointing={enabled: true}"], 1, "a benchmark sets checkpointing.enabled"),
        (["grpo.sede=5"], 1, "grpo.seed"),
        (["policy.dtensor_cfg.tensor_parallel_size=2"], 3, "3 ranks"),
    ],
)
def test_a_wrong_request_is_refused_before_any_run(
    recipe: Path, overrides: list[str], ranks: int, told: str
):
    with pytest.raises(ValueError, match=told):
        planned([recipe], overrides, 30, ranks)


# ---- the command --------------------------------------------------------------------------------

SMALL = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=8",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=32",
)


@pytest.mark.slow
def test_recipes_of_both_backends_take_the_same_steps_and_are_shown_in_one_table(tmp_path: Path):
    tiny.save_tokenizer(tmp_path / "model")
    tiny.save_random_model(tmp_path / "model", seed=0)
    other = RECIPES / "grpo_tiny_cpu_megatron.yaml"
    both = ("--config", RECIPE, "--config", other, "--steps", "3", "--window", "2-3")
    places = (f"policy.model_name={tmp_path}/model", f"logger.log_dir={tmp_path}")
    command = (sys.executable, "bin/benchmark.py", *both)
    one_rank = "policy.megatron_cfg.tensor_model_parallel_size=1"
    head, _, *body = cells_of(run(*command, *places, *SMALL, one_rank))
    assert [row[0] for row in body] == ["grpo_tiny_cpu", "grpo_tiny_cpu_megatron"]
    assert body[0][-1] == "1.00"
    for row in body:
        shown = dict(zip(head, row, strict=True))
        parts = [float(shown[f"{name}, s"]) for name in ("training", "refit", "log-probs")]
        assert 0 < sum(parts) < float(shown["step, s"])
        assert 10 < float(shown["tokens/sample"]) <= 32
        assert 0 < float(shown["non-padding"]) <= 1
        assert float(shown["imbalance"]) == 1
    folders = sorted((tmp_path / "benchmark").iterdir())
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in folders)
    for one, other in zip(first, second, strict=True):
        for name in ("train/grad_norm", "train/response_tokens"):
            assert math.isclose(one[name] or 0, other[name] or 0, rel_tol=1e-3)


@pytest.mark.slow
def test_a_failed_run_shows_its_error_and_fails_the_command(tmp_path: Path):
    command = (sys.executable, "bin/benchmark.py", "--config", RECIPE)
    places = (f"policy.model_name={tmp_path}/none", f"logger.log_dir={tmp_path}")
    with pytest.raises(AssertionError, match=r"there is no folder[\s\S]*failed with status 1; see"):
        run(*command, *places)
