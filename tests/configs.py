"""Configs for tests: the smallest valid one, its edits, and the schema as a list of keys."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import strategies as st
from msgspec import inspect, structs

from minirl.config.loader import load
from minirl.config.run import GrpoRun

MINIMAL: dict[str, Any] = {
    "policy": {
        "model_name": "some/model",
        "optimizer": {"kwargs": {"lr": 1e-6}},
        "generation": {"max_new_tokens": 384},
    },
    "data": {"train": {"data_path": "rows.jsonl", "split_validation_size": 0.1}},
}
"""What has no default, and something to validate on."""


MEGATRON: dict[str, Any] = {
    **MINIMAL,
    "policy": {
        **MINIMAL["policy"],
        "optimizer": None,
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {"enabled": True, "optimizer": {"lr": 1e-6}},
    },
}
"""The same with the other backend."""


def load_tree(tree: dict[str, Any], *overrides: str) -> GrpoRun:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return load(path, overrides, GrpoRun)


COMPLETE: dict[str, Any] = msgspec.to_builtins(load_tree(MINIMAL))
"""MINIMAL with every default written out."""


def message(tree: dict[str, Any], *overrides: str) -> str:
    """Why a config is refused."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_tree(tree, *overrides)
    return str(caught.value)


def edited(tree: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` with the values at dotted keys; sections are made where there are none."""
    tree = copy.deepcopy(tree)
    for key, value in edits.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at[section] = at.get(section) or {}
            at = at[section]
        at[name] = value
    return tree


def leaves_of(tree: dict[str, Any], path: str = "") -> set[str]:
    """The dotted keys in a tree, sections included."""
    found = set()
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        found |= {key} | (leaves_of(value, key) if isinstance(value, dict) else set())
    return found


def section_of(kind: Any) -> type[msgspec.Struct] | None:
    """The section that values of a type, or the items of such a list, are."""
    info = inspect.type_info(kind)
    types = info.types if isinstance(info, inspect.UnionType) else (info,)
    types = [t.item_type if isinstance(t, inspect.ListType) else t for t in types]
    return next((t.cls for t in types if isinstance(t, inspect.StructType)), None)


def walk(
    cls: type[msgspec.Struct], path: str = ""
) -> list[tuple[str, type[msgspec.Struct], structs.FieldInfo]]:
    """(dotted key, section that holds it, field) of every key; those of lists are left out."""
    keys = []
    for f in structs.fields(cls):
        key = f"{path}.{f.name}" if path else f.name
        inner = section_of(f.type)
        is_list = fits([], f.type)
        keys += [(key, cls, f), *(walk(inner, key) if inner and not is_list else [])]
    return keys


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type and range of `kind`, and breaks no rule."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


KEYS = walk(GrpoRun)
LEAVES = [(key, f.type) for key, _, f in KEYS if section_of(f.type) is None or fits([], f.type)]


@st.composite
def batch_sizes(draw: st.DrawFn) -> dict[str, int]:
    """Sizes that divide each other as they must."""
    prompts, group = draw(st.integers(1, 12)), draw(st.integers(2, 6))

    def divisor(n: int) -> int:
        return draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))

    batch = divisor(prompts * group)
    return {
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": group,
        "policy.train_global_batch_size": batch,
        "policy.train_micro_batch_size": divisor(batch),
        "policy.logprob_batch_size": divisor(prompts * group),
    }
