"""The FSDP2 backend: any Hugging Face causal LM, sharded, and cut over layers and sequences.

In: rows, a head and a loss per micro-batch. Out: log-probs, updates, full weights. Gradients of
ranks add up (never average), masters are float32 whatever the compute precision, and the model
stays in evaluation mode: dropout would break the equality of a first ratio with exactly 1.

Rows are padded on the right and run without an attention mask: under causal attention no real
token sees a later one, and explicit positions keep models from guessing where documents begin.
Packed rows, and rows that are cut over ranks, are attended to by an attention of our own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Weights, Work
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.backends.dtensor import optim, shards
from minirl.backends.dtensor.compare import check_logprobs
from minirl.backends.dtensor.forward import Forward, open_forward, view
from minirl.backends.dtensor.loss_scale import LossScale, after
from minirl.backends.dtensor.setup import (
    Meshes,
    Model,
    load_model,
    open_meshes,
    shard_,
    units,
)
from minirl.backends.hf_files import as_on_disk
from minirl.backends.norms import global_norm, local_shard, scale_
from minirl.backends.trainer import Handle, attached, current, succeed, update_metrics
from minirl.config.policy import PolicyConfig
from minirl.hf import check_model
from minirl.metrics import Metrics, mean_of, merge
from minirl.parallel import Axis, require_equal, sum_over
from minirl.rng import Key
from minirl.types import Rows


@dataclass(slots=True)
class Trainer:
    """Everything that changes in place."""

    forward: Forward
    optimizer: Optimizer
    schedule: LRScheduler | None
    build: Callable[[], tuple[Optimizer, LRScheduler | None]]
    """Both anew, as before the first step."""
    reference: list[Tensor] | None
    """Local shards of the weights as first loaded, on the CPU, in the order of `parameters`."""
    lora: dtensor_lora.Lora | None
    """With adapters, the reference is the model without them."""
    axis: Axis
    data_axis: Axis
    max_grad_norm: float | None
    loss_scale: LossScale | None
    """In float16 only."""
    offload_optimizer: bool
    """Whether its state leaves the device while log-probs are taken."""
    updates: int = 0
    """Of the only valid state."""
    stamp: int = 0
    """Changes whenever a state is consumed; a handle with another stamp is refused."""

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.forward.model

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters by Hugging Face name; tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


State: TypeAlias = TrainState[Handle[Trainer]]


def open_backend(
    cfg: PolicyConfig, axis: Axis, key: Key, *, with_reference: bool = False
) -> tuple[Backend[Handle[Trainer]], State]:
    """Loads `cfg.model_name` and shards it over `axis`; the state is that of a fresh run.

    First a small stand-in of the model is held against Hugging Face. Then every rank reads the
    whole model into host memory in float32 and keeps its shard; the
    device never holds more than one sharding unit in full. `with_reference` also keeps the
    weights as loaded for `logprobs(..., "reference")`, as shards in host memory. With LoRA the
    reference is the model without its adapters, and costs nothing.

    Collective: every rank of `axis` calls this.

    Raises:
        ValueError: a model that cannot be read in full, or is not what Hugging Face makes of its
            config, an optimizer or a schedule that cannot be
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
    meshes = open_meshes(cfg, axis, device)
    forward, lora = _open_model(cfg, meshes, device, key)
    parameters = [p for p in forward.model.parameters() if p.requires_grad]
    build = partial(optim.build, cfg, parameters)
    optimizer, schedule = build()
    trainer = Trainer(
        forward=forward,
        optimizer=optimizer,
        schedule=schedule,
        build=build,
        reference=[_to_host(p) for p in parameters] if with_reference and lora is None else None,
        lora=lora,
        axis=axis,
        data_axis=meshes.data,
        max_grad_norm=cfg.max_grad_norm,
        loss_scale=LossScale() if cfg.precision == "float16" else None,
        offload_optimizer=cfg.offload_optimizer_for_logprob,
    )
    backend: Backend[Handle[Trainer]] = Backend(
        axis=axis,
        data_axis=meshes.data,
        logprobs=_logprobs,
        update_=_update_,
        end_step_=_end_step_,
        export=_export,
        save=_save,
        load_=_load_,
    )
    return backend, TrainState(Handle(trainer, 0), step=0, updates=0, cursor=0, key=key)


def _open_model(
    cfg: PolicyConfig, meshes: Meshes, device: torch.device, key: Key
) -> tuple[Forward, dtensor_lora.Lora | None]:
    """The model, compared, loaded, adapted and sharded."""
    longest = check_logprobs(cfg)
    model = load_model(cfg, meshes)
    lora = dtensor_lora.attach_(model, cfg, key)
    forward = open_forward(
        model,
        meshes,
        device,
        fused=cfg.dtensor_cfg.use_fused_linear_logprobs,
        positions_at_once=cfg.logprob_chunk_size,
        longest=longest,
    )
    shard_(model, cfg, meshes)
    if lora is not None:
        dtensor_lora.freeze_(model)
    return forward, lora


# ---- the functions of the contract --------------------------------------------------------------


def _logprobs(
    state: State, rows: Sequence[Rows], head: TokenHead, weights: Weights
) -> list[TokenOutput]:
    """See `Backend.logprobs`. Outputs live on the device of their rows.

    Raises:
        ValueError: the reference is asked for but was not loaded; or ranks differ in the number
            of micro-batches.
    """
    trainer = current(state)
    require_equal(
        "the number of micro-batches", len(rows), trainer.data_axis, "fill up with any rows"
    )
    away = optim.away(trainer.optimizer) if trainer.offload_optimizer else nullcontext()
    with torch.no_grad(), away, _holding(trainer, weights):
        return [_on(r.tokens.device, view(trainer.forward, r, head)) for r in rows]


def _on(device: torch.device, output: TokenOutput) -> TokenOutput:
    entropy = None if output.entropy is None else output.entropy.to(device)
    return TokenOutput(output.logprobs.to(device), entropy)


@contextmanager
def _holding(trainer: Trainer, weights: Weights) -> Iterator[None]:
    """Puts the asked weights into the model for the duration."""
    with nullcontext() if weights == "policy" else _reference(trainer):
        try:
            yield
        finally:
            # Without a backward the root would keep its gathered weights, blind to later changes.
            for unit in units(trainer.model):
                unit.reshard()


@contextmanager
def _reference(trainer: Trainer) -> Iterator[None]:
    if trainer.lora is not None:
        with dtensor_lora.adapters_off(trainer.model):
            yield
        return
    if trainer.reference is None:
        raise ValueError("no reference was loaded: open the backend with with_reference=True")
    parameters = list(trainer.parameters().values())
    policy = [_to_host(p) for p in parameters]
    _copy_(parameters, trainer.reference)
    try:
        yield
    finally:
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
    trainer = current(state)
    if not works:
        raise ValueError("an update needs at least one micro-batch")
    # Consumed already now: an error in a loss leaves half a gradient behind, inside the model.
    trainer.stamp += 1
    seen, gradients, norm = _gradients_(trainer, works)
    lr = float(trainer.optimizer.param_groups[0]["lr"])
    taken = isfinite(norm)
    if taken:
        if trainer.max_grad_norm is not None and norm > trainer.max_grad_norm:
            scale_(gradients, trainer.max_grad_norm / norm)
        trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    own = update_metrics(norm, lr, taken=taken, data_rank=trainer.data_axis.rank)
    if trainer.loss_scale is not None:
        own["loss_scale"] = mean_of(trainer.loss_scale.value)
    return succeed(replace(state, updates=state.updates + taken)), merge(*seen, own)


def _gradients_(
    trainer: Trainer, works: Sequence[Work]
) -> tuple[list[Metrics], list[Tensor], float]:
    """Runs all micro-batches: their metrics, the gradients, and the gradients' norm.

    In float16 they run again, with half the scale, as long as the gradient overflows; so an
    overflow costs time and no update.
    """
    tried = trainer.loss_scale
    while True:
        scale = 1.0 if tried is None else tried.value
        done = [
            _accumulate_(trainer, work, scale, is_last=i == len(works) - 1)
            for i, work in enumerate(works)
        ]
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        norm = global_norm(gradients) / scale
        if tried is None:
            break
        if isfinite(norm):
            trainer.loss_scale = after(tried, finite=True)
            break
        # What no scale, or not the scale, made infinite says nothing about it.
        wrong = float(sum(not isfinite(loss) for loss, _ in done))
        if scale == 1.0 or sum_over([wrong], trainer.axis)[0]:
            break
        tried = after(tried, finite=False)
        trainer.optimizer.zero_grad(set_to_none=True)
    if scale != 1.0:
        scale_(gradients, 1.0 / scale)
    return [metrics for _, metrics in done], gradients, norm


def _accumulate_(
    trainer: Trainer, work: Work, scale: float, *, is_last: bool
) -> tuple[float, Metrics]:
    """Adds the gradient of one micro-batch; ranks exchange gradients at the last one only."""
    trainer.model.set_requires_gradient_sync(is_last)
    output = view(trainer.forward, work.rows, work.head)
    loss, metrics = work.loss(output)
    (attached(loss, output) * scale).backward()
    return loss.item() if trainer.loss_scale is not None else 0.0, metrics


def _end_step_(state: State) -> State:
    """See `Backend.end_step_`."""
    trainer = current(state)
    if trainer.schedule is not None:
        optim.advance_(trainer.schedule)
    return succeed(replace(state, step=state.step + 1))


def _export(state: State) -> Iterator[tuple[str, Tensor]]:
    """See `Backend.export`. Float32; tied weights once. Collective, one tensor at a time."""
    return _weights(current(state))


def _weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    if trainer.lora is not None:
        whole = dtensor_lora.merged(trainer.model)
    else:
        whole = ((name, dtensor_lora.full(p)) for name, p in trainer.model.named_parameters())
    for name, weight in whole:
        yield from as_on_disk(trainer.model, name, weight)


def _save(state: State, folder: Path) -> None:
    """See `Backend.save`.

    With LoRA the folder holds the adapters and their optimizer, and not the weights below them,
    which `policy.model_name` keeps; and the adapters once more, for peft to load.
    """
    trainer = current(state)
    values = {
        "step": state.step,
        "updates": state.updates,
        "cursor": state.cursor,
        "key": state.key,
        "optimizer": type(trainer.optimizer).__name__,
        "lora": None if trainer.lora is None else trainer.lora.facts,
        "loss_scale": trainer.loss_scale,
    }
    if trainer.lora is not None:
        dtensor_lora.save(folder, trainer.parameters(), trainer.lora, trainer.axis)
    shards.save(folder, trainer.parameters(), trainer.optimizer, values, trainer.axis)


def _load_(state: State, folder: Path) -> State:
    """See `Backend.load_`. The reference stays what it was.

    Rates and other settings are those of the config; the schedule is taken to the saved step.

    Raises:
        ValueError: the folder holds no such checkpoint, or that of another model, kind of
            optimizer or other adapters.
    """
    trainer = current(state)
    values = shards.read_values(folder)
    dtensor_lora.check_facts(folder, values.get("lora"), trainer.lora)
    kind = type(trainer.optimizer).__name__
    if values["optimizer"] != kind:
        raise ValueError(
            f"{str(folder)!r} was saved with the optimizer {values['optimizer']}, not {kind}: set "
            "policy.optimizer.name as it was, or start a new run"
        )
    trainer.optimizer, trainer.schedule = trainer.build()
    shards.load_(folder, trainer.parameters(), trainer.optimizer, trainer.axis)
    if trainer.schedule is not None:
        for _ in range(int(values["step"])):
            optim.advance_(trainer.schedule)
    if trainer.loss_scale is not None and values.get("loss_scale") is not None:
        trainer.loss_scale = LossScale(*values["loss_scale"])
    step, updates, cursor, key = (int(values[k]) for k in ("step", "updates", "cursor", "key"))
    return succeed(
        replace(state, step=step, updates=updates, cursor=cursor, key=Key(key)),
    )
