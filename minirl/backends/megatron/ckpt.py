"""Megatron checkpoints: Core's sharded tensors, one JSON file, and the provider as YAML.

Tensors are written under global names and offsets ("fully reshardable"), so that a run saved in one
layout goes on in another. Numbers and settings are JSON; `run_config.yaml` records the model's
final provider. Core's own files hold pickles: reading them is restricted to plain data.
"""

import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.checkpoint.api import CheckpointException

from minirl.backends.megatron.bridge import core
from minirl.backends.megatron.setup import Built, Chunk
from minirl.files import read_object

VALUES, RUN_CONFIG = "state.json", "run_config.yaml"
LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Core is told about the format, saving and loading; it adds process groups to its copy."""
KIND = ("optimizer", "use_distributed_optimizer")
"""Of the optimizer's settings, those that decide what a checkpoint holds."""
RATES = {"max_lr": "lr", "min_lr": "min_lr"}
"""By which Core finds the saved group of parameters for one of its own, and their settings."""
PLAIN = ("torch.distributed.checkpoint.", "torch._C._distributed")
"""Modules whose records Core's index of a checkpoint is made of."""
PLAIN_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
}


def save(folder: Path, built: Built, values: Mapping[str, Any]) -> None:
    """Writes weights, optimizer, schedule and `values` (JSON) into `folder`, which exists.

    Collective: every rank calls this.
    """
    _start_(built.optimizer)
    write_tensors(folder, _state(built, loading=False))
    if dist.get_rank() == 0:
        state = {**values, "optimizer": _settings(built)}
        (folder / VALUES).write_text(json.dumps(state))
        write_run_config(folder, built.provider)


def load_(folder: Path, built: Built) -> dict[str, Any]:
    """Reads what `save` wrote, in place and under any layout; returns the values.

    Rates and other settings are those of the config; the schedule is taken to the saved step.

    Collective: every rank calls this.

    Raises:
        ValueError: the folder holds no complete checkpoint, or that of another backend, model or
            kind of optimizer.
    """
    file = folder / VALUES
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} is no complete checkpoint: it has no {VALUES}")
    values = read_object(file, f"{str(folder)!r} is no complete checkpoint: {VALUES}")
    if "param_groups" in values:
        raise ValueError(
            f"{str(folder)!r} was saved by the FSDP2 backend: set policy.dtensor_cfg.enabled to "
            "true, or start a new run"
        )
    saved, here = values["optimizer"], _settings(built)
    for name in KIND:
        if saved[name] != here[name]:
            raise ValueError(
                f"{str(folder)!r} was saved with policy.megatron_cfg.optimizer.{name} "
                f"{saved[name]}, not {here[name]}: set it as it was, or start a new run"
            )
    _start_(built.optimizer)
    own = [
        {name: x for name, x in group.items() if name not in ("params", "step")}
        for group in built.optimizer.param_groups
    ]
    for group in built.optimizer.param_groups:
        group.update({name: saved[RATES[name]] for name in RATES if name in group})
    read = read_tensors(folder, _state(built, loading=True))
    _load_models_(built.chunks, read)
    built.optimizer.load_state_dict(read["optimizer"])
    for group, settings in zip(built.optimizer.param_groups, own, strict=True):
        group.update(settings)
    built.schedule.num_steps = 0
    built.schedule.step(increment=int(values["step"]))
    return values


def _state(built: Built, *, loading: bool) -> dict[str, Any]:
    state = model_state(built.chunks)
    state["optimizer"] = built.optimizer.sharded_state_dict(
        dict(state), is_loading=loading, metadata=dict(LAYOUT)
    )
    return state


def _start_(optimizer: Any) -> None:
    """Gives an optimizer that took no step yet the moments that its first step begins with.

    Core makes them in the first step, cannot save or load an optimizer without, and knows no way
    to make those of SGD.
    """
    chained = isinstance(optimizer, core("optimizer.optimizer").ChainedOptimizer)
    for part in optimizer.chained_optimizers if chained else [optimizer]:
        part.init_state_fn = part.init_state_fn or _start_sgd_
        if not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def _start_sgd_(optimizer: Any, config: Any = None) -> None:
    del config  # Core gives it
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def model_state(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Where each weight of this rank lies in the whole model, by Core's names."""
    states = [model.sharded_state_dict(metadata=dict(LAYOUT)) for model in _cores(chunks)]
    if len(states) == 1:
        return {"model": states[0]}
    return {f"model{i}": state for i, state in enumerate(states)}


def _load_models_(chunks: Sequence[Chunk], read: Mapping[str, Any]) -> None:
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    for model, name in zip(_cores(chunks), names, strict=True):
        model.load_state_dict(read[name])


def _cores(chunks: Sequence[Chunk]) -> list[Any]:
    """The models inside their wrappers for precision and data parallelism."""
    return [core("utils").unwrap_model(chunk) for chunk in chunks]


def load_weights_(chunks: Sequence[Chunk], folder: Path) -> None:
    """Reads the weights alone. Collective."""
    read = read_tensors(folder, model_state(chunks))
    _load_models_(chunks, read)


def write_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Core's writing of a sharded state. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about Core's use of older functions
        core("dist_checkpointing").save(state, str(folder), content_metadata=dict(LAYOUT))


def read_tensors(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Core's reading, restricted to plain data. Collective.

    Raises:
        ValueError: the index names anything but records of a checkpoint, or tensors do not fit.
    """
    check_index(folder)
    try:
        with warnings.catch_warnings(), _only_plain_data():
            warnings.simplefilter("ignore")
            return dict(core("dist_checkpointing").load(state, str(folder)))
    except (
        core("dist_checkpointing.core").CheckpointingException,
        CheckpointException,
        KeyError,
    ) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"{str(folder)!r} does not hold the model of policy.model_name: {reason}"
        ) from error


@contextmanager
def _only_plain_data() -> Iterator[None]:
    """Whatever asks torch to unpickle anything gets tensors, numbers and containers only."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _PlainUnpickler(pickle.Unpickler):
    """Refuses whatever is not a record of torch's checkpoint index."""

    def find_class(self, module: str, name: str) -> Any:
        """The one door through which a pickle reaches code."""
        known = module.startswith(PLAIN) or (module, name) in PLAIN_NAMES
        if known or isinstance(vars(torch).get(name), torch.dtype):
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}")


def check_index(folder: Path) -> None:
    """Refuses a checkpoint whose index, a pickle, would run code.

    Raises:
        ValueError: there is no index, or it names anything but records.
    """
    file = folder / ".metadata"
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} is no Megatron checkpoint: it has no {file.name}")
    try:
        with file.open("rb") as stream:
            _PlainUnpickler(stream).load()
    except (ValueError, pickle.UnpicklingError, AttributeError, EOFError) as error:
        raise ValueError(
            f"{str(file)!r} is no index of a checkpoint and was not read: {error}"
        ) from error


def _settings(built: Built) -> dict[str, Any]:
    return {name: getattr(built.optimizer.config, name) for name in (*KIND, *RATES.values())}


def write_run_config(folder: Path, provider: Any) -> None:
    """The final provider, field by field, as `model` in run_config.yaml."""
    facts = {"model": {"_target_": _path(type(provider)), **_plain_fields(provider)}}
    (folder / RUN_CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(facts)))


def _plain_fields(record: Any) -> dict[str, Any]:
    return {
        f.name: _plain(getattr(record, f.name))
        for f in fields(record)
        if not f.name.startswith("_") and not f.name.endswith("_func")
    }


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(x) for x in cast("list[Any]", value)]
        case dict():
            return {str(k): _plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {"_target_": _path(cast(Any, value).__class__), **_plain_fields(value)}
        case type():
            return _path(cast(Any, value))
        case _ if callable(value):
            return (
                str(getattr(value, "__module__", ""))
                + "."
                + str(getattr(value, "__qualname__", type(value).__name__))
            )
        case _:
            return str(value)


def _path(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
