"""The door to Megatron-Core and Bridge, also where Transformer Engine is not installed.

`import megatron.bridge` imports every model family and, with them, Transformer Engine. Without the
latter, the packages above the converter are entered by path and only the family that is asked for
is imported; and the families' tables of weight names, which describe Transformer Engine's fused
layers (a norm inside the following projection), get the names of Core's local layers in addition.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

ROOT = "megatron.bridge"
LOCAL_NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
"""What a norm is called inside a fused layer, and on its own."""


def core(module: str) -> Any:
    """A module of Megatron-Core, which has no types."""
    return importlib.import_module(f"megatron.core.{module}")


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def open_bridge(model_name: str, model_type: str) -> Any:
    """The `AutoBridge` of a Hugging Face checkpoint; `model_type` is its config's.

    Raises:
        ValueError: Bridge cannot convert this kind of model.
    """
    if has_transformer_engine():
        bridge = importlib.import_module(ROOT).AutoBridge
    else:
        bridge = _import_without_transformer_engine(model_type)
    try:
        return bridge.from_hf_pretrained(model_name, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"policy.model_name: Megatron Bridge cannot convert {model_name!r} "
            f"(model_type {model_type!r}): {str(error).strip().splitlines()[0]}"
        ) from error


def models_own_fields() -> list[tuple[str, str]]:
    """Fields of Hugging Face configs that shape a model, and the provider's for them."""
    module = importlib.import_module(f"{ROOT}.models.conversion.model_bridge")
    pairs: list[tuple[str, str]] = module.MegatronModelBridge.CONFIG_MAPPING
    return [(theirs, own) for theirs, own in pairs if own != "init_method_std"]  # never drawn here


def vocabulary_names(bridge: Any) -> set[str]:
    """Hugging Face names of the tensors with a row for each token of the vocabulary."""
    mappings = bridge._model_bridge.mapping_registry().mappings
    own = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {str(m.hf_param) for m in mappings if m.megatron_param in own}


def _import_without_transformer_engine(model_type: str) -> Any:
    root = _folder()
    _enter(ROOT, root)
    _enter(f"{ROOT}.models", root / "models")
    _enter(f"{ROOT}.peft", root / "peft")
    # Core decides whether Transformer Engine exists when these are first imported.
    importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    importlib.import_module("megatron.core.transformer.moe.moe_utils")
    # Bridge reports each optional import that fails, with its traceback.
    logging.getLogger(f"{ROOT}.utils.import_utils").addFilter(lambda _: False)
    with _transformer_engine_by_name():
        importlib.import_module(f"{ROOT}.peft.lora_layers")
    auto = importlib.import_module(f"{ROOT}.models.conversion.auto_bridge")
    importlib.import_module(f"{ROOT}.models.{_family(root / 'models', model_type)}")
    base = importlib.import_module(f"{ROOT}.models.conversion.model_bridge").MegatronModelBridge
    for cls in _subclasses(base):
        _add_local_names(cls)
    return auto.AutoBridge


def _folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "bridge").is_dir():
            return Path(place) / "bridge"
    raise ValueError(
        "policy.megatron_cfg.enabled: megatron-bridge is not installed; install minirl with its "
        "extra, cpu or cuda, or use policy.dtensor_cfg.enabled=true"
    )


def _family(models: Path, model_type: str) -> str:
    """The package of Bridge that knows `model_type`: the longest name that it begins with."""
    names = [p.name for p in models.iterdir() if (p / "__init__.py").is_file()]
    found = [name for name in names if model_type.startswith(name)]
    if not found:
        raise ValueError(
            f"policy.model_name: Megatron Bridge has no models of type {model_type!r}; use "
            "policy.dtensor_cfg.enabled=true"
        )
    return max(found, key=len)


def _enter(name: str, path: Path) -> None:
    """Puts a package into `sys.modules` without running its `__init__`."""
    if name in sys.modules:
        return
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = [str(path)]
    sys.modules[name] = module
    above = importlib.import_module(name.rpartition(".")[0])
    setattr(above, name.rpartition(".")[2], module)


class _Names(types.ModuleType):
    """A module in which every name exists: classes are empty, the rest are modules alike."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Names(f"{self.__name__}.{name}")


@contextmanager
def _transformer_engine_by_name() -> Iterator[None]:
    """Lets one module that only names Transformer Engine's classes be imported without it."""
    top, layers = _Names("transformer_engine"), _Names("transformer_engine.pytorch")
    top.__path__ = []
    names = {"transformer_engine": top, "transformer_engine.pytorch": layers}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _add_local_names(bridge: Any) -> None:
    """Extends a family's table of names with those of the local layers, once."""
    own = cast("dict[str, Any]", vars(bridge))
    if "mapping_registry" not in own or "minirl_local_names" in own:
        return
    original = own["mapping_registry"]
    names = importlib.import_module(f"{ROOT}.models.conversion.mapping_registry")
    mappings = importlib.import_module(f"{ROOT}.models.conversion.param_mapping")

    def mapping_registry(self: Any) -> Any:
        registry: Any = original(self)
        known = {m.megatron_param for m in registry.mappings}
        extra = {
            m.megatron_param.removesuffix(fused) + local: m.hf_param
            for m in registry.mappings
            for fused, local in LOCAL_NORMS
            if m.megatron_param.endswith(fused)
        }
        new = [mappings.AutoMapping(k, v) for k, v in extra.items() if k not in known]
        return names.MegatronMappingRegistry(*registry.mappings, *new)

    bridge.mapping_registry = mapping_registry
    bridge.minirl_local_names = True
