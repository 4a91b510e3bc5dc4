"""A training update through the backend against a bare torch loop over the same unpadded tokens.

    .venv/bin/python tests/bench/training.py

128 rows of lognormal lengths, a random Qwen3 of 4 layers (hidden 128), float32, AdamW, one process,
one thread. The sides take turns: minirl's update on padded micro-batches of 16 rows, on padded ones
cut by tokens (dynamic batching) and on packed ones; a bare Hugging Face model, AdamW and the same
loss on the same micro-batches of 16 rows; and the bare model on the same tokens without any
padding, packed 16 rows at a time with positions that start anew. Medians.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from minirl.algos import sft
from minirl.backends.dtensor.backend import open_backend
from minirl.config.policy import (
    GenerationConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
    VllmConfig,
)
from minirl.data.packing import pack
from minirl.data.plan import by_length
from minirl.parallel import Axis, world
from minirl.rng import key_of

ROWS, MICRO, VOCABULARY, ROUNDS = 128, 16, 512, 7


def bare(folder: str, batches: list[tuple[Tensor, Tensor, Tensor]]) -> Callable[[], None]:
    """Forward, backward and step on (tokens, positions, mask of trained positions)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count = sum(int(mask.sum()) for _, _, mask in batches)

    def update() -> None:
        optimizer.zero_grad()
        for tokens, positions, mask in batches:
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            (-(logprobs * mask).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def save_model(folder: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def policy_of(folder: str, *, packed: bool) -> PolicyConfig:
    return PolicyConfig(
        sequence_packing=SequencePackingConfig(enabled=packed),
        model_name=folder,
        tokenizer=TokenizerConfig(name=folder),
        logprob_batch_size=MICRO,
        precision="float32",
        optimizer=OptimizerConfig(kwargs={"lr": 1e-4}),
        generation=GenerationConfig(
            max_new_tokens=8, vllm_cfg=VllmConfig(precision="float32", max_model_len=512)
        ),
    )


def packed(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.cat([torch.arange(len(r)) for r in rows])
    return torch.cat(rows)[None], positions[None], (positions[1:] != 0)[None]


def race(sides: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each side; they take turns."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, update in sides.items():
            start = time.perf_counter()
            update()
            seconds[side].append(time.perf_counter() - start)
    return {side: statistics.median(seen) for side, seen in seconds.items()}


def shown(rows: list[Tensor], parts: list[list[int]]) -> list[sft.Shown]:
    """Micro-batches of these rows in which all tokens but the first are trained."""
    return [
        sft.collate(
            [sft.Demonstration((r[0],), tuple(r[1:])) for r in (rows[i].tolist() for i in p)], 0
        )
        for p in parts
    ]


def ours(folder: str, axis: Axis, micro: list[sft.Shown], *, packed: bool) -> Callable[[], None]:
    """minirl's update on these micro-batches."""
    backend, state = open_backend(policy_of(folder, packed=packed), axis, key_of(0))

    def update() -> None:
        nonlocal state
        state, _ = sft.step(state, micro, backend)

    return update


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = torch.empty(ROWS).log_normal_(4.0, 0.6).clamp(8, 512).long().tolist()
    rows = [torch.randint(1, VOCABULARY, (n,)) for n in lengths]
    parts = [list(range(i, i + MICRO)) for i in range(0, ROWS, MICRO)]
    micro = shown(rows, parts)
    padded = [
        (m.tokens, torch.arange(m.tokens.shape[1]).expand_as(m.tokens), mask) for m, mask in micro
    ]
    # As many tokens as the micro-batches of 16 rows hold on average.
    budget = max(max(lengths), sum(m.tokens.numel() for m, _ in micro) // len(micro))
    similar = shown(rows, by_length(range(ROWS), lengths, budget, 1))
    together = shown(rows, pack(lengths, budget))
    with tempfile.TemporaryDirectory() as folder, world() as axis:
        save_model(folder)
        middle = race(
            {
                "minirl, padded": ours(folder, axis, micro, packed=False),
                "minirl, dynamic": ours(folder, axis, similar, packed=False),
                "minirl, packed": ours(folder, axis, together, packed=True),
                "bare torch, padded": bare(folder, padded),
                "bare torch, packed": bare(folder, [packed([rows[i] for i in p]) for p in parts]),
            }
        )
    tokens = sum(lengths)
    for name, cut in (("of 16 rows", micro), ("by tokens", similar)):
        held = sum(m.tokens.numel() for m, _ in cut)
        print(f"{tokens} tokens; {tokens / held:.0%} of {len(cut)} padded micro-batches {name}")
    print(
        f"{tokens / budget / len(together):.0%} of {len(together)} packed ones of {budget} tokens"
    )
    for side, s in middle.items():
        print(f"{side:20} {tokens / s:8.0f} tokens/s")
    for side in ("bare torch, padded", "bare torch, packed"):
        best = min(x for name, x in middle.items() if name.startswith("minirl"))
        print(f"minirl / ({side}) = {middle[side] / middle['minirl, padded']:.2f} of its speed, "
              f"{middle[side] / best:.2f} with the best of the three")  # fmt: skip


if __name__ == "__main__":
    main()
