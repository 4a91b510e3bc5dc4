"""Checkpoints between the two formats: a run's state to Hugging Face, a model to Megatron.

A run's checkpoint is read by the backend that wrote it, under any number of ranks, and its weights
come out as the backend exports them. They are written with the names and the precision of the
checkpoint that the run started from, beside its config, its tokenizer and whatever weights
training does not know.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minirl.backends import check_policy, decided, open_backend, with_own_config
from minirl.backends.hf_files import as_in_checkpoint, local_folder, read_weights, weight_types
from minirl.checkpoint import latest
from minirl.config.policy import PolicyConfig
from minirl.files import writing
from minirl.hf import check_model
from minirl.parallel import Axis, gather
from minirl.rng import key_of

COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model", "*.tiktoken"),
)
"""Files of a model beside its weights."""


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    num_bytes: int
    untrained: tuple[str, ...]
    """Weights that the backend does not know, copied from the model that the run started from."""


def check_paths(checkpoint: Path, folder: Path) -> None:
    """Refuses what could not be read, and what would be overwritten, before any model is loaded.

    Raises:
        ValueError: `checkpoint` is no folder of one saved step, or `folder` is not empty.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint: there is no folder {str(checkpoint)!r}")
    newest = latest(checkpoint)
    if newest is not None:
        raise ValueError(
            f"--checkpoint: {str(checkpoint)!r} is the folder of a run: name one of its steps, "
            f"{str(newest[1])!r} for the last"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"--out: {str(folder)!r} exists already and nothing is overwritten: remove it, or "
            "name another folder"
        )


def to_hugging_face(
    cfg: PolicyConfig, checkpoint: Path, folder: Path, axis: Axis, max_shard_size: str = "5GB"
) -> Exported:
    """Writes the weights of a saved state as a model that transformers and vLLM load.

    The folder is complete or absent. The first rank holds all weights in host memory.

    Collective: every rank calls this; `checkpoint` is on a file system that they share.

    Raises:
        ValueError: on every rank: the paths (see `check_paths`), the model, the layout or the
            checkpoint are refused; or the state has weights that the model's checkpoint lacks.
    """
    check_paths(checkpoint, folder)
    check_model(cfg.model_name)
    check_policy(cfg)
    source = local_folder(cfg.model_name, (*COMPANIONS, "*.safetensors", "*.index.json"))
    types = weight_types(source)
    backend, state = open_backend(decided(cfg), axis, key_of(0))
    state = backend.load_(state, checkpoint)
    weights = _first_rank_s(backend.export(state), types, axis)
    written, problem = None, ""
    if axis.rank == 0:
        try:
            written = _write(cfg.model_name, source, weights, folder, max_shard_size)
        except (ValueError, OSError) as error:
            problem = str(error) or repr(error)
    [result] = [found for found in gather([(written, problem)], axis) if any(found)]
    if result[0] is None:
        raise ValueError(result[1])
    return result[0]


def _first_rank_s(
    pairs: Iterator[tuple[str, Tensor]], types: Mapping[str, torch.dtype], axis: Axis
) -> dict[str, Tensor]:
    """A copy of all weights, in the precision of the model's checkpoint where the name is known.

    Collective: each tensor is assembled from all ranks.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if axis.rank == 0:
            kept[name] = tensor.to("cpu", types.get(name, tensor.dtype), copy=True)
    return kept


def _write(
    model_name: str, source: Path, weights: dict[str, Tensor], folder: Path, max_shard_size: str
) -> Exported:
    from huggingface_hub import save_torch_state_dict

    types = weight_types(source)
    weights = as_in_checkpoint(model_name, weights, types)
    unknown = sorted(weights.keys() - types.keys())
    if unknown:
        raise ValueError(
            f"policy.model_name: the files of {model_name!r} have no weights of these names, which "
            f"were trained: {unknown[:5]} ({len(unknown)} in all); transformers gives no way back"
        )
    untrained = tuple(sorted(types.keys() - weights.keys()))
    whole = {name: x.to(types[name]) for name, x in weights.items()}
    whole |= read_weights(source, untrained)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with writing(part):
        part.mkdir(parents=True)
        save_torch_state_dict(whole, part, max_shard_size=max_shard_size, metadata={"format": "pt"})
        for file in sorted({f for pattern in COMPANIONS for f in source.glob(pattern)}):
            shutil.copyfile(file, part / file.name)
        for file in part.iterdir():
            # Files of weights are made as temporary ones, which nobody else may read.
            file.chmod((part / "config.json").stat().st_mode)
        part.rename(folder)
    return Exported(folder, sum(x.numel() * x.element_size() for x in whole.values()), untrained)


def to_megatron(cfg: PolicyConfig, axis: Axis) -> Path:
    """Converts the model ahead of the run, unless that was done; returns the conversion's folder.

    Collective: every rank calls this.

    Raises:
        ValueError: on every rank: the Megatron backend is not enabled, or the model cannot be
            converted.
    """
    if not cfg.megatron_cfg.enabled:
        raise ValueError(
            "policy.megatron_cfg.enabled is false: a conversion to Megatron's format is for the "
            "Megatron backend only; set policy.megatron_cfg.enabled=true"
        )
    check_model(cfg.model_name)
    check_policy(cfg)
    cfg = with_own_config(cfg)
    from minirl.backends.megatron import convert as megatron_convert

    with megatron_convert.converted(cfg, axis) as folder:
        return folder.parent
