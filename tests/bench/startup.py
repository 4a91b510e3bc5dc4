"""Seconds from `torchrun` to the end of the first optimizer step, by part.

    .venv/bin/python tests/bench/startup.py

Runs the CPU recipe for one step on two processes; the parts are those of the first rank. The model
must have been made (`make grpo` does, or bin/make_tiny.py).
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "bin" / "recipes" / "grpo_tiny_cpu.yaml"


def rank(launched_at: float, out: Path) -> None:
    marks = [("launcher and interpreter", time.time() - launched_at)]
    last = time.perf_counter()

    def mark(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        marks.append((part, now - last))
        last = now

    importlib.import_module("torch")
    mark("import torch")
    from minirl.algos import grpo
    from minirl.algos.launch import open_rewards, read_inputs, score_answers
    from minirl.backends import open_backend, open_engine
    from minirl.config.loader import load
    from minirl.config.run import GrpoRun
    from minirl.parallel import launched_size, world
    from minirl.rng import key_of
    from minirl.rollout.collect import Parts

    mark("import minirl")
    importlib.import_module("transformers")
    mark("import transformers")
    run = load(RECIPE, [], GrpoRun)
    inputs = read_inputs(run, launched_size())
    mark("tokenizer and data")
    with open_rewards(run.env, run.data.train) as reward, world() as axis:
        mark("process group")
        backend, state = open_backend(run.policy, axis, key_of(0))
        mark("model")
        importlib.import_module("vllm")
        mark("import vllm")
        engine = open_engine(run.policy)
        mark("engine")
        engine.load_(backend.export(state), 0)
        mark("first refit")
        score = partial(score_answers, inputs.tokenizer, reward)
        parts = Parts(backend, engine, inputs.data.train, score, inputs.sampling)
        grpo.step(state, parts, run)
        mark("first step")
        if axis.rank == 0:
            out.write_text(json.dumps(marks))
        engine.close()


def main() -> None:
    if len(sys.argv) == 3:
        rank(float(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "marks.json"
        command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", __file__]
        done = subprocess.run(
            [*command, str(time.time()), out],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        marks = json.loads(out.read_text())
    for part, seconds in [*marks, ("in all", sum(s for _, s in marks))]:
        print(f"{part:26} {seconds:6.1f} s")


if __name__ == "__main__":
    main()
