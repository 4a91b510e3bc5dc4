"""GRPO and its family: sample groups, score them, learn from what did better than its group.

    collect   draw prompts, sample a group for each, score     every rank its own prompts
    gather    all samples of the step, on every rank           so that what follows is pure
    learn     log-probs before, advantages, updates            every rank its own rows
    refit     the new weights into the engine

Which algorithm it is (DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++ ...) is the choice of two
pure functions, by `cfg.loss_fn` and `cfg.grpo.adv_estimator`.

Source: Shao et al. 2024, arXiv:2402.03300, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from minirl.advantages import Scores, TokenInputs, advantages
from minirl.algos.evaluate import ScoreFn
from minirl.algos.layout import cut, cut_rows, rows_of_rank, slices
from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Weights, advance_cursor
from minirl.config import GrpoRun
from minirl.data import Dataset, draw
from minirl.engine import Engine, Sampling
from minirl.log import timed
from minirl.loss_config import LossConfig
from minirl.losses import PolicyLossInputs, policy_loss
from minirl.metrics import Max, Mean, Metrics, Sum, mean_over, merge, scalar, values
from minirl.parallel import gather, reduce_metrics, share_of, sum_tensor
from minirl.rollout import collate, rollout
from minirl.types import Batch, Rows, Sample, Scalar, TokenLogProbs
from minirl.update import Counts, update_

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Parts(Generic[M]):
    """What a step uses and never changes."""

    backend: Backend[M]
    engine: Engine
    dataset: Dataset
    score: ScoreFn
    sampling: Sampling


def step(
    state: TrainState[M], on: Parts[M], cfg: GrpoRun
) -> tuple[TrainState[M], dict[str, float]]:
    """Fresh samples, the updates on them, and the new weights in the engine.

    Consumes: `state`. Collective: every rank calls it.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        state, samples = collect(state, on, cfg, seconds)
        state, metrics = learn(state, samples, on, cfg, seconds)
        with timed(seconds, "refit"):
            on.engine.wake_()
            on.engine.load_(on.backend.export(state), state.updates)
    metrics = merge(metrics, sample_metrics(samples))
    return state, values(metrics, "train/") | speed(seconds, samples)


def collect(
    state: TrainState[M], on: Parts[M], cfg: GrpoRun, seconds: dict[str, float]
) -> tuple[TrainState[M], list[Sample]]:
    """The scored samples of this step, group by group, the same on every rank.

    Collective: every rank calls it.
    """
    axis = on.backend.data_axis
    prompts, cursor = draw(on.dataset, state.cursor, cfg.grpo.num_prompts_per_step)
    mine = share_of(prompts, axis)
    with timed(seconds, "generation"):
        trajectories = rollout(
            on.engine,
            mine,
            on.sampling,
            num_generations=cfg.grpo.num_generations_per_prompt,
            key=state.key,
            first_group=axis.rank * len(mine),
            step=state.step,
        )
    with timed(seconds, "reward"):
        on.engine.sleep_()
        samples = on.score(mine, trajectories)
    return advance_cursor(state, cursor), gather(samples, axis)


def learn(
    state: TrainState[M],
    samples: Sequence[Sample],
    on: Parts[M],
    cfg: GrpoRun,
    seconds: dict[str, float],
) -> tuple[TrainState[M], Metrics]:
    """All updates on the samples of one step; the learning-rate schedule advances once.

    Consumes: `state`. Collective: every rank calls it with the same samples.
    """
    axis, head = on.backend.data_axis, TokenHead(on.sampling.temperature)
    mine = rows_of_rank(len(samples), cfg.policy.train_global_batch_size, axis)
    with timed(seconds, "logprobs"):
        batch, entropy = prepare(state, samples, mine, on, cfg)

    def loss(output: TokenOutput, batch: Batch, counts: Counts) -> tuple[Scalar, Metrics]:
        inputs = PolicyLossInputs(
            logprobs=output.logprobs,
            prev_logprobs=batch.prev_logprobs,
            generation_logprobs=batch.generation_logprobs,
            reference_logprobs=batch.reference_logprobs,
            advantages=batch.advantages,
            token_mask=batch.token_mask,
            sample_mask=batch.sample_mask,
            rewards=batch.rewards,
        )
        return policy_loss(inputs, cfg.loss_fn, **counts._asdict())

    metrics: list[Metrics] = [entropy]
    with timed(seconds, "training"):
        micro = [cut(batch, part) for part in slices(len(mine), cfg.policy.train_micro_batch_size)]
        num_updates = len(samples) // cfg.policy.train_global_batch_size
        for part in slices(len(micro), len(micro) // num_updates):
            state, seen = update_(on.backend, state, micro[part], loss, head)
            metrics.append(per_update(seen))
    return on.backend.end_step_(state), merge(*metrics)


def prepare(
    state: TrainState[M],
    samples: Sequence[Sample],
    mine: Sequence[int],
    on: Parts[M],
    cfg: GrpoRun,
) -> tuple[Batch, Metrics]:
    """Everything the updates need of this rank's rows, as one batch; and the policy's entropy.

    Collective: every rank calls it with the same samples and its own rows.
    """
    axis = on.backend.data_axis
    local = collate([samples[row].trajectory for row in mine])
    width = cfg.policy.logprob_batch_size
    head = TokenHead(on.sampling.temperature, entropy=True)
    prev, entropy = row_values(state, local.rows, on.backend, head, "policy", width)
    reference = None
    if needs_reference(cfg.loss_fn):
        head = TokenHead(on.sampling.temperature)
        reference, _ = row_values(state, local.rows, on.backend, head, "reference", width)
    sample_mask = torch.ones(len(mine), dtype=torch.bool)
    token_advantages = advantages(
        cfg.grpo.adv_estimator,
        cfg.loss_fn,
        Scores(
            rewards=torch.tensor([s.reward for s in samples]),
            groups=torch.tensor([s.trajectory.group for s in samples]),
        ),
        TokenInputs(local.token_mask, sample_mask, prev, reference),
        rows=mine,
        sum_over=partial(sum_tensor, axis=axis),
    )
    batch = Batch(
        rows=local.rows,
        token_mask=local.token_mask,
        sample_mask=sample_mask,
        generation_logprobs=local.generation_logprobs,
        prev_logprobs=prev,
        reference_logprobs=reference,
        advantages=token_advantages,
        rewards=torch.tensor([samples[row].reward for row in mine]),
    )
    seen: Metrics = {"entropy": mean_over(entropy[local.token_mask])}
    return batch, reduce_metrics(seen, axis)


def row_values(
    state: TrainState[M],
    rows: Rows,
    backend: Backend[M],
    head: TokenHead,
    weights: Weights,
    batch_size: int,
) -> tuple[TokenLogProbs, TokenLogProbs]:
    """Log-probs and entropies (zeros if not asked for) of all rows, `batch_size` rows at a time.

    Collective: every rank calls it with equally many rows.
    """
    parts = [cut_rows(rows, part) for part in slices(len(rows.lengths), batch_size)]
    outputs = backend.logprobs(state, parts, head, weights)

    def whole(pieces: Sequence[Tensor]) -> Tensor:
        positions = rows.tokens.shape[1] - 1
        pads = [torch.nn.functional.pad(p, (0, positions - p.shape[1])) for p in pieces]
        return torch.cat(pads)

    logprobs = whole([o.logprobs for o in outputs])
    entropies = [o.entropy for o in outputs if o.entropy is not None]
    return logprobs, whole(entropies) if entropies else torch.zeros_like(logprobs)


def needs_reference(cfg: LossConfig) -> bool:
    """Whether any term reads the reference policy's log-probs."""
    return cfg.reference_policy_kl_penalty > 0


COUNTED = ("num_valid_samples", "nonfinite_updates", "overflow_tokens")
"""Totals over the updates of a step; every other metric of an update is averaged over them."""


def per_update(metrics: Metrics) -> Metrics:
    """The metrics of one update, so that several merge into their mean."""
    return {
        name: Mean(m.total, scalar(1.0)) if isinstance(m, Sum) and name not in COUNTED else m
        for name, m in metrics.items()
    }


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """What the samples of a step look like, before anything is learnt from them."""
    rewards: dict[int, list[float]] = {}
    for s in samples:
        rewards.setdefault(s.trajectory.group, []).append(s.score.reward)
    lengths = [float(sum(s.trajectory.sampled)) for s in samples]
    means: dict[str, list[float]] = {
        "reward_mean": [s.score.reward for s in samples],
        "constant_groups": [float(min(group) == max(group)) for group in rewards.values()],
        "truncated": [float(s.trajectory.truncated) for s in samples],
        "response_tokens": lengths,
        "prompt_tokens": [
            len(s.trajectory.tokens) - n for s, n in zip(samples, lengths, strict=True)
        ],
    }
    metrics: Metrics = {name: mean_over(torch.tensor(x)) for name, x in means.items()}
    metrics["response_tokens_max"] = Max(scalar(max(lengths)))
    metrics["verifier_timeouts"] = Sum(scalar(sum(s.score.timed_out for s in samples)))
    return metrics


def speed(seconds: dict[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    """Times of the stages on this rank, and tokens per second over all ranks."""
    tokens = sum(len(s.trajectory.tokens) for s in samples)
    sampled = sum(sum(s.trajectory.sampled) for s in samples)
    return {f"time/{name}_s": t for name, t in seconds.items()} | {
        "perf/tokens_per_s": tokens / seconds["total"],
        "perf/generation_tokens_per_s": sampled / seconds["generation"],
        "perf/training_tokens_per_s": tokens / seconds["training"],
        "perf/logprobs_tokens_per_s": tokens / seconds["logprobs"],
    }
