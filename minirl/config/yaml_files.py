"""YAML files and `key=value` overrides to one tree of plain data.

One rule for both: mappings merge key by key, and anything else is replaced. `_override_: true` in
a mapping makes it replace the one that it would be merged into, and so does a mapping that is
empty. An override is a child file of one key.
"""

import re
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.files import TOO_DEEP, TOO_MANY_DIGITS, shorten

Tree: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None
"""Plain data, as YAML holds it; what is within a mapping or a list is again a Tree."""

REPLACE = "_override_"
"""`_override_: true` in a mapping: it replaces the mapping it would be merged into."""
ANCHORS = "x-"
"""A top-level key of a file that begins so only holds an anchor."""
MAX_DEPTH = 50


class Layer(NamedTuple):
    """What one file or one override sets."""

    source: str
    tree: Tree


def read(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of a file: those it inherits, then its own.

    Raises:
        ValueError: it, or a file that it inherits, is missing, no YAML or no mapping.
    """
    chain = " -> ".join(map(str, (*above, path)))
    if "\0" in chain:
        raise ValueError(f"{chain!r}: the name of a file cannot hold a NUL character")
    if path.resolve() in [file.resolve() for file in above]:
        raise ValueError(f"circular defaults: {chain}; remove one of these `defaults:` lines")
    if not path.is_file():
        raise ValueError(f"no such config file: {chain}")
    tree = _parsed(lambda: OmegaConf.load(path), str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a config is a mapping of sections, not a list")
    parents = tree.pop("defaults", [])
    names = cast("list[object]", parents) if isinstance(parents, list) else [parents]
    layers: list[Layer] = []
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"{path}: defaults = {shorten(repr(names))}: expected a file or a list of files"
            )
        layers += read(path.parent / name, (*above, path))
    own: Tree = {k: v for k, v in tree.items() if not str(k).startswith(ANCHORS)}
    return [*layers, Layer(str(path), own)]


def override(text: str) -> Layer:
    """The layer of one `a.b=value`, the value in YAML.

    Raises:
        ValueError: it has another form, or the value is not YAML.
    """
    source = f"override {shorten(text)!r}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{source}: it is not UTF-8 ({error.reason}); type it again") from error
    key, equals, value = text.partition("=")
    names = key.split(".")
    if not equals or not re.fullmatch(r"\w[^.\s]*(\.[^.\s]+)*", key) or len(names) > MAX_DEPTH:
        raise ValueError(f"{source}: expected key=value, for example grpo.seed=3")
    indexed = re.match(r"([^\[\]]+)\[", key)
    if indexed:
        raise ValueError(
            f"{source}: items of a list are not set one by one; write the whole list, "
            f"{indexed[1]}=[...]"
        )
    parsed = _parsed(lambda: OmegaConf.from_dotlist([f"value={value}"]), source)
    return Layer(source, _nest(names, cast("dict[str, Any]", parsed)["value"]))


def merged(layers: Sequence[Layer]) -> Tree:
    """All layers in one tree, each put onto those before; a layer without keys changes nothing.

    Raises:
        ValueError: a layer sets a key inside a list or an interpolation.
    """
    empty: Tree = {}
    return reduce(_merge, (layer.tree for layer in layers if layer.tree), empty)


def join(path: str, name: str | int) -> str:
    """The dotted key of what `name` is within `path`."""
    return f"{path}.{name}" if path else str(name)


def _parsed(parse: Callable[[], Any], source: str) -> Tree:
    try:
        tree = cast("Tree", OmegaConf.to_container(parse()))
        too_deep = _depth(tree) > MAX_DEPTH
    except RecursionError:
        too_deep, tree = True, None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeError) as error:
        raise ValueError(f"{source}{_yaml_error(error)}") from error
    except ValueError as error:  # a number that only looks like one
        reason = TOO_MANY_DIGITS if "digits" in str(error) else str(error)
        raise ValueError(f"{source}: {shorten(reason)}") from error
    if too_deep:
        raise ValueError(f"{source}: {TOO_DEEP}")
    return tree


def _depth(tree: Tree) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _yaml_error(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f", line {error.problem_mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f": {error.full_key}: {shorten(str(error).splitlines()[0])}"
    return f": not valid YAML: {shorten(str(error))}"


def _nest(names: Sequence[str], tree: Tree) -> Tree:
    return {names[0]: _nest(names[1:], tree)} if names else tree


def _merge(base: Tree, over: Tree, path: str = "") -> Tree:
    """`over` put onto `base`: mappings merge key by key, anything else is replaced."""
    if not isinstance(over, dict):
        return over
    replaces: object = over.get(REPLACE, not over)
    if not isinstance(replaces, bool):
        raise ValueError(f"{join(path, REPLACE)} is {replaces!r}; it is true or false")
    if not replaces and (isinstance(base, list) or (isinstance(base, str) and "${" in base)):
        remedy = "the whole list" if isinstance(base, list) else "that section out"
        raise ValueError(
            f"{path}: cannot set {', '.join(over)} inside {shorten(repr(base))}; write {remedy}"
        )
    kept = base if isinstance(base, dict) and not replaces else {}
    changed = {k: _merge(kept.get(k), v, join(path, k)) for k, v in over.items() if k != REPLACE}
    return {**kept, **changed}
