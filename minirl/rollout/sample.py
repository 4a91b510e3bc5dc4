"""From prompts to trajectories, and from trajectories to padded rows.

`rollout` asks the engine for several samples of each prompt. The tokens it returns are the ones
that are trained: no text is rendered here and nothing is re-tokenised. `collate` is the only
place where a quantity of *tokens* (index t) becomes a quantity of *positions* (index t - 1).
Neither function knows rewards, and neither compares prompts: samples belong together by `group`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minirl.engine import Engine, Request, Sampling
from minirl.rng import Key, fold_in
from minirl.types import Prompt, Rows, TokenLogProbs, TokenMask, Trajectory


def rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    num_generations: int,
    key: Key,
    first_group: int,
    step: int,
) -> list[Trajectory]:
    """Samples `num_generations` completions of every prompt, prompt by prompt.

    Prompt i of this call is group `first_group + i`; give each rank its own range of groups. The
    seed of a sample follows from (key, step, prompt id, group, sample index), so a sample is the
    same on any number of ranks, and one prompt drawn twice in a step gives different samples.

    Raises:
        ValueError: as `Engine.generate`.
    """
    requests = [
        Request(prompt.tokens, fold_in(key, step, prompt.id, first_group + i, sample))
        for i, prompt in enumerate(prompts)
        for sample in range(num_generations)
    ]
    completions = engine.generate(requests, sampling)
    trajectories: list[Trajectory] = []
    for index, completion in enumerate(completions):
        i, sample = divmod(index, num_generations)
        given, drawn = len(prompts[i].tokens), len(completion.tokens)
        trajectories.append(
            Trajectory(
                group=first_group + i,
                sample=sample,
                prompt_id=prompts[i].id,
                tokens=prompts[i].tokens + completion.tokens,
                sampled=(False,) * given + (True,) * drawn,
                generation_logprobs=(0.0,) * given + completion.logprobs,
                truncated=completion.truncated,
                version=completion.version,
            )
        )
    return trajectories


class Collated(NamedTuple):
    """Trajectories as right-padded rows, with what is known of each position."""

    rows: Rows
    token_mask: TokenMask
    """True at position t where token t + 1 was sampled."""
    generation_logprobs: TokenLogProbs
    """The engine's log-prob of token t + 1 at position t where it was sampled, else 0."""


def collate(trajectories: Sequence[Trajectory], *, pad_token_id: int = 0) -> Collated:
    """Rows as long as the longest trajectory, in the given order.

    Which tokens are real follows from lengths, and which are trained from `sampled`, so the value
    of `pad_token_id` is irrelevant, even if it is the end token's.

    Raises:
        ValueError: there is no trajectory, or one has no token, differing numbers of tokens, flags
            and log-probs, or a sampled first token (nothing predicts it).
    """
    if not trajectories:
        raise ValueError("no trajectory to collate: a batch needs at least one row")
    for t in trajectories:
        if not len(t.tokens) == len(t.sampled) == len(t.generation_logprobs) > 0 or t.sampled[0]:
            raise ValueError(
                f"group {t.group} sample {t.sample}: {len(t.tokens)} tokens, {len(t.sampled)} "
                f"flags, {len(t.generation_logprobs)} log-probs, first sampled: {t.sampled[:1]}; a "
                "row needs equally many of each, at least one, and a first token that was given"
            )
    shape = (len(trajectories), max(len(t.tokens) for t in trajectories))
    tokens = torch.full(shape, pad_token_id, dtype=torch.long)
    sampled = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    for row, t in enumerate(trajectories):
        length = len(t.tokens)
        tokens[row, :length] = torch.tensor(t.tokens)
        sampled[row, :length] = torch.tensor(t.sampled)
        logprobs[row, :length] = torch.tensor(t.generation_logprobs)
    lengths = torch.tensor([len(t.tokens) for t in trajectories])
    # Position t predicts token t + 1: what belongs to a token moves one to the left.
    return Collated(
        rows=Rows(tokens, lengths),
        token_mask=sampled[:, 1:],
        generation_logprobs=torch.where(sampled, logprobs, 0.0)[:, 1:],
    )
