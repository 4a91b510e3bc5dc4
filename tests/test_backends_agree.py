"""GRPO on either backend, as a user runs it: the same samples, rewards and gradients.

Both run on two processes with real vLLM: FSDP2 shards the weights, Megatron-Core cuts every layer.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run

STEPS = 5
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=true",
    "grpo.val_greedy=false",
    "grpo.max_val_samples=16",
    "logger.num_val_samples_to_print=16",
    "checkpointing.enabled=false",
)
SAME_OPTIMIZER = {
    "grpo_tiny_cpu": (
        "policy.scheduler=null",
        "policy.optimizer.kwargs={_override_: true, lr: 5.0e-4, betas: [0.9, 0.95]}",
        "policy.optimizer.kwargs.weight_decay=0.0",
    ),
    "grpo_tiny_cpu_megatron": ("policy.megatron_cfg.scheduler={}",),
}
SAMPLED = ("reward_mean", "response_tokens", "response_tokens_max", "truncated", "prompt_tokens")
"""What any other sampled token would change."""

pytestmark = pytest.mark.slow


def train(recipe: str, model: Path, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The metrics of each step, and the answers to the held-out prompts after the last."""
    torchrun = Path(sys.executable).with_name("torchrun")
    shown = run(
        *(torchrun, "--nproc-per-node", "2", "bin/grpo.py"),
        *("--config", f"bin/recipes/{recipe}.yaml", f"policy.model_name={model}"),
        *(f"logger.log_dir={folder}", *SHORT, *SAME_OPTIMIZER[recipe]),
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    answers = [line for line in shown.splitlines() if line.strip().startswith("prompt ")]
    return [line for line in lines if line["step"] > 0], answers


def test_both_backends_sample_and_learn_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    recipe = "bin/recipes/grpo_tiny_cpu.yaml"
    run(sys.executable, "bin/make_tiny.py", "--config", recipe, f"policy.model_name={model}")
    fsdp, megatron = (train(name, model, tmp_path / name) for name in SAME_OPTIMIZER)
    assert len(fsdp[0]) == len(megatron[0]) == STEPS
    assert len(fsdp[1]) == 16
    assert fsdp[1] == megatron[1]
    for a, b in zip(fsdp[0], megatron[0], strict=True):
        assert {n: a[f"train/{n}"] for n in SAMPLED} == {n: b[f"train/{n}"] for n in SAMPLED}
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)
        assert b["train/lr"] == a["train/lr"]
        assert b["train/entropy"] == pytest.approx(a["train/entropy"], rel=1e-4)
