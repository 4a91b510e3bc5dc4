"""A model's own files of weights: what they hold, and a training state under their names.

transformers holds some weights in another form than checkpoints do: all experts of a layer in one
tensor, say. Its loading converts one to the other, and can be run backward.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from minirl.hf import read_config, shards, skeleton

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool},
}
"""Precisions of weights, by their names in safetensors."""


def local_folder(name: str, patterns: Sequence[str]) -> Path:
    """Where the model's files lie; of a model on the hub, those that match are downloaded first."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    import huggingface_hub

    download: Any = huggingface_hub.snapshot_download  # pyright: ignore[reportUnknownVariableType] # typed in part
    return Path(download(name, allow_patterns=list(patterns)))


def weight_types(folder: Path) -> dict[str, torch.dtype]:
    """Every weight in a model's folder, with its precision; only headers are read.

    Raises:
        ValueError: a weight is quantised, so that it is not a number for a parameter.
    """
    types: dict[str, torch.dtype] = {}
    for file in shards(folder, "policy.model_name"):
        with _open(file) as opened:
            kinds = {str(name): opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 # safe_open cannot be iterated
        odd = {name: kind for name, kind in kinds.items() if kind not in TYPES}
        if odd:
            raise ValueError(
                f"policy.model_name: {str(file)!r} holds {odd}, but weights are written back as "
                f"one of {sorted(TYPES)} only: start from a model that is not quantised"
            )
        types |= {name: TYPES[kind] for name, kind in kinds.items()}
    return types


def read_weights(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Some weights of a model's folder."""
    found: dict[str, Tensor] = {}
    for file in shards(folder, "policy.model_name"):
        with _open(file) as opened:
            found |= {name: opened.get_tensor(name) for name in set(names) & set(opened.keys())}
    return found


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return cast(Any, safe_open)(file, framework="pt")


def as_on_disk(model: Any, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter under the names that a checkpoint has for it, and for its parts."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(cast("dict[str, Tensor]", revert_weight_conversion(model, {name: weight})).items())


def as_in_checkpoint(
    model_name: str, weights: dict[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """`weights` under the names of the checkpoint `model_name`, which holds `names`.

    Weights that have those names already stay as they are. A tied weight is there twice where the
    checkpoint has it twice, and once where it has it once. No two share memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = skeleton(read_config(model_name))
    if not weights.keys() <= set(names):
        weights = cast("dict[str, Tensor]", revert_weight_conversion(model, weights))
    twins = cast("dict[str, str]", model.all_tied_weights_keys)
    doubled = {
        twin: weights[kept].clone()
        for twin, kept in twins.items()
        if twin in names and twin not in weights and kept in weights
    }
    return {name: _alone(x) for name, x in weights.items()} | doubled


def _alone(x: Tensor) -> Tensor:
    """The tensor, copied if it is a part of a larger one."""
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x
