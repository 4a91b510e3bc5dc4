"""Laws of the run's config: what is valid round-trips, what is wrong is refused by name."""

import json
from typing import Any

import msgspec
import pytest
import yaml
from configs import (
    COMPLETE,
    KEYS,
    LEAVES,
    MINIMAL,
    batch_sizes,
    edited,
    fits,
    leaves_of,
    load_tree,
    message,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from minirl.config.loader import dump
from minirl.config.run import GrpoRun

FEW = settings(max_examples=10)

CANDIDATES: list[Any] = [
    0, 1, 2, 4, 7, 0.0, 0.25, 0.5, 1.5, 20.0, True, False, None, "", "text", "1", "k1", "vllm",
    "float32", "reasoning_gym", "math", "some.module:function", "token", "tis", "raw_reward",
    [], [1], [1.5], ["stop"], [{"name": "a.B"}], {}, {"a": {"b": [1, "x"]}}, {"lr": 0.1},
]  # fmt: skip
"""Values of every type that a key may have, in and out of every range."""


FITTING = [(key, x) for key, kind in LEAVES for x in CANDIDATES if fits(x, kind)]
CHANGES = st.lists(st.sampled_from(FITTING), max_size=8)


def valid_edits(sizes: dict[str, int], changes: list[tuple[str, Any]]) -> dict[str, Any]:
    """Values by key that may replace those of COMPLETE; what breaks a rule is left out."""
    edits: dict[str, Any] = dict(sizes)
    for key, value in changes:
        if key not in sizes and fits(edited(COMPLETE, edits | {key: value}), GrpoRun):
            edits[key] = value
    return edits


@FEW
@given(sizes=batch_sizes(), changes=CHANGES)
def test_any_valid_config_survives_dump_and_load(sizes, changes):
    edits = valid_edits(sizes, changes)
    run = load_tree(edited(COMPLETE, edits))
    shown = yaml.safe_load(dump(run))
    assert load_tree(shown) == run == msgspec.convert(edited(COMPLETE, edits), GrpoRun)
    absent = "data.validation." if run.data.validation is None else "nothing"
    assert {k for k, _ in LEAVES if not k.startswith(absent)} <= leaves_of(shown)


@FEW
@given(sizes=batch_sizes(), changes=CHANGES)
def test_overrides_equal_edits_of_the_file(sizes, changes):
    edits = valid_edits(sizes, changes)
    overrides = [f"{key}={json.dumps(value)}" for key, value in edits.items()]
    assert load_tree(COMPLETE, *overrides) == load_tree(edited(COMPLETE, edits))


@st.composite
def misspelt(draw: st.DrawFn, name: str) -> str:
    """`name` with one letter lost, added, changed, or swapped with its neighbour."""
    i, letter = draw(st.integers(0, len(name) - 1)), draw(st.sampled_from("aeinstx_"))
    j = max(i, 1)
    return draw(
        st.sampled_from(
            [
                name[:i] + name[i + 1 :],
                name[:i] + letter + name[i:],
                name[:i] + letter + name[i + 1 :],
                name[: j - 1] + name[j] + name[j - 1] + name[j + 1 :],
            ]
        )
    )


@FEW
@given(data=st.data())
def test_every_misspelt_key_is_refused_with_the_right_suggestion(data):
    tree, wrong_keys = MINIMAL, {}
    for key, cls, _ in KEYS:
        section, _, name = key.rpartition(".")
        wrong = data.draw(misspelt(name))
        names = {f.name for f in structs.fields(cls)}
        # A letter is half of a name such as lr, and too much to guess by.
        if len(name) > 2 and wrong.strip() and wrong not in names:
            wrong_key = f"{section}.{wrong}" if section else wrong
            wrong_keys[wrong_key] = key
            tree = edited(tree, {wrong_key: 1})
    lines = message(tree).splitlines()
    for wrong_key, key in wrong_keys.items():
        [line] = [x for x in lines if f"run.yaml: {wrong_key}: unknown key; " in x]
        assert key in line.split("did you mean ")[1].removesuffix("?").split(" or ")


def refusal(key: str, value: Any) -> str:
    return f"run.yaml: {key}{'' if value is None else f' = {json.dumps(value)}'}: "


def is_refused(key: str, value: Any, text: str) -> bool:
    """By its path, or by that of its first element where a list as such would do."""
    inside = isinstance(value, list) and value and refusal(f"{key}.0", value[0]) in text
    return refusal(key, value) in text or bool(inside)


WRONG = {key: [x for x in CANDIDATES if not fits(x, kind)] for key, kind in LEAVES}


@FEW
@given(data=st.data())
def test_every_wrong_value_is_refused_with_its_path(data):
    values = {key: data.draw(st.sampled_from(wrong)) for key, wrong in WRONG.items()}
    text = message(edited(MINIMAL, values))
    assert [key for key, value in values.items() if not is_refused(key, value, text)] == []


@given(leaf=st.sampled_from(LEAVES), data=st.data())
def test_a_single_wrong_value_is_the_only_one_blamed(leaf, data):
    value = data.draw(st.sampled_from(WRONG[leaf[0]]))
    text = message(edited(MINIMAL, {leaf[0]: value}))
    assert is_refused(leaf[0], value, text)
    assert len(text.splitlines()) == 1


def test_no_number_may_be_infinite_or_nan():
    floats = [key for key, kind in LEAVES if fits(0.5, kind) and not fits("x", kind)]
    assert len(floats) > 10
    for value in (".nan", ".inf", "-.inf"):
        lines = message(MINIMAL, *(f"{key}={value}" for key in floats)).splitlines()
        assert len(lines) == len(floats)


def test_no_section_can_be_changed():
    for cls in {cls for _, cls, _ in KEYS}:
        assert cls.__struct_config__.frozen
        assert cls.__struct_config__.forbid_unknown_fields
    run = load_tree(MINIMAL)
    with pytest.raises(AttributeError, match="immutable"):
        run.grpo.seed = 1  # type: ignore[misc] # the point of the test


def test_the_defaults_are_valid_and_derived_ones_are_shown_as_values():
    run = load_tree(MINIMAL)
    assert run.policy.tokenizer.name == "some/model"
    assert run.policy.logprob_batch_size == run.policy.train_micro_batch_size
    assert run.policy.generation.vllm_cfg.max_model_len == run.policy.max_total_sequence_length
    assert run.policy.generation.vllm_cfg.precision == "bfloat16"
    assert run.data.max_input_seq_length == 512 - 384
    assert "${" not in dump(run)
