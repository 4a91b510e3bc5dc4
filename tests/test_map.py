"""The map in `minirl/__init__.py` is complete, and README's commands exist."""

import re

from tree import parse, python_files, read, reading_order


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
