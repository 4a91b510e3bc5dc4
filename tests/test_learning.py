"""The CPU recipe as a user runs it: real processes, real vLLM, from nothing to a learnt policy."""

import json
import sys
from pathlib import Path

import pytest
from commands import run

RECIPE = "bin/recipes/grpo_tiny_cpu.yaml"

pytestmark = pytest.mark.slow


def train(model: Path, folder: Path, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """The lines of metrics.jsonl, and what the terminal showed."""
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--nproc-per-node", "2", "bin/grpo.py", "--config", RECIPE]
    places = [f"policy.model_name={model}", f"logger.log_dir={folder}"]
    shown = run(*command, *places, *overrides)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], shown


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make = [sys.executable, "bin/make_tiny.py", "--config", RECIPE, f"policy.model_name={folder}"]
    assert "made" in run(*make)
    assert "found" in run(*make)
    return folder


def test_the_policy_learns_the_task(model: Path, tmp_path: Path):
    lines, shown = train(model, tmp_path / "run")
    first, last = lines[0], lines[-1]
    assert first["step"] == 0
    assert first["val/accuracy"] < 0.4
    assert last["val/accuracy"] > 0.8
    assert last["val/accuracy_greedy"] > 0.88
    trained = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in trained] == list(range(1, len(trained) + 1))
    assert max(line["train/token_mult_prob_error"] for line in trained) < 1.0005
    assert {line["train/probs_ratio_max"] for line in trained} == {1.0}
    assert sum(line["time/total_s"] for line in trained) > 0
    assert "learning curve" in shown
    assert "val/accuracy_greedy" in shown
    assert (tmp_path / "run" / "config.yaml").exists()


def untimed(line: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in line.items() if not name.startswith(("time/", "perf/"))}


def test_a_run_repeats_itself_and_goes_on_from_its_checkpoint(model: Path, tmp_path: Path):
    quiet = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=3")
    saving = (*quiet, "checkpointing.enabled=true", f"checkpointing.checkpoint_dir={tmp_path}/kept")
    whole, _ = train(model, tmp_path / "whole", *quiet, "grpo.max_num_steps=4")
    begun, _ = train(model, tmp_path / "begun", *saving, "grpo.max_num_steps=2")
    both, _ = train(model, tmp_path / "begun", *saving, "grpo.max_num_steps=4")
    assert [line["step"] for line in both] == [1, 2, 3, 4]
    assert both[:2] == begun
    for one, other in zip(whole, both, strict=True):
        assert untimed(one) == untimed(other)
