"""float16: tiny gradients survive, an overflow costs no update, the scale is part of the state."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from backend_cases import distance, exported, make_rows, make_samples, make_work
from hypothesis import given
from hypothesis import strategies as st
from models import policy_config, save_model
from ranks import run_ranks

from minirl.backend import TokenOutput, Work
from minirl.backends.dtensor.backend import open_backend
from minirl.backends.dtensor.loss_scale import LARGEST, PATIENCE, LossScale, after
from minirl.config.policy import DTensorConfig, OptimizerConfig, PolicyConfig
from minirl.metrics import Metrics, value
from minirl.parallel import Axis
from minirl.rng import key_of
from minirl.types import Scalar


@given(st.lists(st.booleans(), max_size=300))
def test_a_scale_is_a_power_of_two_that_falls_at_once_and_rises_after_long(seen: list[bool]):
    scale = LossScale()
    for finite in seen:
        before, scale = scale, after(scale, finite=finite)
        assert math.log2(scale.value).is_integer()
        assert 1.0 <= scale.value <= LARGEST
        assert scale.value <= before.value if not finite else scale.value >= before.value
        assert scale.good < PATIENCE


def test_a_scale_rises_after_its_patience_and_not_before():
    scale = LossScale(8.0)
    for _ in range(PATIENCE - 1):
        scale = after(scale, finite=True)
    assert scale.value == 8.0
    assert after(scale, finite=True) == LossScale(16.0, 0)


def work_times(factor: float, work: Work) -> Work:
    """The same micro-batch with a loss so many times as large."""

    def loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
        found, metrics = work.loss(output)
        return found * factor, metrics

    return work._replace(loss=loss)


def config(model: str, precision: str, factor: float = 1.0, **keys: Any) -> PolicyConfig:
    """Moves weights equally far whatever the factor, so that they show the gradient."""
    sgd = OptimizerConfig("torch.optim.SGD", {"lr": 1.0 / factor})
    cfg = policy_config(model, optimizer=sgd, max_grad_norm=None, dtensor_cfg=DTensorConfig(**keys))
    return msgspec.structs.replace(cfg, precision=precision)


def run(axis: Axis, cfg: PolicyConfig, factor: float, folder: str) -> dict[str, Any]:
    """One update; then one with a loss that is not finite; then what a checkpoint remembers."""
    backend, state = open_backend(cfg, axis, key_of(0))
    before = exported(backend, state)
    work = work_times(factor, make_work(make_samples(4)))
    state, metrics = backend.update_(state, [work, work])
    found: dict[str, Any] = {name: value(m) for name, m in metrics.items()}
    weights = exported(backend, state)
    found["moved"] = {name: weights[name] - x for name, x in before.items()}
    if cfg.precision == "float16":
        backend.save(state, Path(folder))
        scale = state.model.trainer.loss_scale
        # On the first rank only: all of them leave the update out.
        state, metrics = backend.update_(
            state, [work_times(math.nan if axis.rank == 0 else 1.0, work)] * 2
        )
        found["skipped"] = value(metrics["nonfinite_updates"])
        found["after nan"] = state.model.trainer.loss_scale.value / scale.value
        state = backend.load_(state, Path(folder))
        found["kept"] = state.model.trainer.loss_scale == scale
        found["same"] = distance(exported(backend, state), weights)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), "llama", num_key_value_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [(1, {}), (2, {}), (2, {"tensor_parallel_size": 2, "sequence_parallel": True})],
    ids=["one", "FSDP", "TP + SP"],
)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4], ids=["tiny", "usual", "huge"])
def test_an_update_in_float16_is_that_of_float32(
    model: str, ranks: int, keys: dict[str, Any], factor: float, tmp_path: Path
):
    """Unscaled, tiny gradients would be 0 in float16; huge ones overflow when scaled."""
    exact = run_ranks(ranks, run, config(model, "float32", factor, **keys), factor, str(tmp_path))[
        0
    ]
    found = run_ranks(ranks, run, config(model, "float16", factor, **keys), factor, str(tmp_path))
    for rank, low in enumerate(found):
        assert distance(low["moved"], exact["moved"]) < 0.02
        assert low["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
        assert low["nonfinite_updates"] == 0.0
        assert (
            low["loss_scale"] < LARGEST / 1000 if factor == 1e4 else low["loss_scale"] > LARGEST / 8
        )
        assert low["skipped"] == float(rank == 0 or bool(keys)), "counted once for each copy"
        assert low["after nan"] == 1.0, "which says nothing about the scale"
        assert low["kept"]
        assert low["same"] == 0.0


def test_a_micro_batch_without_a_loss_is_no_overflow(model: str):
    [found] = run_ranks(1, empty, config(model, "float16"))
    assert found == (0.0, LARGEST)


def empty(axis: Axis, cfg: PolicyConfig) -> tuple[float, float]:
    backend, state = open_backend(cfg, axis, key_of(0))
    rows = make_rows(make_samples(1))

    def loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
        return torch.zeros(()), {}

    work = make_work(make_samples(1))._replace(rows=rows, loss=loss)
    state, metrics = backend.update_(state, [work])
    return value(metrics["grad_norm"]), state.model.trainer.loss_scale.value
