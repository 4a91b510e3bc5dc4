"""Log-probs, entropy and the most likely tokens from logits whose vocabulary is cut over ranks.

Rank r holds the columns [start, start + columns) of every row; nobody ever holds a whole row. Only
four numbers of a row travel for a log-prob, once: what its columns say of it (`Stats`), which join
in any order. For the most likely tokens, as many candidates as are asked for travel too.
Everything is float32 (float64 stays) whatever the logits' dtype.
"""

from functools import reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from minirl.types import TokenLogProbs

AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
"""Logits that are worked on at a time: 1 MB in float32 stay in a CPU's cache."""
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
    check_temperature(temperature)
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
    nowhere = flat.new_full(flat.shape[:1], -1, dtype=torch.long)
    seen = over_ranks(stats_of(flat, nowhere), shard.group)
    values, ids = _candidates(flat, k)
    ids = ids + shard.start
    if shard.group is not None:
        values, ids = _gather(values, shard.group), _gather(ids, shard.group)
    if int(torch.isfinite(values).sum(-1).min()) < k:
        raise ValueError(f"the top {k} tokens of a smaller vocabulary were asked for")
    order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
    logs = values.gather(-1, order) - seen.level[:, None]
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


def check_temperature(temperature: float) -> None:
    """Refuses what no log-prob has.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: log-probs exist for positive temperatures only;"
            " greedy sampling (0) has no policy gradient"
        )


class Stats(NamedTuple):
    """What some columns say of each row; zeros for no column. Shapes: [row]."""

    most: Tensor
    """m, the largest logit; never below the smallest float."""
    total: Tensor
    """S = sum exp(z - m)"""
    energy: Tensor
    """E = sum exp(z - m) (z - m); 0 unless asked for."""
    mine: Tensor
    """The logit of the row's token, if it is among the columns; else 0."""

    @property
    def level(self) -> Tensor:
        """log sum exp z."""
        return self.most + self.total.log()

    @property
    def logprob(self) -> Tensor:
        """Of the row's token, once all columns are joined."""
        return self.mine - self.most - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """log S - E / S."""
        return self.total.log() - self.energy / self.total


def stats_of(logits: Tensor, local: Tensor, *, with_entropy: bool = True) -> Stats:
    """The statistics of these columns.

    Shapes: [row, column], [row]: the column of the row's token, or one that does not exist.
    """
    lowest = torch.finfo(logits.dtype).min
    rows, columns = logits.shape
    if columns == 0:
        zeros = logits.new_zeros(rows)
        return Stats(zeros + lowest, zeros, zeros, zeros)
    own = (local >= 0) & (local < columns)
    mine = logits.gather(-1, local.where(own, 0)[:, None]).squeeze(-1).where(own, 0.0)
    most = logits.amax(-1).clamp_(min=lowest)
    shifted = logits - most[:, None]
    if not with_entropy:
        return Stats(most, shifted.exp_().sum(-1), torch.zeros_like(most), mine)
    # A token that cannot be sampled (-inf) adds 0, not 0 * -inf.
    weights = shifted.clamp_(min=-1e4).exp()
    return Stats(most, weights.sum(-1), weights.mul_(shifted).sum(-1), mine)


def joined(a: Stats, b: Stats) -> Stats:
    """What the columns of both say. Associative and commutative."""
    most = torch.maximum(a.most, b.most)
    total, energy = torch.zeros_like(most), torch.zeros_like(most)
    for part in (a, b):
        below = part.most - most
        share = below.exp()
        total = total + share * part.total
        # Where nothing is left of a part, its distance is not finite either.
        energy = energy + share * (part.energy + below.clamp(min=-1e4) * part.total)
    return Stats(most, total, energy, a.mine + b.mine)


def over_ranks(own: Stats, group: dist.ProcessGroup | None) -> Stats:
    """The statistics of whole rows. Collective."""
    if group is None:
        return own
    mine = torch.stack(own)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return reduce(joined, [Stats(*part.unbind()) for part in parts])


def pull_(into: Tensor, logits: Tensor, local: Tensor, level: Tensor, weights: Tensor) -> Tensor:
    """The gradient of sum(weights * log-prob) with respect to logits, in `into` (or their place).

    Shapes: [row, column] twice, [row] as in `stats_of`, [row], [row] to [row, column].
    """
    torch.sub(logits, level[:, None], out=into).exp_().mul_(-weights[:, None])
    if into.shape[1]:
        own = (local >= 0) & (local < into.shape[1])
        added = weights.where(own, 0.0).to(into.dtype)
        into.scatter_add_(-1, local.where(own, 0)[:, None], added[:, None])
    return into


class _VocabLogProbs(torch.autograd.Function):
    """Saves the logits and a number a row; the softmax is made again, in parts, backward."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        chosen: Tensor,
        shard: Shard,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        local = chosen - shard.start
        seen = [
            stats_of(_scaled(flat[part], temperature), local[part], with_entropy=with_entropy)
            for part in _parts(flat)
        ]
        whole = over_ranks(Stats(*map(torch.cat, zip(*seen, strict=True))), shard.group)
        entropy = whole.entropy if with_entropy else torch.zeros_like(whole.most)
        ctx.save_for_backward(flat, local, whole.level)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return whole.logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        flat, local, level = ctx.saved_tensors
        weights = grad_outputs[0] / ctx.temperature
        into = torch.empty_like(flat)
        for part in _parts(flat):
            scaled = _scaled(flat[part], ctx.temperature)
            place = into[part] if into.dtype == scaled.dtype else scaled
            found = pull_(place, scaled, local[part], level[part], weights[part])
            if place is scaled:
                into[part] = found
        return into, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    precise = _precise(logits)
    return precise if temperature == 1.0 else precise / temperature


def _parts(flat: Tensor) -> list[slice]:
    size = max(AT_ONCE[flat.device.type] // max(flat.shape[1], 1), 1)
    return [slice(at, at + size) for at in range(0, max(len(flat), 1), size)]
