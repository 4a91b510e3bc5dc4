"""Rows that reasoning-gym makes: held out by content, the same in every process."""

from typing import Any

import pytest
from test_data import SPELL, load, text_of

from minirl.data.datasets import Dataset


def gym(task: str, **task_kwargs: Any) -> dict[str, Any]:
    return {
        "dataset_name": "reasoning_gym",
        "env_name": "reasoning_gym",
        "task": task,
        "task_kwargs": task_kwargs,
    }


@pytest.mark.slow
def test_the_words_of_the_demo_are_held_out_whatever_their_case_and_no_prompt_shows_an_answer():
    whole = {**gym("spell_backward", **SPELL), "split_validation_size": 0.1, "deduplicate": True}
    train = {**whole, "leave_out_shown_answers": True}
    parts, before = load(train), load(whole)
    assert parts.validation is not None

    def words(dataset: Dataset) -> list[str]:
        return [p.example["metadata"]["word"].lower() for p in dataset.prompts]

    kept, held = words(parts.train), words(parts.validation)
    left_out = parts.num_duplicates + parts.num_shown
    assert len(kept + held) == len(set(kept + held)) == SPELL["size"] - left_out
    for prompt in parts.train.prompts + parts.validation.prompts:
        assert prompt.example["answer"].lower() not in text_of(prompt).lower()
    assert before.validation is not None
    words_before = {*words(before.train), *words(before.validation)}
    dropped = words_before - set(kept + held)
    assert len(dropped) == parts.num_shown
    assert {w for w in words_before if w == w[::-1]} | {
        "cab",
        "sun",
        "nus",
    } & words_before <= dropped
    assert len(held) / len(kept + held) == pytest.approx(0.1, abs=0.01)
    first = parts.train.prompts[0]
    assert text_of(first) == f"<|user|>{first.example['question']}<|assistant|>"


@pytest.mark.slow
def test_rows_of_a_task_do_not_depend_on_the_interpreters_hash_seed(monkeypatch):
    # word_ladder walks through sets of strings: with this hash seed, another ladder comes out.
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    [prompt] = load(gym("word_ladder", size=1, seed=1), max_input_seq_length=500).train.prompts
    metadata = prompt.example["metadata"]
    assert (metadata["start_word"], metadata["end_word"]) == ("TIPS", "BRAN")


@pytest.mark.slow
def test_a_task_that_cannot_be_made_is_refused():
    with pytest.raises(
        ValueError, match=r"data\.train: .* 'spell_backwards' .* nearest .*\['spell_backward'"
    ):
        load(gym("spell_backwards", seed=1))
