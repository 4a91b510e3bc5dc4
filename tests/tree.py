"""The repository as data: its files, the reading order that the map gives, and who imports what."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Import(NamedTuple):
    """One name that a file imports or reaches through an attribute, e.g. `torch.distributed`."""

    file: str
    line: int
    name: str
    at_module_level: bool


@cache
def files() -> tuple[str, ...]:
    """Every file of the repository, tracked or about to be, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(sorted(name for name in set(listed.splitlines()) if (ROOT / name).is_file()))


def python_files(*folders: str) -> list[str]:
    """The Python files below the top-level `folders`."""
    return [f for f in files() if f.endswith(".py") and f.split("/")[0] in folders]


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8", errors="replace")


@cache
def parse(file: str) -> ast.Module:
    return ast.parse(read(file), filename=file)


@cache
def reading_order() -> tuple[str, ...]:
    """The files that the map in `minirl/__init__.py` lists, in its order."""
    text = ast.get_docstring(parse("minirl/__init__.py")) or ""
    entries = re.findall(r"^    ((?:bin/)?[\w/]+\.py)\b", text, flags=re.MULTILINE)
    return tuple(e if e.startswith("bin/") else f"minirl/{e}" for e in entries)


def imports(file: str) -> list[Import]:
    """All imports of a file, inside functions too; not those for type checkers alone."""
    return [
        Import(file, node.lineno, name, at_module_level)
        for node, at_module_level in _walk(parse(file), at_module_level=True)
        for name in _names(node)
    ]


def _walk(node: ast.AST, *, at_module_level: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, at_module_level
        yield from _walk(child, at_module_level=at_module_level and not inside)


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.ImportFrom():
            return ["." * node.level + (node.module or "")]
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            return ["torch.distributed"]
        case _:
            return []


def module_file(name: str) -> str | None:
    """The file of this repository that an imported name comes from; None for other packages."""
    if name.split(".")[0] != "minirl":
        return None
    parts = name.split(".")
    known = files()
    for end in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:end])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if candidate in known:
                return candidate
    return f"{'/'.join(parts)}.py"
