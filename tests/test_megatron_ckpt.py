"""What Core cannot save or load by itself, and what must not be read from its files."""

from pathlib import Path
from typing import Any

import pytest
from backend_cases import distance
from disk import largest_file
from models import save_model
from parity import SIZES
from ranks import run_ranks
from test_megatron import config, load_and_go_on, save_midway

from minirl import checkpoint
from minirl.backends import open_backend
from minirl.backends.megatron.ckpt import check_index
from minirl.config.megatron import MegatronOptimizerConfig
from minirl.config.policy import PolicyConfig
from minirl.parallel import Axis
from minirl.rng import key_of


@pytest.mark.slow
def test_a_run_with_sgd_goes_on_with_its_momentum(tmp_path: Path):
    sgd = MegatronOptimizerConfig(
        optimizer="sgd", lr=0.1, sgd_momentum=0.9, use_distributed_optimizer=False
    )
    cfg = config(save_model(tmp_path / "model", "qwen3", **SIZES), optimizer=sgd)
    saved = tmp_path / "saved"
    saved.mkdir()
    straight = run_ranks(1, save_midway, cfg, saved)[0]
    resumed = run_ranks(1, load_and_go_on, cfg, saved)[0]
    assert resumed["kept"] == straight["kept"]
    assert distance(resumed["weights"], straight["weights"]) < 1e-6


class Evil:
    """Runs code when it is unpickled: it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import pickle

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "trace")))
    with pytest.raises(ValueError, match=r"is no index of a checkpoint.*it names pathlib"):
        check_index(tmp_path)
    assert not (tmp_path / "trace").exists()
    with pytest.raises(ValueError, match="no Megatron checkpoint"):
        check_index(tmp_path / "nowhere")


def full_disk(axis: Axis, cfg: PolicyConfig, folder: Path) -> str:
    backend, state = open_backend(cfg, axis, key_of(0))
    with largest_file(4096), pytest.raises(ValueError, match=r"\S") as caught:
        checkpoint.save(backend, state, folder, axis, {})
    return str(caught.value)


def test_a_full_disk_is_named_with_the_checkpoint(tmp_path: Path) -> None:
    [message] = run_ranks(1, full_disk, config(save_model(tmp_path / "model")), tmp_path)
    assert f"{str(tmp_path / 'step_0.part')!r} cannot be written: an error of the disk" in message
    assert checkpoint.latest(tmp_path) is None
