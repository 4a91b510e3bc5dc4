"""The parts of a step without a model: what a toy engine samples and a toy verifier judges."""

from collections.abc import Sequence

import torch

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState
from minirl.data.datasets import Dataset
from minirl.engine import Engine, Request, Sampling
from minirl.parallel import SOLO
from minirl.rng import key_of
from minirl.rollout.collect import Parts
from minirl.types import Completion, Prompt, Rows, Score, Trajectory

PROMPTS = tuple(Prompt(i, (i + 1,), {"hard": i % 3 != 0}) for i in range(12))


def trajectory(
    length: int = 3, *, truncated: bool = False, group: int = 0, logprob: float = -1.0
) -> Trajectory:
    """One sample of `length` tokens after a prompt of one."""
    return Trajectory(
        group=group,
        sample=0,
        prompt_id=group,
        tokens=(1,) + (2,) * length,
        sampled=(False,) + (True,) * length,
        generation_logprobs=(0.0,) + (logprob,) * length,
        truncated=truncated,
        version=0,
    )


def parts() -> Parts[None]:
    """An engine whose answer is its seed, a verifier that never agrees on hard prompts, and a
    model to which every token has the log-prob -1."""

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return [Completion((r.seed % 97,), (-1.0,), truncated=False, version=0) for r in requests]

    def score(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Score]:
        hard = [PROMPTS[t.prompt_id].example["hard"] for t in trajectories]
        return [
            Score(float(t.sample % 2) if h else 0.0)
            for t, h in zip(trajectories, hard, strict=True)
        ]

    def logprobs(
        state: object, rows: Sequence[Rows], head: TokenHead, weights: str
    ) -> list[TokenOutput]:
        shapes = [(len(r.lengths), r.tokens.shape[1] - 1) for r in rows]
        return [TokenOutput(torch.full(s, -1.0), torch.zeros(s)) for s in shapes]

    engine = Engine(generate, _unused, _nothing, _nothing, _nothing)
    backend: Backend[None] = Backend(SOLO, SOLO, logprobs, *(_unused,) * 5)
    dataset = Dataset(PROMPTS, seed=0, shuffle=False)
    return Parts(backend, engine, dataset, score, Sampling(1.0, 4, (0,)))


def fresh() -> TrainState[None]:
    """Before the first step."""
    return TrainState(None, step=0, updates=0, cursor=0, key=key_of(0))


def _unused(*_: object) -> object:
    raise AssertionError("nothing is trained here")


def _nothing() -> None:
    pass
