"""bin/benchmark.py: what it averages and shows, and that the two backends get the same job."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from commands import ROOT, run
from configs import MEGATRON, MINIMAL, edited, load_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.algos import benchmark, tiny, translate
from minirl.algos.benchmark import Window, averages, planned, table, window_of
from minirl.algos.translate import translated
from minirl.config.loader import load
from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import PolicyConfig
from minirl.config.run import GrpoRun
from minirl.log import read_metrics

MEGA = translate.MEGATRON
RECIPE = ROOT / "bin" / "recipes" / "grpo_tiny_cpu.yaml"
FINITE = st.floats(-1e6, 1e6)

# ---- the window and the means -------------------------------------------------------------------


@given(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_window_within_the_run_is_read_back(first: int, more: int, after: int):
    last = first + more
    assert window_of(f"{first}-{last}", last + after) == Window(first, last)


@pytest.mark.parametrize("text", ["", "22", "22-", "-3", "a-b", "22:29", "0-3", "9-8", "25-31"])
def test_any_other_window_is_refused(text: str):
    with pytest.raises(ValueError, match=f"--window is {text!r}"):
        window_of(text, 30)


@given(st.lists(FINITE, min_size=1, max_size=8), st.lists(FINITE, max_size=4), st.data())
def test_a_mean_is_of_the_steps_of_the_window_only(xs: list[float], rest: list[float], data: Any):
    first = 1 + len(rest)
    lines = [{"step": n, "x": x} for n, x in enumerate(rest + xs + rest, start=1)]
    lines = data.draw(st.permutations(lines))
    mean = averages(lines, Window(first, first + len(xs) - 1))["x"]
    assert mean == pytest.approx(sum(xs) / len(xs), abs=1e-6)


def test_a_mean_is_over_the_steps_that_have_the_metric():
    lines = [{"step": 1, "x": 2.0, "y": None}, {"step": 2, "x": 4.0, "z": 6.0, "y": None}]
    assert averages(lines, Window(1, 2)) == {"x": 3.0, "z": 6.0}


def test_a_step_that_was_not_taken_is_refused():
    with pytest.raises(ValueError, match=r"steps \[3, 4\] of the window 2-4 are missing"):
        averages([{"step": 1}, {"step": 2}], Window(2, 4))


# ---- the table ----------------------------------------------------------------------------------


def cells_of(text: str) -> list[list[str]]:
    """The cells of the Markdown tables in a text."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=4))
def test_the_last_column_is_the_speed_over_the_first_rows(speeds: list[float]):
    rows = [(f"run {i}", {"perf/tokens_per_s_per_rank": x}) for i, x in enumerate(speeds)]
    head, rule, *body = cells_of(table(rows))
    assert len({len(row) for row in (head, rule, *body)}) == 1
    assert [row[0] for row in body] == [label for label, _ in rows]
    for row, x in zip(body, speeds, strict=True):
        assert float(row[-1]) == pytest.approx(x / speeds[0], rel=6e-3)


def test_every_figure_stands_under_its_heading_and_absent_ones_are_a_dash():
    names = [name for names in benchmark.COLUMNS.values() for name in names]
    means = {name: float(i + 100) for i, name in enumerate(names)}
    head, _, full, bare = cells_of(table([("full", means), ("bare", {})]))
    shown = dict(zip(head, full, strict=True))
    assert shown["step, s"] == "100"
    assert shown["tokens/sample"] == str(105 + 106)
    assert shown["MFU"] == str(100 + names.index("perf/training_mfu"))
    assert shown["ratio"] == "1.00"
    assert bare == ["bare", *["-"] * (len(head) - 1)]


def test_a_part_of_a_sum_is_not_shown_as_the_sum():
    head, _, row = cells_of(table([("run", {"train/response_tokens": 7.0})]))
    assert dict(zip(head, row, strict=True))["tokens/sample"] == "-"


# ---- from one backend to the other --------------------------------------------------------------


def on(tree: dict[str, Any], backend: str) -> dict[str, Any]:
    """The complete tree of a run that is carried over."""
    found = translated(load_tree(tree).policy, backend)
    texts = [f"{key}={json.dumps(value)}" for key, value in found.items()]
    carried: dict[str, Any] = msgspec.to_builtins(load_tree(tree, *texts))
    return carried


SIZES = {
    "tensor_parallel_size": st.integers(1, 8),
    "context_parallel_size": st.integers(1, 4),
    "activation_checkpointing": st.booleans(),
    "freeze_moe_router": st.booleans(),
}
ADAM = {
    "lr": st.floats(0, 1),
    "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    "eps": st.floats(1e-12, 1e-3),
    "weight_decay": st.floats(0, 1),
}


@settings(max_examples=8)
@given(st.fixed_dictionaries(SIZES), st.fixed_dictionaries(ADAM), st.booleans(), st.booleans())
def test_there_and_back_gives_the_same_sizes_and_optimizer(
    sizes: dict[str, Any], kwargs: dict[str, Any], between: bool, experts: bool
):
    one = sizes["tensor_parallel_size"] == 1
    sizes |= {"sequence_parallel": between and not one}
    sizes |= {"expert_parallel_size": 4 if experts and one else 1}
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {**kwargs, "fused": True}}
    keys = {f"policy.dtensor_cfg.{key}": x for key, x in sizes.items()}
    tree = edited(MINIMAL, {**keys, "policy.optimizer": optimizer})
    there = on(tree, "megatron")
    back = on(there, "dtensor")
    assert there["policy"]["megatron_cfg"]["enabled"]
    assert back["policy"]["dtensor_cfg"] == msgspec.to_builtins(load_tree(tree).policy.dtensor_cfg)
    assert back["policy"]["optimizer"] == optimizer


def test_each_size_gets_the_other_backends_name():
    keys = {"tensor_parallel_size": 2, "context_parallel_size": 4, "sequence_parallel": True}
    cfg = on(edited(MINIMAL, {f"policy.dtensor_cfg.{k}": x for k, x in keys.items()}), "megatron")
    megatron = cfg["policy"]["megatron_cfg"]
    assert megatron["tensor_model_parallel_size"] == 2
    assert megatron["context_parallel_size"] == 4
    assert megatron["sequence_parallel"] is True
    experts = edited(MEGATRON, {"policy.megatron_cfg.expert_model_parallel_size": 4})
    assert on(experts, "dtensor")["policy"]["dtensor_cfg"]["expert_parallel_size"] == 4


@pytest.mark.parametrize(("chosen", "size", "expected"), [(None, 2, True), (False, 2, False)])
def test_automatic_sequence_parallelism_is_decided(chosen: bool | None, size: int, expected: bool):
    keys = {"sequence_parallel": chosen, "tensor_model_parallel_size": size}
    tree = edited(MEGATRON, {f"policy.megatron_cfg.{k}": x for k, x in keys.items()})
    assert on(tree, "dtensor")["policy"]["dtensor_cfg"]["sequence_parallel"] is expected


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_what_is_left_out_of_the_optimizer_has_torchs_default(name: str):
    import torch

    tree = edited(MINIMAL, {"policy.optimizer.name": f"torch.optim.{name}"})
    adam = on(tree, "megatron")["policy"]["megatron_cfg"]["optimizer"]
    usual = getattr(torch.optim, name)([torch.zeros(1)]).defaults
    assert (adam["adam_beta1"], adam["adam_beta2"]) == usual["betas"]
    assert (adam["adam_eps"], adam["weight_decay"]) == (usual["eps"], usual["weight_decay"])


@pytest.mark.parametrize("tree", [MINIMAL, MEGATRON])
@pytest.mark.parametrize("backend", benchmark.BACKENDS)
def test_the_learning_rate_is_constant_on_either_backend(tree: dict[str, Any], backend: str):
    warm_up = [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}]
    cosine = {"lr_decay_style": "cosine", "lr_decay_iters": 9}
    if tree is MINIMAL:
        tree = edited(tree, {"policy.scheduler": warm_up})
    else:
        keys = {"scheduler": cosine, "optimizer.min_lr": 1e-7}
        tree = edited(tree, {f"policy.megatron_cfg.{k}": x for k, x in keys.items()})
    policy = on(tree, backend)["policy"]
    assert policy["scheduler"] is None
    if backend == "megatron":
        assert policy["megatron_cfg"]["scheduler"]["lr_decay_style"] == "constant"
        assert policy["megatron_cfg"]["optimizer"]["lr"] == 1e-6


def test_the_other_section_keeps_what_has_no_counterpart():
    tree = edited(MINIMAL, {"policy.megatron_cfg.apply_rope_fusion": False})
    assert on(tree, "megatron")["policy"]["megatron_cfg"]["apply_rope_fusion"] is False


REFUSED_BY_MEGATRON = {
    "policy.dtensor_cfg.lora_cfg.enabled": True,
    "policy.dtensor_cfg.cpu_offload": True,
    "policy.dtensor_cfg.dp_replicate_size": 2,
    "policy.offload_optimizer_for_logprob": True,
    "policy.optimizer.name": "torch.optim.SGD",
    "policy.optimizer.kwargs.amsgrad": True,
    "policy.optimizer.kwargs.betas": [0.9],
}
REFUSED_BY_DTENSOR = {
    "pipeline_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "moe_router_bias_update_rate": 0.1,
    "fp8_cfg.enabled": True,
    "model_overrides": {"num_layers": 1},
    "optimizer.optimizer": "sgd",
    "optimizer.use_distributed_optimizer": False,
}


def refusal(policy: PolicyConfig, backend: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        translated(policy, backend)
    return str(caught.value)


@pytest.mark.parametrize("key", REFUSED_BY_MEGATRON)
def test_what_megatron_lacks_is_refused_with_key_and_value(key: str):
    value = REFUSED_BY_MEGATRON[key]
    told = refusal(load_tree(edited(MINIMAL, {key: value})).policy, "megatron")
    assert key in told
    assert str(value) in told


def test_a_custom_plan_is_refused():
    plan = {"tensor_parallel_size": 2, "custom_parallel_plan": "some.module:PLAN"}
    tree = edited(MINIMAL, {f"policy.dtensor_cfg.{k}": x for k, x in plan.items()})
    assert "custom_parallel_plan is 'some.module:PLAN'" in refusal(
        load_tree(tree).policy, "megatron"
    )


def test_weight_decay_that_passes_through_the_gradient_is_refused():
    optimizer = {"name": "torch.optim.Adam", "kwargs": {"lr": 1e-6, "weight_decay": 0.1}}
    told = refusal(load_tree(edited(MINIMAL, {"policy.optimizer": optimizer})).policy, "megatron")
    assert "weight_decay is 0.1" in told


@pytest.mark.parametrize("key", REFUSED_BY_DTENSOR)
def test_what_dtensor_lacks_is_refused_with_key_value_and_remedy(key: str):
    value, full = REFUSED_BY_DTENSOR[key], f"policy.megatron_cfg.{key}"
    told = refusal(load_tree(edited(MEGATRON, {full: value})).policy, "dtensor")
    assert told.startswith(f"{full} is {value!r}")
    assert "a recipe for each backend" in told


def test_every_name_in_the_lists_of_keys_is_a_key():
    keys = set(MegatronConfig.__struct_fields__)
    assert {*translate.HOW, *translate.SAME.values()} <= keys
    assert set(translate.ADAM_KEYS) <= set(MegatronOptimizerConfig.__struct_fields__)


# ---- the runs -----------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(yaml.safe_dump(edited(MINIMAL, {"logger.log_dir": "some/logs"})))
    return path


def test_runs_load_have_folders_of_their_own_and_do_nothing_but_steps(recipe: Path):
    runs = planned([recipe, recipe], ["dtensor", "megatron"], ["grpo.seed=7"], 30, num_ranks=1)
    assert [r.label for r in runs] == ["minimal dtensor", "minimal megatron"] * 2
    assert len({r.folder for r in runs}) == 4
    for r in runs:
        named, path, *overrides = r.arguments
        cfg = load(path, overrides, GrpoRun)
        assert (named, path) == ("--config", str(recipe))
        assert (cfg.grpo.seed, cfg.grpo.max_num_steps) == (7, 30)
        assert cfg.grpo.max_num_epochs >= 30
        assert (cfg.grpo.val_period, cfg.grpo.val_at_start, cfg.grpo.val_at_end) == (
            0,
            False,
            False,
        )
        assert not cfg.checkpointing.enabled
        assert Path(cfg.logger.log_dir) == r.folder
        assert r.folder.is_relative_to("some/logs")
        assert cfg.policy.megatron_cfg.enabled == r.label.endswith("megatron")


def test_without_a_backend_a_recipe_runs_as_it_is():
    (only,) = planned([RECIPE], [], [], 30, num_ranks=2)
    cfg, own = load(RECIPE, only.arguments[2:], GrpoRun), load(RECIPE, [], GrpoRun)
    assert cfg.policy == own.policy
    assert only.label == "grpo_tiny_cpu dtensor"


@pytest.mark.parametrize(
    ("backends", "overrides", "ranks", "told"),
    [
        (["fsdp"], [], 1, "--backend is 'fsdp'; use dtensor or megatron"),
        ([], ["grpo.max_num_steps=5"], 1, "grpo.max_num_steps"),
        ([], ["checkpointing.enabled=true"], 1, "checkpointing.enabled"),
        ([], ["checkpointing={enabled: true}"], 1, "a benchmark sets checkpointing.enabled"),
        ([], ["grpo.sede=5"], 1, "grpo.seed"),
        (["megatron"], [f"{MEGA}tensor_model_parallel_size=2"], 2, f"--backend sets {MEGA}tensor"),
        (["megatron"], [f"{MEGA}optimizer.lr=1.0"], 1, f"--backend sets {MEGA}optimizer.lr"),
        (["megatron"], ["policy.dtensor_cfg.tensor_parallel_size=2"], 3, "3 ranks"),
    ],
)
def test_a_wrong_request_is_refused_before_any_run(
    recipe: Path, backends: list[str], overrides: list[str], ranks: int, told: str
):
    with pytest.raises(ValueError, match=told):
        planned([recipe], backends, overrides, 30, ranks)


def test_all_that_is_translated_may_not_be_overridden(recipe: Path):
    for backend, tree in (("megatron", MINIMAL), ("dtensor", MEGATRON)):
        keys = translated(load_tree(tree).policy, backend).keys()
        other = translate.MEGATRON if backend == "megatron" else translate.DTENSOR
        assert {k for k in keys if k.startswith(other)} <= translate.section_of(backend)


# ---- the command --------------------------------------------------------------------------------

SMALL = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=8",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=32",
)


@pytest.mark.slow
def test_both_backends_take_the_same_steps_and_are_shown_in_one_table(tmp_path: Path):
    tiny.save_tokenizer(tmp_path / "model")
    tiny.save_random_model(tmp_path / "model", seed=0)
    both = ("--backend", "dtensor", "--backend", "megatron", "--steps", "3", "--window", "2-3")
    places = (f"policy.model_name={tmp_path}/model", f"logger.log_dir={tmp_path}")
    command = (sys.executable, "bin/benchmark.py", "--config", RECIPE, *both)
    head, _, *body = cells_of(run(*command, *places, *SMALL))
    assert [row[0] for row in body] == ["grpo_tiny_cpu dtensor", "grpo_tiny_cpu megatron"]
    assert body[0][-1] == "1.00"
    for row in body:
        shown = dict(zip(head, row, strict=True))
        parts = [float(shown[f"{name}, s"]) for name in ("training", "refit", "log-probs")]
        assert 0 < sum(parts) < float(shown["step, s"])
        assert 10 < float(shown["tokens/sample"]) <= 32
        assert 0 < float(shown["non-padding"]) <= 1
        assert float(shown["imbalance"]) == 1
    folders = sorted((tmp_path / "benchmark").iterdir())
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in folders)
    for one, other in zip(first, second, strict=True):
        for name in ("train/grad_norm", "train/response_tokens"):
            assert math.isclose(one[name] or 0, other[name] or 0, rel_tol=1e-3)


@pytest.mark.slow
def test_a_failed_run_shows_its_error_and_fails_the_command(tmp_path: Path):
    command = (sys.executable, "bin/benchmark.py", "--config", RECIPE)
    places = (f"policy.model_name={tmp_path}/none", f"logger.log_dir={tmp_path}")
    with pytest.raises(AssertionError, match=r"there is no folder[\s\S]*failed with status 1; see"):
        run(*command, *places)
