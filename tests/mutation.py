"""Breaks the arithmetic on purpose, one small fault at a time, and counts what the tests notice.

    python tests/mutation.py [module ...]      (default: all of MODULES; run it from the root)

Of a module that is not among them (`packing`, `backends/row_layout`) only its own tests are run.

A fault is an edit of one syntax node: an operator flipped, a comparison moved, a minus, a `~` or a
`.detach()` dropped, a bound swapped, a constant changed. It is applied to a copy of the package;
the working tree is not touched. Each fault runs in a forked process that has already imported
torch, the fastest tests first, and stops at the first failure.
"""

import ast
import copy
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MODULES = [
    "reduce",
    "kl",
    "mismatch",
    "groups",
    "advantages",
    "policy_losses",
    "loss_metrics",
    "losses",
]
TESTS = [
    "golden",
    "groups",
    "kl",
    "reduce",
    "mismatch",
    "advantages",
    "losses",
    "loss_edges",
    "loss_config",
    "policy_losses",
    "loss_metrics",
]
TIMEOUT_S = 300

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.Lt,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NAMES = {
    "maximum": "minimum",
    "minimum": "maximum",
    "amax": "amin",
    "amin": "amax",
    "smallest": "largest",
    "largest": "smallest",
    "Max": "Min",
    "Min": "Max",
    "sum": "mean",
    "low": "high",
    "high": "low",
    "clip_low": "clip_high",
    "clip_high": "clip_low",
    "positive": "negative",
    "negative": "positive",
    "lambda_value": "lambda_policy",
    "lambda_policy": "lambda_value",
    "prev": "generation",
    "generation": "prev",
    "num_tokens": "num_sequences",
    "num_sequences": "num_tokens",
}


class Mutant(NamedTuple):
    module: str
    line: int
    what: str
    source: str


def edits(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a node could wrongly have been."""
    yield from operator_edits(node)
    yield from name_edits(node)


def operator_edits(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    new = copy.deepcopy(node)
    match node, new:
        case ast.BinOp(), ast.BinOp() if type(node.op) in OPERATORS:
            new.op = OPERATORS[type(node.op)]()
            yield f"{type(node.op).__name__} -> {type(new.op).__name__}", new
        case ast.BoolOp(), ast.BoolOp():
            new.op = OPERATORS[type(node.op)]()
            yield f"{type(node.op).__name__} -> {type(new.op).__name__}", new
        case ast.Compare(ops=[op, *_]), ast.Compare() if type(op) in COMPARISONS:
            new.ops[0] = COMPARISONS[type(op)]()
            yield f"{type(op).__name__} -> {type(new.ops[0]).__name__}", new
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)), _:
            pass  # -1 names the last dimension, and of two so does 1: no fault
        case ast.UnaryOp(), ast.UnaryOp() if isinstance(node.op, ast.USub | ast.Invert | ast.Not):
            yield f"{type(node.op).__name__} dropped", new.operand
        case ast.IfExp(), ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield "branches swapped", new


def name_edits(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    new = copy.deepcopy(node)
    match node, new:
        case ast.Call(func=ast.Attribute(attr="detach")), ast.Call(func=ast.Attribute() as func):
            yield "detach dropped", func.value
        case ast.Call(func=ast.Attribute(attr="clamp")), ast.Call(func=ast.Attribute() as func):
            yield "clamp dropped", func.value
        case ast.Attribute(attr=name), ast.Attribute() if name in NAMES:
            new.attr = NAMES[name]
            yield f"{name} -> {new.attr}", new
        case ast.Name(id=name, ctx=ast.Load()), ast.Name() if name in NAMES:
            new.id = NAMES[name]
            yield f"{name} -> {new.id}", new
        case ast.Constant(value=bool() as value), ast.Constant():
            new.value = not value
            yield f"{value} -> {new.value}", new
        case ast.Constant(value=int() | float() as value), ast.Constant():
            new.value = value + 1
            yield f"{value} -> {new.value}", new


def skipped(parent: ast.AST, field: str) -> bool:
    """Annotations, messages and imports are not arithmetic."""
    return (
        field in ("annotation", "returns", "decorator_list")
        or isinstance(parent, ast.Raise | ast.JoinedStr | ast.ImportFrom | ast.AnnAssign)
        or (isinstance(parent, ast.Assert) and field == "msg")
    )


def last_dim(parent: ast.AST, node: ast.AST) -> bool:
    """The -1 of `sum(-1)`: on two dimensions 1 is the same."""
    return (
        isinstance(parent, ast.Call | ast.keyword)
        and isinstance(node, ast.UnaryOp)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 1
    )


def walk(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every place (parent, field, index) that holds a mutable node."""
    for field, value in ast.iter_fields(node):
        if skipped(node, field):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not last_dim(node, child):
                yield node, field, index
                yield from walk(child)


def mutants(folder: Path, module: str) -> Iterator[Mutant]:
    tree = ast.parse((folder / "minirl" / f"{module}.py").read_text())
    for parent, field, index in list(walk(tree)):
        holder = getattr(parent, field)
        node = holder if index is None else holder[index]
        for what, new in edits(node):
            _put(parent, field, index, new)
            line = getattr(node, "lineno", 0)
            yield Mutant(module, line, what, ast.unparse(ast.fix_missing_locations(tree)))
            _put(parent, field, index, node)


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def notices(folder: Path, mutant: Mutant) -> bool:
    """Whether the tests fail, or hang, with the fault in place."""
    path = folder / "minirl" / f"{mutant.module}.py"
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        return not passes(folder, mutant.module)
    finally:
        path.write_text(original)


def passes(folder: Path, module: str) -> bool:
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = 1
        try:
            status = run_tests(folder, module)
        finally:
            os._exit(status)
    return wait(child) == 0


def run_tests(folder: Path, module: str) -> int:
    import pytest

    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    own = Path(module).name
    names = [own, *(name for name in TESTS if name != own)] if module in MODULES else [own]
    files = [f"tests/test_{name}.py" for name in names]
    return int(
        pytest.main(
            ["-xq", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminalreporter", *files]
        )
    )


def wait(child: int) -> int:
    """The child's exit status; a child that hangs is killed and counts as failed."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    import hypothesis  # once, before the forks
    import jaxtyping
    import pytest
    import torch

    del hypothesis, jaxtyping, pytest
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    survivors: list[Mutant] = []
    total = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("minirl", "tests", "pyproject.toml"):
            copy_of = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy_of(ROOT / part, folder / part)
        for module in sys.argv[1:] or MODULES:
            if not passes(folder, module):
                raise SystemExit(f"{module}: the tests fail without a fault: run pytest first")
            found = list(mutants(folder, module))
            alive = [mutant for mutant in found if not notices(folder, mutant)]
            total, survivors = total + len(found), survivors + alive
            say(f"{module}: {len(found) - len(alive)} of {len(found)} noticed")
            for mutant in alive:
                say(f"    survives: {mutant.module}.py:{mutant.line}: {mutant.what}")
    killed = total - len(survivors)
    say(f"{killed} of {total} faults noticed ({100 * killed / total:.1f} %)")


if __name__ == "__main__":
    main()
