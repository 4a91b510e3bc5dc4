"""What the FSDP2 backend keeps: checkpoints, skipped updates, schedules, precision."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import (
    distance,
    exported,
    make_rows,
    make_samples,
    make_work,
    real,
)
from models import policy_config
from ranks import run_ranks
from safetensors.torch import load_file

from minirl.backend import TokenHead, TokenOutput, after_draw
from minirl.backends.dtensor import backend as dtensor
from minirl.backends.dtensor import optim
from minirl.backends.norms import local_shard
from minirl.config.policy import OptimizerConfig, PolicyConfig, ScheduleConfig
from minirl.metrics import value, values
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of
from minirl.types import Rows

HEAD = TokenHead()
KEY = key_of(0)
LINEAR = ScheduleConfig(
    "torch.optim.lr_scheduler.LinearLR", {"start_factor": 0.25, "total_iters": 3}
)


# ---- save and load ------------------------------------------------------------------------------


def _save_midway(axis: Axis, cfg: PolicyConfig, folder: Path, before: int) -> dict[str, Any]:
    """Some steps, a save, and one step more."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    for _ in range(before):
        state, _ = _step(axis, backend, state)
    backend.save(state, folder)
    return _outcome(axis, backend, state)


def _load_and_go_on(axis: Axis, cfg: PolicyConfig, folder: Path) -> dict[str, Any]:
    backend, state = dtensor.open_backend(cfg, axis, key_of(99))
    state, _ = _step(axis, backend, state)
    return _outcome(axis, backend, backend.load_(state, folder))


def _step(axis: Axis, backend: Any, state: Any) -> Any:
    samples = make_samples(4)[axis.rank :: axis.size]
    state, metrics = backend.update_(after_draw(state, state.cursor + 4), [make_work(samples)])
    return backend.end_step_(state), values(metrics)


def _outcome(axis: Axis, backend: Any, state: Any) -> dict[str, Any]:
    state, metrics = _step(axis, backend, state)
    kept = (state.step, state.updates, state.cursor, state.key, metrics["lr"])
    return {"kept": kept, "norm": metrics["grad_norm"], "weights": exported(backend, state)}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(
    folders, tmp_path, saving, loading, before
):
    # field failures 71 (masters) and 73
    schedule = [LINEAR, LINEAR, ScheduleConfig(milestones=[2])]
    cfg = policy_config(folders["qwen3"], max_grad_norm=0.05, scheduler=schedule)
    straight = run_ranks(saving, _save_midway, cfg, tmp_path, before)[0]
    resumed = run_ranks(loading, _load_and_go_on, cfg, tmp_path)[0]
    assert resumed["kept"] == straight["kept"]
    assert resumed["norm"] == pytest.approx(straight["norm"], rel=1e-6)
    bound = 0.0 if saving == loading else 1e-6
    assert distance(resumed["weights"], straight["weights"]) <= bound


def test_a_checkpoint_holds_no_pickle(solo, folders, tmp_path):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    state, _ = backend.update_(state, [make_work(make_samples(2))])
    backend.save(state, tmp_path)
    assert {f.suffix for f in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_another_model_s_checkpoint_is_refused(solo, folders, tmp_path):
    small, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    small.save(state, tmp_path)
    for other in ("large", "llama"):
        backend, fresh = dtensor.open_backend(policy_config(folders[other]), solo, KEY)
        with pytest.raises(ValueError, match=r"holds another model than policy\.model_name"):
            backend.load_(fresh, tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(solo, folders, tmp_path):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    with pytest.raises(ValueError, match=r"state\.json"):
        backend.load_(state, tmp_path)


def test_rates_are_those_of_the_config_and_moments_those_of_the_checkpoint(solo, folders, tmp_path):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    for _ in range(2):
        state, _ = _step(solo, backend, state)
    backend.save(state, tmp_path)
    faster = OptimizerConfig(kwargs={"lr": 2.0, "betas": [0.5, 0.75]})
    cfg = policy_config(folders["qwen3"], optimizer=faster, scheduler=[LINEAR])
    backend, other = dtensor.open_backend(cfg, solo, KEY)
    other = backend.load_(other, tmp_path)
    # Two of the three steps from a quarter to the whole.
    _, metrics = _step(solo, backend, other)
    assert metrics["lr"] == pytest.approx(1.5)
    optimizer = other.model.trainer.optimizer
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.5, 0.75)
    assert {float(slots["step"]) for slots in optimizer.state.values()} == {3.0}


def test_another_kind_of_optimizer_is_refused_on_load(solo, folders, tmp_path):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    backend.save(state, tmp_path)
    sgd = OptimizerConfig("torch.optim.SGD", {"lr": 1e-3})
    backend, fresh = dtensor.open_backend(policy_config(folders["qwen3"], optimizer=sgd), solo, KEY)
    with pytest.raises(ValueError, match=r"AdamW, not SGD: set policy\.optimizer\.name"):
        backend.load_(fresh, tmp_path)


def test_a_torn_checkpoint_is_refused_by_its_folder(solo, folders, tmp_path):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    backend.save(state, tmp_path)
    (tmp_path / "state.json").write_text("")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        backend.load_(state, tmp_path)


# ---- gradients that are not finite --------------------------------------------------------------


def _skip(axis: Axis, cfg: PolicyConfig, folder: Path, poisoned_rank: int) -> dict[str, Any]:
    """An update, a poisoned one, and the files of the state before and after the latter."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    good = make_work(make_samples(2, seed=axis.rank))
    state, _ = backend.update_(state, [good])
    _save(backend, state, folder / "before", axis)

    def bad(output: TokenOutput):
        return output.logprobs.sum() * math.nan, {}

    poisoned = good._replace(loss=bad) if axis.rank == poisoned_rank else good
    skipped, metrics = backend.update_(state, [poisoned, good])
    _save(backend, skipped, folder / "after", axis)
    with pytest.raises(ValueError, match="consumed"):
        backend.end_step_(state)
    next_one, after = backend.update_(skipped, [good])
    return {
        "skips": value(metrics["nonfinite_updates"]),
        "skips_after": value(after["nonfinite_updates"]),
        "updates": (state.updates, skipped.updates, next_one.updates),
    }


def _save(backend: Any, state: Any, folder: Path, axis: Axis) -> None:
    folder.mkdir(exist_ok=True)
    backend.save(state, folder)


@pytest.mark.parametrize(("size", "poisoned_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_gradient_that_is_not_finite_skips_the_update(folders, tmp_path, size, poisoned_rank):
    # field failure 30
    seen = run_ranks(size, _skip, policy_config(folders["qwen3"]), tmp_path, poisoned_rank)
    assert sum(rank["skips"] for rank in seen) == 1
    assert sum(rank["skips_after"] for rank in seen) == 0
    assert {rank["updates"] for rank in seen} == {(1, 1, 2)}
    before, after = _contents(tmp_path / "before"), _contents(tmp_path / "after")
    assert before.keys() == after.keys()
    assert any("exp_avg" in key for key in before)
    assert all(torch.equal(before[key], after[key]) for key in before)


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        f"{f.name}:{k}": v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()
    }


# ---- schedules, optimizers, precision -----------------------------------------------------------


def test_the_schedule_advances_with_steps_not_with_updates(solo, folders):
    ramp = ScheduleConfig(
        "torch.optim.lr_scheduler.LinearLR", {"start_factor": 0.1, "total_iters": 2}
    )
    flat = ScheduleConfig("torch.optim.lr_scheduler.ConstantLR", {"factor": 0.5, "total_iters": 2})
    scheduler = [ramp, flat, ScheduleConfig(milestones=[3])]
    cfg = policy_config(folders["qwen3"], scheduler=scheduler)
    backend, state = dtensor.open_backend(cfg, solo, KEY)
    rates = []
    for _ in range(7):
        for _ in range(2):
            state, metrics = backend.update_(state, [make_work(make_samples(1))])
            rates.append(value(metrics["lr"]))
        state = backend.end_step_(state)
    by_step = [1e-4, 5.5e-4, 1e-3, 5e-4, 5e-4, 1e-3, 1e-3]
    assert rates == pytest.approx([rate for rate in by_step for _ in range(2)])


def test_a_schedule_may_advance_before_the_first_update(solo, folders):
    cfg = policy_config(folders["qwen3"], scheduler=[LINEAR])
    backend, state = dtensor.open_backend(cfg, solo, KEY)
    state, metrics = backend.update_(backend.end_step_(state), [make_work(make_samples(1))])
    assert value(metrics["lr"]) == pytest.approx(5e-4)


def _optimizer(name: str, **kwargs: object) -> dict[str, OptimizerConfig]:
    return {"optimizer": OptimizerConfig(name, {"lr": 1.0, **kwargs})}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (_optimizer("torch.optim.Adamw"), r"policy\.optimizer\.name: 'torch.optim.Adamw' is no"),
        (_optimizer("nowhere.Adam"), r"policy\.optimizer\.name: cannot import"),
        (_optimizer("AdamW"), r"policy\.optimizer\.name: 'AdamW' is no Optimizer"),
        (_optimizer("torch.nn.Linear"), r"'torch\.nn\.Linear' is no Optimizer"),
        (_optimizer("torch.optim.AdamW", beta=2), r"policy\.optimizer\.kwargs: AdamW .*'beta'"),
        (
            {"scheduler": [ScheduleConfig("torch.optim.lr_scheduler.LinearLR", {"factor": 1})]},
            r"policy\.scheduler\[0\]\.kwargs: LinearLR refuses",
        ),
        (
            {"scheduler": [LINEAR, ScheduleConfig("torch.Linear"), ScheduleConfig(milestones=[1])]},
            r"policy\.scheduler\[1\]\.name",
        ),
        (
            {"scheduler": [ScheduleConfig("torch.optim.lr_scheduler.ReduceLROnPlateau")]},
            r"policy\.scheduler: .* step",
        ),
        ({"model_name": "./nowhere"}, r"policy\.model_name"),
    ],
)
def test_what_cannot_be_built_is_refused_by_key(solo, folders, fields, message):
    cfg = policy_config(**{"model_name": folders["qwen3"], **fields})
    with pytest.raises(ValueError, match=message):
        dtensor.open_backend(cfg, solo, KEY)


def test_a_checkpoint_that_lacks_weights_is_refused(solo, folders, tmp_path):
    from safetensors.torch import save_file

    weights = load_file(Path(folders["qwen3"]) / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(folders["qwen3"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks weights.*model\.norm\.weight"):
        dtensor.open_backend(policy_config(str(tmp_path)), solo, KEY)


def test_a_checkpoint_with_weights_of_other_shapes_is_refused(solo, folders, tmp_path):
    folder = Path(folders["qwen3"])
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"in other shapes: .*mlp\.down_proj\.weight"):
        dtensor.open_backend(policy_config(str(tmp_path)), solo, KEY)


def test_an_axis_without_a_group_is_refused(folders):
    with pytest.raises(ValueError, match="process group"):
        dtensor.open_backend(policy_config(folders["qwen3"]), SOLO, KEY)


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3", "bfloat16"), ("large", "bfloat16"), ("qwen3", "float16")]
)
def test_low_precision_computes_low_and_keeps_float32_masters(solo, folders, name, precision):
    # field failure 71: in bfloat16, a change of 1e-6 is lost on nearly every weight.
    optimizer = OptimizerConfig("torch.optim.AdamW", {"lr": 1e-6, "weight_decay": 0.0})
    cfg = policy_config(folders[name], precision=precision, optimizer=optimizer)
    rows = make_rows(make_samples(3))
    exact, exact_state = dtensor.open_backend(policy_config(folders[name]), solo, KEY)
    backend, state = dtensor.open_backend(cfg, solo, KEY)
    (low,) = backend.logprobs(state, [rows], HEAD, "policy")
    (high,) = exact.logprobs(exact_state, [rows], HEAD, "policy")
    error = (low.logprobs - high.logprobs)[real(rows)].abs().max()
    assert low.logprobs.dtype == torch.float32
    assert 1e-5 < error < 0.5
    before = exported(backend, state)
    state, _ = backend.update_(state, [make_work(make_samples(3))])
    after = exported(backend, state)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name] - before[name]).abs()
    assert after[name].dtype == torch.float32
    assert (moved > 0.5e-6).float().mean() > 0.9


def test_the_optimizer_is_away_while_log_probs_are_taken(solo, folders):
    runs = []
    for offload in (False, True):
        cfg = policy_config(folders["qwen3"], offload_optimizer_for_logprob=offload)
        backend, state = dtensor.open_backend(cfg, solo, KEY)
        work = make_work(make_samples(4))
        for _ in range(2):
            state, _ = backend.update_(state, [work])
            backend.logprobs(state, [work.rows], HEAD, "policy")
        runs.append(exported(backend, state))
    assert distance(runs[0], runs[1]) == 0.0
    optimizer = state.model.trainer.optimizer
    moments = [x for slots in optimizer.state.values() for x in slots.values() if x.dim()]
    with optim.away(optimizer):
        assert {local_shard(x).untyped_storage().nbytes() for x in moments} == {0}
    assert all(local_shard(x).untyped_storage().nbytes() > 0 for x in moments)


def test_outputs_live_where_their_rows_live_and_rows_are_not_changed(solo, folders):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    rows = make_rows(make_samples(2), padding=2, junk=77)
    kept = Rows(*(t.clone() for t in rows))
    (output,) = backend.logprobs(state, [rows], HEAD, "policy")
    assert not output.logprobs.requires_grad
    assert torch.isfinite(output.logprobs).all()
    assert all(torch.equal(a, b) for a, b in zip(rows, kept, strict=True))
