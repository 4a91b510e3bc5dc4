"""Whose a folder is: one process's at a time, and the same run's whenever it goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import COMPLETE, KEYS, LEAVES, edited
from hypothesis import given
from hypothesis import strategies as st
from models import save_model
from msgspec.structs import replace
from toy import PROMPTS

from minirl import ownership
from minirl.config.run import GrpoRun
from minirl.data.datasets import Dataset
from minirl.ownership import check_allowed, check_identity, identity_of, locked

SETTINGS = dict(ownership._settings(COMPLETE, ""))
"""The smallest run's, without the digests."""


def saved_in(folder: Path, identity: dict[str, Any]) -> Path:
    (folder / "identity.json").write_text(json.dumps(identity))
    return folder


def test_what_may_change_are_keys_of_a_run():
    known = {key for key, _, _ in KEYS} | {"policy.optimizer.kwargs.lr", "policy.model_name.path"}
    assert set(ownership.FREE) - known == set()
    assert len(set(ownership.FREE)) == len(ownership.FREE)


@given(key=st.sampled_from(sorted(SETTINGS)), allowed=st.booleans())
def test_any_key_may_change_if_it_changes_no_result_or_is_allowed(
    tmp_path_factory: pytest.TempPathFactory, key: str, allowed: bool
):
    folder = saved_in(tmp_path_factory.mktemp("step_2"), {**SETTINGS, key: "another"})
    free = any(f"{key}.".startswith(f"{name}.") for name in ownership.FREE)
    phrase = f'{key}: "another" when it was saved, {json.dumps(SETTINGS[key])} now'
    names = [key] if allowed and not free else []
    if free or allowed:
        assert check_identity(folder, SETTINGS, names) == [phrase]
    else:
        with pytest.raises(ValueError, match="saved by another run") as refused:
            check_identity(folder, SETTINGS, names)
        assert phrase in str(refused.value)
        assert f"checkpointing.allowed_changes: [{key}]" in str(refused.value)
    if free:
        with pytest.raises(ValueError, match="no key that a checkpoint is compared by"):
            check_allowed([key], SETTINGS)
    else:
        check_allowed([key, key.split(".")[0]], SETTINGS)


@pytest.mark.parametrize(
    "key",
    [
        *("grpo.seed", "grpo.num_generations_per_prompt", "grpo.adv_estimator.name", "loss_fn"),
        *("policy.train_global_batch_size", "policy.precision", "policy.hf_config_overrides"),
        *("policy.model_name.weights", "policy.dtensor_cfg.enabled", "policy.dtensor_cfg.lora_cfg"),
        *("policy.optimizer.kwargs.betas", "policy.generation.temperature", "data.train.rows"),
        *("data.shuffle", "policy.generation.backend", "policy.megatron_cfg.optimizer.adam_beta1"),
    ],
)
def test_what_changes_results_is_compared(key: str):
    assert not any(f"{key}.".startswith(f"{name}.") for name in ownership.FREE)


def test_every_difference_is_named_and_a_section_allows_all_within(tmp_path: Path):
    saved = {**SETTINGS, "grpo.seed": 7, "loss_fn.ratio_clip_min": 0.3, "grpo.val_period": 3}
    del saved["policy.precision"]
    folder = saved_in(tmp_path, saved)
    with pytest.raises(ValueError, match="saved by another run") as refused:
        check_identity(folder, SETTINGS, [])
    assert str(refused.value).splitlines()[1:4] == [
        "  grpo.seed: 7 when it was saved, 42 now",
        "  loss_fn.ratio_clip_min: 0.3 when it was saved, 0.2 now",
        '  policy.precision: nothing when it was saved, "bfloat16" now',
    ]
    assert "grpo.val_period" not in str(refused.value)
    changed = check_identity(folder, SETTINGS, ["grpo", "loss_fn", "policy"])
    assert [line.partition(":")[0] for line in changed] == [
        *("grpo.val_period", "grpo.seed", "loss_fn.ratio_clip_min", "policy.precision"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, r"step_2' has no identity.json.*checkpoint_dir"), ("{", "no complete checkpoint")],
)
def test_a_checkpoint_that_does_not_tell_its_run_is_refused(tmp_path: Path, text, message):
    folder = tmp_path / "step_2"
    folder.mkdir()
    if text:
        (folder / "identity.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        check_identity(folder, SETTINGS, [])


def test_a_key_that_only_the_checkpoint_has_can_be_allowed(tmp_path: Path):
    folder = saved_in(tmp_path, {**SETTINGS, "policy.optimizer.kwargs.eps": 1e-5})
    with pytest.raises(ValueError, match=r"allowed_changes: \[policy\.optimizer\.kwargs\.eps\]"):
        check_identity(folder, SETTINGS, [])
    [phrase] = check_identity(folder, SETTINGS, ["policy.optimizer.kwargs.eps"])
    assert phrase == "policy.optimizer.kwargs.eps: 1e-05 when it was saved, nothing now"


def test_a_reward_function_s_code_and_the_stop_tokens_are_a_run_s(
    run: GrpoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    file, rows = tmp_path / "own_reward.py", Dataset(PROMPTS, seed=0, shuffle=False)
    file.write_text("def score(text, row): return 1.0")
    data = replace(run.data, train=replace(run.data.train, env_name="own_reward:score"))
    own = replace(run, data=data)
    before = identity_of(own, rows, [1])
    assert changed_keys(before, identity_of(own, rows, [1, 2])) == {"policy.generation.ends"}
    file.write_text("def score(text, row): return 5.0")
    assert changed_keys(before, identity_of(own, rows, [1])) == {"data.train.env_name.code"}


def test_a_misspelt_allowance_gets_its_name():
    with pytest.raises(ValueError, match=r"'grpo.sed' is no key .* did you mean grpo.seed"):
        check_allowed(["grpo.sed"], SETTINGS)


def test_a_run_is_its_settings_its_model_and_its_rows(run: GrpoRun, tmp_path: Path):
    rows = Dataset(PROMPTS, seed=0, shuffle=False)
    whole = identity_of(run, rows)
    moved = tmp_path / "moved"
    Path(run.policy.model_name).rename(moved)
    tokenizer = replace(run.policy.tokenizer, name=str(moved))
    other = replace(run, policy=replace(run.policy, model_name=str(moved), tokenizer=tokenizer))
    assert changed_keys(whole, identity_of(other, rows)) == {"policy.model_name.path"}
    for file in moved.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    assert changed_keys(whole, identity_of(other, rows)) == {"policy.model_name.path"}
    [file] = moved.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert changed_keys(whole, identity_of(other, rows)) == {
        *("policy.model_name.path", "policy.model_name.weights"),
    }
    longer = Dataset((*PROMPTS, PROMPTS[0]), seed=0, shuffle=False)
    first = PROMPTS[0]._replace(example={"hard": {"b", "a"}})
    relabelled = Dataset((first, *PROMPTS[1:]), seed=0, shuffle=False)
    for dataset in (longer, relabelled):
        seen = changed_keys(identity_of(other, rows), identity_of(other, dataset))
        assert seen == {"data.train.rows"}
    assert {key for key, _ in LEAVES if not key.startswith("data.validation.")} - {
        "policy.optimizer.kwargs"
    } <= {*whole, *(key.rsplit(".", 1)[0] for key in whole)}


def changed_keys(one: dict[str, object], other: dict[str, object]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


@pytest.fixture
def run(tmp_path: Path) -> GrpoRun:
    from configs import load_tree

    name = save_model(tmp_path / "model")
    return load_tree(edited(COMPLETE, {"policy.model_name": name, "policy.tokenizer.name": name}))


HOLD = """
import sys
from pathlib import Path
from minirl.ownership import locked
with locked(Path(sys.argv[1]), "logger.log_dir"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_of_one_process_at_a_time_however_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "deep" / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for _ in range(2):
            with (
                pytest.raises(
                    ValueError, match=f"log_dir: .*run' is in use by process {holder.pid} on"
                ),
                locked(folder, "logger.log_dir"),
            ):
                pass
        monkeypatch.setenv("RANK", "1")  # another rank of the same run
        with locked(folder, "logger.log_dir"):
            pass
        monkeypatch.delenv("RANK")
        holder.kill()
    with locked(folder, "logger.log_dir"):
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"), locked(tmp_path / "file" / "x", "k"):
        pass
