"""A model's folder is judged without loading it, and its end tokens are found."""

import json
from pathlib import Path
from typing import Any

import pytest

from minirl.backends import hf_files
from minirl.hf import NUMBERS, check_model, end_token_ids, model_facts, weight_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes, and could not be loaded: nothing reads the weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 7}')
    safetensors(folder / "model.safetensors", {"w": {"dtype": "BF16", "data_offsets": [0, 8]}}, 8)
    return folder


def safetensors(file: Path, header: dict[str, Any], num_bytes: int) -> None:
    """A file with this header and so many bytes of tensors."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def refusal(name: str | Path, key: str = "policy.model_name") -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        check_model(str(name), key)
    return str(caught.value)


def test_a_complete_folder_passes_and_is_not_loaded(model: Path):
    check_model(str(model))
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    check_model(str(model))


def test_a_relative_folder_passes(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model.parent)
    check_model("model")
    check_model("./model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("", "is not JSON"),
        ('{"model_type": ', "is not JSON"),
        ("{}", "names no model_type"),
        ('["model_type"]', "holds no JSON object but a list"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' + "1" * 5000 + "}", "an integer too long to be one"),
        ('{"model_type": "q", "quantization_config": {"bits": 4}}', "start from a model that is"),
    ],
)
def test_a_folder_without_a_model_s_config_is_refused(model: Path, text: str | None, message: str):
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    assert message in refusal(model)


ODD = {"w": {"dtype": "I8", "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), ["bytes, but its header says", "again"]),
        (lambda f: f.write_bytes(f.read_bytes() + b"1"), ["bytes, but its header says"]),
        (lambda f: f.write_bytes(f.read_bytes()[:30]), ["(30 bytes) is no file of safetensors"]),
        (lambda f: f.write_bytes(b""), ["(0 bytes) is no file of safetensors"]),
        (lambda f: f.write_text("version https://git-lfs.github.com/spec"), ["no file of safe"]),
        (lambda f: safetensors(f, {"w": 3}, 0), ["is no file of safetensors"]),
        (lambda f: safetensors(f, ODD, 8), ["['I8']", "quantised", "start from a model that"]),
        (lambda f: (f.unlink(), f.symlink_to("gone")), ["cannot be read (No such file"]),
    ],
)
def test_weights_that_could_not_be_loaded_are_refused_by_their_header(model, change, parts):
    change(model / "model.safetensors")
    message = refusal(model)
    assert message.startswith(f"policy.model_name: {str(model / 'model.safetensors')!r}")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "b.safetensors"}}',
            "1 of the 1 files",
        ),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map"', "is not JSON"),
        ("generation_config.json", '{"eos_token_id": ', "is not JSON"),
    ],
)
def test_a_file_beside_the_weights_that_says_nothing_is_refused(model, name, text, part):
    (model / name).write_text(text)
    message = refusal(model)
    assert part in message
    assert str(model / name) in message


def test_the_kinds_of_weights_that_are_read_are_those_that_are_written():
    assert set(hf_files.TYPES) == NUMBERS


def test_a_name_longer_than_a_path_can_be_is_refused_in_few_words():
    message = refusal("a" * 5000)
    assert "there is no folder" in message
    assert len(message) < 600


def test_pickled_weights_are_no_weights(model: Path):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "no pickled weights" in refusal(model)


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "nowhere", "a/b/c", "/nowhere/at/all"])
def test_a_name_that_can_only_be_a_folder_is_refused_as_one(name: str):
    assert f"there is no folder {name!r}" in refusal(name)


def test_a_file_is_no_folder(model: Path):
    assert "there is no folder" in refusal(model / "config.json")


def test_a_home_folder_is_written_out():
    assert f"write {str(Path.home() / 'model')!r}" in refusal("~/model")


def test_a_hub_name_that_is_not_in_reach_is_refused_in_one_line():
    # Tests run offline.
    message = refusal("nobody/nothing")
    assert "'nobody/nothing' is neither a folder here nor a Hugging Face model in reach" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["./nowhere", "~/x", "nobody/nothing"])
def test_a_refusal_names_the_key_that_was_set(name: str):
    assert refusal(name, "policy.other").startswith("policy.other: ")


@pytest.mark.parametrize("ends", [3, [3, 5], None])
def test_the_generation_config_names_the_end_tokens(model: Path, ends: int | list[int] | None):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert end_token_ids(str(model)) == ends


def test_without_a_generation_config_the_config_does(model: Path):
    assert end_token_ids(str(model)) == 7


def test_the_facts_of_a_model_are_its_config(model: Path):
    assert model_facts(str(model)) == {"model_type": "qwen3", "eos_token_id": 7}


def test_a_model_on_the_hub_is_known_by_the_revision_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert weight_files("some/model") == [["some/model", "not cached"]]
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    for revision in ("abc", "def"):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").touch()
    for revision in ("abc", "def"):
        (model / "refs" / "main").write_text(revision)
        assert weight_files("some/model") == [["some/model", revision]]
