"""Policies with adapters, the checkpoint to begin with, and the model as peft reads it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import Family, policy_config, save_model
from torch import Tensor

from minirl.backends.dtensor import backend as dtensor
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.backends.norms import local_shard
from minirl.config.dtensor import DTensorConfig, LoraConfig
from minirl.config.policy import OptimizerConfig, PolicyConfig
from minirl.parallel import Axis
from minirl.rng import key_of

ADAM: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
ADAPTED: dict[str, dict[str, Any]] = {
    # Where the output embedding is not tied, it is adapted too.
    "llama": {"match_all_linear": False, "target_modules": ["*_proj", "lm_head"]}
}
"""Keys of `lora_cfg` of a family, if not the defaults."""


class Start(NamedTuple):
    """A model, its keys of `lora_cfg`, and a checkpoint in which no adapter is zero."""

    model: str
    lora: dict[str, Any]
    folder: Path


def lora_keys(lora: dict[str, Any] | None = None, **keys: Any) -> DTensorConfig:
    """The section with adapters, and other keys of it."""
    return DTensorConfig(lora_cfg=LoraConfig(enabled=True, **(lora or {})), **keys)


def policy(
    model: str, lora: dict[str, Any] | None = None, lr: float = ADAM["lr"], **fields: Any
) -> PolicyConfig:
    """A policy with adapters."""
    optimizer = OptimizerConfig(kwargs={**ADAM, "lr": lr})
    return policy_config(model, dtensor_cfg=lora_keys(lora), optimizer=optimizer, **fields)


def make_start(axis: Axis, root: Path, family: Family, **sizes: Any) -> Start:
    """Where B were zero, so were the gradient of A. For one rank."""
    model = save_model(root / "model", family, **sizes)
    return begin(axis, Start(model, ADAPTED.get(family, {}), root / "begin"))


def begin(axis: Axis, start: Start, lr: float = ADAM["lr"]) -> Start:
    """Writes the checkpoint of `start`."""
    start.folder.mkdir()
    model = start.model
    backend, state = dtensor.open_backend(policy(model, start.lora, lr), axis, key_of(0))
    draw = torch.Generator().manual_seed(1)
    for name, parameter in state.model.trainer.parameters().items():
        if "lora_B" in name:
            shard = local_shard(parameter.detach())
            shard.copy_(torch.randn(shard.shape, generator=draw) * 0.05)
    backend.save(state, start.folder)
    return start


def full_adapters(state: Any) -> dict[str, Tensor]:
    """The adapters, in full."""
    parameters = state.model.trainer.parameters()
    return {name: dtensor_lora.full(p).clone() for name, p in parameters.items()}


def load_peft(start: Start, *, trained: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The base model with the adapters of the checkpoint, as peft reads them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(start.model, dtype=dtype)
    base.get_input_embeddings().padding_idx = None
    return PeftModel.from_pretrained(base, start.folder, is_trainable=trained).to(dtype).eval()
