"""The FSDP2 backend: any Hugging Face causal LM, sharded over the data axis.

In: rows, a head and a loss per micro-batch. Out: log-probs, updates, full weights. Gradients of
ranks add up (never average), masters are float32 whatever the compute precision, and the model
stays in evaluation mode: dropout would break the equality of a first ratio with exactly 1.

Rows are padded on the right and run without an attention mask: under causal attention no real
token sees a later one, and explicit positions keep models from guessing where documents begin.

It does not pack several samples into a row, and it shards over the data axis only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Weights, Work
from minirl.backends import optim, shards
from minirl.backends.norms import global_norm, local_shard, scale_
from minirl.hf import check_model
from minirl.logprobs import token_logprobs, token_logprobs_and_entropy
from minirl.metrics import Metrics, Sum, mean_of, merge, scalar
from minirl.parallel import Axis, require_equal
from minirl.policy_config import PolicyConfig
from minirl.rng import Key
from minirl.types import Rows, Scalar

# A decoder layer below this size is sharded together with the root: its own all-gathers and
# reduce-scatters would cost latency (a third of an update of 2 small layers over gloo) and
# save no memory worth the name.
UNIT_PARAMETERS = 2**20

Model: TypeAlias = Any
"""A `transformers.PreTrainedModel`, whose calls are not typed."""


@dataclass(slots=True)
class Trainer:
    """Everything that changes in place."""

    model: Model
    optimizer: Optimizer
    schedule: LRScheduler | None
    reference: list[Tensor] | None
    """Local shards of the weights as first loaded, on the CPU, in the order of `parameters`."""
    axis: Axis
    device: torch.device
    max_grad_norm: float | None
    updates: int = 0
    """Of the only valid state."""
    stamp: int = 0
    """How many states were consumed."""

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by Hugging Face name; tied ones once."""
        return dict(self.model.named_parameters())


@dataclass(frozen=True, slots=True)
class Handle:
    """A trainer as of one moment. Valid until the trainer's next change."""

    trainer: Trainer
    stamp: int


State: TypeAlias = TrainState[Handle]


def open_backend(
    cfg: PolicyConfig, axis: Axis, key: Key, *, with_reference: bool = False
) -> tuple[Backend[Handle], State]:
    """Loads `cfg.model_name` and shards it over `axis`; the state is that of a fresh run.

    Every rank reads the whole model into host memory in float32 and keeps its shard; the
    device never holds more than one sharding unit in full. `with_reference` also keeps the
    weights as loaded for `logprobs(..., "reference")`, as shards in host memory.

    Collective: every rank of `axis` calls this.

    Raises:
        ValueError: a model that cannot be read in full, an optimizer or a schedule that cannot be
            built (the message names the key), or an axis without a process group.
    """
    check_model(cfg.model_name)
    optim.check(cfg)
    if axis.group is None:
        raise ValueError(
            "the dtensor backend needs a process group: open one with parallel.world()"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    model = _load_model(cfg.model_name)
    _shard_(model, DeviceMesh.from_group(axis.group, device.type), cfg.precision)
    parameters = list(model.parameters())
    optimizer, schedule = optim.build(cfg, parameters)
    reference = [_to_host(p) for p in parameters] if with_reference else None
    trainer = Trainer(model, optimizer, schedule, reference, axis, device, cfg.max_grad_norm)
    backend: Backend[Handle] = Backend(
        axis=axis,
        data_axis=axis,
        logprobs=_logprobs,
        update_=_update_,
        end_step_=_end_step_,
        export=_export,
        save=_save,
        load_=_load_,
    )
    return backend, TrainState(Handle(trainer, 0), step=0, updates=0, cursor=0, key=key)


# ---- model --------------------------------------------------------------------------------------


def _load_model(name: str) -> Model:
    """The model in float32 on the CPU, in evaluation mode.

    Raises:
        ValueError: the checkpoint lacks weights of the model, or holds them in other shapes.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    untyped: Any = AutoModelForCausalLM
    model, report = untyped.from_pretrained(
        name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ValueError(
            f"policy.model_name: the checkpoint {name!r} lacks weights that its config.json asks "
            f"for, or has them in other shapes: {wrong[:5]} ({len(wrong)} in all)"
        )
    # Which tokens are padding is told by lengths. Left alone, the embedding of the tokenizer's
    # padding token, often also the end token, would get no gradient.
    model.get_input_embeddings().padding_idx = None
    model.eval()
    return model


def _shard_(model: Model, mesh: DeviceMesh, precision: str) -> None:
    """Shards large decoder layers one by one, the rest as one unit; moves to the mesh's device."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        if sum(p.numel() for p in layer.parameters()) >= UNIT_PARAMETERS:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in _units(model):
        # Sums, not means: losses are already divided by the counts of the global batch. The
        # setters do not recurse, and gloo knows the plain sum only.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _units(model: Model) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _view(trainer: Trainer, rows: Rows, head: TokenHead) -> TokenOutput:
    """The head's view of the rows: the one path of `logprobs` and `update_`."""
    tokens, lengths = rows.tokens.to(trainer.device), rows.lengths.to(trainer.device)
    positions = torch.arange(tokens.shape[1], device=trainer.device).expand_as(tokens)
    tokens = torch.where(positions < lengths[:, None], tokens, 0)
    output = trainer.model(input_ids=tokens, position_ids=positions, use_cache=False)
    logits, following = output.logits[:, :-1], tokens[:, 1:]
    if head.entropy:
        return TokenOutput(*token_logprobs_and_entropy(logits, following, head.temperature))
    return TokenOutput(token_logprobs(logits, following, head.temperature), None)


# ---- the functions of the contract --------------------------------------------------------------


def _current(state: State) -> Trainer:
    """The state's trainer.

    Raises:
        ValueError: the state was consumed.
    """
    trainer = state.model.trainer
    if state.model.stamp != trainer.stamp:
        raise ValueError(
            f"state of update {state.updates} was consumed; now at {trainer.updates}: "
            "go on with the state that the last update_, end_step_ or load_ returned"
        )
    return trainer


def _succeed(changed: State) -> State:
    """The only valid state from now on, with the values of `changed`."""
    trainer = changed.model.trainer
    trainer.stamp += 1
    trainer.updates = changed.updates
    return replace(changed, model=Handle(trainer, trainer.stamp))


def _logprobs(
    state: State, rows: Sequence[Rows], head: TokenHead, weights: Weights
) -> list[TokenOutput]:
    """See `Backend.logprobs`. Outputs live on the device of their rows.

    Raises:
        ValueError: the reference is asked for but was not loaded; or ranks differ in the number
            of micro-batches.
    """
    trainer = _current(state)
    require_equal("the number of micro-batches", len(rows), trainer.axis, "fill up with any rows")
    with torch.no_grad(), _holding(trainer, weights):
        return [_on(r.tokens.device, _view(trainer, r, head)) for r in rows]


def _on(device: torch.device, output: TokenOutput) -> TokenOutput:
    entropy = None if output.entropy is None else output.entropy.to(device)
    return TokenOutput(output.logprobs.to(device), entropy)


@contextmanager
def _holding(trainer: Trainer, weights: Weights) -> Iterator[None]:
    """Puts the asked weights into the model for the duration."""
    parameters = list(trainer.parameters().values())
    policy: list[Tensor] = []
    if weights == "reference":
        if trainer.reference is None:
            raise ValueError("no reference was loaded: open the backend with with_reference=True")
        policy = [_to_host(p) for p in parameters]
        _copy_(parameters, trainer.reference)
    try:
        yield
    finally:
        # Without a backward the root would keep its gathered weights, blind to later changes.
        for unit in _units(trainer.model):
            unit.reshard()
        if policy:
            _copy_(parameters, policy)


def _to_host(tensor: Tensor) -> Tensor:
    return local_shard(tensor.detach()).to("cpu", copy=True)


def _copy_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, new in zip(parameters, values, strict=True):
        local_shard(parameter.detach()).copy_(new)


def _update_(state: State, works: Sequence[Work]) -> tuple[State, Metrics]:
    """See `Backend.update_`. A skipped update does not count in `updates`.

    Consumes: the state, also when a loss raises.
    """
    trainer = _current(state)
    if not works:
        raise ValueError("an update needs at least one micro-batch")
    # Consumed already now: an error in a loss leaves half a gradient behind, inside the model.
    trainer.stamp += 1
    seen = [
        _accumulate_(trainer, work, is_last=i == len(works) - 1) for i, work in enumerate(works)
    ]
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = global_norm(gradients)
    lr = float(trainer.optimizer.param_groups[0]["lr"])
    taken = isfinite(norm)
    if taken:
        if trainer.max_grad_norm is not None and norm > trainer.max_grad_norm:
            scale_(gradients, trainer.max_grad_norm / norm)
        trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    # Counted on one rank, since the sum over ranks is what is logged.
    skipped = Sum(scalar(float(not taken and trainer.axis.rank == 0)))
    own: Metrics = {"grad_norm": mean_of(norm), "lr": mean_of(lr), "nonfinite_updates": skipped}
    return _succeed(replace(state, updates=state.updates + taken)), merge(*seen, own)


def _accumulate_(trainer: Trainer, work: Work, *, is_last: bool) -> Metrics:
    """Adds the gradient of one micro-batch; ranks exchange gradients at the last one only."""
    trainer.model.set_requires_gradient_sync(is_last)
    output = _view(trainer, work.rows, work.head)
    loss, metrics = work.loss(output)
    _attached(loss, output).backward()
    return metrics


def _attached(loss: Scalar, output: TokenOutput) -> Scalar:
    """The loss, with a zero gradient if it has none: every rank must take part in the backward."""
    if loss.requires_grad:
        return loss
    return loss + torch.zeros_like(output.logprobs).mul(output.logprobs).sum()


def _end_step_(state: State) -> State:
    """See `Backend.end_step_`."""
    trainer = _current(state)
    if trainer.schedule is not None:
        optim.advance_(trainer.schedule)
    return _succeed(replace(state, step=state.step + 1))


def _export(state: State) -> Iterator[tuple[str, Tensor]]:
    """See `Backend.export`. Float32; tied weights once. Collective, one tensor at a time."""
    return ((name, _full(p.detach())) for name, p in _current(state).parameters().items())


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _save(state: State, folder: Path) -> None:
    """See `Backend.save`."""
    trainer = _current(state)
    values = {
        "step": state.step,
        "updates": state.updates,
        "cursor": state.cursor,
        "key": state.key,
        "schedule": None if trainer.schedule is None else trainer.schedule.state_dict(),
        "optimizer": optim.settings(trainer.optimizer),
    }
    shards.save(folder, trainer.parameters(), trainer.optimizer, values, trainer.axis)


def _load_(state: State, folder: Path) -> State:
    """See `Backend.load_`. The reference stays what it was.

    Raises:
        ValueError: the folder holds no such checkpoint, or that of another model, schedule or
            optimizer.
    """
    trainer = _current(state)
    values = shards.read_values(folder)
    if (values["schedule"] is None) != (trainer.schedule is None):
        raise ValueError(
            f"{str(folder)!r} was saved {'without' if trainer.schedule else 'with'} a schedule: "
            "set policy.scheduler as it was, or start a new run"
        )
    if values["optimizer"] != optim.settings(trainer.optimizer):
        raise ValueError(
            f"{str(folder)!r} was saved with the optimizer {values['optimizer']}, not "
            f"{optim.settings(trainer.optimizer)}: set policy.optimizer as it was, or start anew"
        )
    shards.load_(folder, trainer.parameters(), trainer.optimizer, values, trainer.axis)
    if trainer.schedule is not None:
        trainer.schedule.load_state_dict(values["schedule"])
    step, updates, cursor, key = (int(values[k]) for k in ("step", "updates", "cursor", "key"))
    return _succeed(
        replace(state, step=step, updates=updates, cursor=cursor, key=Key(key)),
    )
