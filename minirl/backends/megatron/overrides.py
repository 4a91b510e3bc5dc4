"""`policy.megatron_cfg.model_overrides`: fields of Megatron Bridge's model provider by name.

Which fields exist, of which types, is what the installed provider says. Values come from YAML: a
dtype or a member of an enumeration is given by its name, and a callable cannot be given at all.
"""

import copy
import dataclasses
import enum
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from minirl.config.loader import refuse
from minirl.config.megatron import KEY
from minirl.config.megatron_rules import check_overrides

P = TypeVar("P")
PATH = f"{KEY}model_overrides"
DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
SCALARS = (bool, int, float, str)


def merge_overrides(provider: P, overrides: Mapping[str, Any], first_class: Collection[str]) -> P:
    """A copy of a provider with the overrides in it; `provider` stays as it is.

    A mapping goes into the config object that the provider holds there, and is the value itself
    where the field takes mappings. Call this before the provider is finalised.

    Raises:
        ValueError: no such field, a value of the wrong type, a mapping over what holds no fields,
            or a name in `first_class`; the message has the full path.
    """
    check_overrides(overrides, first_class)
    return cast("P", _merged(provider, overrides, PATH))


def refuse_models_own(
    overrides: Mapping[str, Any], provider: object, names: Iterable[tuple[str, str]]
) -> None:
    """Refuses overrides of what the model's config.json says: the engine reads only the latter.

    `names` are pairs of a field of that config and the provider's field that is read from it.

    Raises:
        ValueError: an override differs from what `provider`, as read, says.
    """
    own = dict(vars(provider))
    for theirs, name in names:
        refuse(
            name in overrides and name in own and overrides[name] != own[name],
            f"{PATH}.{name} is {overrides.get(name)!r}, but the model's config makes it "
            f"{own.get(name)!r}, in the engine too, and the two would differ; set "
            f"policy.hf_config_overrides.{theirs} instead",
        )


def refuse_decided(overrides: Mapping[str, Any], decided: Mapping[str, Any]) -> None:
    """Refuses overrides that would be lost, as the backend sets these provider fields itself.

    Raises:
        ValueError: an override differs from the value that is `decided` for its field.
    """
    for name, value in overrides.items():
        refuse(
            name in decided and value not in (decided[name], _name_of(decided[name])),
            f"{PATH}.{name} is {value!r}, but other keys of policy, the model's config or "
            f"this machine make it "
            f"{_name_of(decided.get(name))!r}; remove it",
        )


def _merged(target: Any, overrides: Mapping[str, Any], path: str) -> Any:
    """A copy of a config object with the overrides in it."""
    if not overrides:
        return target
    kinds, values = _kinds(target), _attributes(target)
    changed: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in kinds:
            _refuse_unknown(target, name, kinds, path)
        changed[name] = _value(values.get(name), value, kinds[name], f"{path}.{name}")
    if not dataclasses.is_dataclass(target):
        merged = copy.copy(target)
        _attributes(merged).update(changed)
        return merged
    merged = dataclasses.replace(cast("Any", target), **changed)
    # What was hung onto the provider beside its fields, replace() leaves behind.
    own = {field.name for field in dataclasses.fields(target)}
    _attributes(merged).update({name: x for name, x in values.items() if name not in own})
    return merged


def _refuse_unknown(target: Any, name: str, known: Collection[str], path: str) -> None:
    near = [f"{path}.{n}" for n in get_close_matches(name, known)]
    hint = f"did you mean {' or '.join(near)}?" if near else "remove it"
    raise ValueError(
        f"{path}.{name} does not match a configurable field on Megatron Bridge config "
        f"{type(target).__name__}; {hint}"
    )


def _attributes(target: object) -> dict[str, Any]:
    """Of the object itself: a change of the mapping changes it."""
    attributes: dict[str, Any] = vars(target)
    return attributes


def _kinds(target: Any) -> dict[str, Any]:
    """The annotations of the fields that can be set; of plain objects, the types they hold."""
    if not dataclasses.is_dataclass(target):
        return {
            name: type(value) if type(value) in SCALARS else Any
            for name, value in _attributes(target).items()
            if not name.startswith("_")
        }
    try:
        hints = get_type_hints(type(target), include_extras=True)
    except (NameError, TypeError, AttributeError):  # names that only type checkers import
        hints = {}
    return {
        f.name: hints.get(f.name, Any if isinstance(f.type, str) else f.type)
        for f in dataclasses.fields(target)
        if f.init and not f.name.startswith("_")
    }


def _value(old: Any, new: Any, kind: Any, path: str) -> Any:
    """What becomes of a field that holds `old`."""
    if isinstance(new, dict):
        given = cast("dict[str, Any]", new)
        if isinstance(old, dict):
            return {**cast("dict[str, object]", old), **given}
        if _is_config(old):
            return _merged(old, given, path)
        refuse(
            kind is Any or not _readings(given, kind),
            f"{path} = {given}: a mapping cannot replace {old!r}, which has no fields; give a "
            f"{_shown(kind)}",
        )
    readings = _readings(new, kind)
    refuse(not readings, f"{path} = {new!r}: expected {_shown(kind)}")
    return readings[0]


def _is_config(value: object) -> bool:
    """Whether a value is an object with fields of its own."""
    if callable(value) or isinstance(value, enum.Enum | types.ModuleType):
        return False
    try:
        vars(value)
    except TypeError:  # a number, a string, a list ...
        return False
    return True


def _readings(value: Any, kind: Any) -> list[Any]:
    """What a value from YAML means as `kind`: one value; none if it does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return [value]
    if origin is Annotated:
        return _readings(value, args[0])
    if origin in (Union, types.UnionType):
        return next((found for arg in args if (found := _readings(value, arg))), list[Any]())
    if origin is Literal:
        return [value] if any(value == x and type(value) is type(x) for x in args) else []
    if isinstance(value, list):
        return _readings_of_list(cast("list[object]", value), origin or kind, args)
    if isinstance(value, dict):
        return [value] if (origin or kind) in (dict, Mapping) else []
    return _readings_of_scalar(value, kind)


def _readings_of_list(value: list[object], kind: Any, args: tuple[Any, ...]) -> list[Any]:
    if kind not in (list, tuple, Sequence):
        return []
    if not args:
        items: list[Any] = [Any] * len(value)
    elif kind is tuple and args[-1] is not Ellipsis:
        items = list(args)
    else:
        items = [args[0]] * len(value)
    if len(items) != len(value):
        return []
    found = [_readings(x, item) for x, item in zip(value, items, strict=True)]
    if not all(found):
        return []
    first = [x[0] for x in found]
    return [tuple(first) if kind is tuple else first]


def _readings_of_scalar(value: Any, kind: Any) -> list[Any]:
    if value is None:
        return [None] if kind is types.NoneType else []
    if kind is torch.dtype:
        return [DTYPES[value]] if value in DTYPES else []
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [kind[value]] if value in kind.__members__ else []
    if kind is float:
        return [value] if type(value) in (int, float) else []
    return [value] if kind in SCALARS and type(value) is kind else []


def _name_of(value: Any) -> Any:
    """A value as YAML would give it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.name if isinstance(value, enum.Enum) else value


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
