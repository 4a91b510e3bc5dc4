"""The rules of the run's config that concern several keys, the launch, and the recipes."""

import copy
from typing import Any

import pytest
import yaml
from configs import LEAVES, MINIMAL, batch_sizes, edited, leaves_of, load_tree, message
from hypothesis import given, settings
from hypothesis import strategies as st
from tree import ROOT

from minirl.config.loader import load
from minirl.config.run import GrpoRun, check_launch

RECIPES = sorted((ROOT / "bin" / "recipes").glob("*.yaml"))
GPU_RECIPE = ROOT / "bin" / "recipes" / "grpo_math_1b.yaml"

GYM = "data.train={_override_: true, dataset_name: reasoning_gym"
SEEDED = "task: gcd, task_kwargs: {seed: 1}"
GDPO = ["grpo.adv_estimator.name=gdpo", "data.train.env_name=my.rewards:parts"]

RULES: list[tuple[list[str], list[str]]] = [
    (
        ["grpo.num_generations_per_prompt=1"],
        ["num_generations_per_prompt is 1", "every advantage would be 0", "at least 2"],
    ),
    (
        ["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.num_generations_per_prompt=1"],
        ["num_generations_per_prompt is 1"],
    ),
    (["grpo.adv_estimator.name=gae"], ["adv_estimator.name is gae, which needs a value model"]),
    (["grpo.adv_estimator.name=opd"], ["adv_estimator.name is opd, which needs a teacher"]),
    (["policy.generation.temperature=0"], ["policy.generation.temperature is 0", "> 0"]),
    (
        ["policy.train_global_batch_size=500"],
        ["policy.train_global_batch_size 500 does not divide", "32 x", "16 = 512"],
    ),
    (
        ["policy.logprob_batch_size=3"],
        ["policy.logprob_batch_size 3 does not divide", "= 512; use a divisor"],
    ),
    (
        ["policy.train_micro_batch_size=3", "policy.logprob_batch_size=4"],
        ["train_micro_batch_size 3 does not divide train_global_batch_size 512", "510 or 513"],
    ),
    (
        ["policy.generation.max_new_tokens=512"],
        ["policy: generation.max_new_tokens 512 leaves no room", "512; lower"],
    ),
    (
        ["data.max_input_seq_length=129"],
        ["data.max_input_seq_length 129 + policy.generation.max_new_tokens 384 = 513", "128"],
    ),
    (["data.max_input_seq_length=0"], ["max_input_seq_length is 0, must be >= 1"]),
    (
        ["policy.generation.vllm_cfg.max_model_len=511"],
        ["max_model_len 511 is less than max_total_sequence_length 512"],
    ),
    (
        ["policy.dtensor_cfg.enabled=false"],
        [
            "yaml: policy.dtensor_cfg.enabled is False and policy.megatron_cfg.enabled False",
            "exactly one of the two is true",
        ],
    ),
    (
        ["policy.megatron_cfg.enabled=true"],
        ["yaml: policy.dtensor_cfg.enabled is True and policy.megatron_cfg.enabled True"],
    ),
    (["policy.optimizer=null"], ["yaml: policy.optimizer is null", "{kwargs: {lr: 5e-6}}"]),
    (["policy.optimizer.kwargs={}"], ["policy.optimizer: kwargs has no lr"]),
    (["policy.optimizer.kwargs.lr=-1e-6"], ["policy.optimizer: kwargs.lr is -1e-06", ">= 0"]),
    (["policy.optimizer.kwargs.lr='1e-6'"], ["kwargs.lr is '1e-6'; a learning rate is a number"]),
    (["policy.optimizer.kwargs.lr=true"], ["kwargs.lr is True; a learning rate is a number"]),
    (["policy.scheduler=[{}]"], ["policy.scheduler[0]: name is None and milestones None"]),
    (["policy.scheduler=[{name: a.B, milestones: [3]}]"], ["an entry has one of the two"]),
    (["policy.scheduler=[{milestones: [3], kwargs: {a: 1}}]"], ["no effect on milestones"]),
    (["policy.scheduler=[{name: a.B}, {name: a.B}]"], ["2 schedules and the milestones []"]),
    (["policy.scheduler=[{name: a.B}, {milestones: [3]}]"], ["one entry with 0 strictly"]),
    (
        ["policy.scheduler=[{name: a.B}, {name: a.B}, {name: a.B}, {milestones: [4, 4]}]"],
        ["3 schedules and the milestones [4, 4]", "one entry with 2 strictly increasing"],
    ),
    (
        ["policy.scheduler=[{name: a.B}, {name: a.B}, {milestones: []}, {milestones: [3]}]"],
        ["in 2 entries; one entry"],
    ),
    (["data.train.data_path=null"], ["dataset_name is None and data_path None", "exactly one"]),
    (["data.train.dataset_name=a/b"], ["dataset_name is 'a/b' and data_path 'rows.jsonl'"]),
    (
        [f"{GYM}, env_name: reasoning_gym}}"],
        ["data.train: dataset_name reasoning_gym needs a task"],
    ),
    (
        [f"{GYM}, env_name: reasoning_gym, task: gcd}}"],
        ["task_kwargs is {}", "set one"],
    ),
    (
        [f"{GYM}, env_name: reasoning_gym, {SEEDED}, input_key: question}}"],
        ["input_key and output_key do not apply to reasoning_gym"],
    ),
    (["data.train.task=gcd"], ["task 'gcd'", "belong to dataset_name reasoning_gym"]),
    (["data.train.task_kwargs={seed: 1}"], ["belong to dataset_name reasoning_gym"]),
    (["data.train.split=train"], ["split 'train' belong to a Hugging Face dataset"]),
    (["data.train.env_name=mth"], ["env_name is 'mth'; use math, reasoning_gym or package."]),
    (["data.train.env_name='my/judge.py:score'"], ["a file; write judge:score, and start with"]),
    (["data.train.env_name=my..judge:score"], ["env_name is 'my..judge:score'; use math"]),
    (["data.train.env_name=reasoning_gym"], ["env_name is reasoning_gym with dataset_name None"]),
    (
        [f"{GYM}, {SEEDED}}}"],
        ["env_name is math with dataset_name reasoning_gym"],
    ),
    (["data.train.partial_credit=true"], ["partial_credit does not apply to env_name math"]),
    (
        ["data.validation={data_path: v.jsonl}"],
        ["data: split_validation_size holds rows out of data.train"],
    ),
    (
        [
            "data.train.split_validation_size=0",
            "data.validation={data_path: v.jsonl, output_key: answer}",
        ],
        ["one verifier judges both", "'output_key': 'answer'"],
    ),
    (
        ["data.train.split_validation_size=0"],
        ["grpo.val_period is 10", "nothing to validate on", "val_period: 0"],
    ),
    (
        ["data.train.split_validation_size=0", "grpo.val_period=0", "grpo.val_at_end=true"],
        ["val_at_end True", "nothing to validate on"],
    ),
    (
        ["data.train.split_validation_size=0", "grpo.val_period=0", "grpo.val_at_start=true"],
        ["val_at_start True", "nothing to validate on"],
    ),
    (["grpo.val_period=0", "grpo.val_greedy=true"], ["grpo.val_greedy has no effect"]),
    (
        ["grpo.val_period=0", "logger.num_val_samples_to_print=2"],
        ["logger.num_val_samples_to_print 2 has no effect", "set one, or it to 0"],
    ),
    (
        ["grpo.adv_estimator.name=gdpo"],
        ["grpo.adv_estimator.name is gdpo", "env_name math gives one reward", "several by name"],
    ),
    (
        [
            "grpo.adv_estimator.name=gdpo",
            f"{GYM}, env_name: reasoning_gym, {SEEDED}, split_validation_size: 0.1}}",
        ],
        ["env_name reasoning_gym gives one reward"],
    ),
    (
        [*GDPO, "grpo.reward_scaling.enabled=true"],
        ["grpo: adv_estimator.name gdpo judges", "and reward_shaping act on the sum"],
    ),
    ([*GDPO, "grpo.reward_shaping.enabled=true"], ["which it does not read; disable them"]),
    (["grpo.adv_estimator.minus_baseline=false"], ["minus_baseline is read by reinforce_plus"]),
    (
        ["loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_clip_max=0.28"],
        ["loss_fn: ratio_clip_min 0.2 and ratio_clip_max 0.28 have no effect"],
    ),
    (["loss_fn.use_kl_in_reward=true"], ["grpo.adv_estimator.name grpo leaves it out"]),
    (
        ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0"],
        ["loss_fn: use_kl_in_reward has no effect"],
    ),
    (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
        ["(is 256) to the 512 samples of a step"],
    ),
    (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], ["loss_fn: use_cispo excludes"]),
]
"""Overrides of MINIMAL that contradict each other or the rest, and what the message must say."""


@pytest.mark.parametrize(("overrides", "parts"), RULES, ids=[rule[0][-1] for rule in RULES])
def test_contradictions_are_refused_by_name(overrides, parts):
    text = message(MINIMAL, *overrides)
    assert [part for part in parts if part not in text] == []


ONE_EACH = ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*ONE_EACH, "grpo.adv_estimator.name=raw_reward"],
        [*ONE_EACH, "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}"],
        ["policy.scheduler=[]"],
        ["policy.scheduler=[{name: a.B}]"],
        ["policy.scheduler=[{name: a.B}, {milestones: [5, 9]}, {name: a.B}, {name: a.B}]"],
        ["policy.optimizer.kwargs.lr=0"],
        ["policy.max_grad_norm=null"],
        [
            "data.train={data_path: a.parquet, split_validation_size: 0}",
            "data.validation={dataset_name: a/b, split: test}",
        ],
        ["data.train={_override_: true, data_path: a.parquet}", "grpo.val_period=0"],
        ["data.train.env_name=my.rewards:score"],
        GDPO,
        ["logger.num_val_samples_to_print=2"],
        ["loss_fn.force_on_policy_ratio=true"],
        ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
    ],
)
def test_what_is_no_contradiction_is_accepted(overrides):
    load_tree(MINIMAL, *overrides)


# ----------------------------------------------------------------------------------------- launch


@settings(max_examples=20)
@given(sizes=batch_sizes(), num_ranks=st.integers(1, 12))
def test_an_accepted_launch_gives_every_rank_an_equal_share_in_whole_micro_batches(
    sizes, num_ranks
):
    run = load_tree(edited(MINIMAL, sizes))
    prompts, group = sizes["grpo.num_prompts_per_step"], sizes["grpo.num_generations_per_prompt"]
    batch, micro = sizes["policy.train_global_batch_size"], sizes["policy.train_micro_batch_size"]
    shares = [
        prompts / num_ranks,
        batch / num_ranks / micro,
        prompts * group / num_ranks / sizes["policy.logprob_batch_size"],
    ]
    if all(share == int(share) for share in shares):
        check_launch(run, num_ranks)
    else:
        with pytest.raises(ValueError, match=str(num_ranks)):
            check_launch(run, num_ranks)


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "parts"),
    [
        ([], 64, ["64 ranks are more than grpo.num_prompts_per_step 32", "at most 32 ranks"]),
        ([], 6, ["num_prompts_per_step 32 cannot be shared equally by 6 ranks; use 30 or 36"]),
        (
            ["policy.train_micro_batch_size=64"],
            16,
            ["train_global_batch_size 512", "16 ranks x", "64 = 1024; use 1024, or another micro"],
        ),
        (
            ["policy.logprob_batch_size=512"],
            2,
            ["logprob_batch_size 512 does not divide", "32 prompts / 2 ranks x 16 = 256"],
        ),
    ],
)
def test_a_launch_that_cannot_share_the_work_is_refused(overrides, num_ranks, parts):
    run = load_tree(MINIMAL, *overrides)
    with pytest.raises(ValueError, match=r"\d") as caught:
        check_launch(run, num_ranks)
    assert [part for part in parts if part not in str(caught.value)] == []


# ---------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads_and_the_tiny_ones_fit_two_processes(recipe):
    run = load(recipe, ["grpo.seed=3"], GrpoRun)
    assert run.grpo.seed == 3
    if recipe.name.endswith("_tiny_cpu.yaml"):
        check_launch(run, 2)


def test_the_recipe_for_gpus_says_only_what_it_must_and_runs_on_eight():
    run = load(GPU_RECIPE, [], GrpoRun)
    check_launch(run, 8)
    written = yaml.safe_load(GPU_RECIPE.read_text())
    leaves = leaves_of(written) & set(dict(LEAVES))
    assert [key for key in leaves if without(written, key) == run] == []


def without(tree: dict[str, Any], key: str) -> GrpoRun | None:
    """The config without one key; None if it cannot be left out."""
    tree = copy.deepcopy(tree)
    *sections, name = key.split(".")
    at = tree
    for section in sections:
        at = at[section]
    del at[name]
    try:
        return load_tree(tree)
    except ValueError:
        return None


@pytest.mark.parametrize("key", ["top_p", "top_k"])
def test_a_sampler_that_leaves_tokens_out_is_refused(key: str):
    # field failure 28: the trainer's log-probs are over the whole vocabulary.
    text = message(MINIMAL, f"policy.generation.{key}=0.9")
    assert f"policy.generation.{key}" in text
