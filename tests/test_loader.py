"""Laws of the loader, on a schema of its own."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loading import Engine, Model, Run, loaded, message, write

from minirl.config.loader import Section, dump, load

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
