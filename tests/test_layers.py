"""The architecture as tests: one-way imports, one door per dependency, ceilings, a clean tree."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch

from tree import ROOT, files, imports, module_file, parse, python_files, read, reading_order

TOP_LEVEL = {
    ".ci", ".gitignore", ".python-version", "LICENSE", "Makefile", "README.md",
    "bin", "minirl", "pyproject.toml", "tests",
}  # fmt: skip

DOORS = {
    "torch.distributed": ("minirl/parallel.py", "minirl/backends/*.py"),
    "vllm": ("minirl/backends/vllm*.py",),
    "megatron": ("minirl/backends/megatron/*.py",),
    "transformers": (
        "minirl/backends/*.py", "minirl/data/chat.py", "minirl/hf.py", "minirl/algos/tiny.py",
    ),
    "rich": ("minirl/log.py",),
    "plotext": ("minirl/log.py",),
}  # fmt: skip
"""The only files of minirl/ and bin/ that may import a dependency."""

LAZY = (
    "datasets",
    "math_verify",
    "megatron",
    "reasoning_gym",
    "tokenizers",
    "transformers",
    "vllm",
)
"""Slow to import, or not installed everywhere: imported inside the functions that need them."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:home|root|Users|work|opt|mnt|srv)\b|(?<![\w.-])/tmp/\w")
# Brackets, so that this file does not hold what it forbids.
REGISTRY_HOST = re.compile(r"pypi[.]org|python[h]osted|npm[j]s[.]|debian[.]org|pytorch[.]org/whl")
SUPPRESSION = re.compile(r"#\s*(type: ignore|pyright: ignore|noqa)(.*)")


def code() -> list[str]:
    return python_files("minirl", "bin")


def test_imports_point_up_the_reading_order():
    order = {file: i for i, file in enumerate(reading_order())}
    wrong = []
    for file in code():
        for item in imports(file):
            target = module_file(item.name)
            if target and order.get(target, len(order)) >= order.get(file, -1):
                wrong.append(f"{file}:{item.line} imports {target}, which is not above it")
    assert wrong == [], "\n".join(wrong)


def test_imports_are_absolute():
    assert [i for file in code() for i in imports(file) if i.name.startswith(".")] == []


def test_each_dependency_comes_in_through_its_doors():
    wrong = [
        f"{i.file}:{i.line} imports {i.name}; only {', '.join(doors)} may"
        for file in code()
        for i in imports(file)
        for package, doors in DOORS.items()
        if f"{i.name}.".startswith(f"{package}.") and not any(fnmatch(file, d) for d in doors)
    ]
    assert wrong == [], "\n".join(wrong)


def test_heavy_packages_are_imported_inside_functions():
    wrong = [
        f"{i.file}:{i.line} imports {i.name} when it is itself imported"
        for file in code()
        for i in imports(file)
        if i.at_module_level and i.name.split(".")[0] in LAZY
    ]
    assert wrong == [], "\n".join(wrong)


def test_importing_all_of_minirl_loads_no_heavy_package():
    modules = [f.removesuffix(".py").replace("/", ".") for f in python_files("minirl")]
    program = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; "
        f"print([p for p in {LAZY} if p in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_no_file_is_longer_than_the_ceiling():
    lengths = {f: len(read(f).splitlines()) for f in python_files("minirl", "bin", "tests")}
    assert {f: n for f, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_the_ceiling():
    long = [
        f"{file}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for file in python_files("minirl", "bin", "tests")
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == [], "\n".join(long)


def test_the_top_level_holds_nothing_else():
    assert {file.split("/")[0] for file in files()} - TOP_LEVEL == set()


def test_no_file_names_a_path_of_one_machine():
    assert _lines_with(MACHINE_PATH) == []


def test_no_file_names_the_host_of_a_registry():
    assert _lines_with(REGISTRY_HOST) == []


def test_suppressed_checks_say_which_and_why():
    unexplained = [
        f"{file}:{number}: {line.strip()}"
        for file in python_files("minirl", "bin", "tests")
        for number, line in enumerate(read(file).splitlines(), start=1)
        if file != "tests/test_layers.py"
        and (found := SUPPRESSION.search(line))
        and not re.fullmatch(r"(\[[\w, -]+\]|: [A-Z]+\d+(, ?[A-Z]+\d+)*)\W+\w{2,}.+", found[2])
    ]
    assert unexplained == [], "\n".join(unexplained)


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{file}:{number}: {line.strip()}"
        for file in files()
        for number, line in enumerate(read(file).splitlines(), start=1)
        if pattern.search(line)
    ]
