"""Log-probs, entropy and the most likely tokens from logits whose vocabulary is cut over ranks.

Rank r holds the columns [start, start + columns) of every row; nobody ever holds a whole row. Only
statistics of a row travel: its maximum, and three sums. With a single rank (`group` None) the same
code is the plain log-softmax. Everything is float32 (float64 stays) whatever the logits' dtype.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

from minirl.types import TokenLogProbs

CACHE_SIZED = 2**18
"""Elements of the chunks that a CPU works on: 1 MB in float32."""
LocalLogits = Float[Tensor, "batch position columns"]


class Shard(NamedTuple):
    """Which columns of the vocabulary the logits of this rank are."""

    start: int
    group: dist.ProcessGroup | None = None


def vocab_logprobs(
    logits: LocalLogits,
    tokens: Int[Tensor, "batch position"],
    shard: Shard,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
) -> tuple[TokenLogProbs, TokenLogProbs]:
    r"""The log-prob of one token at each position, and the exact entropy, on every rank.

    log p(y) = z_y - m - log S,  H = log S - E / S,
    m = max_v z_v,  S = sum_v exp(z_v - m),  E = sum_v exp(z_v - m) (z_v - m),  z = logits / T

    The gradient of the log-prob with respect to this rank's logits is g (1[v = y] - p_v) / T: every
    rank is given the same g, that of the whole loss. The entropy carries none, and is 0 unless
    asked for.

    Collective: every rank of the group calls this with the same tokens.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: log-probs exist for positive temperatures only;"
            " greedy sampling (0) has no policy gradient"
        )
    flat, chosen = logits.flatten(0, 1), tokens.reshape(-1)
    found, entropy = cast(Any, _VocabLogProbs).apply(flat, chosen, shard, temperature, with_entropy)
    return found.view(tokens.shape), entropy.view(tokens.shape)


def vocab_top_k(
    logits: LocalLogits, k: int, shard: Shard, temperature: float = 1.0
) -> tuple[Float[Tensor, "batch position k"], Int[Tensor, "batch position k"]]:
    """The log-probs and ids of the `k` most likely tokens of each position, without a gradient.

    Equal logits are taken in the order of their ids. Only k candidates per rank travel.

    Collective: every rank of the group calls this.

    Raises:
        ValueError: the vocabulary has fewer than `k` tokens.
    """
    flat = _precise(logits.detach().flatten(0, 1)) / temperature
    most, total, _ = _statistics(flat, shard.group)
    values, ids = _candidates(flat, k)
    ids = ids + shard.start
    if shard.group is not None:
        values, ids = _gather(values, shard.group), _gather(ids, shard.group)
    if int(torch.isfinite(values).sum(-1).min()) < k:
        raise ValueError(f"the top {k} tokens of a smaller vocabulary were asked for")
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    logs = values.gather(-1, order) - most - total.log()
    shape = (*logits.shape[:2], k)
    return logs.view(shape), ids.gather(-1, order).view(shape)


def _candidates(flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, largest first, filled up with -inf."""
    order = flat.argsort(dim=-1, descending=True, stable=True)[:, :k]
    pad = (0, k - order.shape[1])
    values = torch.nn.functional.pad(flat.gather(-1, order), pad, value=-torch.inf)
    return values, torch.nn.functional.pad(order, pad)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _statistics(flat: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """m, S and E of every row, as columns."""
    most = flat.new_full((len(flat), 1), -torch.inf)
    if flat.shape[1]:
        most = flat.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    shifted = flat - most
    weights = shifted.exp()
    # A token that cannot be sampled (-inf) adds 0, not 0 * -inf.
    energy = (weights * shifted.nan_to_num(neginf=0.0)).sum(-1)
    total, energy = _sum(torch.stack([weights.sum(-1), energy]), group)
    return most, total[:, None], energy[:, None]


class _VocabLogProbs(torch.autograd.Function):
    """Saves the logits and two numbers a row; the softmax is made again, in parts, backward."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        chosen: Tensor,
        shard: Shard,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        entropy: list[Tensor] = []
        levels: list[Tensor] = []
        own = (chosen >= shard.start) & (chosen < shard.start + flat.shape[1])
        local = torch.where(own, chosen - shard.start, 0)
        # Ranks reduce part by part, so they cut rows alike, however many columns each has.
        for part in _parts(flat, shard.group):
            scaled = _precise(flat[part])
            scaled = scaled if temperature == 1.0 else scaled / temperature
            if shard.group is None:
                values = _on_one_rank(scaled, local[part, None], with_entropy=with_entropy)
                for value, values_so_far in zip(values, (found, entropy, levels), strict=True):
                    values_so_far.append(value)
                continue
            most, total, energy = _statistics(scaled, shard.group)
            level = most + total.log()
            mine = scaled.new_zeros(len(scaled), 1)
            if flat.shape[1]:
                mine = scaled.gather(-1, local[part, None]).where(own[part, None], 0.0)
            found.append((_sum(mine, shard.group) - level).squeeze(-1))
            entropy.append((total.log() - energy / total).squeeze(-1))
            levels.append(level)
        ctx.save_for_backward(flat, local, own, torch.cat(levels))
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies := torch.cat(entropy))
        return torch.cat(found), entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = grad_outputs[0]
        flat, local, own, levels = ctx.saved_tensors
        into = torch.empty_like(flat)
        for part in _parts(flat):
            scaled = _precise(flat[part])
            scaled = scaled if ctx.temperature == 1.0 else scaled / ctx.temperature
            away = -(scaled - levels[part]).exp()
            if flat.shape[1]:
                away.scatter_add_(-1, local[part, None], own[part, None].to(away.dtype))
            into[part] = (away * (gradient[part, None] / ctx.temperature)).to(into.dtype)
        return into, None, None, None, None


def _on_one_rank(
    scaled: Tensor, chosen: Tensor, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and log-sum-exp of every row, by torch's one pass over it."""
    logs = log_softmax(scaled, -1)
    mine = logs.gather(-1, chosen)
    level = scaled.gather(-1, chosen) - mine
    if not bool(level.isfinite().all()):  # a token that cannot be sampled was chosen
        level = scaled.logsumexp(-1, keepdim=True)
    entropy = torch.zeros_like(mine)
    if with_entropy:
        entropy = -(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
    return mine.squeeze(-1), entropy.squeeze(-1), level


def _parts(flat: Tensor, group: dist.ProcessGroup | None = None) -> list[slice]:
    """Rows to work on at a time; the same on every rank of the group."""
    size = max(len(flat), 1)
    if flat.device.type == "cpu":
        columns = torch.tensor(max(flat.shape[1], 1))
        if group is not None:
            dist.all_reduce(columns, op=dist.ReduceOp.MAX, group=group)
        size = max(CACHE_SIZED // int(columns), 1)
    return [slice(at, at + size) for at in range(0, max(len(flat), 1), size)]
