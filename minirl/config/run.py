"""Every section of a GRPO run, with NeMo-RL's names and defaults.

Defaults live here and nowhere else. Each struct is frozen and refuses unknown keys; rules within
one section stand in its `__post_init__`, rules across sections in `GrpoRun`, and rules that need
the number of ranks in `check_launch`. Only `minirl.config.loader.load` may build a config from
outside: msgspec checks types there, not in constructors. A key exists only if code reads it.
"""

from typing import Annotated

from msgspec import Meta, field

from minirl.config.data import DataConfig
from minirl.config.loader import Count, Positive, Section, default, refuse
from minirl.config.loss import AdvEstimatorConfig, LossConfig, refuse_inert
from minirl.config.policy import PolicyConfig, data_parallel_size, has_fixed_rows, multiples
from minirl.config.rewards import RewardScalingConfig, RewardShapingConfig


class GrpoConfig(Section, frozen=True, kw_only=True):
    """`grpo`: the algorithm's outer loop."""

    num_prompts_per_step: Count = 32
    num_generations_per_prompt: Count = 16
    max_num_epochs: Count = 1
    max_num_steps: Count = 1_000_000
    """The run ends after this many steps or `max_num_epochs` passes over the data."""
    val_period: Annotated[int, Meta(ge=0)] = 10
    """Validate every so many steps; 0 never."""
    val_at_start: bool = False
    val_at_end: bool = False
    val_greedy: bool = False
    """Also validate at temperature 0, logged as `val/accuracy_greedy`. Not in NeMo-RL."""
    max_val_samples: Count = 256
    seed: Annotated[int, Meta(ge=0)] = 42
    adv_estimator: AdvEstimatorConfig = AdvEstimatorConfig()
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig
    overlong_filtering: bool = False
    """Leave truncated samples out of the loss; they still count in their group's baseline."""
    use_dynamic_sampling: bool = False
    """Train on groups whose scores differ only, and draw until there are enough. Surplus groups
    wait for the next step, where NeMo-RL drops them."""
    dynamic_sampling_max_gen_batches: Count = 10
    batch_multiplier: Annotated[float, Meta(ge=1)] = 1.0
    """Prompts of one draw under dynamic sampling, in units of `num_prompts_per_step`."""
    seq_logprob_error_threshold: Annotated[float, Meta(gt=1)] | None = None
    """Leave out samples whose mean of exp|generation - trainer log-prob| exceeds this."""

    def __post_init__(self) -> None:
        """An estimator needs what it reads: a group for its baseline, a critic, a teacher."""
        name, group = self.adv_estimator.name, self.num_generations_per_prompt
        refuse(name == "gae", "adv_estimator.name is gae, which needs a value model; use grpo")
        refuse(name == "opd", "adv_estimator.name is opd, which needs a teacher; use grpo")
        baseline = self.adv_estimator.minus_baseline or name != "reinforce_plus_plus"
        refuse(
            group == 1 and baseline and name != "raw_reward",
            f"num_generations_per_prompt is 1, but adv_estimator.name {name} subtracts the mean of "
            "the group: every advantage would be 0; use at least 2, or raw_reward",
        )
        refuse(
            name == "gdpo" and (self.reward_scaling.enabled or self.reward_shaping.enabled),
            "adv_estimator.name gdpo judges every part of the reward on its own; reward_scaling "
            "and reward_shaping act on the sum, which it does not read; disable them",
        )
        _check_dynamic_sampling(self)
        low, high = self.advantage_clip_low, self.advantage_clip_high
        refuse(
            low is not None and high is not None and low >= high,
            f"advantage_clip_low {low} must be less than advantage_clip_high {high}",
        )


class EnvConfig(Section, frozen=True):
    """`env`: the processes that verify answers."""

    num_workers: Count = 8
    timeout_s: Positive = 10.0
    memory_gb: Annotated[float, Meta(ge=0.5)] = 4.0
    """Most private memory of one process that verifies, in 10^9 bytes; memory that it shares or
    maps from files does not count. An answer that exceeds it is one that broke the verifier.
    Not in NeMo-RL."""


class CheckpointingConfig(Section, frozen=True, kw_only=True):
    """`checkpointing`."""

    enabled: bool = True
    checkpoint_dir: Annotated[str, Meta(min_length=1), default("results/${recipe:}")]
    """In NeMo-RL results/grpo; here, as `logger.log_dir`, by the name of the config file."""
    save_period: Count = 10
    allowed_changes: list[str] = field(default_factory=list[str])
    """Keys or sections in which a checkpoint may differ from the run that goes on from it, beside
    those that change no result. Not in NeMo-RL, which compares nothing."""


class LoggerConfig(Section, frozen=True, kw_only=True):
    """`logger`."""

    log_dir: Annotated[str, Meta(min_length=1), default("logs/${recipe:}")]
    num_val_samples_to_print: Annotated[int, Meta(ge=0)] = 0


class GrpoRun(Section, frozen=True, kw_only=True):
    """A whole run of `bin/grpo.py`."""

    grpo: GrpoConfig
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    data: DataConfig
    env: EnvConfig = EnvConfig()
    checkpointing: CheckpointingConfig
    logger: LoggerConfig

    def __post_init__(self) -> None:
        """Rules that concern more than one section."""
        _check_sizes(self)
        _check_loss(self)
        refuse(
            self.policy.generation.temperature == 0,
            "policy.generation.temperature is 0: all samples of a prompt would be equal and their "
            "log-probs 0; train with a temperature > 0 (grpo.val_greedy validates at 0)",
        )
        grpo, data = self.grpo, self.data
        wanted = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
        refuse(
            wanted and data.validation is None and not data.train.split_validation_size,
            f"grpo.val_period is {grpo.val_period}, val_at_start {grpo.val_at_start}, val_at_end "
            f"{grpo.val_at_end}, but there is nothing to validate on; set data.validation or "
            "data.train.split_validation_size, or val_period: 0 and no val_at_*",
        )
        refuse(
            grpo.val_greedy and not wanted,
            "grpo.val_greedy has no effect without val_period, val_at_start or val_at_end; set one",
        )
        refuse(
            self.logger.num_val_samples_to_print > 0 and not wanted,
            f"logger.num_val_samples_to_print {self.logger.num_val_samples_to_print} has no effect "
            "without grpo.val_period, val_at_start or val_at_end; set one, or it to 0",
        )


def check_launch(run: GrpoRun, num_ranks: int) -> None:
    """Refuses a number of ranks that cannot share the work of a step equally.

    Every rank samples an equal share of a step's prompts. Every copy of the model trains an equal,
    contiguous share of every global batch, in whole micro-batches; with Megatron, several ranks
    may hold one copy. Under packing and dynamic batching shares are equal in work, not in rows.

    Raises:
        ValueError: naming the keys, the numbers and what would fit.
    """
    prompts, group = run.grpo.num_prompts_per_step, run.grpo.num_generations_per_prompt
    refuse(
        num_ranks > prompts,
        f"{num_ranks} ranks are more than grpo.num_prompts_per_step {prompts}: some would have no "
        f"prompt; start at most {prompts} ranks or raise it",
    )
    refuse(
        prompts % num_ranks != 0,
        f"grpo.num_prompts_per_step {prompts} cannot be shared equally by {num_ranks} ranks; "
        f"{multiples(prompts, num_ranks)}",
    )
    drawn = int(prompts * run.grpo.batch_multiplier)
    refuse(
        drawn % num_ranks != 0,
        f"grpo.batch_multiplier {run.grpo.batch_multiplier} x num_prompts_per_step {prompts} = "
        f"{drawn} prompts cannot be shared equally by {num_ranks} ranks",
    )
    copies = data_parallel_size(run.policy, num_ranks)
    names = f"{copies} ranks" if copies == num_ranks else f"{copies} data-parallel ranks"
    micro, batch = run.policy.train_micro_batch_size, run.policy.train_global_batch_size
    if not has_fixed_rows(run.policy):
        refuse(
            batch < copies,
            f"policy.train_global_batch_size {batch} is less than one sample for each of {names}; "
            f"use at least {copies}",
        )
        return
    refuse(
        batch % (copies * micro) != 0,
        f"policy.train_global_batch_size {batch} is not a multiple of {names} x "
        f"policy.train_micro_batch_size {micro} = {copies * micro}; "
        f"{multiples(batch, copies * micro)}, or another micro-batch size",
    )
    samples, size = prompts // copies * group, run.policy.logprob_batch_size
    refuse(
        samples % size != 0,
        f"policy.logprob_batch_size {size} does not divide the samples of a rank, {prompts} "
        f"prompts / {names} x {group} = {samples}; use a divisor of {samples}",
    )
    _check_pipeline(run.policy, batch // copies // micro, samples // size)


def _check_pipeline(policy: PolicyConfig, updates: int, passes: int) -> None:
    """Interleaved stages take micro-batches in groups of one a stage (Core's schedules.py)."""
    megatron, stages = policy.megatron_cfg, policy.megatron_cfg.pipeline_model_parallel_size
    if not megatron.enabled or megatron.virtual_pipeline_model_parallel_size is None:
        return
    for key, number in (("train_micro_batch_size", updates), ("logprob_batch_size", passes)):
        refuse(
            number % stages != 0,
            f"policy.{key} makes {number} micro-batches a data-parallel rank, and "
            "policy.megatron_cfg.virtual_pipeline_model_parallel_size needs a multiple of "
            f"policy.megatron_cfg.pipeline_model_parallel_size {stages}; lower the former",
        )


def _check_dynamic_sampling(cfg: GrpoConfig) -> None:
    draws, multiplier = cfg.dynamic_sampling_max_gen_batches, cfg.batch_multiplier
    refuse(
        not cfg.use_dynamic_sampling and (draws, multiplier) != (10, 1.0),
        f"dynamic_sampling_max_gen_batches is {draws} and batch_multiplier {multiplier}, which "
        "have no effect without use_dynamic_sampling; set it to true or remove them",
    )
    refuse(
        cfg.use_dynamic_sampling and cfg.num_generations_per_prompt == 1,
        "use_dynamic_sampling keeps groups whose scores differ, and a group of "
        "num_generations_per_prompt 1 never does; use at least 2",
    )
    prompts = cfg.num_prompts_per_step * multiplier
    refuse(
        prompts != int(prompts),
        f"batch_multiplier {multiplier} x num_prompts_per_step {cfg.num_prompts_per_step} = "
        f"{prompts} is no whole number of prompts",
    )


def _check_sizes(run: GrpoRun) -> None:
    prompts, group = run.grpo.num_prompts_per_step, run.grpo.num_generations_per_prompt
    sizes = {"train_global_batch_size": run.policy.train_global_batch_size}
    if has_fixed_rows(run.policy):
        sizes["logprob_batch_size"] = run.policy.logprob_batch_size
    for key, size in sizes.items():
        refuse(
            prompts * group % size != 0,
            f"policy.{key} {size} does not divide the samples of a step, grpo.num_prompts_per_step "
            f"{prompts} x num_generations_per_prompt {group} = {prompts * group}; use a divisor",
        )
    prompt, total = run.data.max_input_seq_length, run.policy.max_total_sequence_length
    response = run.policy.generation.max_new_tokens
    refuse(
        prompt + response > total,
        f"data.max_input_seq_length {prompt} + policy.generation.max_new_tokens {response} = "
        f"{prompt + response} exceeds policy.max_total_sequence_length {total}; remove the first "
        f"(it is then {total - response}) or raise the last",
    )


def _check_loss(run: GrpoRun) -> None:
    loss, estimator = run.loss_fn, run.grpo.adv_estimator.name
    try:
        refuse_inert(loss)
    except ValueError as error:
        raise ValueError(f"loss_fn: {error}") from error
    refuse(
        loss.use_kl_in_reward and estimator != "reinforce_plus_plus",
        "loss_fn.use_kl_in_reward moves the KL term into the advantages, but "
        f"grpo.adv_estimator.name {estimator} leaves it out; set it to false or use "
        "reinforce_plus_plus",
    )
    env = run.data.train.env_name
    refuse(
        estimator == "gdpo" and env in ("math", "reasoning_gym"),
        f"grpo.adv_estimator.name is gdpo, but data.train.env_name {env} gives one reward; name a "
        "function that returns several by name, as package.module:function, or use grpo",
    )
    samples = run.grpo.num_prompts_per_step * run.grpo.num_generations_per_prompt
    batch = run.policy.train_global_batch_size
    refuse(
        loss.force_on_policy_ratio and batch != samples,
        "loss_fn.force_on_policy_ratio is right for one update a step only: set it to false, or "
        f"policy.train_global_batch_size (is {batch}) to the {samples} samples of a step",
    )
