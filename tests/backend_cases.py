"""Rows with weighted log-prob losses, and what a plain torch loop over rows makes of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Work
from minirl.config.policy import OptimizerConfig
from minirl.metrics import Metrics, Sum, mean_over, value
from minirl.types import Rows, Scalar

RATE = 1e4
"""A learning rate so large that the change of a weight is its gradient, free of rounding."""

GRADIENT = {"optimizer": OptimizerConfig("torch.optim.SGD", {"lr": RATE}), "max_grad_norm": None}


class Sample(NamedTuple):
    """One row; its loss is - sum_t weights[t] logp(tokens[t + 1])."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    engine: tuple[float, ...] = ()
    """The log-probs that an engine gave when it sampled the last tokens."""


def make_samples(num: int, seed: int = 0, vocab: int = 64, longest: int = 12) -> list[Sample]:
    """Random samples of 2 to `longest` tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (num,), generator=draw).tolist()
    return [
        Sample(
            tuple(torch.randint(0, vocab, (n,), generator=draw).tolist()),
            tuple((torch.randn(n - 1, generator=draw) / num).tolist()),
        )
        for n in lengths
    ]


def make_rows(samples: Sequence[Sample], padding: int = 0, junk: int = 0) -> Rows:
    """The samples' tokens, padded with `junk` by `padding` more than needed."""
    width = max(len(s.tokens) for s in samples) + padding
    tokens = [[*s.tokens, *[junk] * (width - len(s.tokens))] for s in samples]
    return Rows(torch.tensor(tokens), torch.tensor([len(s.tokens) for s in samples]))


def real(rows: Rows) -> Tensor:
    """True on the positions that predict a real token."""
    return torch.arange(1, rows.tokens.shape[1]) < rows.lengths[:, None]


def make_work(
    samples: Sequence[Sample], padding: int = 0, junk: int = 0, head: TokenHead | None = None
) -> Work:
    """One micro-batch of `samples`, with the metrics `loss` (a sum) and `logprob` (a mean)."""
    rows = make_rows(samples, padding, junk)
    width = rows.tokens.shape[1] - 1
    weights = torch.tensor([[*s.weights, *[math.nan] * (width - len(s.weights))] for s in samples])
    mask = real(rows)

    def loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
        terms = torch.where(mask, weights, 0.0) * torch.where(mask, output.logprobs, 0.0)
        total = -terms.sum()
        logprobs = output.logprobs.detach().double()
        return total, {
            "loss": Sum(total.detach()),
            "logprob": mean_over(logprobs[mask]),
            "token_mult_prob_error": mean_over(_engine_gaps(samples, logprobs).abs().exp()),
        }

    return Work(rows, head or TokenHead(), loss)


def _engine_gaps(samples: Sequence[Sample], logprobs: Tensor) -> Tensor:
    """Engine against trainer, of every token that an engine sampled."""
    gaps = [
        torch.tensor(s.engine, dtype=logprobs.dtype) - row[last - len(s.engine) : last]
        for s, row in zip(samples, logprobs, strict=True)
        for last in (len(s.tokens) - 1,)
    ]
    return torch.cat(gaps)


def split(samples: Sequence[Sample], sizes: Sequence[int]) -> list[list[Sample]]:
    """Consecutive parts of the given sizes, again and again, until the samples are used up."""
    parts: list[list[Sample]] = []
    rest = list(samples)
    while rest:
        size = sizes[len(parts) % len(sizes)]
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


class Plain(NamedTuple):
    """What a plain loop finds."""

    logprobs: list[Tensor]
    """One tensor per sample, without padding."""
    gradients: dict[str, Tensor]
    norm: float


def plain_loop(model_name: str, samples: Sequence[Sample], temperature: float = 1.0) -> Plain:
    """Forward and backward of one unpadded row at a time, in float32, no sharding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    found = []
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        logits = model(tokens, use_cache=False).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        (-(chosen * torch.tensor(sample.weights)).sum()).backward()
        found.append(chosen.detach())
    gradients = by_expert({name: p.grad for name, p in model.named_parameters()})
    squares = sum(float(g.double().square().sum()) for g in gradients.values())
    return Plain(found, gradients, math.sqrt(squares))


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as in a checkpoint: transformers holds all experts of a layer in two tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        for i, part in enumerate(tensor if last in ("gate_up_proj", "down_proj") else ()):
            if last == "gate_up_proj":
                gate, up = part.chunk(2)
                found[f"{stem}.{i}.gate_proj.weight"] = gate
                found[f"{stem}.{i}.up_proj.weight"] = up
            else:
                found[f"{stem}.{i}.down_proj.weight"] = part
        if last not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
    return found


def exported(backend: Backend, state: TrainState) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in backend.export(state)}


def gradient_of(
    backend: Backend, state: TrainState, works: Sequence[Work]
) -> tuple[dict[str, Tensor], float]:
    """The gradient and its norm, from one update of a backend opened with `GRADIENT`."""
    before = exported(backend, state)
    state, metrics = backend.update_(state, works)
    after = exported(backend, state)
    gradients = {name: (before[name].double() - after[name].double()) / RATE for name in before}
    return gradients, value(metrics["grad_norm"])


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative L2 distance of any tensor of `a` to its namesake in `b`."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).double().norm() / b[k].double().norm()) for k in a)
