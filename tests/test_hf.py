"""A model's folder is judged without loading it, and its end tokens are found."""

import json
from pathlib import Path

import pytest

from minirl.hf import check_model, end_token_ids, model_facts, weight_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes, and could not be loaded: nothing reads the weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 7}')
    (folder / "model.safetensors").touch()
    return folder


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
        ('["model_type"]', "names no model_type"),
    ],
)
def test_a_folder_without_a_model_s_config_is_refused(model: Path, text: str | None, message: str):
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    assert message in refusal(model)


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
