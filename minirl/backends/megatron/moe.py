"""How evenly a mixture's router deals tokens to experts, layer by layer.

Counted in forward passes that are trained (not in those that are thrown away and recomputed),
padding included. 1 is perfectly even; the number of experts over those chosen is the worst.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.backends.megatron.bridge import core
from minirl.backends.megatron.setup import ROUTER, Chunk
from minirl.metrics import Metrics, mean_of


@dataclass(slots=True)
class RouterLoads:
    """Tokens that each expert was given since the last reading, by layer (counted from 1)."""

    counts: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


def watch_routers(chunks: Sequence[Chunk]) -> RouterLoads:
    """Counts on every router of this stage from now on."""
    loads = RouterLoads()

    def count(router: Any, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            chosen = output[1].detach().sum(0, dtype=torch.long)
            before = loads.counts.get(router.layer_number, 0)
            loads.counts[router.layer_number] = chosen + before

    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.endswith(ROUTER):
                module.register_forward_hook(count)
    return loads


def read_loads_(loads: RouterLoads) -> Metrics:
    """`moe/layer_N/max_load`: tokens of the busiest expert over the mean, of all layers; resets.

    Collective: every rank calls this.
    """
    groups = core("parallel_state")
    everywhere = groups.get_tensor_and_data_parallel_group(with_context_parallel=True)
    own: dict[str, float] = {}
    for layer in sorted(loads.counts):
        total = loads.counts[layer]
        dist.all_reduce(total, group=everywhere)
        own[f"moe/layer_{layer}/max_load"] = float(total.max() / total.double().mean())
    loads.counts.clear()
    parts: list[Any] = [None] * groups.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(parts, own, group=groups.get_pipeline_model_parallel_group())
    return {name: mean_of(x) for part in parts for name, x in part.items()}
