"""The Megatron backend against what it stands on: Core's schedule, and a copy of the weights.

    .venv/bin/python tests/bench/megatron_core.py

One process, one thread, float32; a random Qwen3 of 4 layers (hidden 128) and 8 micro-batches of 8
rows of equal lengths. Three sides take turns: minirl's update; a bare loop over the same chunks,
optimizer and micro-batches, which is Core's schedule with a loss and nothing else; and, for the
noise, the bare loop again. Then an export copied into an engine's tensors, against a clone of the
same bytes, for hidden 128 and 1024. Medians.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.backend import TokenHead, TokenOutput, Work
from minirl.backends.megatron.backend import open_backend
from minirl.backends.megatron.bridge import core
from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import (
    DTensorConfig,
    GenerationConfig,
    PolicyConfig,
    TokenizerConfig,
    VllmConfig,
)
from minirl.metrics import Metrics, Sum
from minirl.parallel import world
from minirl.rng import key_of
from minirl.types import Rows, Scalar

MICRO_BATCHES, ROWS, TOKENS, ROUNDS = 8, 8, 128, 9
VOCABULARY = 512


def save_model(folder: str, hidden: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def policy_of(folder: str) -> PolicyConfig:
    return PolicyConfig(
        model_name=folder,
        tokenizer=TokenizerConfig(name=folder),
        train_micro_batch_size=ROWS,
        logprob_batch_size=ROWS,
        precision="float32",
        max_total_sequence_length=TOKENS,
        optimizer=None,
        dtensor_cfg=DTensorConfig(enabled=False),
        megatron_cfg=MegatronConfig(enabled=True, optimizer=MegatronOptimizerConfig(lr=1e-5)),
        generation=GenerationConfig(
            max_new_tokens=8, vllm_cfg=VllmConfig(precision="float32", max_model_len=512)
        ),
    )


def work_of(tokens: Tensor) -> Work:
    def loss(view: TokenOutput) -> tuple[Scalar, Metrics]:
        total = -view.logprobs.sum() / (MICRO_BATCHES * view.logprobs.numel())
        return total, {"loss": Sum(total.detach())}

    return Work(Rows(tokens, torch.full((len(tokens),), tokens.shape[1])), TokenHead(), loss)


def bare(trainer: Any, batches: list[Tensor]) -> Callable[[], None]:
    """Core's schedule, its optimizer, and the loss that `work_of` asks for; as Core's users do."""
    built = trainer.built
    schedule = core("pipeline_parallel").get_forward_backward_func()
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)

    def forward_step(batch: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        tokens = next(batch)
        logits = chunk(input_ids=tokens, position_ids=positions, attention_mask=None)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs = output[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
            total = -logprobs.sum() / (MICRO_BATCHES * logprobs.numel())
            return total, torch.ones((), dtype=torch.int), {"loss": total.detach()}

        return logits, loss

    def update() -> None:
        for chunk in built.chunks:
            chunk.zero_grad_buffer()
        built.optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=built.chunks,
            num_microbatches=len(batches),
            seq_length=TOKENS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        built.optimizer.step()

    return update


def race(sides: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each side, round by round; they take turns, after one round that is not kept."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for kept in range(-1, ROUNDS):
        for side, run in sides.items():
            start = time.perf_counter()
            run()
            if kept >= 0:
                seconds[side].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], side: str, to: str) -> float:
    """The median over rounds of `side`'s time to `to`'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[side], seconds[to], strict=True))


def race_updates(backend: Any, state: Any) -> Any:
    """Prints the first table; the state afterwards."""
    batches = [torch.randint(1, VOCABULARY, (ROWS, TOKENS)) for _ in range(MICRO_BATCHES)]
    works = [work_of(tokens) for tokens in batches]

    def ours() -> None:
        nonlocal state
        state, _ = backend.update_(state, works)

    plain = bare(state.model.trainer, batches)
    seconds = race({"minirl": ours, "bare Core": plain, "bare Core again": plain})
    tokens = MICRO_BATCHES * ROWS * TOKENS
    for side, seen in seconds.items():
        print(f"{side:16} {tokens / statistics.median(seen):8.0f} tokens/s")
    for side in ("minirl", "bare Core again"):
        print(f"{side} / bare Core = {ratio(seconds, 'bare Core', side):.2f} of its speed")
    return state


def race_exports(backend: Any, state: Any) -> None:
    """Prints the second table."""
    slots = {name: x.clone() for name, x in backend.export(state)}

    def export() -> None:
        for name, x in backend.export(state):
            slots[name].copy_(x)

    def clone() -> None:
        for x in slots.values():
            x.clone()

    seconds = race({"export and copy": export, "clone": clone})
    size = sum(x.numel() * x.element_size() for x in slots.values())
    for side, seen in seconds.items():
        print(f"{side:16} {statistics.median(seen) * 1e3:8.1f} ms for {size / 1e6:.0f} MB")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with world() as axis, tempfile.TemporaryDirectory() as root:
        for hidden in (128, 1024):
            folder = str(Path(root) / str(hidden))
            save_model(folder, hidden)
            backend, state = open_backend(policy_of(folder), axis, key_of(0))
            if hidden == 128:
                state = race_updates(backend, state)
            race_exports(backend, state)


if __name__ == "__main__":
    main()
