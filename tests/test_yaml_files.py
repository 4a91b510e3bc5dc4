"""Laws of inheritance and of overrides, and what YAML may not hold."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import Run, loaded, message, write

from minirl.config.loader import load

# ----------------------------------------------------------------------------------- inheritance


def test_a_file_overrides_what_it_inherits_key_by_key_and_replaces_lists(tmp_path):
    write(
        tmp_path, "model: {name: base, rate: 0.5, ids: [1, 2], kwargs: {a: 1, b: 2}}", "base.yaml"
    )
    run = loaded(tmp_path, "defaults: base.yaml\nmodel: {name: mine, ids: [3], kwargs: {b: 3}}")
    assert (run.model.name, run.model.rate, run.model.ids) == ("mine", 0.5, [3])
    assert run.model.kwargs == {"a": 1, "b": 3}


def test_of_several_parents_the_later_wins_and_a_shared_ancestor_is_no_circle(tmp_path):
    write(tmp_path, "model: {name: root}\nseed: 1\ntitle: root", "root.yaml")
    write(tmp_path, "defaults: root.yaml\nseed: 2\ntitle: a", "a.yaml")
    write(tmp_path, "defaults: root.yaml\nseed: 3", "b.yaml")
    run = loaded(tmp_path, "defaults: [a.yaml, b.yaml]")
    assert (run.model.name, run.seed, run.title) == ("root", 3, "root")


def test_parents_are_found_relative_to_the_file_that_names_them(tmp_path):
    write(tmp_path, "model: {name: base}", "deep/er/base.yaml")
    write(tmp_path, "defaults: er/base.yaml", "deep/middle.yaml")
    assert loaded(tmp_path, "defaults: deep/middle.yaml").model.name == "base"


def test_a_circle_is_refused_with_its_chain(tmp_path):
    a = write(tmp_path, "defaults: b.yaml", "a.yaml")
    b = write(tmp_path, "defaults: [a.yaml]", "b.yaml")
    with pytest.raises(ValueError, match="circular defaults") as caught:
        load(a, [], Run)
    assert f"{a} -> {b} -> {a}" in str(caught.value)


def test_a_missing_file_is_named_with_the_files_that_lead_to_it(tmp_path):
    path = write(tmp_path, "defaults: gone.yaml")
    with pytest.raises(ValueError, match="no such config file") as caught:
        load(path, [], Run)
    assert f"{path} -> {tmp_path / 'gone.yaml'}" in str(caught.value)
    with pytest.raises(ValueError, match="no such config file"):
        load(tmp_path, [], Run)


def test_a_mapping_marked_override_replaces_the_inherited_one(tmp_path):
    write(tmp_path, "model: {name: base, rate: 0.5, kwargs: {a: 1}}", "base.yaml")
    text = "defaults: base.yaml\nmodel: {kwargs: {_override_: true, b: 2}}"
    assert loaded(tmp_path, text).model.kwargs == {"b": 2}
    text = "defaults: base.yaml\nmodel: {_override_: true, name: mine}"
    assert loaded(tmp_path, text).model.rate == 0.1


def test_an_empty_mapping_clears_the_inherited_one(tmp_path):
    write(tmp_path, "model: {name: base, kwargs: {a: 1}}\nother: {name: o, rate: 0.5}", "base.yaml")
    run = loaded(tmp_path, "defaults: base.yaml\nmodel: {kwargs: {}}\nother: {_override_: false}")
    assert (run.model.name, run.model.kwargs) == ("base", {})
    assert run.other is not None
    assert run.other.rate == 0.5
    assert "_override_ is 'no'; it is true or false" in message(
        tmp_path, "model: {name: m, kwargs: {_override_: 'no'}}"
    )


def test_an_anchor_can_be_kept_under_a_key_of_its_own(tmp_path):
    run = loaded(tmp_path, "x-base: &base {a: 1}\nmodel: {name: m, kwargs: {<<: *base, b: 2}}")
    assert run.model.kwargs == {"a": 1, "b": 2}
    text = message(tmp_path, "base: &base {a: 1}\nmodel: {name: m, kwargs: *base}")
    assert "base: unknown key" in text
    assert "a key that only holds an anchor begins with x-" in text


@pytest.mark.parametrize("text", ["defaults: {a: b}", "defaults: [1]", "defaults: 3"])
def test_defaults_that_name_no_file_are_refused(tmp_path, text):
    assert "expected a file or a list of files" in message(tmp_path, text)


# ------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "edit"),
    [
        ("model.rate=1e-5", {"rate": 1e-5}),
        ("model.stages=[{name: a, steps: 2}]", {"stages": [{"name": "a", "steps": 2}]}),
        ("model.kwargs={b: [1, x]}", {"kwargs": {"a": 1, "b": [1, "x"]}}),
        ("model.kwargs={_override_: true, b: 2}", {"kwargs": {"b": 2}}),
        ("model.kwargs={}", {"kwargs": {}}),
        ("model.kwargs.new.key=1", {"kwargs": {"a": 1, "new": {"key": 1}}}),
        ("model.ids=null", {"ids": None}),
        ("model.name='a=b, c: d'", {"name": "a=b, c: d"}),
        ("model.name=${seed}x", {"name": "42x"}),
    ],
)
def test_an_override_equals_the_edit_of_its_key(tmp_path, override, edit):
    model = {"name": "m", "ids": [1], "kwargs": {"a": 1}}
    changed = loaded(tmp_path, json.dumps({"model": model}), override)
    assert changed == loaded(tmp_path, json.dumps({"model": model | edit}))


MAPPINGS = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(0, 1), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "_override_"]), inner, max_size=3),
    max_leaves=8,
).map(lambda tree: _marked(tree if isinstance(tree, dict) else {"a": tree}))


def _marked(tree: Any) -> Any:
    """The same with true or false where a mapping says whether it replaces."""
    if not isinstance(tree, dict):
        return tree
    return {k: bool(v) if k == "_override_" else _marked(v) for k, v in tree.items()}


@given(base=MAPPINGS, over=MAPPINGS, inside=st.booleans())
def test_an_override_by_a_mapping_equals_a_child_file_with_it(base, over, inside):
    key, nested = ("model.kwargs.a", {"a": over}) if inside else ("model.kwargs", over)
    parent = json.dumps({"model": {"name": "m", "kwargs": base}})
    child = json.dumps({"defaults": "base.yaml", "model": {"kwargs": nested}})
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), parent, "base.yaml")
        from_file = _outcome(lambda: loaded(Path(folder), child))
        given_by_hand = _outcome(lambda: loaded(Path(folder), parent, f"{key}={json.dumps(over)}"))
    assert given_by_hand == from_file


def _outcome(run: Callable[[], Run]) -> object:
    try:
        return run().model.kwargs
    except ValueError as error:  # a mapping cannot be put into a list
        return str(error)


def test_the_last_override_of_a_key_wins(tmp_path):
    assert loaded(tmp_path, "model: {name: m}", "seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    "override", ["seed", "+seed=1", "++seed=1", "~seed", "=1", "a..b=1", ".a=1"]
)
def test_an_override_that_is_no_assignment_is_refused(tmp_path, override):
    assert f"override {override!r}: expected key=value" in message(tmp_path, "{}", override)


def test_an_override_of_an_unknown_key_is_refused(tmp_path):
    text = message(tmp_path, "model: {name: m}", "model.lenght=3", "sed=1")
    assert (
        "override 'model.lenght=3': model.lenght: unknown key; did you mean model.length?" in text
    )
    assert "override 'sed=1': sed: unknown key; did you mean seed?" in text


def test_an_override_that_is_no_yaml_is_refused(tmp_path):
    text = message(tmp_path, "model: {name: m}", "model.ids=[1")
    assert "override 'model.ids=[1'" in text
    assert "not valid YAML" in text


def test_setting_a_key_inside_an_interpolated_section_or_a_list_is_refused(tmp_path):
    text = message(tmp_path, "model: {name: m}\nother: ${model}", "other.name=x")
    assert "other: cannot set name inside '${model}'" in text
    assert "ids: cannot set 0 inside [1]" in message(tmp_path, "model: {ids: [1]}", "model.ids.0=3")


# ------------------------------------------------------------------------------ what cannot be held


DIGITS = "7" * 5000
NESTED = "[" * 100 + "]" * 100


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (f"seed={DIGITS}", "it holds an integer too long to be one; write it as text, in quotes"),
        (f"seed={DIGITS[:4000]}", "an integer must fit into 64 bits"),
        (f"seed=0x{DIGITS}", "seed = an integer of thousands of digits: an integer must fit"),
        (f"seed=${{mul:{DIGITS[:4000]},{DIGITS[:4000]}}}", "an integer must fit into 64 bits"),
        (f"model.rate={DIGITS}.5", "Infinity: a number must be finite"),
        ("model.length=1e300", "write 1000000000000000052504760255204420248704468581108159"),
        (f"title=[{DIGITS[:4000]}]", "... (4002 characters): Expected `str | null`, got `list`"),
        (f"model.kwargs.a={NESTED}", "lists and mappings are nested too deep in it"),
        (f"model.kwargs.a={'[' * 5000}", "exceeded maximum nesting depth"),
        ("model" + ".a" * 2000 + "=1", "expected key=value"),
        ("model.stages[0].name=", "write the whole list, model.stages=[...]"),
        ("model.stages[0]=x", "write the whole list, model.stages=[...]"),
        ('title="a\\0b"', "a name or a path cannot hold a NUL character"),
        ("title=\udcff", "it is not UTF-8"),
        ("model.\udcff=1", "it is not UTF-8"),
        ("modél.name=x", "override 'modél.name=x': modél: unknown key; did you mean model?"),
        ("seed=!!int abc", "invalid literal for int()"),
        ("seed=" + "x" * 9000, "(9002 characters): Expected `int`, got `str`"),
        ("y" * 9000 + "=1", "(9000 characters): unknown key"),
    ],
)
def test_what_python_cannot_hold_or_show_is_refused_in_few_words(tmp_path, override, part):
    text = message(tmp_path, "model: {name: m}", override)
    assert part in text
    assert "override '" in text
    assert len(text) < 1000
    # The same in a file, where it can be written there.
    key, _, value = override.partition("=")
    if "[" not in key and key.isascii() and value.isascii():
        tree = f"{key}: {value}" if "." not in key else f"model: {{name: m, {key[6:]}: {value}}}"
        in_file = message(tmp_path, f"{tree}\n" + "model: {name: m}" * ("." not in key))
        assert str(tmp_path) in in_file
        assert len(in_file) < 1000


def test_text_of_any_language_is_a_value(tmp_path):
    assert loaded(tmp_path, "model: {name: m}", "title=日本/é😀").title == "日本/é😀"
    assert loaded(tmp_path, "model: {name: m}", "model.kwargs.ключ=é").model.kwargs == {"ключ": "é"}
