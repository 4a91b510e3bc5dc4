"""Laws of the loader, on a schema of its own."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta, field

from minirl.loader import Section, default, dump, load

Count = Annotated[int, Meta(gt=0)]


class Engine(Section, frozen=True, kw_only=True):
    precision: Annotated[Literal["fp32", "bf16"], default("${model.precision}")]
    length: Annotated[int, default("${sub:${model.length},${model.response}}")]


class Stage(Section, frozen=True, kw_only=True):
    name: str
    steps: Count = 1


class Model(Section, frozen=True, kw_only=True):
    name: str
    precision: Literal["fp32", "bf16"] = "bf16"
    length: Count = 512
    response: Count = 12
    rate: float = 0.1
    stages: list[Stage] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    ids: list[int] | None = None
    engine: Engine

    def __post_init__(self) -> None:
        if self.response >= self.length:
            raise ValueError("response leaves no room")


class Run(Section, frozen=True, kw_only=True):
    model: Model
    seed: int = 42
    title: str | None = None
    other: Model | None = None

    def __post_init__(self) -> None:
        if self.seed == 13:
            raise ValueError("seed 13 is unlucky")


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def loaded(folder: Path, text: str, *overrides: str) -> Run:
    return load(write(folder, text), overrides, Run)


def message(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        loaded(folder, text, *overrides)
    return str(caught.value)


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


# -------------------------------------------------------------------------------- interpolations


def test_interpolations_see_values_of_files_and_defaults_of_structs(tmp_path):
    text = "model: {name: 'm${seed}', rate: '${.length}', kwargs: {a: ['${model.response}']}}"
    run = loaded(tmp_path, text)
    assert (run.model.name, run.model.rate, run.model.kwargs) == ("m42", 512.0, {"a": [12]})


def test_arithmetic_of_interpolations(tmp_path):
    text = "model: {name: m, length: '${mul:${.response}, 3, 2}', response: '${sub:${seed},2}'}"
    model = loaded(tmp_path, text).model
    assert (model.response, model.length) == (40, 240)


def test_a_section_can_stand_for_another_one(tmp_path):
    run = loaded(tmp_path, "model: {name: m}\nother: ${model}", "model.rate=0.7")
    assert run.other == run.model
    assert run.model.rate == 0.7


def test_a_derived_default_follows_its_source_unless_it_is_set(tmp_path):
    engine = loaded(tmp_path, "model: {name: m, precision: fp32}", "model.length=100").model.engine
    assert (engine.precision, engine.length) == ("fp32", 88)
    text = "model: {name: m, precision: fp32, engine: {precision: bf16}}"
    assert loaded(tmp_path, text).model.engine.precision == "bf16"


def test_a_wrong_source_of_a_derived_default_is_blamed_where_it_is_written(tmp_path):
    text = message(tmp_path, "model: {name: m, length: wide}")
    assert 'model.length = "wide": Expected `int`, got `str`' in text
    assert "engine" not in text


def test_a_wrong_interpolated_value_shows_where_it_comes_from(tmp_path):
    text = message(tmp_path, "model: {name: m, rate: '${model.name}'}")
    assert 'model.rate = "m" (from ${model.name}): Expected `float`, got `str`' in text


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("${model.lenght}", ["'model.lenght' not found", "did you mean model.length"]),
        ("${nowhere.at.all}", ["'nowhere.at.all' not found"]),
        ("${.sead}", ["not found"]),
        ("${div:1,2}", ["Unsupported interpolation type div"]),
        ("${mul:model.length,2}", ["'model.length' is not a number", "${section.key}"]),
        ("${model.${x}}", ["'x' not found"]),
        ("${model.kwargs}", ["parent node"]),
        ("???", ["Missing mandatory value"]),
    ],
)
def test_an_unresolved_interpolation_is_named_with_file_path_and_text(tmp_path, value, parts):
    text = message(tmp_path, f"model: {{name: m, kwargs: {{a: {{b: '{value}'}}}}}}")
    for part in [f"run.yaml: model.kwargs.a.b = {value}: ", *parts]:
        assert part in text


def test_a_malformed_interpolation_is_named_with_file_and_path(tmp_path):
    text = message(tmp_path, "model: {name: m, kwargs: {a: [1, '${model']}}")
    assert "run.yaml: model.kwargs.a[1]: no viable alternative at input '${model'" in text
    assert "override 'seed=${': value: " in message(tmp_path, "model: {name: m}", "seed=${")


def test_interpolations_in_a_circle_are_refused(tmp_path):
    text = message(tmp_path, "model: {name: m, length: '${.response}', response: '${.length}'}")
    assert "Recursive interpolation" in text


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
        assert "write the whole list" in str(error)
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


# ------------------------------------------------------------------------------------ wrong input


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: [1\nseed: 2\n", 2),
        ("seed: 1\nmodel: {name: m}\nseed: 2\n", 3),
        ("seed: 1\n\tmodel: 2\n", 2),
        ("seed: 1\nmodel: name: m\n", 2),
        ("seed: !!python/object:os.system {}\n", 1),
    ],
)
def test_bad_yaml_is_named_with_file_and_line(tmp_path, text, line):
    # A repeated key is reported where its mapping begins or where it is repeated.
    found = message(tmp_path, text)
    assert "run.yaml, line" in found
    assert "not valid YAML" in found
    assert int(found.split("line ")[1].split(":")[0]) in (line, 1)


@pytest.mark.parametrize("text", ["- a\n- b\n", "3\n", "\xff"])
def test_a_file_that_is_no_mapping_of_text_is_refused(tmp_path, text):
    (tmp_path / "run.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"run\.yaml"):
        load(tmp_path / "run.yaml", [], Run)


def test_all_wrong_keys_and_values_are_listed_with_the_file_that_sets_them(tmp_path):
    write(tmp_path, "model: {nam: m, rate: fast}\nseed: 1", "base.yaml")
    lines = message(tmp_path, "defaults: base.yaml\nseed: x\nmodel: {ids: [1, y]}").splitlines()
    base, own = f"{tmp_path / 'base.yaml'}: ", f"{tmp_path / 'run.yaml'}: "
    assert lines == [
        f"{base}model.nam: unknown key; did you mean model.name?",
        f"{own}model.name: missing, and it has no default; set it",
        f'{base}model.rate = "fast": Expected `float`, got `str`',
        f'{own}model.ids = [1, "y"]: Expected `int`, got `str` - at `model.ids[1]`',
        f'{own}seed = "x": Expected `int`, got `str`',
    ]


def test_an_unknown_key_like_no_other_gets_the_list_of_keys(tmp_path):
    text = message(tmp_path, "model: {name: m, engine: {zzz: 1, lenth: 1}}")
    assert "model.engine.zzz: unknown key\n" in text
    assert "model.engine.lenth: unknown key; did you mean model.engine.length" in text
    assert "model.engine: its keys are precision, length" in text


def test_an_unknown_key_is_told_where_it_exists_elsewhere(tmp_path):
    assert "did you mean model.engine.precision or model.precision" not in message(
        tmp_path, "precision: fp32\nmodel: {name: m}"
    )
    text = message(tmp_path, "precision: fp32\nmodel: {name: m}")
    assert "precision: unknown key; did you mean model.precision or model.engine.precision" in text


def test_an_unknown_key_in_a_list_is_refused(tmp_path):
    text = message(tmp_path, "model: {name: m, stages: [{name: a}, {nmae: b}]}")
    assert "model.stages.1.nmae: unknown key; did you mean model.stages.1.name?" in text
    assert "model.stages.1.name: missing" in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: {name: 7}", "model.name = 7: Expected `str`, got `int`; put it in quotes"),
        ("model: {name: yes}", "model.name = true: Expected `str`, got `bool`; put it in quotes"),
        (
            "model: {name: m, rate: '1e-5'}",
            '"1e-5": Expected `float`, got `str`; remove the quotes',
        ),
        ("model: {name: m, length: 1e3}", "1000.0: Expected `int`, got `float`; write 1000"),
        ("model: {name: m, length: true}", "model.length = true: Expected `int`, got `bool`"),
        ("model: {name: m, length: 0}", "model.length = 0: Expected `int` >= 1"),
        ("model: {name: m, precision: fp8}", 'precision = "fp8": expected one of bf16, fp32'),
        ("model: {name: m, rate: .nan}", "model.rate = NaN: a number must be finite"),
        ("model: {name: m, rate: -.inf}", "model.rate = -Infinity: a number must be finite"),
        ("model: {name: m, kwargs: {a: [.inf]}}", "model.kwargs.a.0 = Infinity: a number must"),
        ("model: 3", "model = 3: Expected `mapping`, got `int`"),
        ("model: {name: m, ids: 3}", "model.ids = 3: Expected `list | null`, got `int`"),
        ("model: null", "model: Expected `mapping`, got `null`"),
        ("model: {name: m, response: 600}", "run.yaml: model: response leaves no room"),
        ("model: {name: m}\nother: {name: m, length: 1}", "run.yaml: other: response leaves"),
        ("model: {name: m}\nseed: 13", "run.yaml: seed 13 is unlucky"),
        ("seed: 1", "run.yaml: model.name: missing, and it has no default; set it"),
    ],
)
def test_wrong_values_are_refused_with_path_value_and_rule(tmp_path, text, part):
    assert part in message(tmp_path, text)


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


@pytest.mark.parametrize("text", ["1e-5", "1.0e-05", "0.00001", "1E-5", "1e-05"])
def test_numbers_in_every_notation_are_numbers(tmp_path, text):
    assert loaded(tmp_path, f"model: {{name: m, rate: {text}, kwargs: {{eps: {text}}}}}") == loaded(
        tmp_path, "model: {name: m, rate: 0.00001, kwargs: {eps: 0.00001}}"
    )
    assert loaded(tmp_path, "model: {name: m}", f"model.rate={text}").model.rate == 1e-5


# ------------------------------------------------------------------------------------- round trip

TRAPS = [
    "yes", "1e5", "1e-5", "null", "~", "0x1f", "12:30", "2020-01-01", ".inf", "=", "<<", "a: b",
    "${seed}", "\\${seed}", "\\\\${", " x ", "x\n\ny\n",
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
    | st.text("${}\\a.:,'\"?#-_1e~ \n")
    | st.sampled_from(TRAPS)
)
KEYS = st.text("abc.${}1", min_size=1, max_size=5)
VALUES = st.recursive(
    SCALARS.filter(lambda x: x != "???"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@example(name="\\${seed}", value=["\\\\${seed}", "${seed}", "${"])
@given(name=st.text(max_size=20).filter(lambda x: x != "???"), value=VALUES)
def test_any_text_and_any_free_value_survive_dump_and_load(name, value):
    engine = Engine(precision="fp32", length=3)
    run = Run(model=Model(name=name, engine=engine, kwargs={"value": value}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(dump(run), encoding="utf-8")
        again = load(path, [], Run)
    assert again == run
    assert dump(again) == dump(run)


def test_every_section_is_frozen_even_if_its_class_does_not_say_so():
    class Plain(Section):
        x: int = 1

    with pytest.raises(AttributeError, match="immutable"):
        Plain().x = 2


def test_loading_shares_no_state_between_configs(tmp_path):
    first, second = (loaded(tmp_path, "model: {name: m}") for _ in range(2))
    assert first.model.kwargs is not second.model.kwargs


def test_a_loaded_config_is_what_msgspec_makes_of_its_dump(tmp_path):
    run = loaded(tmp_path, "model: {name: m, stages: [{name: a}]}")
    assert msgspec.convert(msgspec.to_builtins(run), Run) == run
