"""GRPO and its family: sample groups, score them, learn from what did better than its group.

    collect   draw prompts, sample a group for each, score     every rank its own prompts
    gather    all samples of the step, on every rank           so that what follows is pure
    learn     log-probs (before, if needed), advantages, updates: every rank its own rows
    refit     the new weights into the engine

Which algorithm it is (DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++ ...) is the choice of two
pure functions, by `cfg.loss_fn` and `cfg.grpo.adv_estimator`.

Source: Shao et al. 2024, arXiv:2402.03300, algorithm 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Weights
from minirl.config.loss import LossConfig
from minirl.config.run import GrpoRun
from minirl.data.plan import Plan, plan_step, put_back, take, take_rows
from minirl.envs.shaping import by_group, informative
from minirl.flops import training_flops
from minirl.log import timed
from minirl.losses.advantages import Scores, TokenInputs, advantages, clip_advantages
from minirl.losses.mismatch import keep_matching_sequences
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.metrics import Max, Mean, Metrics, Min, Sum, mean_over, merge, scalar, values
from minirl.parallel import reduce_metrics, sum_tensor
from minirl.rng import fold_in
from minirl.rollout.collect import Parts, collect
from minirl.rollout.sample import Collated, collate
from minirl.types import Batch, Rows, Sample, SampleMask, Scalar, TokenLogProbs
from minirl.update import Counts, update_

M = TypeVar("M")


def step(
    state: TrainState[M], on: Parts[M], cfg: GrpoRun
) -> tuple[TrainState[M], dict[str, float]] | None:
    """Fresh samples, the updates on them, and the new weights in the engine.

    None, with `state` as it was: the data ends before there are samples for a step.

    Consumes: `state`. Collective: every rank calls it.
    """
    seconds = {"generation": 0.0, "reward": 0.0}
    with timed(seconds, "total"):
        collected = collect(state, on, cfg.grpo, seconds)
        if collected is None:
            return None
        state, samples, drawn = collected
        on.engine.sleep_()
        plan = plan_of(state, samples, on, cfg)
        state, metrics = learn(state, samples, plan, on, cfg, seconds)
        with timed(seconds, "refit"):
            on.engine.wake_()
            on.engine.load_(on.backend.export(state), state.updates)
    seen = values(merge(metrics, drawn, sample_metrics(samples)), "train/")
    passes = needs_prev(len(plan.updates), cfg) + needs_reference(cfg.loss_fn)
    perf = {
        f"perf/{name}": x
        for name, x in plan.efficiency.items()
        if passes or not name.startswith("logprobs")
    }
    return state, seen | perf | speed(seconds, samples, seen, passes, on, cfg)


def plan_of(state: TrainState[M], samples: Sequence[Sample], on: Parts[M], cfg: GrpoRun) -> Plan:
    """Which rows this rank trains, in which micro-batches. Every rank has the same samples."""
    lengths = [len(s.trajectory.tokens) for s in samples]
    key = fold_in(state.key, "packing", state.step)
    return plan_step(lengths, cfg.policy, on.backend.data_axis, on.cost, key)


def learn(
    state: TrainState[M],
    samples: Sequence[Sample],
    plan: Plan,
    on: Parts[M],
    cfg: GrpoRun,
    seconds: dict[str, float],
) -> tuple[TrainState[M], Metrics]:
    """All updates on the samples of one step; the learning-rate schedule advances once.

    Consumes: `state`. Collective: every rank calls it with the same samples and its own plan.
    """
    fresh = not needs_prev(len(plan.updates), cfg)
    with timed(seconds, "logprobs"):
        batch, seen_before = prepare(state, samples, plan, on, cfg)

    def loss(output: TokenOutput, batch: Batch, counts: Counts) -> tuple[Scalar, Metrics]:
        prev = batch.prev_logprobs
        inputs = PolicyLossInputs(
            logprobs=output.logprobs,
            prev_logprobs=output.logprobs.detach() if prev is None else prev,
            generation_logprobs=batch.generation_logprobs,
            reference_logprobs=batch.reference_logprobs,
            advantages=batch.advantages,
            token_mask=batch.token_mask,
            sample_mask=batch.sample_mask,
            rewards=batch.rewards,
            entropy=output.entropy,
        )
        return policy_loss(inputs, cfg.loss_fn, **counts._asdict())

    head = TokenHead(on.sampling.temperature, entropy=fresh)
    metrics: list[Metrics] = [seen_before]
    with timed(seconds, "training"):
        for parts in plan.updates:
            micro = [take(batch, part, plan.width) for part in parts]
            state, seen = update_(on.backend, state, micro, loss, head)
            metrics.append(per_update(seen))
    return on.backend.end_step_(state), merge(*metrics)


def prepare(
    state: TrainState[M],
    samples: Sequence[Sample],
    plan: Plan,
    on: Parts[M],
    cfg: GrpoRun,
) -> tuple[Batch, Metrics]:
    """Everything the updates need of this rank's rows, as one batch; and what was seen on the way.

    Collective: every rank calls it with the same samples and its own plan.
    """
    axis, mine = on.backend.data_axis, [samples[row] for row in plan.rows]
    local = collate([s.trajectory for s in mine])
    prev = entropy = reference = None
    head = TokenHead(on.sampling.temperature)
    if needs_prev(len(plan.updates), cfg):
        asked = head._replace(entropy=True)
        prev, entropy = row_values(state, local.rows, plan, on.backend, asked, "policy")
    if needs_reference(cfg.loss_fn):
        reference, _ = row_values(state, local.rows, plan, on.backend, head, "reference")
    sample_mask, seen = trained_samples(mine, local, prev, cfg)
    found = advantages(
        cfg.grpo.adv_estimator,
        cfg.loss_fn,
        scores_of(samples),
        TokenInputs(local.token_mask, sample_mask, prev, reference),
        rows=plan.rows,
        sum_over=partial(sum_tensor, axis=axis),
    )
    batch = Batch(
        rows=local.rows,
        token_mask=local.token_mask,
        sample_mask=sample_mask,
        generation_logprobs=local.generation_logprobs,
        prev_logprobs=prev,
        reference_logprobs=reference,
        advantages=clip_advantages(
            found, cfg.grpo.advantage_clip_low, cfg.grpo.advantage_clip_high
        ),
        rewards=torch.tensor([s.reward for s in mine]),
    )
    trained = local.token_mask & sample_mask[:, None]
    # On every rank: 1 where no advantage of any is other than 0.
    seen |= {"without_advantage": Min(scalar(float(not found[trained].any())))}
    if entropy is not None:
        seen |= {"entropy": mean_over(entropy[trained])}
    return batch, reduce_metrics(seen, axis)


def trained_samples(
    samples: Sequence[Sample], local: Collated, prev: TokenLogProbs | None, cfg: GrpoRun
) -> tuple[SampleMask, Metrics]:
    """Which samples enter the loss: not those that are filtered, nor those that do not match."""
    filtered = cfg.grpo.overlong_filtering
    mask = torch.tensor([not (filtered and s.trajectory.truncated) for s in samples])
    threshold = cfg.grpo.seq_logprob_error_threshold
    if threshold is None or prev is None:
        return mask, {}
    return keep_matching_sequences(
        prev, local.generation_logprobs, local.token_mask, mask, threshold
    )


def scores_of(samples: Sequence[Sample]) -> Scores:
    """What advantages are computed from; all samples have the same components."""
    names = samples[0].score.components
    return Scores(
        rewards=torch.tensor([s.reward for s in samples]),
        groups=torch.tensor([s.trajectory.group for s in samples]),
        components={n: torch.tensor([s.score.components[n] for s in samples]) for n in names},
    )


def row_values(
    state: TrainState[M],
    rows: Rows,
    plan: Plan,
    backend: Backend[M],
    head: TokenHead,
    weights: Weights,
) -> tuple[TokenLogProbs, TokenLogProbs]:
    """Log-probs and entropies (zeros if not asked for) of all rows, in their own order.

    Collective: every rank calls it with its own plan.
    """
    parts = [take_rows(rows, part, plan.width) for part in plan.logprobs]
    outputs = backend.logprobs(state, parts, head, weights)
    shape = (len(rows.lengths), rows.tokens.shape[1] - 1)
    logprobs = put_back(plan.logprobs, [o.logprobs for o in outputs], shape)
    entropies = [o.entropy for o in outputs if o.entropy is not None]
    if not entropies:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, put_back(plan.logprobs, entropies, shape)


def needs_prev(num_updates: int, cfg: GrpoRun) -> bool:
    """Whether log-probs before the updates can be other than those that the first one sees.

    A single update runs on the weights that sampled, so its own forward gives them; unless what
    enters the loss, or the advantages, depend on them before.
    """
    before = cfg.grpo.seq_logprob_error_threshold is not None or cfg.loss_fn.use_kl_in_reward
    return before or num_updates > 1


def needs_reference(cfg: LossConfig) -> bool:
    """Whether any term reads the reference policy's log-probs."""
    return cfg.reference_policy_kl_penalty > 0


COUNTED = (
    "num_valid_samples",
    "num_valid_tokens",
    "nonfinite_updates",
    "empty_updates",
    "overflow_tokens",
)
"""Totals over the updates of a step; every other metric of an update is averaged over them."""


def per_update(metrics: Metrics) -> Metrics:
    """The metrics of one update, so that several merge into their mean."""
    return {
        name: Mean(m.total, scalar(1.0)) if isinstance(m, Sum) and name not in COUNTED else m
        for name, m in metrics.items()
    }


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """What the samples of a step look like, before anything is learnt from them."""
    lengths = [float(sum(s.trajectory.sampled)) for s in samples]
    means: dict[str, list[float]] = {
        "reward_mean": [s.score.reward for s in samples],
        "shaped_reward_mean": [s.reward for s in samples],
        "constant_groups": [float(not informative(group)) for group in by_group(samples)],
        "truncated": [float(s.trajectory.truncated) for s in samples],
        "response_tokens": lengths,
        "prompt_tokens": [
            len(s.trajectory.tokens) - n for s, n in zip(samples, lengths, strict=True)
        ],
    }
    for name in samples[0].score.components:
        means[f"reward/{name}"] = [s.score.components[name] for s in samples]
    metrics: Metrics = {name: mean_over(torch.tensor(x)) for name, x in means.items()}
    metrics["response_tokens_max"] = Max(scalar(max(lengths)))
    return metrics


def speed(
    seconds: Mapping[str, float],
    samples: Sequence[Sample],
    seen: Mapping[str, float],
    passes: int,
    on: Parts[M],
    cfg: GrpoRun,
) -> dict[str, float]:
    """Times of the stages on this rank; tokens and samples per second, of all ranks and of each.

    Tokens are those of prompts and responses, whatever was padded; `generation` counts only what
    was sampled, that of dropped groups included, `valid` what was trained, `logprobs` the `passes`
    without a gradient.
    `mfu` is the share of all devices' peak that went into the model's own work.
    """
    lengths = [len(s.trajectory.tokens) for s in samples]
    tokens, ranks = float(sum(lengths)), on.backend.axis.size
    valid = seen.get("train/num_valid_tokens", 0.0)
    done = {
        "tokens": ("total", tokens),
        "valid_tokens": ("total", valid),
        "samples": ("total", float(len(samples))),
        "generation_tokens": ("generation", seen["train/sampled_tokens"]),
        "logprobs_tokens": ("logprobs", tokens * passes),
        "training_tokens": ("training", tokens if valid else 0.0),
    }
    rates = {
        f"perf/{name}_per_s": num / seconds[stage] for name, (stage, num) in done.items() if num > 0
    }
    each = {f"{name}_per_rank": rate / ranks for name, rate in rates.items()}
    found = {f"time/{name}_s": t for name, t in seconds.items()} | rates | each
    if on.peak_flops is not None and valid:
        work = training_flops(lengths, on.cost, frozen=cfg.policy.dtensor_cfg.lora_cfg.enabled)
        found["perf/training_tflops_per_s_per_rank"] = work / seconds["training"] / ranks / 1e12
        found["perf/training_mfu"] = work / seconds["training"] / ranks / on.peak_flops
    return found
