"""The one-time conversion: where it goes, when it is made again, and what may interrupt it.

Most tests put a short script in the converter's place, which is a process either way.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from backend_cases import exported
from models import save_model
from msgspec import structs
from omegaconf import OmegaConf
from parity import SIZES, Layout, policy
from ranks import RankError, run_ranks
from safetensors.torch import load_file, save_file

from minirl.backends import open_backend
from minirl.backends.megatron import convert as megatron_convert
from minirl.backends.megatron.convert import FACTS, ITERATION, checkpoint_root, converted, folder_of
from minirl.config.policy import PolicyConfig
from minirl.hf import check_model
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of

FOLDER, COMPARED = "NRL_MEGATRON_CHECKPOINT_DIR", "compared with transformers"
CONVERTER = """#!/bin/sh
echo start >> {trace}
{work}
echo end >> {trace}
"""
GOOD = 'touch "$4/run_config.yaml"'


class Place:
    """A folder for conversions, a model, and a script in the converter's place."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.trace, self.script = root / "trace", root / "converter"
        self.cfg = config(str(model))
        self.converts_by(GOOD)

    def converts_by(self, work: str) -> None:
        self.script.write_text(CONVERTER.format(trace=self.trace, work=work))
        self.script.chmod(0o755)

    def runs(self) -> int:
        """Conversions that came to their end."""
        return self.trace.read_text().count("end") if self.trace.exists() else 0

    def open(self, **megatron: Any) -> Path:
        with converted(with_megatron(self.cfg, **megatron), SOLO) as folder:
            return folder


def config(model: str, **megatron: Any) -> PolicyConfig:
    return with_megatron(policy(Layout("", 1, {}), model, packed=False), **megatron)


def with_megatron(cfg: PolicyConfig, **megatron: Any) -> PolicyConfig:
    return structs.replace(cfg, megatron_cfg=structs.replace(cfg.megatron_cfg, **megatron))


def write_model(folder: Path) -> Path:
    """As much of a model as is looked at before it is converted."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path, write_model(tmp_path / "model"))
    monkeypatch.setenv(FOLDER, str(tmp_path / "converted"))
    monkeypatch.setattr(sys, "executable", str(found.script))
    monkeypatch.setattr(megatron_convert, "POLL_S", 0.05)
    return found


# ---- where it goes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "home", "expected"),
    [
        ("/a", "/b", "/a"),
        ("~/a", "/b", "{user}/a"),
        (None, "/b", "/b/nemo_rl"),
        ("", "/b", "/b/nemo_rl"),
        ("  ", "/b", "/b/nemo_rl"),
        (None, None, "{user}/.cache/huggingface/nemo_rl"),
        (" ", "\t", "{user}/.cache/huggingface/nemo_rl"),
    ],
)
def test_the_folder_is_chosen_in_order_and_blank_counts_as_unset(
    chosen: str | None, home: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    for name, text in ((FOLDER, chosen), ("HF_HOME", home)):
        if text is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, text)
    assert checkpoint_root() == Path(expected.format(user=Path.home()))


def test_a_missing_folder_is_made_with_those_above_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FOLDER, str(place.root / "some" / "where"))
    assert place.open().is_dir()
    assert (place.root / "some" / "where").is_dir()


def test_a_folder_that_cannot_be_written_is_named_with_reason_and_remedy(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    (place.root / "file").touch()
    root = place.root / "file" / "below"
    monkeypatch.setenv(FOLDER, str(root))
    with pytest.raises(ValueError, match=f"'{root}'.*Not a directory.*set {FOLDER} to a folder"):
        place.open()


def test_what_fails_beside_the_converter_is_a_message_too(place: Place):
    final = folder_of(str(place.model))
    part = final.with_name(f".{final.name}.part")  # a conversion is written here first
    part.parent.mkdir()
    part.touch()
    with pytest.raises(ValueError, match="part"):
        place.open()


# ---- when it is made again ----------------------------------------------------------------------


def test_a_model_is_converted_once(place: Place):
    file = place.open() / FACTS
    first = file.stat()
    assert place.open() / FACTS == file
    assert place.runs() == 1
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def change_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 3}')


def change_weights(model: Path) -> None:
    file = model / "model.safetensors"
    before = file.stat().st_mtime_ns
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(before + 1, before + 1))


def add_weights(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").touch()


@pytest.mark.parametrize("change", [change_config, change_weights, add_weights])
def test_another_model_under_the_same_name_is_converted_again(place: Place, change: Any):
    place.open()
    change(place.model)
    place.open()
    assert place.runs() == 2


@pytest.mark.parametrize(
    "changed", [{"model_overrides": {"layernorm_epsilon": 1e-4}}, {"force_reconvert_from_hf": True}]
)
def test_other_overrides_and_force_convert_again(place: Place, changed: dict[str, Any]):
    place.open()
    place.open(**changed)
    assert place.runs() == 2


def test_settings_that_a_conversion_does_not_depend_on_convert_nothing(place: Place):
    place.open()
    place.open(tensor_model_parallel_size=2, activation_checkpointing=True)
    assert place.runs() == 1


@pytest.mark.parametrize("package", ["megatron-core", "megatron-bridge", COMPARED])
def test_a_conversion_by_other_versions_is_made_again(place: Place, package: str):
    file = place.open() / FACTS
    file.write_text(json.dumps({**json.loads(file.read_text()), package: "0.1"}))
    place.open()
    assert place.runs() == 2
    assert json.loads(file.read_text())[package] != "0.1"


@pytest.mark.parametrize("text", [None, "", '{"model": ', "[]", "7", "{}"])
def test_a_torn_record_is_no_conversion(place: Place, text: str | None):
    file = place.open() / FACTS
    file.unlink()
    if text is not None:
        file.write_text(text)
    place.open()
    assert place.runs() == 2


# ---- what may interrupt it ----------------------------------------------------------------------


def test_a_killed_converter_leaves_nothing_that_looks_complete(place: Place):
    place.converts_by(f"{GOOD}; kill -9 $$")
    with pytest.raises(ValueError, match=r"could not be converted.*exit status -9"):
        place.open()
    assert not folder_of(str(place.model)).exists()
    place.converts_by(GOOD)
    assert place.open().is_dir()
    assert place.runs() == 1


def test_a_failed_conversion_leaves_the_one_before(place: Place):
    file = place.open() / FACTS
    before = file.read_text()
    place.converts_by("echo 'KeyError: no such weight'; exit 1")
    with pytest.raises(ValueError, match=r"could not be converted.*KeyError: no such weight"):
        place.open(force_reconvert_from_hf=True)
    assert file.read_text() == before


JOB = """
import sys
from minirl.backends.megatron import convert as megatron_convert
from minirl.parallel import SOLO
from minirl.config.policy import PolicyConfig
import msgspec
cfg = msgspec.json.decode(sys.argv[1], type=PolicyConfig)
sys.executable = sys.argv[2]
with megatron_convert.converted(cfg, SOLO):
    pass
"""


@pytest.mark.slow
def test_the_converter_of_a_killed_job_keeps_others_out_until_it_ends(place: Place):
    place.converts_by(f"sleep 2; {GOOD}")
    python, cfg = Path(sys.prefix) / "bin" / "python", msgspec.json.encode(place.cfg).decode()
    job = subprocess.Popen([str(python), "-c", JOB, cfg, str(place.script)])
    while not place.trace.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.wait()
    place.open()
    assert place.trace.read_text().split() == ["start", "end", "start", "end"]


def test_a_reader_keeps_other_settings_out(place: Place):
    other = with_megatron(place.cfg, model_overrides={"layernorm_epsilon": 1e-4})
    done: list[Path] = []

    def second_job() -> None:
        with converted(other, SOLO) as folder:
            done.append(folder)

    thread = threading.Thread(target=second_job)
    with converted(place.cfg, SOLO):
        thread.start()
        time.sleep(0.3)
        assert (place.runs(), done) == (1, [])
    thread.join(timeout=600)
    assert place.runs() == 2
    assert done


def test_who_gets_another_job_s_conversion_makes_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """Between converting and reading, a job with other overrides replaces the folder."""
    hold, taken = megatron_convert._Lock.hold, []

    def hold_late(self: Any, kind: int) -> Iterator[None]:
        taken.append(kind)
        if len(taken) == 2:
            self.close()
            with monkeypatch.context() as patch:
                patch.setattr(megatron_convert._Lock, "hold", hold)
                place.open(model_overrides={"layernorm_epsilon": 1e-4})
            self.open()
        yield from hold(self, kind)

    monkeypatch.setattr(megatron_convert._Lock, "hold", hold_late)
    facts = json.loads((place.open() / FACTS).read_text())
    assert facts == megatron_convert.fingerprint(place.cfg)
    assert place.runs() == 3


def in_jobs(axis: Axis, size: int) -> Axis:
    """The ranks of `axis` as jobs of `size` ranks each."""
    jobs = axis.size // size
    groups = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(jobs)]
    return Axis(axis.rank % size, size, groups[axis.rank // size])


@contextmanager
def converting_in(root: Path, script: Path | None = None) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(root))
        patch.setattr(megatron_convert, "POLL_S", 0.05)
        if script is not None:
            patch.setattr(sys, "executable", str(script))
        yield patch


def open_blindly(axis: Axis, cfg: PolicyConfig, root: Path, script: Path) -> str:
    """Rank 1 runs on a host that mounts something else at the folder."""
    with converting_in(root, script) as patch:
        if axis.rank == 1:
            patch.setattr(megatron_convert, "folder_of", lambda name: root / "elsewhere")
            patch.setattr(socket, "gethostname", lambda: "node7")
        try:
            with converted(cfg, axis):
                return ""
        except ValueError as error:
            return str(error)


def test_a_host_that_does_not_see_the_folder_is_named_on_every_rank(place: Place):
    for message in run_ranks(2, open_blindly, place.cfg, place.root / "blind", place.script):
        assert "is not visible on ['node7']" in message
        assert f"set {FOLDER} to a folder that all hosts share" in message


def open_at_once(axis: Axis, cfg: PolicyConfig, root: Path) -> tuple[int, Sequence[str]]:
    with converting_in(root), converted(cfg, in_jobs(axis, 2)) as folder:
        return (folder / FACTS).stat().st_ino, sorted(f.name for f in folder.iterdir())


def reopen(axis: Axis, cfg: PolicyConfig, root: Path, saved: Path) -> tuple[int, dict[str, Any]]:
    with converting_in(root):
        backend, state = open_backend(cfg, axis, key_of(0))
        backend.save(state, saved)
        return (folder_of(cfg.model_name) / ITERATION / FACTS).stat().st_ino, exported(
            backend, state
        )


@pytest.mark.slow
def test_jobs_that_start_at_once_share_one_real_conversion(tmp_path: Path):
    model = save_model(tmp_path / "model", "qwen3", **SIZES)
    root, saved = tmp_path / "converted", tmp_path / "saved"
    saved.mkdir()
    cfg = config(model, model_overrides={"init_method_std": 0.03})
    found = run_ranks(4, open_at_once, cfg, root)
    assert len({ino for ino, _ in found}) == 1
    assert {FACTS, "run_config.yaml", ".metadata"} <= set(found[0][1])

    two = with_megatron(cfg, tensor_model_parallel_size=2)
    again = run_ranks(2, reopen, two, root, saved)
    assert {ino for ino, _ in again} == {found[0][0]}, "the second open converts nothing"
    kept = load_file(Path(model) / "model.safetensors")
    assert again[0][1].keys() == kept.keys()
    assert all(torch.equal(x, kept[name]) for name, x in again[0][1].items())

    with converting_in(root):
        conversion = folder_of(model) / ITERATION
    for folder, size in ((conversion, 1), (saved, 2)):
        provider = OmegaConf.load(folder / "run_config.yaml").model
        assert provider.init_method_std == 0.03
        assert provider.tensor_model_parallel_size == size
        assert provider.calculate_per_token_loss is True


@pytest.mark.slow
def test_a_weight_that_the_files_lack_is_named_on_every_rank(tmp_path: Path):
    model = Path(save_model(tmp_path / "model", "qwen3", **SIZES))
    weights, name = load_file(model / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    del weights[name]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError) as caught:
        run_ranks(2, open_at_once, config(str(model)), tmp_path / "converted")
    text = str(caught.value)
    assert text.count(f"ValueError: its files lack these weights, or have NaN in them: ['{name}']")
    assert text.count("\nValueError: policy.model_name: ") == 2


@pytest.mark.parametrize(
    "content", ["run_config.yaml", "iter_0000000", "latest_checkpointed_iteration.txt"]
)
def test_a_megatron_checkpoint_is_no_input(tmp_path: Path, content: str):
    (tmp_path / content).touch()
    with pytest.raises(ValueError, match=r"policy.model_name.*Megatron's format: only .*Hugging"):
        check_model(str(tmp_path))
