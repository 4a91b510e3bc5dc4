"""Generation through `rollout` against bare `LLM.generate` on the same requests.

Both use one engine and take turns, so that a busy machine slows both alike. The bare call is what
a user of vLLM would write: one `SamplingParams` a request, log-probs of the sampled tokens asked
for. Run from the repository: `OMP_NUM_THREADS=1 python tests/bench/rollout.py`.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from engines import save_tokenizer
from models import save_model

from minirl.backends import vllm
from minirl.config.policy import GenerationConfig, VllmConfig
from minirl.engine import Sampling
from minirl.parallel import world
from minirl.rng import fold_in, key_of
from minirl.rollout.sample import rollout
from minirl.types import Prompt

ROUNDS = 21
SHAPES = [(8, 16, 24, 8), (8, 16, 40, 32), (16, 16, 100, 64)]
"""Prompts, samples of each, tokens of a prompt, tokens of a completion."""


def main() -> None:
    """Prints one row a shape."""
    cfg = GenerationConfig(
        max_new_tokens=64,
        vllm_cfg=VllmConfig(precision="float32", max_model_len=256, enforce_eager=True),
    )
    with tempfile.TemporaryDirectory() as folder, world():
        save_model(
            Path(folder), vocab=128, hidden_size=64, head_dim=32, max_position_embeddings=256
        )
        save_tokenizer(Path(folder))
        with vllm._contained():
            llm = vllm._build(cfg, folder, folder)
        engine = vllm._engine_of(llm, {}, eager=True)
        print(
            f"{'prompts x samples, tokens':32}{'rollout tok/s':>15}{'bare tok/s':>15}{'ratio':>8}"
        )
        for shape in SHAPES:
            ours, bare, tokens = measure(llm, engine, *shape)
            name = "{} x {}, {} -> {}".format(*shape)
            print(f"{name:32}{tokens / ours:15.0f}{tokens / bare:15.0f}{bare / ours:8.3f}")
        engine.close()


def measure(llm, engine, num_prompts: int, samples: int, length: int, drawn: int):
    """The median seconds of both, and the tokens that each samples."""
    from vllm import SamplingParams, TokensPrompt

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 97, (num_prompts, length), generator=generator).tolist()
    prompts = [Prompt(i, tuple(row), {}) for i, row in enumerate(rows)]
    key = key_of(0)

    def through_rollout() -> int:
        trajectories = rollout(
            engine,
            prompts,
            Sampling(1.0, drawn, (1,)),
            num_generations=samples,
            key=key,
            first_group=0,
            step=0,
        )
        return sum(sum(t.sampled) for t in trajectories)

    def alone() -> int:
        asked = [(p, fold_in(key, 0, p.id, p.id, s)) for p in prompts for s in range(samples)]
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=list(p.tokens)) for p, _ in asked],
            [
                SamplingParams(
                    temperature=1.0,
                    max_tokens=drawn,
                    seed=seed,
                    stop_token_ids=[1],
                    logprobs=0,
                    detokenize=False,
                )
                for _, seed in asked
            ],
            use_tqdm=False,
        )
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    counts = set()
    for turn in range(ROUNDS + 2):
        for name, run in [("ours", through_rollout), ("bare", alone)][:: 1 if turn % 2 else -1]:
            llm.reset_prefix_cache()
            start = time.perf_counter()
            counts.add(run())
            if turn >= 2:  # the first turns compile and warm up
                seconds[name].append(time.perf_counter() - start)
    assert len(counts) == 1, "both must have sampled the same tokens"
    return median(seconds["ours"]), median(seconds["bare"]), counts.pop()


if __name__ == "__main__":
    main()
