"""A whole GRPO step against TRL's GRPOTrainer on the CPU, in tokens sampled and trained per second.

    .venv/bin/python tests/bench/grpo_vs_trl.py

Both sides: the same random 2-layer Qwen3 (hidden 64), the same prompts, 4 prompts x 4 completions
of exactly 16 tokens a step, float32, one process, one thread, the same reward. The sides run by
turns in processes of their own; the first steps are not counted. Medians over the turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

WORDS = ("apple", "bread", "cloud", "dream", "eagle", "flame", "grape", "house")
TURNS, WARM_UP, STEPS = 3, 4, 20
TOKENS_A_STEP = 4 * 4 * 16


def measure_minirl(folder: Path) -> float:
    from minirl.algos import grpo
    from minirl.algos.launch import open_parts, read_inputs, sampled_tokens
    from minirl.config import GrpoRun
    from minirl.loader import load
    from minirl.parallel import world
    from minirl.types import Score

    recipe = Path(__file__).parents[2] / "bin" / "recipes" / "grpo_tiny_cpu.yaml"
    (folder / "run.yaml").write_text(
        f"defaults: {recipe}\n"
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, val_period: 0, "
        "val_at_start: false, val_at_end: false, val_greedy: false}\n"
        f"policy: {{model_name: {folder}, train_global_batch_size: 16,\n"
        "  train_micro_batch_size: 16, max_total_sequence_length: 64,\n"
        "  generation: {max_new_tokens: 16}}\n"
        f"data: {{train: {{_override_: true, data_path: {folder / 'words.jsonl'}}}}}\n"
    )
    run = load(folder / "run.yaml", [], GrpoRun)
    inputs = read_inputs(run, 1)
    inputs = inputs._replace(sampling=inputs.sampling._replace(stop_token_ids=()))

    def score(prompts: object, trajectories: list) -> list[Score]:
        return [Score(float(sum(sampled_tokens(t)) % 7)) for t in trajectories]

    with world() as axis, open_parts(run, inputs, score, axis) as (state, parts):
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                start = time.perf_counter()
            state, _ = grpo.step(state, parts, run)
        return time.perf_counter() - start


def measure_trl(folder: Path) -> float:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        start = end = 0.0

        def on_step_end(self, args, state, control, **_):
            if state.global_step == WARM_UP:
                self.start = time.perf_counter()
            self.end = time.perf_counter()

    clock = Clock()
    chats = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=Dataset.from_list(chats * 20),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=16,
            generation_kwargs={"min_new_tokens": 16},
            max_steps=WARM_UP + STEPS,
            learning_rate=5e-4,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return clock.end - clock.start


def one_side(side: str) -> None:
    warnings.simplefilter("ignore")
    from minirl.algos import tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save_tokenizer(folder)
        tiny.save_random_model(folder, seed=0)
        rows = [json.dumps({"input": word, "output": word}) for word in WORDS]
        (folder / "words.jsonl").write_text("\n".join(rows))
        seconds = {"minirl": measure_minirl, "trl": measure_trl}[side](folder)
    print(json.dumps({"tokens_per_s": STEPS * TOKENS_A_STEP / seconds}))


def main() -> None:
    if len(sys.argv) == 2:
        one_side(sys.argv[1])
        return
    speeds: dict[str, list[float]] = {"minirl": [], "trl": []}
    for _ in range(TURNS):
        for side, seen in speeds.items():
            done = subprocess.run(
                [sys.executable, __file__, side],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            seen.append(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])
    middle = {side: statistics.median(seen) for side, seen in speeds.items()}
    for side, speed in middle.items():
        print(f"{side:8} {speed:8.0f} tokens/s   {[round(s) for s in speeds[side]]}")
    print(f"minirl / trl = {middle['minirl'] / middle['trl']:.2f}")


if __name__ == "__main__":
    main()
