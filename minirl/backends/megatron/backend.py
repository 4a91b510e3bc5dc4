"""The Megatron backend: models of Megatron Bridge in any layout of Megatron-Core.

In: rows, a head and a loss per micro-batch. Out: log-probs, updates, full weights, as from the
FSDP2 backend and with its numbers, over tensor, sequence, pipeline, context, expert and data
parallelism. Gradients add up over all ranks and are never averaged; clipping, the optimizer and its
sharding are Core's. The model runs without dropout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Weights, Work
from minirl.backends.megatron import ckpt as megatron_ckpt
from minirl.backends.megatron import convert as megatron_convert
from minirl.backends.megatron import setup as megatron_setup
from minirl.backends.megatron.bridge import core, vocabulary_names
from minirl.backends.megatron.forward import Stage, backward_, forward, open_stage
from minirl.backends.megatron.moe import RouterLoads, read_loads_, watch_routers
from minirl.backends.megatron.setup import Built
from minirl.backends.trainer import Handle, current, succeed, update_metrics
from minirl.config.megatron import data_parallel_size
from minirl.config.megatron_auto import decided
from minirl.config.megatron_fit import this_machine
from minirl.config.policy import PolicyConfig
from minirl.hf import check_model
from minirl.metrics import Metrics, merge
from minirl.parallel import Axis, require_equal
from minirl.rng import Key
from minirl.types import Rows


@dataclass(slots=True)
class Trainer:
    """Everything that changes in place."""

    built: Built
    stage: Stage
    reference: list[Tensor] | None
    """This rank's weights as first loaded, on the CPU, in the order of `_parameters`."""
    data_axis: Axis
    loads: RouterLoads | None
    updates: int = 0
    stamp: int = 0
    """Changes whenever a state is consumed; a handle with another stamp is refused."""


State: TypeAlias = TrainState[Handle[Trainer]]


def open_backend(
    cfg: PolicyConfig, axis: Axis, key: Key, *, with_reference: bool = False
) -> tuple[Backend[Handle[Trainer]], State]:
    """Builds `cfg.model_name` in the layout of `cfg.megatron_cfg`; the state of a fresh run.

    The Hugging Face checkpoint is converted to Megatron's format once, in a folder that all ranks
    see (`convert.folder_of`), and read from there, each rank its own parts.
    `with_reference` also keeps this rank's weights as loaded, in host memory.

    Collective: every rank of `axis`, which is all of them, calls this.

    Raises:
        ValueError: a model that Bridge cannot convert, or that the layout does not fit.
    """
    cfg = decided(cfg, this_machine())
    check_model(cfg.model_name)
    data_parallel_size(cfg.megatron_cfg, axis.size)  # raises if the ranks do not fit
    if axis.group is None:
        raise ValueError(
            "the megatron backend needs a process group: open one with parallel.world()"
        )
    megatron_setup.prepare_process(cfg.megatron_cfg)
    with megatron_convert.converted(cfg, axis) as folder:
        megatron_setup.open_groups(cfg.megatron_cfg, key)
        described = megatron_setup.describe(cfg)
        built = megatron_setup.build(cfg, described)
        megatron_convert.read_(folder, built)
    groups = core("parallel_state")
    trainer = Trainer(
        built=built,
        stage=open_stage(cfg, described, built.chunks),
        reference=None,
        data_axis=Axis(
            groups.get_data_parallel_rank(),
            groups.get_data_parallel_world_size(),
            groups.get_data_parallel_group(),
        ),
        loads=watch_routers(built.chunks) if cfg.megatron_cfg.moe_per_layer_logging else None,
    )
    if with_reference:
        trainer.reference = [_to_host(p) for p in _parameters(trainer)]
    backend: Backend[Handle[Trainer]] = Backend(
        axis=axis,
        data_axis=trainer.data_axis,
        logprobs=_logprobs,
        update_=_update_,
        end_step_=_end_step_,
        export=_export,
        save=_save,
        load_=_load_,
    )
    return backend, TrainState(Handle(trainer, 0), step=0, updates=0, cursor=0, key=key)


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
    with _holding(trainer, weights):
        return forward(trainer.stage, rows, head)


@contextmanager
def _holding(trainer: Trainer, weights: Weights) -> Iterator[None]:
    """Puts the asked weights into the model for the duration."""
    _settle(trainer)
    if weights == "policy":
        yield
        return
    if trainer.reference is None:
        raise ValueError("no reference was loaded: open the backend with with_reference=True")
    parameters = _parameters(trainer)
    policy = [_to_host(p) for p in parameters]
    _copy_(parameters, trainer.reference)
    try:
        yield
    finally:
        _copy_(parameters, policy)


def _parameters(trainer: Trainer) -> list[Tensor]:
    return [p for chunk in trainer.built.chunks for p in chunk.parameters()]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, new in zip(parameters, values, strict=True):
        parameter.detach().copy_(new)


def _settle(trainer: Trainer) -> None:
    """Ends a gathering of updated parameters that would otherwise overlap the next forward."""
    for chunk in trainer.built.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _update_(state: State, works: Sequence[Work]) -> tuple[State, Metrics]:
    """See `Backend.update_`. A skipped update does not count in `updates`.

    Consumes: the state, also when a loss raises.
    """
    trainer = current(state)
    if not works:
        raise ValueError("an update needs at least one micro-batch")
    # Consumed already now: an error in a loss leaves half a gradient behind, inside the model.
    trainer.stamp += 1
    optimizer = trainer.built.optimizer
    for chunk in trainer.built.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    seen = backward_(trainer.stage, works)
    if trainer.loads is not None:
        seen.append(read_loads_(trainer.loads))
    lr = float(optimizer.param_groups[0]["lr"])
    norm, taken = _step_(trainer)
    own = update_metrics(norm, lr, taken=taken, data_rank=trainer.data_axis.rank)
    return succeed(replace(state, updates=state.updates + taken)), merge(*seen, own)


def _step_(trainer: Trainer) -> tuple[float, bool]:
    """The optimizer's step, unless the gradient is not finite; the norm before clipping."""
    optimizer = trainer.built.optimizer
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not isfinite(norm):
        return norm, False
    # Core's own step prepares once more, which copies the same gradients, and clips.
    optimizer.step()
    return norm, True


def _end_step_(state: State) -> State:
    """See `Backend.end_step_`."""
    trainer = current(state)
    trainer.built.schedule.step(increment=1)
    return succeed(replace(state, step=state.step + 1))


def _export(state: State) -> Iterator[tuple[str, Tensor]]:
    """See `Backend.export`. In the precision of the model. Collective, one tensor at a time."""
    trainer = current(state)
    _settle(trainer)
    bridge, size = trainer.built.bridge, trainer.stage.vocab_size
    filled_up = vocabulary_names(bridge)
    pairs = bridge.export_hf_weights(trainer.built.chunks, cpu=False, show_progress=False)
    return ((n, x.detach()[:size] if n in filled_up else x.detach()) for n, x in pairs)


def _save(state: State, folder: Path) -> None:
    """See `Backend.save`."""
    trainer = current(state)
    _settle(trainer)
    values = {
        "step": state.step,
        "updates": state.updates,
        "cursor": state.cursor,
        "key": state.key,
    }
    megatron_ckpt.save(folder, trainer.built, values)


def _load_(state: State, folder: Path) -> State:
    """See `Backend.load_`. The reference stays what it was.

    Raises:
        ValueError: the folder holds no such checkpoint, or that of another model or optimizer.
    """
    trainer = current(state)
    values = megatron_ckpt.load_(folder, trainer.built)
    step, updates, cursor, key = (int(values[k]) for k in ("step", "updates", "cursor", "key"))
    return succeed(
        replace(state, step=step, updates=updates, cursor=cursor, key=Key(key)),
    )
