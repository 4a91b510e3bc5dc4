"""What Core cannot save or load by itself: an optimizer other than Adam."""

from pathlib import Path

import pytest
from backend_cases import distance
from models import save_model
from parity import SIZES
from ranks import run_ranks
from test_megatron import config, load_and_go_on, save_midway

from minirl.megatron_config import MegatronOptimizerConfig


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
