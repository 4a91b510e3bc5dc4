"""Engines for tests: tiny models with a tokenizer, what to ask, and what the answer must be."""

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import save_model

from minirl.backends import hf_generate, vllm
from minirl.config.policy import GenerationConfig, VllmConfig
from minirl.engine import Engine, Request, Sampling
from minirl.rng import fold_in, key_of

VOCABULARY, NUM_CHARACTERS, MAX_MODEL_LEN = 128, 97, 224
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_token_ids=())
DRAWN = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())


class Case(NamedTuple):
    """An engine, and the trainer's model with the weights that its checkpoint has."""

    kind: str
    engine: Engine
    model: Any
    tokenizer: Any


def save_tokenizer(folder: Path) -> None:
    """One token a character: ids 0 to 96. Ids above are the model's alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>"]
    letters = list(string.printable[: NUM_CHARACTERS - len(special)])
    ids = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=8,
        vllm_cfg=VllmConfig(precision="float32", max_model_len=MAX_MODEL_LEN, enforce_eager=True),
        **fields,
    )


def save_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied and an untied model."""
    made = {}
    for name in ("qwen3", "llama"):
        folder = tmp_path_factory.mktemp(name)
        save_model(
            folder,
            name,
            vocab=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            head_dim=32,
            max_position_embeddings=256,
        )
        save_tokenizer(folder)
        # An engine that honours this ends almost at once; `Sampling` alone decides.
        hostile = {"eos_token_id": list(range(2, 120)), "max_new_tokens": 2, "top_k": 1}
        (folder / "generation_config.json").write_text(json.dumps(hostile))
        made[name] = folder
    return made


class Engines(dict[tuple[str, str], Engine]):
    def __init__(self, folders: dict[str, Path]):
        super().__init__()
        self.folders = folders

    def __missing__(self, key: tuple[str, str]) -> Engine:
        kind, name = key
        module = {"vllm": vllm, "hf": hf_generate}[kind]
        self[key] = module.open_engine(config(), str(self.folders[name]))
        return self[key]

    def close(self) -> None:
        while self:
            self.popitem()[1].close()


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(2, VOCABULARY, (count, length), generator=generator)
    return [tuple(row) for row in draws.tolist()]


def requests(count: int, length: int = 70) -> list[Request]:
    return [
        Request(tokens, fold_in(key_of(0), i)) for i, tokens in enumerate(prompts(count, length))
    ]


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """An optimizer step, as far as an engine can tell."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def exported(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as a backend may export them: a tensor is valid until the next one."""
    room = torch.empty(max(p.numel() for p in model.parameters()))
    for name, parameter in model.named_parameters():
        room.fill_(float("nan"))
        yield name, room[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())


@torch.no_grad()
def greedy(model: Any, asked: list[Request], num_tokens: int) -> list[tuple[int, ...]]:
    """Every token from a full recompute."""
    rows = torch.tensor([r.tokens for r in asked])
    start = rows.shape[1]
    for _ in range(num_tokens):
        rows = torch.cat([rows, model(rows).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [tuple(row) for row in rows[:, start:].tolist()]


def tokens_of(engine: Engine, asked: list[Request], sampling: Sampling) -> list[tuple[int, ...]]:
    return [c.tokens for c in engine.generate(asked, sampling)]
