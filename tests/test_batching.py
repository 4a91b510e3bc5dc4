"""How rows become micro-batches changes neither what is learnt nor what is measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from backend_cases import RATE, distance, exported
from configs import MEGATRON, MINIMAL, edited, load_tree
from models import save_model
from ranks import run_ranks
from toy import parts as toy_parts

from minirl.algos import grpo
from minirl.backends import dtensor
from minirl.config import GrpoRun
from minirl.metrics import values
from minirl.packing import cost_of
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
SGD = {"policy.optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": RATE * 1e-6}}}
BATCHING: dict[str, dict[str, Any]] = {
    "packing": {"policy.sequence_packing.enabled": True},
    "dynamic": {
        "policy.dynamic_batching.enabled": True,
        "policy.dynamic_batching.sequence_length_round": 8,
    },
}


def run_of(kind: str) -> GrpoRun:
    """A run whose plan is of this kind; packing needs another backend, but not for its plan."""
    tree = MEGATRON if kind == "packing" else edited(MINIMAL, SGD)
    return load_tree(edited(tree, {**SIZES, **BATCHING.get(kind, {})}))


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


def learnt(axis: Axis, model: str, kind: str) -> Any:
    """Weights and metrics after the two updates of a step, and the plan that was followed."""
    policy = load_tree(edited(MINIMAL, {**SIZES, **SGD, "policy.model_name": model})).policy
    backend, state = dtensor.open_backend(policy, axis, key_of(0), with_reference=True)
    on = replace(toy_parts(), backend=backend, cost=cost_of({}))
    run = run_of(kind)
    plan = grpo.plan_of(state, samples(), on, run)
    state, metrics = grpo.learn(state, samples(), plan, on, run, {})
    return exported(backend, state), values(metrics), plan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fixed(solo: Axis, model: str) -> Any:
    return learnt(solo, model, "fixed")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["packing", "dynamic"])
def test_any_batching_on_any_number_of_ranks_learns_the_same(
    fixed: Any, model: str, kind: str, num_ranks: int
):
    weights, metrics, plan = fixed
    assert len(plan.updates) == 2
    found = run_ranks(num_ranks, learnt, model, kind)
    for other, seen, other_plan in found:
        assert other_plan.updates != plan.updates
        assert distance(other, weights) < 3e-6
        assert seen == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    if num_ranks == 2:
        assert {len(f[2].logprobs) for f in found} == {len(found[0][2].logprobs)}
