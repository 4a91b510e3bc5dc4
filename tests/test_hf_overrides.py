"""`policy.hf_config_overrides`: another config for the same weights, everywhere."""

import json
from pathlib import Path

import pytest
from models import policy_config, save_model

from minirl.backends import check_policy
from minirl.hf import check_model, model_facts, with_overrides


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("overrides") / "model", "llama")


def test_without_overrides_the_model_is_itself(model: str, tmp_path: Path) -> None:
    assert with_overrides(model, {}, tmp_path) == model
    assert not list(tmp_path.iterdir())


def test_overrides_change_the_config_and_share_the_weights(model: str, tmp_path: Path) -> None:
    changed = with_overrides(model, {"max_position_embeddings": 999}, tmp_path)
    check_model(changed)
    facts = model_facts(model)
    assert model_facts(changed) == {**facts, "max_position_embeddings": 999}
    weights = Path(changed) / "model.safetensors"
    assert weights.samefile(Path(model) / "model.safetensors")
    # The same question has the same answer; another has another.
    assert with_overrides(model, {"max_position_embeddings": 999}, tmp_path) == changed
    assert with_overrides(model, {"max_position_embeddings": 998}, tmp_path) != changed
    assert len(list(tmp_path.iterdir())) == 2
    assert json.loads((Path(model) / "config.json").read_text()) == facts


def test_a_field_that_configs_lack_is_refused_with_the_nearest(model: str, tmp_path: Path) -> None:
    message = r"hf_config_overrides.rms_norm_epsilon: .* no such field; did you mean rms_norm_eps"
    with pytest.raises(ValueError, match=message):
        with_overrides(model, {"rms_norm_epsilon": 1.0}, tmp_path)
    with pytest.raises(ValueError, match=r"hf_config_overrides.nothing_like_it"):
        check_policy(policy_config(model, hf_config_overrides={"nothing_like_it": 1}))


def test_a_value_that_configs_do_not_take_is_refused(model: str, tmp_path: Path) -> None:
    message = r"hf_config_overrides: a config of 'llama' does not take .*'num_hidden_layers': 'two'"
    with pytest.raises(ValueError, match=message):
        with_overrides(model, {"num_hidden_layers": "two"}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_whose_own_config_changed_is_another_question(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    with_overrides(model, {"max_position_embeddings": 999}, tmp_path / "root")
    changed = {**model_facts(model), "rms_norm_eps": 0.5}
    (Path(model) / "config.json").write_text(json.dumps(changed))
    after = with_overrides(model, {"max_position_embeddings": 999}, tmp_path / "root")
    assert model_facts(after)["rms_norm_eps"] == 0.5


@pytest.mark.slow
def test_training_reads_the_overridden_config(
    model: str, solo: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from backend_cases import make_rows, make_samples

    from minirl.backend import TokenHead
    from minirl.backends import open_backend
    from minirl.rng import key_of

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    rows = [make_rows(make_samples(2))]
    found = []
    for overrides in ({}, {"rms_norm_eps": 0.5}):
        cfg = policy_config(model, hf_config_overrides=overrides)
        backend, state = open_backend(cfg, solo, key_of(0))
        found.append(backend.logprobs(state, rows, TokenHead(), "policy")[0].logprobs)
    assert not torch.allclose(found[0], found[1])
