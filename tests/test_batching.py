"""How rows become micro-batches changes neither what is learnt nor what is measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from backend_cases import distance, exported
from configs import MEGATRON, MINIMAL, edited, load_tree
from models import save_model
from msgspec import structs
from ranks import run_ranks
from toy import parts as toy_parts

from minirl.algos import grpo
from minirl.backends import open_backend
from minirl.config.run import GrpoRun
from minirl.cost import Cost, cost_of
from minirl.metrics import values
from minirl.parallel import Axis
from minirl.rng import key_of
from minirl.types import Sample, Score, Trajectory

SIZES: dict[str, Any] = {
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.overlong_filtering": True,
    "loss_fn.reference_policy_kl_penalty": 0.1,
    "policy.train_global_batch_size": 8,
    "policy.train_micro_batch_size": 2,
    "policy.max_total_sequence_length": 24,
    "policy.generation.max_new_tokens": 20,
    "policy.precision": "float32",
    "policy.max_grad_norm": None,
}
SGD = {"policy.optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}}
PLAIN = {
    "optimizer": {
        "optimizer": "sgd",
        "lr": 1.0,
        "sgd_momentum": 0.0,
        "weight_decay": 0.0,
        "use_distributed_optimizer": False,
    }
}
BATCHING: dict[str, dict[str, Any]] = {
    "packing": {"policy.sequence_packing.enabled": True},
    "dynamic": {
        "policy.dynamic_batching.enabled": True,
        "policy.dynamic_batching.sequence_length_round": 8,
    },
    "alone": {
        "policy.dynamic_batching.enabled": True,
        "policy.dynamic_batching.sequence_length_round": 1,
        "policy.dynamic_batching.train_mb_tokens": 24,
        "policy.dynamic_batching.logprob_mb_tokens": 24,
    },
}


def run_of(kind: str) -> GrpoRun:
    """A run whose plan is of this kind, on the FSDP2 backend."""
    return load_tree(edited(MINIMAL, {**SIZES, **SGD, **BATCHING.get(kind, {})}))


def samples() -> list[Sample]:
    """16 samples of 2 to 24 tokens; some truncated."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for i in range(16):
        given, drawn = (int(torch.randint(1, n, (), generator=draw)) for n in (5, 21))
        tokens = torch.randint(2, 64, (given + drawn,), generator=draw).tolist()
        logprobs = (0.0,) * given + tuple((-4 * torch.rand(drawn, generator=draw)).tolist())
        sampled = (False,) * given + (True,) * drawn
        trajectory = Trajectory(
            i // 4, i % 4, i // 4, tuple(tokens), sampled, logprobs, truncated=i % 5 == 0, version=0
        )
        reward = float(torch.rand((), generator=draw))
        found.append(Sample(trajectory, Score(reward), reward))
    return found


def learnt(axis: Axis, model: str, kind: str, megatron: dict[str, Any] | None = None) -> Any:
    """Weights and metrics after the two updates of a step, the plan, and how far weights moved.

    With `megatron`, keys of `policy.megatron_cfg`, on that backend.
    """
    run = run_of(kind)
    if megatron is not None:
        keys = {f"policy.megatron_cfg.{name}": x for name, x in {**PLAIN, **megatron}.items()}
        run = load_tree(edited(MEGATRON, {**SIZES, **BATCHING.get(kind, {}), **keys}))
    policy = structs.replace(run.policy, model_name=model)
    backend, state = open_backend(policy, axis, key_of(0), with_reference=True)
    before = exported(backend, state)
    on = replace(toy_parts(), backend=backend, cost=cost_of(model))
    plan = grpo.plan_of(state, samples(), on, run)
    state, metrics = grpo.learn(state, samples(), plan, on, run, {})
    after = exported(backend, state)
    return after, values(metrics), plan, distance(after, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def fixed(model: str) -> Any:
    [found] = run_ranks(1, learnt, model, "fixed")
    return found


def agree(found: list[Any], fixed: Any, tolerance: float) -> None:
    weights, metrics, plan, moved = fixed
    assert moved > 0.01
    assert len(plan.updates) == 2
    for other, seen, other_plan, _ in found:
        assert other_plan.updates != plan.updates
        assert distance(other, weights) < tolerance
        assert {k: seen[k] for k in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["packing", "dynamic"])
def test_any_batching_on_any_number_of_ranks_learns_the_same(
    fixed: Any, model: str, kind: str, num_ranks: int
):
    found = run_ranks(num_ranks, learnt, model, kind)
    agree(found, fixed, 3e-6)


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("packing", 2, {}),
    ("packing", 2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    ("packing", 2, {"context_parallel_size": 2}),
    ("dynamic", 2, {"tensor_model_parallel_size": 2}),
    ("dynamic", 2, {"pipeline_model_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "layout"), LAYOUTS)
def test_any_batching_on_the_other_backend_learns_the_same(
    fixed: Any, model: str, kind: str, ranks: int, layout: dict[str, Any]
):
    agree(run_ranks(ranks, learnt, model, kind, layout), fixed, 1e-5)


def test_a_rank_with_nothing_left_takes_part_with_an_empty_micro_batch(fixed: Any, model: str):
    found = run_ranks(2, learnt, model, "alone")
    assert any([] in update for f in found for update in f[2].updates)
    assert any([] in f[2].logprobs for f in found)
    agree(found, fixed, 3e-6)


def once(axis: Axis, model: str, kind: str, saved: bool, changes: dict[str, Any]) -> Any:
    """Weights, metrics and number of forward passes of a step of one update."""
    tree = {**SIZES, **SGD, **BATCHING.get(kind, {}), "policy.train_global_batch_size": 16}
    run = load_tree(edited(MINIMAL, {**tree, **changes}))
    policy = structs.replace(run.policy, model_name=model)
    backend, state = open_backend(policy, axis, key_of(0), with_reference=True)
    passes: list[str] = []

    def logprobs(state: Any, rows: Any, head: Any, weights: Any) -> Any:
        passes.append(weights)
        return backend.logprobs(state, rows, head, weights)

    on = replace(toy_parts(), backend=replace(backend, logprobs=logprobs))
    plan = grpo.plan_of(state, samples(), on, run)
    with pytest.MonkeyPatch.context() as patch:
        if not saved:
            patch.setattr(grpo, "needs_prev", lambda *_: True)
        state, metrics = grpo.learn(state, samples(), plan, on, run, {})
    return exported(backend, state), values(metrics), passes


TIS = {
    "loss_fn.use_importance_sampling_correction": True,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 2.0,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("fixed", {}), ("packing", {}), ("fixed", TIS), ("fixed", {"loss_fn.use_cispo": True})],
    ids=["fixed", "packing", "importance weights", "cispo"],
)
def test_one_update_needs_no_log_probs_before_it(model: str, kind: str, changes: Any):
    [(weights, metrics, passes)] = run_ranks(1, once, model, kind, True, changes)
    [(expected, expected_metrics, all_passes)] = run_ranks(1, once, model, kind, False, changes)
    assert passes == ["reference"]
    assert all_passes == ["policy", "reference"]
    assert distance(weights, expected) < 1e-6
    assert metrics.keys() == expected_metrics.keys()
    assert metrics["entropy"] > 0
    for name, x in expected_metrics.items():
        assert metrics[name] == pytest.approx(x, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "changes",
    [
        {"policy.train_global_batch_size": 8},
        {"grpo.seq_logprob_error_threshold": 2.0},
        {"grpo.adv_estimator.name": "reinforce_plus_plus", "loss_fn.use_kl_in_reward": True},
    ],
)
def test_log_probs_are_taken_before_what_depends_on_them(changes: dict[str, Any]):
    tree = {**SIZES, "policy.train_global_batch_size": 16}
    assert not grpo.needs_prev(1, load_tree(edited(MINIMAL, tree)))
    run = load_tree(edited(MINIMAL, {**tree, **changes}))
    assert grpo.needs_prev(16 // run.policy.train_global_batch_size, run)


def test_speed_counts_tokens_and_samples_a_second_in_all_and_on_each_rank():
    shown, run = samples(), run_of("fixed")
    lengths = [len(s.trajectory.tokens) for s in shown]
    tokens = sum(lengths)
    seconds = {"total": 8.0, "generation": 4.0, "logprobs": 2.0, "training": 0.5, "reward": 0.0}
    seen = {"train/sampled_tokens": 600.0, "train/num_valid_tokens": 100.0}
    cost = Cost(per_token=3.0, per_pair=0.5)
    on = replace(toy_parts(), cost=cost, peak_flops=1e6)
    on = replace(on, backend=replace(on.backend, axis=Axis(0, 4, None)))
    found = grpo.speed(seconds, shown, seen, 2, on, run)
    rates = {
        "tokens": tokens / 8.0,
        "valid_tokens": 100.0 / 8.0,
        "samples": 16 / 8.0,
        "generation_tokens": 600.0 / 4.0,
        "logprobs_tokens": 2 * tokens / 2.0,
        "training_tokens": tokens / 0.5,
    }
    work = 3 * 2 * sum(3.0 * n + 0.5 * n * n for n in lengths) / 0.5 / 4
    assert found == {
        **{f"time/{name}_s": x for name, x in seconds.items()},
        **{f"perf/{name}_per_s": x for name, x in rates.items()},
        **{f"perf/{name}_per_s_per_rank": x / 4 for name, x in rates.items()},
        "perf/training_tflops_per_s_per_rank": pytest.approx(work / 1e12),
        "perf/training_mfu": pytest.approx(work / 1e6),
    }
    nothing = grpo.speed(seconds, shown, {"train/sampled_tokens": 600.0}, 2, on, run)
    assert not [name for name in nothing if "training" in name and not name.startswith("time")]
