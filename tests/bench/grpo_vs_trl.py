"""A whole GRPO step against TRL's GRPOTrainer on the CPU, in tokens sampled and trained per second.

    .venv/bin/python tests/bench/grpo_vs_trl.py [even | uneven]

Both sides: the same random Qwen3, the same prompts, float32, one process, one thread, the same
reward, one update a step. Tokens are those that were sampled, up to and with the end token.

even: 4 prompts of a word x 4 completions of exactly 16 tokens; 2 layers (hidden 64).
uneven: 8 prompts of lognormal lengths x 8 completions that end at one of 85 tokens of 2048, so
after 24 on average and 128 at most; 4 layers (hidden 256). minirl packs its micro-batches. TRL
has no packing for this; it trains micro-batches of 16 rows.

The sides run by turns in processes of their own; the first steps are not counted. Medians over the
turns: tokens over wall time, over CPU time (which other programs on the machine disturb less), and
the seconds of a step's stages; TRL's `training` is all of a step but its generation.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))


class Case(NamedTuple):
    """What both sides do."""

    prompts: int
    generations: int
    new_tokens: int
    lr: float
    turns: int
    warm_up: int
    steps: int
    batching: str
    """minirl's."""
    trl: dict[str, object]
    """TRL's."""

    @property
    def rows(self) -> int:
        return self.prompts * self.generations


CASES = {
    "even": Case(
        prompts=4,
        generations=4,
        new_tokens=16,
        lr=5e-4,
        turns=3,
        warm_up=4,
        steps=20,
        batching="train_micro_batch_size: 16, max_total_sequence_length: 64",
        trl={
            "per_device_train_batch_size": 16,
            "generation_kwargs": {"min_new_tokens": 16},
        },
    ),
    "uneven": Case(
        prompts=8,
        generations=8,
        new_tokens=128,
        lr=1e-5,
        turns=3,
        warm_up=1,
        steps=4,
        batching="max_total_sequence_length: 256, "
        "sequence_packing: {enabled: true, train_mb_tokens: 2048}",
        trl={"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
    ),
}
WORDS = ["apple", "bread", "cloud", "dream", "eagle", "flame", "grape", "house"]
VOCABULARY, ENDS = 2048, 84


def prepare(name: str, folder: Path) -> list[str]:
    """Writes the model and its tokenizer; gives the prompts."""
    import torch
    from models import save_model
    from transformers import GenerationConfig

    from minirl.algos import tiny

    tiny.save_tokenizer(folder)
    if name == "even":
        tiny.save_random_model(folder, seed=0)
        return WORDS
    end = tiny.SPECIAL.index("<|end|>")
    save_model(
        folder,
        "qwen3_untied",
        vocab=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        eos_token_id=end,
        pad_token_id=tiny.SPECIAL.index("<|pad|>"),
    )
    # Both sides read the end tokens of a model from here.
    ends = [end, *range(VOCABULARY - ENDS, VOCABULARY)]
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(folder)
    torch.manual_seed(0)
    lengths = torch.empty(64).log_normal_(3.0, 0.6).clamp(4, 100).long().tolist()
    return ["".join(chr(97 + int(c)) for c in torch.randint(26, (n,))) for n in lengths]


class Seen(NamedTuple):
    """Of the counted steps together."""

    tokens: int
    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    """Seconds of each."""


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds, from some start."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = clocks()
    return wall - start[0], cpu - start[1]


def measure_minirl(case: Case, prompts: list[str], folder: Path) -> Seen:
    from minirl.algos import grpo
    from minirl.algos.launch import open_parts, read_inputs, sampled_tokens
    from minirl.config.loader import load
    from minirl.config.run import GrpoRun
    from minirl.parallel import world
    from minirl.types import Score

    recipe = Path(__file__).parents[2] / "bin" / "recipes" / "grpo_tiny_cpu.yaml"
    rows = [json.dumps({"input": prompt, "output": prompt}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "run.yaml").write_text(
        f"defaults: {recipe}\n"
        f"grpo: {{num_prompts_per_step: {case.prompts}, val_period: 0, val_at_start: false,\n"
        f"  num_generations_per_prompt: {case.generations}, val_at_end: false,\n"
        "  val_greedy: false}\n"
        f"policy: {{model_name: {folder}, train_global_batch_size: {case.rows},\n"
        f"  {case.batching}, optimizer: {{kwargs: {{lr: {case.lr}}}}},\n"
        f"  generation: {{max_new_tokens: {case.new_tokens}}}}}\n"
        f"data: {{train: {{_override_: true, data_path: {folder / 'prompts.jsonl'}}}}}\n"
    )
    run = load(folder / "run.yaml", [], GrpoRun)
    inputs = read_inputs(run, 1)
    if "generation_kwargs" in case.trl:
        inputs = inputs._replace(sampling=inputs.sampling._replace(stop_token_ids=()))
    tokens, stages = 0, {}

    def score(prompts: object, trajectories: list) -> list[Score]:
        nonlocal tokens
        tokens += sum(sum(t.sampled) for t in trajectories)
        return [Score(float(sum(sampled_tokens(t)) % 7)) for t in trajectories]

    with world() as axis, open_parts(run, inputs, score, axis) as (state, parts):
        for step in range(case.warm_up + case.steps):
            if step == case.warm_up:
                start, tokens, stages = clocks(), 0, {}
            state, metrics = grpo.step(state, parts, run)
            for stage in ("generation", "logprobs", "training", "refit"):
                stages[stage] = stages.get(stage, 0.0) + metrics[f"time/{stage}_s"]
        return Seen(tokens, *since(start), stages)


def measure_trl(case: Case, prompts: list[str], folder: Path) -> Seen:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokens = 0
    sampling = 0.0
    start, taken = clocks(), (0.0, 0.0)

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            nonlocal tokens, sampling, start, taken
            if state.global_step == case.warm_up:
                start, tokens, sampling = clocks(), 0, 0.0
            taken = since(start)

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Trainer(GRPOTrainer):
        def _generate(self, *args, **kwargs):
            nonlocal sampling
            began = time.perf_counter()
            found = super()._generate(*args, **kwargs)
            sampling += time.perf_counter() - began
            return found

    chats = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(chats * 20),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            num_generations=case.generations,
            max_completion_length=case.new_tokens,
            max_steps=case.warm_up + case.steps,
            learning_rate=case.lr,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **case.trl,
        ),
    )
    trainer.train()
    return Seen(tokens, *taken, {"generation": sampling, "training": taken[0] - sampling})


def one_side(name: str, side: str) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        prompts = prepare(name, Path(folder))
        measure = {"minirl": measure_minirl, "trl": measure_trl}[side]
        print(json.dumps(measure(CASES[name], prompts, Path(folder))))


def compare(name: str) -> None:
    """Runs both sides by turns and prints their medians."""
    runs: dict[str, list[Seen]] = {"minirl": [], "trl": []}
    for _ in range(CASES[name].turns):
        for side, seen in runs.items():
            done = subprocess.run(
                [sys.executable, __file__, name, side],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            seen.append(Seen(*json.loads(done.stdout.splitlines()[-1])))
    print(f"{name}, tokens:")
    wall = {side: [s.tokens / s.seconds for s in seen] for side, seen in runs.items()}
    cpu = {side: [s.tokens / s.cpu_seconds for s in seen] for side, seen in runs.items()}
    steps = CASES[name].steps
    for side, seen in runs.items():
        each = [
            f"{stage} {statistics.median(s.stages[stage] for s in seen) / steps:.3f}"
            for stage in seen[0].stages
        ]
        print(
            f"{side:8}{summary(wall[side])} a second, {summary(cpu[side])} a CPU second; "
            f"{seen[0].tokens / steps:.0f} a step, in seconds: {', '.join(each)}"
        )
    for clock, speeds in (("second", wall), ("CPU second", cpu)):
        ratio = statistics.median(speeds["minirl"]) / statistics.median(speeds["trl"])
        print(f"minirl / trl = {ratio:.2f} in tokens a {clock}")


def summary(speeds: list[float]) -> str:
    """The median, and what it is the median of."""
    return f"{statistics.median(speeds):.0f} {[round(speed) for speed in speeds]}"


def main() -> None:
    if len(sys.argv) == 3:
        one_side(sys.argv[1], sys.argv[2])
        return
    for name in sys.argv[1:] or CASES:
        compare(name)


if __name__ == "__main__":
    main()
