"""No key of `grpo` is without effect: for each, two values between which something changes.

The keys of `grpo.adv_estimator` and of `loss_fn` have their table in test_loss_config.py.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from configs import MINIMAL, load_tree
from toy import PROMPTS, fresh, parts, trajectory
from tree import parse, python_files

from minirl.algos import grpo, launch, loop
from minirl.config.rewards import RewardScalingConfig, RewardShapingConfig
from minirl.config.run import GrpoConfig, GrpoRun
from minirl.data.datasets import Dataset, Datasets
from minirl.envs.shaping import rewarded
from minirl.log import SILENT, Log
from minirl.rollout.collect import collect
from minirl.types import Prompt, Sample, Score, Trajectory

SIZES = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "policy.train_global_batch_size=4",
)
DATA = Datasets(
    Dataset(PROMPTS, seed=0, shuffle=False), Dataset(PROMPTS, seed=0, shuffle=False), 0, 0
)

# ---- what a key may change ----------------------------------------------------------------------


def collected(run: GrpoRun) -> object:
    """The samples of a step, and what the state keeps of them."""
    state, samples, _ = collect(fresh(), parts(), run.grpo, {})
    return samples, state.cursor, state.surplus


def enough(run: GrpoRun) -> bool:
    """Whether the draws of a step suffice."""
    try:
        collected(run)
    except ValueError as error:
        if "dynamic_sampling_max_gen_batches" not in str(error):
            raise
        return False
    return True


def prepared(run: GrpoRun) -> object:
    """The advantages of four samples, and which of them are trained: one was cut off, another was
    sampled by other weights than the trainer's."""
    samples = [
        Sample(trajectory(2 + i, truncated=i == 1, group=i // 2, logprob=p), Score(r), r)
        for i, (r, p) in enumerate([(1.0, -1.0), (0.0, -1.0), (0.25, -3.0), (0.5, -1.0)])
    ]
    state, on = fresh(), parts()
    batch, _ = grpo.prepare(state, samples, grpo.plan_of(state, samples, on, run), on, run)
    return batch.advantages.tolist(), batch.sample_mask.tolist()


def steps(run: GrpoRun) -> int:
    """How many steps the run takes."""
    return launch.num_steps(run, DATA)


def validated(run: GrpoRun) -> list[int]:
    """Behind which steps the loop validates."""
    seen: list[int] = []

    def evaluate(state: Any) -> dict[str, float]:
        seen.append(state.step)
        return {}

    loop.run(
        fresh(),
        launch._plan(run, steps(run)),
        step=lambda s: (replace(s, step=s.step + 1), {}),
        evaluate=evaluate,
        save=lambda s: None,
        log=SILENT,
    )
    return seen


def validation(run: GrpoRun) -> dict[str, float]:
    """The metrics of a validation, but for its seconds. Later prompts score higher."""

    def score(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(t.prompt_id)) for t in trajectories]

    on = replace(parts(), score=score)
    inputs = launch.Inputs(object(), DATA, on.sampling, on.cost)
    log = Log(step=SILENT.step, say=pytest.fail)
    metrics = launch.validate(fresh(), on, inputs, run, log)
    return {name: x for name, x in metrics.items() if not name.startswith("time/")}


def rewards(run: GrpoRun) -> list[float]:
    """What is learnt from, for scores in and out of [0, 1], and for answers short, long, cut."""
    scores = [Score(x) for x in (-0.5, 0.25, 0.75, 1.5)]
    answers = [trajectory(n, truncated=n == 30) for n in (3, 20, 30, 150)]
    cfg = run.grpo
    return [s.reward for s in rewarded(answers, scores, cfg.reward_scaling, cfg.reward_shaping)]


# ---- for each key -------------------------------------------------------------------------------


class Case(NamedTuple):
    """Two values of a key that `observe` tells apart, in a run with the settings `around`."""

    observe: Callable[[GrpoRun], object]
    one: str
    other: str
    around: tuple[str, ...] = ()


DYNAMIC = ("grpo.use_dynamic_sampling=true",)
NEVER = ("grpo.val_period=0",)
SCALED = ("grpo.reward_scaling.enabled=true",)
LENGTH = ("grpo.reward_shaping.max_response_length=140",)
SHAPED = ("grpo.reward_shaping.enabled=true", *LENGTH)

CASES = {
    "num_prompts_per_step": Case(collected, "2", "4"),
    "num_generations_per_prompt": Case(collected, "2", "4"),
    "max_num_epochs": Case(steps, "1", "2"),
    "max_num_steps": Case(steps, "1000000", "5"),
    "val_period": Case(validated, "2", "3"),
    "val_at_start": Case(validated, "false", "true", NEVER),
    "val_at_end": Case(validated, "false", "true", NEVER),
    "val_greedy": Case(validation, "false", "true"),
    "max_val_samples": Case(validation, "256", "5"),
    "adv_estimator": Case(prepared, "{name: grpo}", "{name: raw_reward}"),
    "advantage_clip_low": Case(prepared, "null", "-0.1"),
    "advantage_clip_high": Case(prepared, "null", "0.1"),
    "reward_scaling": Case(collected, "{}", "{enabled: true, target_max: 2.0}"),
    "reward_shaping": Case(
        collected, "{}", "{enabled: true, max_response_length: 1, overlong_buffer_length: 1}"
    ),
    "overlong_filtering": Case(prepared, "false", "true"),
    "use_dynamic_sampling": Case(collected, "false", "true"),
    "dynamic_sampling_max_gen_batches": Case(enough, "10", "1", DYNAMIC),
    "batch_multiplier": Case(collected, "1.0", "3.0", DYNAMIC),
    "seq_logprob_error_threshold": Case(prepared, "null", "1.5"),
    "reward_scaling.enabled": Case(rewards, "false", "true"),
    "reward_scaling.source_min": Case(rewards, "0.0", "0.1", SCALED),
    "reward_scaling.source_max": Case(rewards, "1.0", "0.9", SCALED),
    "reward_scaling.target_min": Case(rewards, "0.0", "-1.0", SCALED),
    "reward_scaling.target_max": Case(rewards, "1.0", "2.0", SCALED),
    "reward_shaping.enabled": Case(rewards, "false", "true", LENGTH),
    "reward_shaping.overlong_buffer_length": Case(rewards, "128", "64", SHAPED),
    "reward_shaping.overlong_buffer_penalty": Case(rewards, "1.0", "0.5", SHAPED),
    "reward_shaping.max_response_length": Case(rewards, "140", "150", SHAPED),
    "reward_shaping.stop_properly_penalty_coef": Case(rewards, "null", "0.5", SHAPED),
}

ELSEWHERE = {"seed": "test_one_seed_gives_one_run_and_another_seed_another"}
"""Keys that only a run with a model shows, and the test of such runs."""

KEYS = [
    *GrpoConfig.__struct_fields__,
    *(f"reward_scaling.{name}" for name in RewardScalingConfig.__struct_fields__),
    *(f"reward_shaping.{name}" for name in RewardShapingConfig.__struct_fields__),
]


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ELSEWHERE])
def test_every_key_of_grpo_changes_something(key: str):
    case = CASES[key]
    one, again, other = (
        case.observe(load_tree(MINIMAL, *SIZES, *case.around, f"grpo.{key}={value}"))
        for value in (case.one, case.one, case.other)
    )
    assert one == again
    assert one != other


def test_the_tables_name_no_key_that_does_not_exist():
    assert sorted(CASES.keys() | ELSEWHERE.keys()) == sorted(KEYS)


def test_what_is_shown_elsewhere_is_shown_there():
    tests = {
        node.name
        for file in python_files("tests")
        for node in parse(file).body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(ELSEWHERE.values()) <= tests
