"""Megatron-Core without CUDA: process-wide patches and stand-in modules, all of them in this file.

Megatron-Core is written for GPUs. On a machine without one, `install` makes its code run as it is,
on the CPU and over gloo, so that the layouts of the backend can be tested for what they compute:

- `torch.cuda` answers for the CPU: the current device, streams and events that do nothing, the
  CPU's random state; factories and `.to`, `.cuda`, `.pin_memory` take "cuda" for "cpu", and
  `Tensor.type()` gives the names of CUDA's tensor types, by which Core tells dtypes apart.
- The norm of the local layers refuses sequence parallelism, their attention context parallelism
  and packed sequences: both have stand-ins here with the same parameters. The token dispatcher of
  mixtures of experts hands its split sizes out as CUDA tensors: here as numpy arrays.
- A gradient norm in float32 is 1.7 percent too small at 134 million elements: torch's norm on a CPU
  loses what it adds to a long sum. Here it is taken in float64.
- Core's optimizer over plain torch.optim.AdamW resumes wrongly, since it keeps its step count per
  parameter; the Adam here keeps it per group, as Transformer Engine's does.

With CUDA nothing is installed. Nothing else in minirl may import this file but the Megatron
backend, and a green run through it says nothing about Transformer Engine, NCCL or fused kernels.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.optim import Optimizer

from minirl.backends.attention import causal_attention
from minirl.backends.norms import global_norm

CPU = torch.device("cpu")
FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"),
    *("empty_like", "zeros_like"),
)


@functools.cache
def install() -> None:
    """Patches torch and Megatron-Core in this process, once; does nothing where CUDA is."""
    if torch.cuda.is_available():
        return
    _patch_devices()
    _patch_factories()
    _patch_streams()
    _patch_random_state()
    _patch_type_names()
    _replace_modules()


# ---- torch --------------------------------------------------------------------------------------


def _is_cuda(device: object) -> bool:
    match device:
        case str():
            return device.startswith("cuda")
        case torch.device():
            return device.type == "cuda"
        case _:
            return isinstance(device, int) and not isinstance(device, bool)


# torch's compiler lists the functions of torch.cuda and takes none twice: each name gets its own.


def _nothing() -> Callable[..., None]:
    def done_already(*args: Any, **kwargs: Any) -> None: ...

    return done_already


def _itself() -> Callable[..., Any]:
    def already_there(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    return already_there


def _patch_devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _nothing())


def _patch_factories() -> None:
    # `with torch.device("meta")` knows the factories by identity, from a table that is filled at
    # its first use: filled later, it would know the wrappers and change nothing.
    cast(Any, torch.utils)._device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    plain_to = tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return cast(Tensor, plain_to(self, *args, **kwargs))

    tensor.to = to
    tensor.cuda, tensor.pin_memory = _itself(), _itself()
    cast(Any, torch.nn.Module).cuda = _itself()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _Event:
    """Always over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _nothing()

    def query(self) -> bool:
        return True


class _Stream:
    """The one stream of a CPU: everything in it has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    wait_stream = wait_event = synchronize = _nothing()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


def _patch_streams() -> None:
    cuda: Any = torch.cuda
    cuda.current_stream, cuda.default_stream = lambda: _Stream(), lambda: _Stream()
    cuda.stream = nullcontext
    cuda.Stream, cuda.Event = _Stream, _Event
    cast(Any, torch.Tensor).record_stream = _nothing()


def _patch_random_state() -> None:
    trackers: Any = importlib.import_module("megatron.core.tensor_parallel.random")

    def get(*args: Any, **kwargs: Any) -> Tensor:
        return torch.random.get_rng_state()

    def put(state: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.random.set_rng_state(state)

    for module in (cast(Any, torch.cuda), cast(Any, torch.cuda.random)):
        module.get_rng_state, module.set_rng_state = get, put
    cast(Any, torch.cuda).manual_seed = torch.default_generator.manual_seed
    trackers._get_cuda_rng_state, trackers._set_cuda_rng_state = get, put


def _patch_type_names() -> None:
    tensor: Any = torch.Tensor
    plain_type = tensor.type

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain_type(self, *args, **kwargs)
        if args or kwargs or found.startswith("torch.cuda."):
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    tensor.type = type_


# ---- Megatron-Core ------------------------------------------------------------------------------


def _replace_modules() -> None:
    specs, optimizer, steps, distributed, dispatcher, block, backends = (
        cast(Any, importlib.import_module(f"megatron.core.{name}"))
        for name in (
            "models.gpt.gpt_layer_specs",
            "optimizer",
            "optimizer.optimizer",
            "optimizer.distrib_optimizer",
            "transformer.moe.token_dispatcher",
            "transformer.transformer_block",
            "models.backends",
        )
    )

    base: Any = backends.LocalSpecProvider

    class Provider(base):  # type: ignore[misc]  # Core has no types
        """Core's local layers, with the two stand-ins."""

        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            return make_norm

        def core_attention(self) -> Any:
            return attention_class()

    specs.LocalSpecProvider, specs.LNImpl, block.LayerNormImpl = Provider, make_norm, make_norm
    plain_move = dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = plain_move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    dispatcher.maybe_move_tensor_to_cpu = move
    steps.get_grad_norm_fp32 = exact_grad_norm
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
    distributed.HAVE_APEX_OR_TE = True


def exact_grad_norm(
    grads_for_norm: Sequence[Tensor],
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> float:
    """In the place of Core's: the norm of all gradients of the group, right to 1e-6 at any size.

    Collective over the group.
    """
    assert norm_type == 2, "the gradient norm of an update is the L2 norm"
    own = global_norm(grads_for_norm)
    squares = torch.tensor(own * own, dtype=torch.float64)
    dist.all_reduce(squares, group=grad_stats_parallel_group)
    return float(squares.sqrt())


def make_norm(config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> torch.nn.Module:
    """RMSNorm or LayerNorm; its parameters say whether their gradients are partial sums."""
    cls = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = (_around_one(cls) if config.layernorm_zero_centered_gamma else cls)(hidden_size, eps=eps)
    for parameter in norm.parameters():
        cast(Any, parameter).sequence_parallel = config.sequence_parallel
    return norm


@functools.cache
def _around_one(cls: Any) -> Any:
    """The same norm with weights that are given as their distance from one."""

    class Norm(cls):  # type: ignore[misc]  # given at run time
        def forward(self, x: Tensor) -> Tensor:
            if cls is torch.nn.RMSNorm:
                return rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)
            return layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)

    return Norm


@functools.cache
def attention_class() -> Any:
    """Causal attention for sbhd and thd rows, grouped queries and context parallelism."""
    groups: Any = importlib.import_module("megatron.core.parallel_state")
    module: Any = importlib.import_module("megatron.core.transformer.module")
    layers: Any = importlib.import_module("megatron.core.transformer.utils")

    class CoreAttention(module.MegatronModule):  # type: ignore[misc]  # Core has no types
        """In the place of Core's DotProductAttention: same arguments, same layout."""

        def __init__(
            self,
            config: Any,
            layer_number: int,
            attn_mask_type: Any,
            attention_type: str,
            attention_dropout: float | None = None,
            softmax_scale: float | None = None,
            **ignored: Any,
        ) -> None:
            super().__init__(config=config)
            for name, plain in (("attn_logit_softcapping", None), ("softmax_type", "vanilla")):
                if getattr(config, name, plain) != plain:
                    raise ValueError(
                        "policy.megatron_cfg: the attention for machines without a GPU has no "
                        f"{name} (the model's is {getattr(config, name)!r})"
                    )
            size = config.window_size
            of_layer = (size, config.window_attn_skip_freq, layer_number)
            self.window = size[0] + 1 if layers.is_layer_window_attention(*of_layer) else None
            self.scale, self.group = softmax_scale, groups.get_context_parallel_group()

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            packed_seq_params: Any = None,
            **ignored: Any,
        ) -> Tensor:
            assert attention_mask is None, "rows are causal; padding needs no mask"
            attend = functools.partial(causal_attention, scale=self.scale, window=self.window)
            if packed_seq_params is None:
                lengths = [query.shape[0] * dist.get_world_size(self.group)]
                return attend(query, key, value, lengths, self.group)
            ends = packed_seq_params.cu_seqlens_q_padded
            lengths = (ends[1:] - ends[:-1]).tolist()
            rows = [x.unsqueeze(1) for x in (query, key, value)]
            return attend(rows[0], rows[1], rows[2], lengths, self.group)[:, 0]

    return CoreAttention


class GroupStepAdam(Optimizer):
    """AdamW with the state of Transformer Engine's FusedAdam: `step` belongs to the group.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w - lr weight_decay w - lr m' / (sqrt(v') + eps);  m' = m / (1 - b1^t), v' = v / (1 - b2^t)

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **ignored: Any,
    ) -> None:
        """Takes what Core gives FusedAdam; what a CPU has no use for is ignored."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Core gives none and reads no loss
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], cast(Tensor, parameter.grad).float()
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1 ** group["step"]))
