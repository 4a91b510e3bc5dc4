"""Checks on a model's folder that cost nothing, before anything expensive starts."""

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from minirl.files import read_object, shorten, writing

MEGATRON = ("run_config.yaml", "iter_0000000", "latest_checkpointed_iteration.txt")
"""What shows that a folder holds a checkpoint of Megatron's."""
NUMBERS = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})
"""Precisions of weights that are not quantised, by their names in safetensors."""
HfConfig: TypeAlias = Any
HfModel: TypeAlias = Any
"""transformers' own types are partial."""


def check_model(name: str, key: str = "policy.model_name") -> None:
    """Refuses a model that could not be loaded, without loading it.

    A folder must hold a config.json that names an architecture, and weights as safetensors
    (pickled weights are never read). A name that is no folder is taken for one on the Hugging
    Face hub, where its configuration must be reachable or cached.

    Raises:
        ValueError: names the key, the value, and what is missing.
    """
    folder = Path(name)
    if name.startswith("~"):
        raise ValueError(f"{key}: '~' is not expanded; write {str(folder.expanduser())!r}")
    # Not pathlib's questions, which fail where a name is too long.
    if os.path.isdir(name):
        _check_folder(folder, key)
    elif os.path.exists(name) or name.startswith((".", "/")) or name.count("/") != 1:
        raise ValueError(
            f"{key}: there is no folder {shorten(name)!r} (from {str(Path.cwd())!r}); "
            "give a model's folder or a Hugging Face name such as 'Qwen/Qwen2.5-1.5B'"
        )
    else:
        _check_hub(name, key)


def _check_folder(folder: Path, key: str) -> None:
    file = folder / "config.json"
    if not file.is_file() and any((folder / name).exists() for name in MEGATRON):
        raise ValueError(
            f"{key}: {str(folder)!r} is a checkpoint in Megatron's format: only a model in Hugging "
            "Face format is an input; name the one that it was converted from, or convert a run's "
            "checkpoint back with bin/convert.py to-hf"
        )
    if not file.is_file():
        raise ValueError(
            f"{key}: {str(folder)!r} has no config.json: it is no model in Hugging Face format"
        )
    config = read_object(file, f"{key}: {str(file)!r}")
    if "model_type" not in config:
        raise ValueError(f"{key}: {str(file)!r} names no model_type; is it a model's config?")
    _check_not_quantised(config, key)
    ends = folder / "generation_config.json"
    if ends.is_file():
        # transformers takes one that it cannot read for one that is not there.
        read_object(ends, f"{key}: {str(ends)!r}")
    weights = shards(folder, key)
    if not weights:
        raise ValueError(
            f"{key}: {str(folder)!r} has no *.safetensors; minirl reads no pickled weights: "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )
    for weight in weights:
        odd = {kind for kind in check_safetensors(weight, key) if kind not in NUMBERS}
        if odd:
            raise ValueError(
                f"{key}: {str(weight)!r} holds weights of the kinds {sorted(odd)}, which are "
                "quantised and cannot be trained; start from a model that is not"
            )


def _check_not_quantised(config: Mapping[str, Any], key: str) -> None:
    method = config.get("quantization_config")
    if method is not None:
        raise ValueError(
            f"{key}: its config says quantization_config = {shorten(str(method))}, and quantised "
            "weights cannot be trained; start from a model that is not quantised"
        )


def shards(folder: Path, key: str) -> list[Path]:
    """The files of weights in a folder: those that the index names; without one, all.

    Copies in other forms are not in the index.

    Raises:
        ValueError: the index cannot be read, or a file that it names is not there.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names: Any = read_object(index, f"{key}: {str(index)!r}").get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{key}: {str(index)!r} has no weight_map; download it again")
    files = {folder / str(file) for file in cast("dict[str, object]", names).values()}
    missing = sorted(str(file) for file in files if not file.is_file())
    if missing:
        raise ValueError(
            f"{key}: {len(missing)} of the {len(files)} files that {str(index)!r} names are not "
            f"there, {missing[0]!r} first; download them again"
        )
    return sorted(files)


class _Tensor(msgspec.Struct):
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    data_offsets: tuple[int, int]


def check_safetensors(file: Path, key: str) -> set[str]:
    """The kinds of numbers in a file of safetensors, by its header; tensors are not read.

    Raises:
        ValueError: it has another size than its header says, or no such header.
    """
    remedy = "download or copy it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length) if length <= size else b""
    except OSError as error:
        raise ValueError(f"{key}: {str(file)!r} cannot be read ({error.strerror})") from error
    try:
        entries = msgspec.json.decode(header, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = msgspec.convert(entries, dict[str, _Tensor])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(
            f"{key}: {str(file)!r} ({size} bytes) is no file of safetensors, or its header was cut "
            f"short; {remedy}"
        ) from error
    wanted = 8 + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size != wanted:
        raise ValueError(
            f"{key}: {str(file)!r} has {size} bytes, but its header says {wanted}; {remedy}"
        )
    return {t.dtype for t in tensors.values()}


def _check_hub(name: str, key: str) -> None:
    try:
        config = read_config(name).to_dict()
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"{key}: {name!r} is neither a folder here nor a Hugging Face model in reach "
            f"({first_line})"
        ) from error
    _check_not_quantised(config, key)


def model_facts(name: str) -> dict[str, Any]:
    """The model's Hugging Face config as a dictionary; `model_type` is always in it."""
    folder = Path(name)
    if folder.is_dir():
        return dict(json.loads((folder / "config.json").read_text()))
    return dict(read_config(name).to_dict())


def read_config(name: str) -> HfConfig:
    """The model's Hugging Face config as an object; no code of the model's own is run."""
    from transformers import AutoConfig

    return cast(Any, AutoConfig).from_pretrained(name, trust_remote_code=False)


def causal_class(config: HfConfig) -> HfModel | None:
    """transformers' class of causal language models with such a config; None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)


def skeleton(config: HfConfig) -> HfModel:
    """The model's modules with parameters on no device: names and shapes at no cost.

    Raises:
        ValueError: transformers has no causal language model with such a config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return cast(Any, AutoModelForCausalLM).from_config(config, trust_remote_code=False)


def with_overrides(name: str, overrides: Mapping[str, Any], root: Path) -> str:
    """The same model with other fields in its config: a folder under `root`, which links its files.

    The folder's name follows from the model, its config and the overrides; it is made once, by
    whoever comes first.

    Raises:
        ValueError: a field that configs of this kind of model do not have, or a value that they do
            not take.
    """
    if not overrides:
        return name
    facts = model_facts(name)
    known = _config_fields(facts) | facts.keys()
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"policy.hf_config_overrides.{key}: a config of {facts['model_type']!r} has no "
                f"such field{hint}"
            )
    _check_values(facts, overrides)
    # The model's own config is part of the question: it may change under the same name.
    text = json.dumps([str(Path(name).resolve()), facts, dict(overrides)], sort_keys=True)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.is_dir():
        with writing(folder):
            _link_with_config(_files_of(name), folder, {**facts, **overrides})
    return str(folder)


def _config_fields(facts: Mapping[str, Any]) -> set[str]:
    from transformers import AutoConfig

    default: Any = cast(Any, AutoConfig).for_model(facts["model_type"])
    return set(default.to_dict())


def _check_values(facts: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    config = cast(Any, type(cast(Any, AutoConfig).for_model(facts["model_type"])))
    try:
        config.from_dict({**facts, **overrides})
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"policy.hf_config_overrides: a config of {facts['model_type']!r} does not take "
            f"{shorten(str(dict(overrides)))}: {str(error).strip().splitlines()[-1].strip()}"
        ) from error


def _files_of(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name).resolve()
    import huggingface_hub

    download: Any = huggingface_hub.snapshot_download  # pyright: ignore[reportUnknownVariableType] # typed in part
    return Path(download(name))


def _link_with_config(source: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    for file in source.iterdir():
        if file.name != "config.json":
            (aside / file.name).symlink_to(file.resolve())
    (aside / "config.json").write_text(json.dumps(facts, indent=1))
    try:
        aside.rename(folder)
    except OSError:  # another process was faster, with the same content
        shutil.rmtree(aside)


def weight_files(name: str) -> list[list[str | int]]:
    """The model's files of weights by name, with what changes when they do.

    Of a folder: sizes and times of change. Of a model on the hub: the revision that is loaded,
    which is that of its config, downloaded last when `check_model` asked for it.
    """
    folder = Path(name)
    if folder.is_dir():
        found = sorted([*folder.glob("*.safetensors"), *folder.glob("*.index.json")])
        return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in found]
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return [[name, Path(config).parent.name if isinstance(config, str) else "not cached"]]


def end_token_ids(name: str) -> int | list[int] | None:
    """`eos_token_id` of the model's generation config, else of its config; it may list several."""
    from transformers import GenerationConfig

    ends: Any
    try:
        ends = cast(Any, GenerationConfig.from_pretrained(name)).eos_token_id
    except OSError:
        ends = read_config(name).eos_token_id
    return cast("int | list[int] | None", ends)
