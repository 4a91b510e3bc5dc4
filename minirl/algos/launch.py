"""From a config to a finished GRPO run: everything is checked, then opened, then the loop runs.

In order of cost: the config, the number of ranks, the model's folder, the tokenizer, the data, the
reward function, the checkpoint it goes on from. Then the folders are locked, the model is
opened, and the engine last, since a closing engine takes the process group with it. Nothing else is
written before all of this has passed.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from minirl.algos import grpo, loop
from minirl.algos.evaluate import Judged, accuracy, answer
from minirl.backend import TrainState
from minirl.backends import check_policy, decided, open_backend, open_engine, with_own_config
from minirl.checkpoint import latest, load_, save
from minirl.config.loader import dump
from minirl.config.run import GrpoRun, check_launch
from minirl.cost import Cost, cost_of
from minirl.data.chat import (
    Tokenizer,
    decode,
    load_tokenizer,
    stop_token_ids,
    unstopped,
    vocabulary_size,
)
from minirl.data.datasets import Datasets, draw, load_datasets
from minirl.engine import Sampling
from minirl.envs.rewards import Answer, RewardFn, open_rewards
from minirl.flops import peak_flops
from minirl.hf import check_model, end_token_ids, read_config
from minirl.log import (
    Log,
    curve,
    metrics_path,
    open_log,
    prepare_run_dir,
    read_metrics,
    timed,
    user_errors,
)
from minirl.ownership import Identity, check_allowed, check_identity, identity_of, locked
from minirl.parallel import Axis, launched_size, require_equal, world
from minirl.rng import fold_in, key_of
from minirl.rollout.collect import Parts, ScoreFn, prompts_per_draw
from minirl.types import Prompt, Score, Trajectory


class Inputs(NamedTuple):
    """What a run reads before any model exists."""

    tokenizer: Tokenizer
    data: Datasets
    sampling: Sampling
    cost: Cost
    vocabulary: int | None = None
    """Tokens from here on have no text; None: all have one."""


class Origin(NamedTuple):
    """Whether the run goes on from a checkpoint, and what tells it from other runs."""

    identity: Identity
    said: tuple[str, ...]
    """What to say about it at the start."""


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
        run.env,
        chat.special_tokens_in_messages,
    )
    _check_vocabulary(data, run)
    prompts, drawn = len(data.train.prompts), prompts_per_draw(run.grpo)
    if prompts * run.grpo.max_num_epochs < drawn:
        raise ValueError(
            f"{prompts} training prompts x grpo.max_num_epochs {run.grpo.max_num_epochs} are fewer "
            f"than grpo.num_prompts_per_step {run.grpo.num_prompts_per_step} x batch_multiplier "
            f"{run.grpo.batch_multiplier:g}: not one step; use more data or more epochs"
        )
    generation = run.policy.generation
    ends = stop_token_ids(tokenizer, end_token_ids(run.policy.model_name))
    sampling = Sampling(
        temperature=generation.temperature,
        max_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(sorted({*ends, *(generation.stop_token_ids or ())})),
        stop_strings=tuple(generation.stop_strings or ()),
    )
    cost = cost_of(with_own_config(run.policy).model_name)
    return Inputs(tokenizer, data, sampling, cost, vocabulary_size(tokenizer))


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

    Raises:
        ValueError: something that the user gave is wrong; nothing was written.

    Collective: every launched rank calls it with the same config.
    """
    run = resolved(run)
    run_dir, folder = Path(run.logger.log_dir), Path(run.checkpointing.checkpoint_dir)
    with ExitStack() as stack:
        inputs = read_inputs(run, launched_size())
        rows = [side.prompts[0] for side in inputs.data[:2] if side is not None]
        reward = stack.enter_context(open_rewards(run.env, run.data.train, rows, run_dir))
        origin = origin_of(run, inputs)
        places = {run_dir.absolute(): "logger.log_dir"}
        if run.checkpointing.enabled:
            places.setdefault(folder.absolute(), "checkpointing.checkpoint_dir")
        for place, key in places.items():
            stack.enter_context(locked(place, key))
        with user_errors(run_dir):
            axis = stack.enter_context(world())
            ends = inputs.sampling.stop_token_ids
            score = partial(score_answers, inputs.tokenizer, reward, stop_token_ids=ends)
            state, parts = stack.enter_context(open_parts(run, inputs, score, axis))
            prepare_run_dir(run_dir, dump(run), resumed_step=state.step)
            total = num_steps(run, inputs.data)
            with open_log(run_dir, state.step, total, axis.rank) as log:
                _announce(run, inputs, origin, state, log)
                _announce_text(inputs, run, log)
                loop.run(
                    state,
                    _plan(run, total),
                    step=lambda s: grpo.step(s, parts, run),
                    evaluate=lambda s: validate(s, parts, inputs, run, log),
                    save=lambda s: save(parts.backend, s, folder, axis, origin.identity),
                    log=log,
                )
                if axis.rank == 0:
                    log.say(learning_curve(metrics_path(run_dir)))


def origin_of(run: GrpoRun, inputs: Inputs) -> Origin:
    """What the run is, compared with the checkpoint that it goes on from, if there is one.

    Raises:
        ValueError: as `check_allowed` and `check_identity`.
    """
    identity = identity_of(run, inputs.data.train, inputs.sampling.stop_token_ids)
    kept = resumed_from(run)
    if kept is None:
        check_allowed(run.checkpointing.allowed_changes, identity)
        return Origin(identity, ())
    step, folder = kept
    changed = check_identity(folder, identity, run.checkpointing.allowed_changes)
    said = [f"resumed from {folder} at step {step}"]
    if changed:
        said.append(f"changed since: {'; '.join(changed)}")
    return Origin(identity, tuple(said))


def resolved(run: GrpoRun) -> GrpoRun:
    """The same run with every setting decided that was left to code."""
    return structs.replace(run, policy=decided(run.policy))


def resumed_from(run: GrpoRun) -> tuple[int, Path] | None:
    """The step and the checkpoint that the run goes on from, if there is one."""
    return latest(Path(run.checkpointing.checkpoint_dir)) if run.checkpointing.enabled else None


def num_steps(run: GrpoRun, data: Datasets) -> int:
    """Whole steps within `max_num_steps` and `max_num_epochs`; fewer where groups are dropped."""
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
    require_equal(
        "the step of the last checkpoint",
        kept[0] if kept else 0,
        axis,
        f"is checkpointing.checkpoint_dir {run.checkpointing.checkpoint_dir!r} on a file system "
        "that all hosts share?",
    )
    if kept is not None:
        state = load_(backend, state, kept[1])
    engine = open_engine(run.policy)
    try:
        engine.load_(backend.export(state), state.updates)
        data, sampling, cost = inputs.data.train, inputs.sampling, inputs.cost
        peak = peak_flops(run.policy.precision, cost)
        yield (
            state,
            Parts(backend, engine, data, score, sampling, cost, peak, inputs.vocabulary),
        )
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


def _announce(
    run: GrpoRun, inputs: Inputs, origin: Origin, state: TrainState[Any], log: Log
) -> None:
    data, total = inputs.data, num_steps(run, inputs.data)
    held = 0 if data.validation is None else len(data.validation.prompts)
    filtered = data.train.num_filtered + (data.validation.num_filtered if data.validation else 0)
    ahead = f"steps {state.step + 1} to {total}"
    if run.grpo.use_dynamic_sampling:
        ahead += " at most"
    if state.step >= total:
        ahead = f"all {total} steps were taken (the checkpoint is of step {state.step})"
    for line in origin.said:
        log.say(line)
    log.say(
        f"{len(data.train.prompts)} training prompts, {held} for validation "
        f"({data.num_shared} of them also in training; left out: {data.num_duplicates} duplicates, "
        f"{data.num_shown} whose prompt shows the answer, {filtered} too long); {ahead}"
    )
    samples = run.grpo.num_prompts_per_step * run.grpo.num_generations_per_prompt
    if not grpo.needs_prev(samples // run.policy.train_global_batch_size, run):
        log.say("one update a step: log-probs before it are those of its own forward pass")
    size = read_config(with_own_config(run.policy).model_name).get_text_config().vocab_size
    for line in vocabulary_warnings(size, inputs.vocabulary or size):
        log.say(line)


def vocabulary_warnings(model: int, tokenizer: int) -> list[str]:
    """A sentence if more of the model's vocabulary has no text than padding to a multiple explains.

    >>> vocabulary_warnings(model=151_936, tokenizer=151_665)
    []
    """
    without = model - tokenizer
    if without <= max(256, tokenizer // 10):
        return []
    return [
        f"  warning: {without} of the model's {model} tokens are beyond the {tokenizer} of its "
        "tokenizer and have no text; unless the model has learnt to avoid them, samples are made "
        "of them and no answer is right: use policy.tokenizer.name of the model, or a model made "
        "for it"
    ]


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
