"""Checkpoint folders: complete or absent, found by step, read back whole."""

import json
from typing import Any

import pytest
from backend_cases import distance, exported, make_samples, make_work
from disk import largest_file
from models import policy_config, save_model

from minirl.backend import after_draw
from minirl.backends.dtensor import backend as dtensor
from minirl.checkpoint import latest, load_, save
from minirl.parallel import world
from minirl.rng import key_of
from minirl.types import Sample, Score, Trajectory

SURPLUS = Sample(
    Trajectory(1, 2, 3, (4, 5), (False, True), (0.0, -0.1), True, 6),
    Score(0.1, {"form": 1 / 3}, timed_out=True),
    reward=2.0,
)


@pytest.fixture
def opened(tmp_path) -> Any:
    name = save_model(tmp_path / "model")
    with world() as axis:
        yield (*dtensor.open_backend(policy_config(name), axis, key_of(0)), axis)


def test_a_checkpoint_gives_back_weights_and_values(opened, tmp_path):
    backend, state, axis = opened
    state, _ = backend.update_(state, [make_work(make_samples(2))])
    state = backend.end_step_(after_draw(state, 8, [SURPLUS, SURPLUS]))
    saved, weights = state, exported(backend, state)
    folder = save(backend, state, tmp_path / "run", axis, {"grpo.seed": 1})
    assert json.loads((folder / "identity.json").read_text()) == {"grpo.seed": 1}
    state, _ = backend.update_(after_draw(state, 16), [make_work(make_samples(2))])
    assert distance(exported(backend, state), weights) > 0
    state = load_(backend, state, folder)
    assert distance(exported(backend, state), weights) == 0
    for name in ("step", "updates", "cursor", "key", "surplus"):
        assert getattr(state, name) == getattr(saved, name)


def test_the_latest_complete_checkpoint_is_found_by_number(opened, tmp_path):
    backend, state, axis = opened
    run = tmp_path / "run"
    assert latest(run) is None
    for _ in range(10):
        state = backend.end_step_(state)
        if state.step in (2, 9, 10):
            folder = save(backend, state, run, axis, {})
            assert latest(run) == (state.step, folder) == (state.step, run / f"step_{state.step}")
    (run / "step_99.part").mkdir()
    assert latest(run) == (10, run / "step_10")


@pytest.mark.parametrize("text", [None, "", '[{"trajectory"', "{}"])
def test_a_checkpoint_whose_surplus_is_missing_or_torn_is_refused(opened, tmp_path, text):
    backend, state, axis = opened
    folder = save(backend, after_draw(state, 8, [SURPLUS]), tmp_path / "run", axis, {})
    (folder / "surplus.json").unlink()
    if text is not None:
        (folder / "surplus.json").write_text(text)
    with pytest.raises(ValueError, match=r"step_0' is no complete checkpoint: surplus.json"):
        load_(backend, state, folder)


def test_a_checkpoint_that_was_cut_short_is_refused_by_its_file(opened, tmp_path):
    backend, state, axis = opened
    folder = save(backend, state, tmp_path / "run", axis, {})
    [file] = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"step_0' is no complete .*{file.name}' has \d+ bytes,"):
        load_(backend, state, folder)


def test_a_full_disk_is_named_with_the_checkpoint_and_the_one_before_stays(opened, tmp_path):
    backend, state, axis = opened
    kept = save(backend, state, tmp_path / "run", axis, {})
    state = backend.end_step_(state)
    with (
        largest_file(4096),
        pytest.raises(ValueError, match=r"step_1\.part' cannot be written: File too large; make"),
    ):
        save(backend, state, tmp_path / "run", axis, {})
    assert latest(tmp_path / "run") == (0, kept)
    assert save(backend, state, tmp_path / "run", axis, {}).name == "step_1"


def test_what_an_interrupted_save_left_is_replaced(opened, tmp_path):
    backend, state, axis = opened
    for name in ("step_0", "step_0.part"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "left_over").touch()
    folder = save(backend, state, tmp_path / "run", axis, {})
    assert not (folder / "left_over").exists()
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["step_0"]
