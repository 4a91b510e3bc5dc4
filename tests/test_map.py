"""The map in `minirl/__init__.py` is complete, and README's commands exist."""

import ast
import re

from tree import ROOT, parse, python_files, read, reading_order

from minirl.config.loss import AdvEstimatorConfig, LossConfig
from minirl.config.run import GrpoConfig


def test_the_map_names_every_file():
    unlisted = set(python_files("minirl", "bin")) - {"minirl/__init__.py"} - set(reading_order())
    assert unlisted == set()


def test_the_map_names_only_files_and_each_once():
    listed = list(reading_order())
    assert set(listed) - set(python_files("minirl", "bin")) == set()
    assert len(listed) == len(set(listed))


def test_the_map_module_holds_nothing_but_the_map():
    assert len(parse("minirl/__init__.py").body) == 1


def test_every_make_command_of_the_readme_exists():
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", read("README.md"), flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), flags=re.MULTILINE))
    assert named
    assert named <= targets


def test_what_the_readme_names_exists():
    """Functions, tests, files and keys in the README's tables; a dangling name fails here."""
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:test_)?[a-z_]+)`", text.split("## Algorithms")[1].split("## How")[0])
    defined = {
        node.name
        for file in python_files("minirl", "tests")
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    keys = {
        f for cls in (GrpoConfig, LossConfig, AdvEstimatorConfig) for f in cls.__struct_fields__
    }
    assert sorted(set(named) - defined - keys - {"loss_fn", "max_grad_norm"}) == []
    assert [
        f for f in re.findall(r"`((?:bin|minirl|tests)/[\w/.]+)`", text) if not (ROOT / f).exists()
    ] == []
