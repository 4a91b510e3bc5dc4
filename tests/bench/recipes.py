"""Runs the CPU recipe of every algorithm with two seeds and prints the README's table.

    .venv/bin/python tests/bench/recipes.py [NUM_STEPS [RECIPE ...]]

Each run is the real thing: torchrun, two processes, FSDP2, vLLM. The accuracy is that on held-out
words at temperature 1 (of the exact answer, where a recipe rewards something else too).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minirl.log import read_metrics

ROOT = Path(__file__).parents[2]
ORDER = (
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce", "reinforce_pp", "gdpo",
    "prorl_v2",
)  # fmt: skip


def accuracies(name: str, seed: int, num_steps: int) -> list[float]:
    recipe = f"bin/recipes/{name}_tiny_cpu.yaml"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("torchrun"),
            *("--nproc-per-node", "2", "bin/grpo.py", "--config", recipe),
            *(f"grpo.max_num_steps={num_steps}", f"grpo.seed={seed}", f"logger.log_dir={folder}"),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        lines = read_metrics(Path(folder) / "metrics.jsonl")
    key = "val/accuracy/answer" if name == "gdpo" else "val/accuracy"
    return [x for line in lines if (x := line.get(key)) is not None]


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    print("| recipe | steps | seed 0: start, end | seed 1: start, end |\n|---|---|---|---|")
    for name in sys.argv[2:] or ORDER:
        seen = [accuracies(name, seed, num_steps) for seed in (0, 1)]
        cells = [f"{a[0]:.2f}, {a[-1]:.2f}" for a in seen]
        print(f"| {name} | {num_steps} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
