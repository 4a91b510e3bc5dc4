"""No key of a config is dead: some code reads it, outside the modules of settings.

Types are followed through the code as far as annotations, assignments and loops tell them, so
`.name` of something else does not count as a read of `policy.optimizer.name`.
"""

import ast
import re

import msgspec
import pytest
from configs import KEYS as ALL_KEYS
from configs import section_of
from msgspec import inspect, structs
from tree import parse, python_files

from minirl.config.run import GrpoRun

SETTINGS = ("config.py", "_rules.py", "_fit.py")
"""How the files end that hold settings and check them: to check a key is not to use it."""
Section = type[msgspec.Struct]


def sections(cls: Section) -> dict[str, Section]:
    """Every section of a run by its name, those in lists included."""
    found = {cls.__name__: cls}
    for f in structs.fields(cls):
        inner = section_of(f.type)
        found |= sections(inner) if inner else {}
    return found


SECTIONS = sections(GrpoRun)
KEYS = {f"{cls.__name__}.{f.name}" for cls in SECTIONS.values() for f in structs.fields(cls)}
Types = dict[str, Section]


def type_of(node: ast.AST | None, types: Types) -> Section | None:
    """The section that an expression is, or that its items are."""
    match node:
        case ast.Name(id=name):
            return types.get(name)
        case ast.Attribute(value=value, attr=attr):
            holder = type_of(value, types)
            kinds = {f.name: f.type for f in structs.fields(holder)} if holder else {}
            return section_of(kinds[attr]) if attr in kinds else None
        case ast.Call(func=ast.Name(id="load"), args=[*_, ast.Name(id=name)]):
            return SECTIONS.get(name)
        case ast.BoolOp(values=values) | ast.Call(func=ast.Name(id="enumerate"), args=values):
            return next((t for t in (type_of(v, types) for v in values) if t), None)
        case ast.IfExp(body=body, orelse=orelse):
            return type_of(body, types) or type_of(orelse, types)
        case ast.Subscript(value=value):
            return type_of(value, types)
    return None


def bind(target: ast.AST, value: ast.AST | None, types: Types) -> None:
    """Notes what an assignment makes of the names on its left."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for t, v in zip(targets, values, strict=True):
                bind(t, v, types)
        case ast.Tuple(elts=targets), _:
            for t in targets:
                bind(t, value, types)
        case ast.Name(id=name), _:
            # A name keeps its type, as the type checkers demand.
            found = type_of(value, types)
            types |= {name: found} if found else {}


def scan(node: ast.AST, types: Types, found: set[str]) -> None:
    """Adds every "Section.key" that `node` reads from a value of known type."""
    match node:
        case ast.FunctionDef(args=args):
            types = dict(types)
            for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                parts = ast.walk(arg.annotation) if arg.annotation else ()
                named = [
                    SECTIONS[n.id] for n in parts if isinstance(n, ast.Name) and n.id in SECTIONS
                ]
                types.pop(arg.arg, None)
                types |= {arg.arg: named[0]} if named else {}
        case ast.Assign(targets=[target], value=value):
            scan(value, types, found)
            bind(target, value, types)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            for item in value.elts if isinstance(value, ast.Tuple) else (value,):
                bind(target, item, types)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            for generator in node.generators:
                scan(generator, types, found)
        case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
            holder = type_of(value, types)
            found |= {f"{holder.__name__}.{attr}"} if holder else set()
    for child in ast.iter_child_nodes(node):
        scan(child, types, found)


def reads(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    scan(tree, {}, found)
    return found


def interpolated() -> set[str]:
    """The keys whose values other keys take over by default."""
    named = {key: f"{cls.__name__}.{f.name}" for key, cls, f in ALL_KEYS}
    metas = [inspect.type_info(f.type) for _, _, f in ALL_KEYS]
    texts = [str(m.extra) for m in metas if isinstance(m, inspect.Metadata)]
    return {named[key] for text in texts for key in re.findall(r"\$\{([a-z_.]+)\}", text)}


def test_every_key_is_read_by_code_or_by_the_default_of_one_that_is():
    code = [f for f in python_files("minirl", "bin") if not f.endswith(SETTINGS)]
    read = interpolated().union(*(reads(parse(f)) for f in code))
    assert sorted(KEYS - read) == []


def test_defaults_read_the_keys_that_they_are_made_of():
    assert "PolicyConfig.max_total_sequence_length" in interpolated()
    assert "PolicyConfig.scheduler" not in interpolated()


def test_keys_of_sections_in_lists_are_among_those_checked():
    assert {"ScheduleConfig.milestones", "DatasetConfig.task", "LossConfig.ratio_clip_c"} <= KEYS


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(r: GrpoRun): return r.policy.precision", "GrpoRun.policy PolicyConfig.precision"),
        ("def f(r: GrpoRun, x: Any): return x.policy", ""),
        ("def f(r: GrpoRun | None):\n a, b = r.grpo, 1\n a.seed", "GrpoRun.grpo GrpoConfig.seed"),
        ("def f(xs: list[ScheduleConfig]): [x.name for x in xs or []]", "ScheduleConfig.name"),
        ("def f(s: list[ScheduleConfig]):\n for x in enumerate(s): x.name", "ScheduleConfig.name"),
        ("def f(d: DataConfig):\n c = d.train or 1\n c.x", "DataConfig.train DatasetConfig.x"),
        ("def f(d: DatasetConfig):\n def g(): return d.seed", "DatasetConfig.seed"),
        (
            "def f(p: PolicyConfig):\n for k, x in (1, 2), (3, p.tokenizer), (5, 6): x.name",
            "PolicyConfig.tokenizer TokenizerConfig.name",
        ),
        ("def f(p: PolicyConfig):\n def g(p): return p.precision", ""),
        ("def f(p: PolicyConfig):\n p = other()\n p.precision", "PolicyConfig.precision"),
        ("def f(p: PolicyConfig): p.precision = 1", ""),
        ("r = load(path, [], GrpoRun)\nr.env", "GrpoRun.env"),
    ],
)  # fmt: skip
def test_reads_are_followed_by_type(code, expected):
    assert reads(ast.parse(code)) == set(expected.split())
