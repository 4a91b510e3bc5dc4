"""The model made from nothing: its text survives, its mixture is even, its folder is complete."""

import json
import random
from pathlib import Path

import pytest
from configs import MINIMAL, edited, load_tree
from hypothesis import given
from hypothesis import strategies as st

from minirl.algos import tiny
from minirl.config.run import GrpoRun
from minirl.data.chat import Tokenizer, decode, load_tokenizer
from minirl.parallel import Axis
from minirl.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    return load_tokenizer(tiny.TokenizerConfig(name=str(folder)))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    [ids] = tokenizer([text], add_special_tokens=False)["input_ids"]
    return list(ids)


def test_the_instruction_is_one_token(tokenizer: Tokenizer):
    with_word = tokens_of(tokenizer, tiny.INSTRUCTION + "sun")
    assert len(with_word) == 1 + len("sun")
    assert with_word[1:] == tokens_of(tokenizer, "sun")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.jsonl"
    rows = [{"input": f"{tiny.INSTRUCTION}ab{c}", "answer": f"{c}ba"} for c in "cdefghij"]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_text_comes_back_as_it_was_one_token_a_character(tokenizer: Tokenizer):
    @given(st.text(alphabet=tiny.CHARACTERS, min_size=1, max_size=20))
    def law(text: str) -> None:
        if tiny.INSTRUCTION in text:
            return
        ids = tokens_of(tokenizer, text)
        assert len(ids) == len(text)
        assert decode(tokenizer, [ids]) == [text]

    law()


def test_a_demonstration_is_backward_or_forward_half_of_the_time(tokenizer: Tokenizer):
    prompt = Prompt(0, (2, 3), {"answer": "nus"})
    draws = random.Random(0)
    shown = [tiny.demonstration(prompt, tokenizer, draws) for _ in range(400)]
    assert {d.prompt for d in shown} == {prompt.tokens}
    assert {d.answer[-1] for d in shown} == {tokenizer.eos_token_id}
    texts = decode(tokenizer, [d.answer[:-1] for d in shown])
    assert set(texts) == {"nus", "sun"}
    assert 160 < texts.count("sun") < 240


def run_in(folder: Path, words: Path) -> GrpoRun:
    edits = {
        "policy.model_name": str(folder),
        "policy.precision": "float32",
        "policy.max_total_sequence_length": 32,
        "policy.generation.max_new_tokens": 8,
        "data.train": {
            "data_path": str(words),
            "output_key": "answer",
            "split_validation_size": 0.5,
        },
    }
    return load_tree(edited(MINIMAL, edits))


def test_a_model_is_made_once_whole_and_again_when_its_arguments_change(
    solo: Axis, tmp_path: Path, words: Path
):
    folder = tmp_path / "model"
    run = run_in(folder, words)
    (tmp_path / "model.part").mkdir()  # what a killed run left
    assert tiny.make(run, solo, seed=0, steps=1)
    assert not (tmp_path / "model.part").exists()
    made = {f.name: f.read_bytes() for f in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tiny.json"} <= made.keys()
    assert not tiny.make(run, solo, seed=0, steps=1)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == made
    for seed, steps in ((1, 1), (0, 2), (0, 1)):
        assert tiny.make(run, solo, seed=seed, steps=steps)
        same = (folder / "model.safetensors").read_bytes() == made["model.safetensors"]
        assert same == ((seed, steps) == (0, 1))


def test_a_folder_that_holds_something_else_is_left_alone(solo: Axis, tmp_path: Path, words: Path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"policy\.model_name: .*precious.* is no tiny model"):
        tiny.make(run_in(folder, words), solo, seed=0, steps=1)
    assert [f.name for f in folder.iterdir()] == ["thesis.txt"]
