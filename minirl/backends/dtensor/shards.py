"""A sharded training state on disk: safetensors written by every rank, and one JSON file.

Tensors (float32 masters, optimizer state) go through `torch.distributed.checkpoint` with its
safetensors storage, so any number of ranks reads what any number wrote. Everything else is JSON.
Nothing is pickled, so loading a checkpoint cannot run code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from minirl.files import read_object
from minirl.parallel import Axis

VALUES = "state.json"
MODEL, OPTIMIZER = "model:", "optimizer:"


def save(
    folder: Path,
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer,
    values: Mapping[str, Any],
    axis: Axis,
) -> None:
    """Writes parameters, optimizer and `values` (JSON) into `folder`, which exists.

    Collective: every rank of `axis` calls this.
    """
    state = optimizer.state_dict()
    slots: dict[int, dict[str, Tensor]] = state["state"]
    tensors = {MODEL + name: p.detach() for name, p in parameters.items()}
    for i, name in enumerate(parameters):
        for slot, value in slots.get(i, {}).items():
            tensors[f"{OPTIMIZER}{name}:{slot}"] = value
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, process_group=axis.group)
    if axis.rank == 0:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]
        (folder / VALUES).write_text(json.dumps({"param_groups": groups, **values}))


def read_values(folder: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint.

    Raises:
        ValueError: the folder holds none, or those of another backend.
    """
    file = folder / VALUES
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} is no complete checkpoint: it has no {VALUES}")
    values = read_object(file, f"{str(folder)!r} is no complete checkpoint: {VALUES}")
    if "param_groups" not in values:
        raise ValueError(
            f"{str(folder)!r} was saved by the Megatron backend: set policy.megatron_cfg.enabled "
            "to true, or start a new run"
        )
    return values


def load_(
    folder: Path,
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer,
    axis: Axis,
) -> None:
    """Reads what `save` wrote, in place. Settings of the optimizer (its rate ...) stay.

    Collective: every rank of `axis` calls this.

    Raises:
        ValueError: the names or shapes of the saved parameters are not those of `parameters`.
    """
    reader = HuggingFaceStorageReader(str(folder))
    saved = {
        key: facts
        for key, facts in reader.read_metadata().state_dict_metadata.items()
        # Other files of tensors may lie beside these.
        if isinstance(facts, TensorStorageMetadata) and key.startswith((MODEL, OPTIMIZER))
    }
    _check_model(folder, {k: f.size for k, f in saved.items() if k.startswith(MODEL)}, parameters)
    tensors = {MODEL + name: p.detach() for name, p in parameters.items()}
    index = {name: i for i, name in enumerate(parameters)}
    slots: dict[int, dict[str, Tensor]] = {}
    for key in saved.keys() - tensors.keys():
        name, slot = key.removeprefix(OPTIMIZER).rsplit(":", 1)
        tensors[key] = _like(saved[key], parameters[name])
        slots.setdefault(index[name], {})[slot] = tensors[key]
    dcp.load(tensors, storage_reader=reader, process_group=axis.group)
    # One group holds all parameters, in order: see `optim.build`.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})


def _like(facts: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Room for a saved slot: sharded as its parameter, or one number on every rank."""
    dtype = facts.properties.dtype
    if facts.size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(facts.size, dtype=dtype)


def _check_model(
    folder: Path, saved: Mapping[str, torch.Size], parameters: Mapping[str, Tensor]
) -> None:
    here = {MODEL + name: p.shape for name, p in parameters.items()}
    wrong = sorted(k for k in saved.keys() | here.keys() if saved.get(k) != here.get(k))
    if wrong:
        key = wrong[0]
        raise ValueError(
            f"{str(folder)!r} holds another model than policy.model_name: "
            f"{key.removeprefix(MODEL)!r} has the shape {saved.get(key)} there and {here.get(key)} "
            f"here ({len(wrong)} such differences)"
        )
