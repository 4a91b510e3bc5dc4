"""From a config to a finished GRPO run: everything is checked, then opened, then the loop runs.

In order of cost: the config, the number of ranks, the model's folder, the tokenizer, the data,
the run folder, the reward function; only then the model, and the engine last, since a closing
engine takes the process group with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from minirl.algos import grpo, loop
from minirl.algos.collect import Parts, ScoreFn
from minirl.algos.evaluate import Judged, accuracy, answer
from minirl.backend import TrainState
from minirl.backends import (
    check_policy,
    decided,
    open_backend,
    open_engine,
    with_own_config,
)
from minirl.chat import Tokenizer, decode, load_tokenizer, stop_token_ids, unstopped
from minirl.checkpoint import latest, load_, save
from minirl.config import GrpoRun, check_launch
from minirl.cost import Cost, cost_of
from minirl.data import Datasets, draw, load_datasets
from minirl.engine import Sampling
from minirl.flops import peak_flops
from minirl.hf import check_model, end_token_ids, read_config
from minirl.loader import dump
from minirl.log import (
    Log,
    curve,
    metrics_path,
    open_log,
    prepare_folder,
    prepare_run_dir,
    read_metrics,
    timed,
    user_errors,
)
from minirl.parallel import Axis, launched_size, world
from minirl.rewards import Answer, RewardFn, open_rewards
from minirl.rng import fold_in, key_of
from minirl.types import Prompt, Score, Trajectory


class Inputs(NamedTuple):
    """What a run reads before any model exists."""

    tokenizer: Tokenizer
    data: Datasets
    sampling: Sampling
    cost: Cost


def read_inputs(run: GrpoRun, num_ranks: int) -> Inputs:
    """Checks the launch and the model's folder; reads the tokenizer and the data.

    Raises:
        ValueError: anything is missing or does not fit; nothing expensive has started.
    """
    check_launch(run, num_ranks)
    check_model(run.policy.model_name)
    check_policy(run.policy)
    tokenizer = load_tokenizer(run.policy.tokenizer)
    chat = run.policy.tokenizer
    data = load_datasets(
        run.data,
        tokenizer,
        chat.chat_template_kwargs,
        run.grpo.seed,
        chat.special_tokens_in_messages,
    )
    _check_vocabulary(data, run)
    if num_steps(run, data) == 0:
        raise ValueError(
            f"{len(data.train.prompts)} training prompts x grpo.max_num_epochs "
            f"{run.grpo.max_num_epochs} are fewer than grpo.num_prompts_per_step "
            f"{run.grpo.num_prompts_per_step}: not one step; use more data or more epochs"
        )
    generation = run.policy.generation
    ends = stop_token_ids(tokenizer, end_token_ids(run.policy.model_name))
    sampling = Sampling(
        temperature=generation.temperature,
        max_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(sorted({*ends, *(generation.stop_token_ids or ())})),
        stop_strings=tuple(generation.stop_strings or ()),
    )
    return Inputs(tokenizer, data, sampling, cost_of(with_own_config(run.policy).model_name))


def _check_vocabulary(data: Datasets, run: GrpoRun) -> None:
    """Refuses a tokenizer whose tokens the model has no embedding for."""
    config = read_config(with_own_config(run.policy).model_name)
    size = config.get_text_config().vocab_size
    for name, side in (("training", data.train), ("validation", data.validation)):
        for prompt in side.prompts if side else ():
            if max(prompt.tokens) >= size:
                raise ValueError(
                    f"policy.tokenizer.name: {name} prompt {prompt.id} has the token "
                    f"{max(prompt.tokens)}, but the model's vocabulary is {size}; use the model's "
                    f"own tokenizer ({run.policy.model_name})"
                )


def run_grpo(run: GrpoRun) -> None:
    """The whole run.

    What the user gave is checked before the process group opens, alike on every rank, and ends
    the process with a message; what fails later is raised.

    Collective: every launched rank calls it with the same config.
    """
    run = resolved(run)
    run_dir, folder = Path(run.logger.log_dir), Path(run.checkpointing.checkpoint_dir)
    with ExitStack() as stack:
        with user_errors():
            inputs = read_inputs(run, launched_size())
            if run.checkpointing.enabled:
                prepare_folder(folder, "checkpointing.checkpoint_dir")
            kept = resumed_from(run)
            prepare_run_dir(run_dir, dump(run), resumed_step=kept[0] if kept else 0)
            reward = stack.enter_context(open_rewards(run.env, run.data.train))
        axis = stack.enter_context(world())
        ends = inputs.sampling.stop_token_ids
        score = partial(score_answers, inputs.tokenizer, reward, stop_token_ids=ends)
        state, parts = stack.enter_context(open_parts(run, inputs, score, axis))
        total = num_steps(run, inputs.data)
        log = stack.enter_context(open_log(run_dir, state.step, total, axis.rank))
        _announce(inputs.data, state, total, log)
        _announce_text(inputs, run, log)
        samples = run.grpo.num_prompts_per_step * run.grpo.num_generations_per_prompt
        if not grpo.needs_prev(samples // run.policy.train_global_batch_size, run):
            log.say("one update a step: log-probs before it are those of its own forward pass")
        loop.run(
            state,
            _plan(run, total),
            step=lambda s: grpo.step(s, parts, run),
            evaluate=lambda s: validate(s, parts, inputs, run, log),
            save=lambda s: save(parts.backend, s, folder, axis),
            log=log,
        )
        if axis.rank == 0:
            log.say(learning_curve(metrics_path(run_dir)))


def resolved(run: GrpoRun) -> GrpoRun:
    """The same run with every setting decided that was left to code."""
    return structs.replace(run, policy=decided(run.policy))


def resumed_from(run: GrpoRun) -> tuple[int, Path] | None:
    """The step and the checkpoint that the run goes on from, if there is one."""
    return latest(Path(run.checkpointing.checkpoint_dir)) if run.checkpointing.enabled else None


def num_steps(run: GrpoRun, data: Datasets) -> int:
    """Whole steps within `max_num_steps` and `max_num_epochs`."""
    prompts = len(data.train.prompts) * run.grpo.max_num_epochs
    return min(run.grpo.max_num_steps, prompts // run.grpo.num_prompts_per_step)


def _plan(run: GrpoRun, total: int) -> loop.Plan:
    cfg = run.grpo
    period = run.checkpointing.save_period if run.checkpointing.enabled else 0
    return loop.Plan(total, cfg.val_period, cfg.val_at_start, cfg.val_at_end, period)


@contextmanager
def open_parts(
    run: GrpoRun, inputs: Inputs, score: ScoreFn, axis: Axis
) -> Iterator[tuple[TrainState[Any], Parts[Any]]]:
    """Backend, then engine; the weights of the last checkpoint, if there is one, in both."""
    backend, state = open_backend(
        run.policy,
        axis,
        key_of(run.grpo.seed),
        with_reference=grpo.needs_reference(run.loss_fn),
    )
    kept = resumed_from(run)
    if kept is not None:
        state = load_(backend, state, kept[1])
    engine = open_engine(run.policy)
    try:
        engine.load_(backend.export(state), state.updates)
        data, sampling, cost = inputs.data.train, inputs.sampling, inputs.cost
        peak = peak_flops(run.policy.precision, cost)
        yield state, Parts(backend, engine, data, score, sampling, cost, peak)
    finally:
        engine.close()


def score_answers(
    tokenizer: Tokenizer,
    reward: RewardFn,
    prompts: Sequence[Prompt],
    trajectories: Sequence[Trajectory],
    stop_token_ids: Sequence[int] = (),
) -> list[Score]:
    """Renders what was sampled, once, and has it judged."""
    by_id = {prompt.id: prompt for prompt in prompts}
    texts = decode(tokenizer, [sampled_tokens(t) for t in trajectories], stop_token_ids)
    return reward(
        [
            Answer(by_id[t.prompt_id], text, t.truncated)
            for t, text in zip(trajectories, texts, strict=True)
        ]
    )


def sampled_tokens(trajectory: Trajectory) -> list[int]:
    """The tokens that the policy wrote."""
    return [t for t, drawn in zip(trajectory.tokens, trajectory.sampled, strict=True) if drawn]


def validate(
    state: TrainState[Any], parts: Parts[Any], inputs: Inputs, run: GrpoRun, log: Log
) -> dict[str, float]:
    """Accuracy on the held-out prompts, as trained and (if asked) greedily. Collective."""
    assert inputs.data.validation is not None
    held_out = inputs.data.validation
    prompts, _ = draw(held_out, 0, min(run.grpo.max_val_samples, len(held_out.prompts)))
    key = fold_in(state.key, "validation", state.step)
    names = {"val/accuracy": inputs.sampling}
    if run.grpo.val_greedy:
        names["val/accuracy_greedy"] = inputs.sampling._replace(temperature=0.0)
    seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}
    with timed(seconds, "validation"):
        for name, sampling in names.items():
            samples = answer(parts.engine, prompts, sampling, parts.score, parts.backend.axis, key)
            metrics[name] = accuracy(samples)
            late = sum(s.score.timed_out or s.score.failed for s in samples)
            metrics["val/verifier_timeouts"] = metrics.get("val/verifier_timeouts", 0.0) + late
            for part in samples[0].score.components:
                metrics[f"{name}/{part}"] = accuracy(samples, part)
            if name == "val/accuracy":
                show_samples(samples[: run.logger.num_val_samples_to_print], inputs, log)
    return metrics | {"time/validation_s": seconds["validation"]}


def show_samples(samples: Sequence[Judged], inputs: Inputs, log: Log) -> None:
    """Some answers, with their rewards."""
    answers = [sampled_tokens(s.trajectory) for s in samples]
    texts = decode(inputs.tokenizer, answers, inputs.sampling.stop_token_ids)
    for s, text in zip(samples, texts, strict=True):
        log.say(f"  prompt {s.trajectory.prompt_id}: reward {s.score.reward:g}: {text!r}")


def _announce(data: Datasets, state: TrainState[Any], total: int, log: Log) -> None:
    held = 0 if data.validation is None else len(data.validation.prompts)
    filtered = data.train.num_filtered + (data.validation.num_filtered if data.validation else 0)
    ahead = f"steps {state.step + 1} to {total}"
    if state.step >= total:
        ahead = f"all {total} steps were taken (the checkpoint is of step {state.step})"
    log.say(
        f"{len(data.train.prompts)} training prompts, {held} for validation "
        f"({data.num_shared} of them also in training; left out: {data.num_duplicates} duplicates, "
        f"{filtered} too long); {ahead}"
    )


def _announce_text(inputs: Inputs, run: GrpoRun, log: Log) -> None:
    """What prompts and answers may hold that one would not expect."""
    sides = (inputs.data.train, inputs.data.validation)
    num = sum(side.num_spelled for side in sides if side)
    if num:
        log.say(
            f"{num} rows spell special tokens of the tokenizer; they are kept as text "
            "(policy.tokenizer.special_tokens_in_messages)"
        )
    ids, strings = inputs.sampling.stop_token_ids, inputs.sampling.stop_strings
    kwargs = run.policy.tokenizer.chat_template_kwargs
    after = unstopped(inputs.tokenizer, kwargs, ids, strings)
    if after is not None:
        log.say(
            f"warning: the chat template writes {after!r} after an answer, and no stop token "
            f"(the model's are {list(ids)}); answers may run on to their greatest length. "
            "Set policy.generation.stop_token_ids to its token"
        )


def learning_curve(path: Path) -> str:
    """The run's accuracy over its steps, or its reward where it was not validated."""
    lines = read_metrics(path)
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name in ("val/accuracy", "val/accuracy_greedy", "train/reward_mean"):
            x = line.get(name)
            if x is not None:
                points.setdefault(name, []).append((int(line["step"] or 0), x))
    return curve(points, "learning curve") if points else "no step was taken"
