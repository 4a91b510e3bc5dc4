"""Each rank holds some experts of a mixture: tokens travel to them, or answers add up.

Under expert parallelism ranks see different samples. A token is sent once for each expert it was
routed to, to the rank that holds it, and its answer comes back; all ranks send at once. Under
tensor parallelism they see the same tokens: each rank answers for its own experts, and a token's
answer is the sum over ranks.

Whatever the router does stays as it is. The experts' parameters are cut over the group by expert,
and FSDP shards what a rank has left over the ranks outside the group.

Source: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, section 2.
"""

import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import linear

NAMES = ("gate_up_proj", "down_proj")
"""What the parameters of a layer's experts are called."""


def find_experts(model: nn.Module) -> list[Any]:
    """The modules that hold all experts of a layer, as two tensors of weights.

    Shapes: [expert, 2 x inner, width] (gate and up) and [expert, width, inner].
    """
    found: list[Any] = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if set(own) == set(NAMES) and own["down_proj"].dim() == 3:
            number, width, inner = own["down_proj"].shape
            if own["gate_up_proj"].shape == (number, 2 * inner, width):
                found.append(module)
    return found


def check_experts(model: nn.Module, size: int) -> None:
    """Refuses to cut experts that a model does not have, or not in this form.

    Raises:
        ValueError: names the key and the form.
    """
    if not find_experts(model):
        raise ValueError(
            f"policy.dtensor_cfg.expert_parallel_size is {size}, but the model has no experts, or "
            "none in the form that can be cut (gate_up_proj and down_proj, without biases); set it "
            "to 1"
        )


def cut_(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Cuts every layer's experts over `mesh`, and lets tokens travel; returns those modules.

    Raises:
        ValueError: the model has no experts that can be cut, or `mesh` does not divide them.
    """
    key, layers = "policy.dtensor_cfg.expert_parallel_size", find_experts(model)
    check_experts(model, mesh.size())
    for experts in layers:
        number = _keep_own_(experts, mesh, key)
        experts.forward = types.MethodType(_travelling(mesh.get_group(), number), experts)
    return layers


def _keep_own_(experts: Any, mesh: DeviceMesh, key: str) -> int:
    """Cuts one layer's experts over `mesh`; returns how many there are on all ranks."""
    number, size = int(experts.down_proj.shape[0]), mesh.size()
    if number % size:
        raise ValueError(f"{key} {size} does not divide the model's {number} experts")
    each = number // size
    own = slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
    for name in NAMES:
        part = getattr(experts, name).detach()[own].clone()
        cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(cut))
    return number


class Share(ParallelStyle):
    """The experts of a layer, of which each rank holds some and all ranks see the same tokens.

    It gives a DTensor that is a part of a sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module not in find_experts(module):
            raise ValueError(
                "policy.dtensor_cfg.custom_parallel_plan: 'experts' is for modules that hold "
                f"gate_up_proj and down_proj, without biases, not for {type(module).__name__}"
            )
        _keep_own_(module, device_mesh, "policy.dtensor_cfg.tensor_parallel_size")
        module.forward = types.MethodType(_sharing(device_mesh), module)
        return module


def _sharing(mesh: DeviceMesh) -> Callable[..., DTensor]:
    def entering(x: Tensor) -> Tensor:
        """The same on every rank; its gradient is the sum of theirs."""
        placed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, run_check=False)
        whole = placed.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> DTensor:
        """Shapes: [tokens, width], [tokens, k], [tokens, k] to [tokens, width]."""
        seen, share = entering(hidden), entering(weights)
        own = experts.down_proj.to_local().shape[0]
        order, sent = _by_expert(chosen, own * mesh.size())
        counts = _numbers(sent)
        first = mesh.get_local_rank() * own
        start, mine = sum(counts[:first]), counts[first : first + own]
        order = order[start : start + sum(mine)]
        answers = _answers(experts, seen[order // chosen.shape[1]], mine)
        return DTensor.from_local(
            _added(seen, answers, order, share), mesh, [Partial()], run_check=False
        )

    return forward


def _travelling(group: dist.ProcessGroup, number: int) -> Callable[..., Tensor]:
    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Shapes: [tokens, width], [tokens, k], [tokens, k] to [tokens, width]."""
        size = dist.get_world_size(group)
        order, sent = _by_expert(chosen, number)
        sent = sent.view(size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        coming, going = _numbers(received.sum(1)), _numbers(sent.sum(1))
        travel = cast(Any, _Travel).apply
        arrived = travel(hidden[order // chosen.shape[1]], coming, going, group)
        # They come rank by rank, and of each rank expert by expert.
        expert = torch.arange(received.shape[1], device=hidden.device).repeat(size)
        by_expert = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        answers = _answers(experts, arrived[by_expert], _numbers(received.sum(0)))
        unsorted = torch.empty_like(answers).index_copy(0, by_expert, answers)
        answered = travel(unsorted, going, coming, group)
        return _added(hidden, answered, order, weights)

    return forward


def _by_expert(chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The places of `chosen`, flat, expert by expert; and how many each expert has."""
    wanted = chosen.reshape(-1)
    return wanted.argsort(stable=True), wanted.bincount(minlength=number)


def _added(hidden: Tensor, answers: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """For each token, the weighted sum of the answers to it; `order` are their places."""
    share = weights.reshape(-1)[order][:, None]
    token = order // weights.shape[1]
    return torch.zeros_like(hidden).index_add(0, token, (answers * share).to(hidden.dtype))


def _numbers(x: Tensor) -> list[int]:
    return cast("list[int]", x.tolist())


def _answers(experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """What this rank's experts make of their rows, expert by expert."""
    gate_up, down = (
        p.to_local() if isinstance(p, DTensor) else p
        for p in (experts.gate_up_proj, experts.down_proj)
    )
    answers: list[Tensor] = []
    parts: Any = cast(Any, rows).split(counts)
    for i, part in enumerate(parts):
        # The gate is the module's own: some clamp.
        answers.append(linear(experts._apply_gate(linear(part, gate_up[i])), down[i]))
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
