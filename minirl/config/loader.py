"""From YAML files and `key=value` overrides to one frozen, checked record; and back to YAML.

The files of a `defaults:` chain and the overrides are merged, the defaults of the Structs are
put under them, and only then are interpolations resolved: `${grpo.seed}` may name a key that no
file sets. Whatever is wrong (key, type, range, contradiction) is a ValueError that names file,
key, value and rule; wrong keys and values are listed all at once. Nothing is coerced.

A run is a `Section` whose fields are its sections. The loader knows no key of any run.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import NODEFAULT, inspect, structs
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.config.yaml_files import Layer, Tree, join, merged, override, read
from minirl.files import shorten

Kind: TypeAlias = object
"""The annotation of a field: what msgspec converts to."""
Count: TypeAlias = Annotated[int, msgspec.Meta(gt=0)]
NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the config with a fixed set of keys."""

    moved: ClassVar[Mapping[str, str]] = {}
    """Names that one might take for keys of it, and what holds instead."""


S = TypeVar("S", bound=Section)


def refuse(wrong: bool, message: str) -> None:
    """Raises ValueError(message) if something is wrong."""
    if wrong:
        raise ValueError(message)


def is_file_name(path: str) -> bool:
    """Whether an import path, as `module:NAME`, names a file where a module belongs."""
    module = path.partition(":")[0]
    return "/" in module or module.endswith(".py")


def module_instead(path: str) -> str:
    """The remedy for `is_file_name`.

    >>> module_instead("my/rewards.py:score")
    'write rewards:score, and start with its folder on the path: PYTHONPATH=my torchrun ...'
    """
    file, colon, name = path.partition(":")
    folder = shorten(str(Path(file).parent))
    return (
        f"write {shorten(Path(file).stem)}{colon}{name}, and start with its folder on the path: "
        f"PYTHONPATH={folder} torchrun ..."
    )


class Problem(NamedTuple):
    """What is wrong at a key."""

    path: str
    value: Tree
    """None where the key itself is wrong."""
    rule: str


def default(interpolation: str) -> msgspec.Meta:
    """Annotates a field whose default is made of other keys: `load` fills in `interpolation`.

    In Python such a field has no default, its value must be given. A required field that is
    itself a section needs no mark: where it is left out, it is filled with its own defaults.
    """
    return msgspec.Meta(extra={"default": interpolation})


def load(path: str | Path, overrides: Sequence[str], cls: type[S]) -> S:
    """The config in `path`, changed by `overrides` (`a.b=value`, the value in YAML).

    `defaults: FILE` or a list of files, relative to the file that says so, is what its keys are
    merged into, and overrides into those: see `minirl.config.yaml_files`.
    `${a.b}`, `${.sibling}`, `${mul:${a.b},2}` and `${sub:${a.b},1}` stand for other values,
    `${recipe:}` in a default for the name of the file.

    Raises:
        ValueError: a file, an override, a key, a value or a combination of them is wrong.
    """
    layers = [*read(Path(path)), *(override(text) for text in overrides)]
    tree = _fill(merged(layers), cls, Path(path).stem)
    # Strongest first; what no layer sets is missing in `path`.
    layers = [*reversed(layers), Layer(str(path), {})]
    known = list(_keys(cls, ""))
    # Twice, so that a wrong value is reported where it is written, not where it is interpolated.
    _refuse([p for p in _problems(tree, cls, "", known) if not _is_open(p.value)], layers, tree)
    plain = _resolve(tree, layers, known)
    _refuse(list(_problems(plain, cls, "", known)), layers, tree)
    try:
        return msgspec.convert(plain, cls)
    except msgspec.ValidationError as error:  # Some section's __post_init__ refused it.
        rule, _, section = str(error).partition(" - at `$.")
        section = section[:-1]
        prefix = "" if rule.startswith(section) else f"{section}: "
        raise ValueError(f"{path}: {prefix}{shorten(rule, 2000)}") from error


def dump(config: Section) -> str:
    """YAML of every key with its value, which `load` turns into an equal config."""
    return OmegaConf.to_yaml(_omega(_escape(msgspec.to_builtins(config))))


# ---------------------------------------------------------------------------- trees and the schema


@cache
def _sections(kind: Kind) -> tuple[type[msgspec.Struct] | None, type[msgspec.Struct] | None]:
    """The section that a value of this type may be, and the one that its items may be."""
    types = _alternatives(inspect.type_info(kind))
    items = [t.item_type for t in types if isinstance(t, inspect.ListType)]
    section = next((t.cls for t in types if isinstance(t, inspect.StructType)), None)
    return section, next((t.cls for t in items if isinstance(t, inspect.StructType)), None)


def _alternatives(info: inspect.Type) -> Sequence[inspect.Type]:
    while isinstance(info, inspect.Metadata):
        info = info.type
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def _keys(kind: Kind, path: str) -> Iterator[str]:
    """Every key of the schema, dotted."""
    section, _ = _sections(kind)
    for field in structs.fields(section) if section is not None else ():
        yield join(path, field.name)
        yield from _keys(field.type, join(path, field.name))


def _fill(tree: Tree, kind: Kind, recipe: str) -> Tree:
    """`tree` and the defaults of what it leaves out, in the schema's order."""
    section, item = _sections(kind)
    if isinstance(tree, list) and item is not None:
        return [_fill(value, item, recipe) for value in tree]
    if not isinstance(tree, dict) or section is None:
        return tree
    filled: dict[str, Any] = {}
    for field in structs.fields(section):
        info = inspect.type_info(field.type)
        if field.name in tree:
            filled[field.name] = _fill(tree[field.name], field.type, recipe)
        elif isinstance(info, inspect.Metadata) and info.extra is not None:
            made = cast("str", info.extra["default"])
            filled[field.name] = made.replace("${recipe:}", str(_escape(recipe)))
        elif field.default is not NODEFAULT:
            filled[field.name] = _escape(msgspec.to_builtins(field.default))
        elif field.default_factory is not NODEFAULT:
            filled[field.name] = _escape(msgspec.to_builtins(field.default_factory()))
        elif isinstance(info, inspect.StructType):
            filled[field.name] = _fill({}, field.type, recipe)
    return filled | {name: value for name, value in tree.items() if name not in filled}


def _problems(tree: Tree, kind: Kind, path: str, known: Sequence[str]) -> Iterator[Problem]:
    """Unknown and missing keys, wrong types and ranges."""
    section, item = _sections(kind)
    if isinstance(tree, list) and item is not None:
        for i, value in enumerate(tree):
            yield from _problems(value, item, join(path, i), known)
    elif isinstance(tree, dict) and section is not None:
        kinds = {field.name: field.type for field in structs.fields(section)}
        strangers = [name for name in tree if name not in kinds]
        moved: Mapping[str, str] = section.moved if issubclass(section, Section) else {}
        yield from (Problem(join(path, n), None, moved[n]) for n in strangers if n in moved)
        yield from _strangers([n for n in strangers if n not in moved], list(kinds), path, known)
        for name, inner in kinds.items():
            key = join(path, name)
            if name in tree:
                yield from _problems(tree[name], inner, key, known)
            else:
                yield Problem(key, None, "missing, and it has no default; set it")
    else:
        yield from _problems_of_value(tree, kind, path)


def _strangers(
    names: Sequence[str], valid: Sequence[str], path: str, known: Sequence[str]
) -> Iterator[Problem]:
    """Unknown keys, each with like-named ones here and the equally named ones elsewhere."""
    hopeless = False
    for name in names:
        near = [join(path, n) for n in get_close_matches(str(name), valid)]
        near += [key for key in known if key.endswith(f".{name}")]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        yield Problem(join(path, name), None, f"unknown key{hint}")
        hopeless = hopeless or not near
    if hopeless:
        anchors = "" if path else "; a key that only holds an anchor begins with x-"
        yield Problem(path or "a config", None, f"its keys are {', '.join(valid)}{anchors}")


def _problems_of_value(tree: Tree, kind: Kind, path: str) -> Iterator[Problem]:
    try:
        msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        types = _alternatives(inspect.type_info(kind))
        choices = [str(x) for t in types if isinstance(t, inspect.LiteralType) for x in t.values]
        rule = str(error).replace("`object", "`mapping").replace("`array", "`list")
        rule = rule.replace(" - at `$", f" - at `{path}") + _remedy(rule, tree)
        yield Problem(path, tree, f"expected one of {', '.join(choices)}" if choices else rule)
    else:
        if isinstance(tree, str) and "\0" in tree:
            yield Problem(path, tree, "a name or a path cannot hold a NUL character; remove it")
        for key, leaf in _leaves(tree, path):
            if isinstance(leaf, float) and not math.isfinite(leaf):
                yield Problem(key, leaf, "a number must be finite")
            if isinstance(leaf, int) and leaf.bit_length() > 64:
                yield Problem(key, leaf, "an integer must fit into 64 bits")


def _remedy(rule: str, value: Tree) -> str:
    """How to write in YAML what was probably meant."""
    if "Expected `str" in rule and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if "got `str`" in rule and re.fullmatch(r"[-+.\de]+", str(value)):
        return "; remove the quotes"
    if "Expected `int" in rule and isinstance(value, float) and value.is_integer():
        return f"; write {shorten(str(int(value)))}"
    return ""


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    """What holds nothing further: scalars, and empty mappings and lists."""
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree
    if not isinstance(inner, dict) or not inner:
        yield path, tree
        return
    for name, value in inner.items():
        yield from _leaves(value, join(path, name))


def _refuse(problems: Sequence[Problem], layers: Sequence[Layer], tree: Tree) -> None:
    """Raises if there are problems: all of them, each with its origin."""
    written = dict(_leaves(tree, ""))
    lines: list[str] = []
    for path, value, rule in problems:
        raw = written.get(path)
        formula = f" (from {shorten(raw)})" if isinstance(raw, str) and raw != value else ""
        shown = "" if value is None else f" = {_shown(value)}{formula}"
        lines.append(f"{_source(layers, path)}: {shorten(path)}{shown}: {shorten(rule, 2000)}")
    if lines:
        raise ValueError("\n".join(lines))


def _shown(value: Tree) -> str:
    try:
        return shorten(json.dumps(value, default=str))
    except ValueError:
        return "an integer of thousands of digits"


def _is_open(value: Tree) -> bool:
    """Whether an interpolation in it waits for its value."""
    return any("${" in leaf for _, leaf in _leaves(value, "") if isinstance(leaf, str))


def _source(layers: Sequence[Layer], path: str) -> str:
    """The strongest layer that sets something at, above or below `path`, else the weakest."""
    for layer in layers:
        for key, _ in _leaves(layer.tree, ""):
            if f"{key}.".startswith(f"{path}.") or f"{path}.".startswith(f"{key}."):
                return layer.source
    return layers[-1].source


# --------------------------------------------------------------------------------- interpolations


def _product(*factors: object) -> int | float:
    return math.prod(_number(factor) for factor in factors)


def _difference(a: object, b: object) -> int | float:
    return _number(a) - _number(b)


def _number(value: object) -> int | float:
    if isinstance(value, int | float):
        return value
    raise ValueError(f"{value!r} is not a number; another key's value is ${{section.key}}")


OmegaConf.register_resolver("mul", _product, replace=True, annotation_validation="off")
OmegaConf.register_resolver("sub", _difference, replace=True, annotation_validation="off")


def _resolve(tree: Tree, layers: Sequence[Layer], known: Sequence[str]) -> Tree:
    """`tree` with every interpolation replaced by its value."""
    try:
        return cast(
            "Tree", OmegaConf.to_container(_omega(tree), resolve=True, throw_on_missing=True)
        )
    except OmegaConfBaseException as error:
        path = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key))
        raw = str(dict(_leaves(tree, "")).get(path))
        names: list[str] = re.findall(r"\$\{(\w[\w.]*)\}", raw)
        near = [key for n in names if n not in known for key in get_close_matches(n, known)]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        reason = str(error).splitlines()[0] + hint
        raise ValueError(f"{_source(layers, path)}: {path} = {shorten(raw)}: {reason}") from error


def _omega(tree: Tree) -> DictConfig:
    return OmegaConf.create(cast("dict[str, Any]", tree))


def _escape(tree: object) -> Tree:
    """Data as a tree whose strings are not taken for interpolations."""
    match tree:
        case dict():
            return {name: _escape(value) for name, value in cast("dict[str, object]", tree).items()}
        case list():
            return [_escape(value) for value in cast("list[object]", tree)]
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", tree)
        case _:
            return cast("Tree", tree)
