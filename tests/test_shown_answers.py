"""Rows whose prompt shows the answer can be left out: a copy of it would be rewarded."""

from pathlib import Path
from typing import Any

import pytest
from test_data import SPELL, gym, ids, jsonl, load, text_of

from minirl.config import GrpoRun
from minirl.data import Datasets
from minirl.loader import load as load_config

ROWS = [("Say Yes", "yes"), ("Is it so?", "no"), ("a  B", "A b"), ("12 + 3", "15"), ("2 x 5", 2)]
RECIPE = Path(__file__).parent.parent / "bin" / "recipes" / "grpo_tiny_cpu.yaml"


def test_they_are_left_out_and_counted(tmp_path: Path):
    rows = [{"input": text, "output": answer} for text, answer in ROWS]
    train: dict[str, Any] = jsonl(tmp_path / "rows.jsonl", rows)
    assert load(train).num_shown == 0
    train["leave_out_shown_answers"] = True
    parts = load(train, validation=train)
    assert (ids(parts.train), parts.num_shown) == ([1, 3], 2 * 3)


def test_without_the_column_or_a_row_left_the_key_is_named(tmp_path: Path):
    every = jsonl(tmp_path / "every.jsonl", [{"input": "yes", "output": "yes"}])
    train = {**every, "leave_out_shown_answers": True}
    with pytest.raises(ValueError, match=r"data\.train\.leave_out_shown_answers: every input"):
        load(train)
    with pytest.raises(ValueError, match=r"data\.train\.output_key='answer': row 0 has only the"):
        load({**train, "output_key": "answer", "env_name": "some.module:function"})


@pytest.mark.slow
def test_no_prompt_of_the_demo_contains_its_answer():
    keys = {"split_validation_size": 0.1, "deduplicate": True}
    whole = load({**gym("spell_backward", **SPELL), **keys})
    asked = load_config(RECIPE, [], GrpoRun).data.train
    assert (asked.task_kwargs, asked.leave_out_shown_answers) == (SPELL, True)
    parts = load({**gym("spell_backward", **SPELL), **keys, "leave_out_shown_answers": True})
    for prompt in parts.train.prompts + validation(parts):
        assert prompt.example["answer"].lower() not in text_of(prompt).lower()
    left_out = words(whole) - words(parts)
    assert len(left_out) == parts.num_shown > 0
    palindromes = {word for word in words(whole) if word == word[::-1]}
    assert left_out == palindromes | ({"cab", "sun", "nus"} & words(whole))


def validation(parts: Datasets) -> tuple[Any, ...]:
    assert parts.validation is not None
    return parts.validation.prompts


def words(parts: Datasets) -> set[str]:
    return {p.example["metadata"]["word"].lower() for p in parts.train.prompts + validation(parts)}
