"""Expert parallelism: each rank holds some experts of a mixture, and tokens travel to them.

A token is sent once for each expert it was routed to, to the rank that holds it, and its answer
comes back; ranks see different samples, so all of them send at once. Whatever the router does stays
as it is. The experts' parameters are cut over the group by expert, and sharded over the ranks
outside it by FSDP along their next dimension.

Source: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, section 2.
"""

import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear


def find_experts(model: nn.Module) -> list[Any]:
    """The modules that hold all experts of a layer: two tensors, [expert, rows, columns] each."""
    found: list[Any] = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if set(own) == {"gate_up_proj", "down_proj"} and own["down_proj"].dim() == 3:
            found.append(module)
    return found


def cut_(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Cuts every layer's experts over `mesh`, and lets tokens travel; returns those modules.

    Raises:
        ValueError: the model has no experts that can be cut, or `mesh` does not divide them.
    """
    key, size = "policy.dtensor_cfg.expert_parallel_size", mesh.size()
    layers = find_experts(model)
    if not layers:
        raise ValueError(
            f"{key} is {size}, but the model has no experts, or none in the form that can be cut "
            "(gate_up_proj and down_proj, without biases); set it to 1"
        )
    for experts in layers:
        number = experts.down_proj.shape[0]
        if number % size:
            raise ValueError(f"{key} {size} does not divide the model's {number} experts")
        each = number // size
        own = slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
        for name in ("gate_up_proj", "down_proj"):
            part = getattr(experts, name).detach()[own].clone()
            cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(cut))
        experts.forward = types.MethodType(_forward_of(mesh.get_group(), number), experts)
    return layers


def _forward_of(group: dist.ProcessGroup, number: int) -> Callable[..., Tensor]:
    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shapes: [tokens, width], [tokens, k], [tokens, k] to [tokens, width]."""
        size = dist.get_world_size(group)
        wanted = chosen.reshape(-1)
        order = wanted.argsort(stable=True)
        token = order // chosen.shape[1]
        sent = wanted.bincount(minlength=number).view(size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        coming, going = _numbers(received.sum(1)), _numbers(sent.sum(1))
        travel = cast(Any, _Travel).apply
        arrived = travel(hidden[token], coming, going, group)
        # They come rank by rank, and of each rank expert by expert.
        expert = torch.arange(received.shape[1], device=hidden.device).repeat(size)
        by_expert = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        answers = _answers(experts, arrived[by_expert], _numbers(received.sum(0)))
        unsorted = torch.empty_like(answers).index_copy(0, by_expert, answers)
        answered = travel(unsorted, going, coming, group)
        share = weights.reshape(-1)[order][:, None]
        return torch.zeros_like(hidden).index_add(0, token, (answered * share).to(hidden.dtype))

    return forward


def _numbers(x: Tensor) -> list[int]:
    return [int(n) for n in x]


def _answers(experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """What this rank's experts make of their rows, expert by expert."""
    gate_up, down = (
        p.to_local() if isinstance(p, DTensor) else p
        for p in (experts.gate_up_proj, experts.down_proj)
    )
    answers: list[Tensor] = []
    parts: Any = cast(Any, rows).split(counts)
    for i, part in enumerate(parts):
        gate, up = linear(part, gate_up[i]).chunk(2, dim=-1)
        answers.append(linear(experts.act_fn(gate) * up, down[i]))
    return torch.cat(answers)


class _Travel(torch.autograd.Function):
    """Rows to other ranks; backward, their gradients home."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, out: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.out, ctx.sent, ctx.group = out, sent, group
        arrived = rows.new_empty(sum(out), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), out, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = grad_outputs[0].contiguous()
        home = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(home, gradient, ctx.sent, ctx.out, group=ctx.group)
        return home, None, None, None
