"""Optimizers and learning-rate schedules by import path, as the YAML names them.

`policy.optimizer` is `{name: torch.optim.AdamW, kwargs: {lr: 1e-6, ...}}`. `policy.scheduler` is a
list of such entries; two or more are joined at the steps given by one entry `{milestones: [50]}`.
The unit of a schedule is a step of the algorithm (one rollout and its updates), not an update.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from minirl.backends.norms import local_shard
from minirl.config.loader import is_file_name, module_instead, refuse
from minirl.config.policy import PolicyConfig
from minirl.files import shorten

C = TypeVar("C")


def check(cfg: PolicyConfig) -> None:
    """Tries optimizer and schedule on a parameter of one element, before any model is loaded.

    Raises:
        ValueError: as `build`, or the schedule cannot advance without a measured quantity.
    """
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    weight.grad = torch.zeros(1, 1)
    built, schedule = build(cfg, [weight])
    try:
        built.step()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"policy.optimizer.name: {type(built).__name__} cannot take a step from gradients "
            f"alone ({error}); use another, such as torch.optim.AdamW"
        ) from error
    if schedule is not None:
        try:
            advance_(schedule)
        except TypeError as error:
            raise ValueError(
                f"policy.scheduler: the schedule cannot be advanced by step() alone ({error})"
            ) from error


def build(cfg: PolicyConfig, parameters: Sequence[Tensor]) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer over `parameters`, as one group, and its schedule; none: a constant rate.

    Raises:
        ValueError: a path that leads to no such class, or arguments that it refuses; the message
            names the key.
    """
    optimizer, scheduler = cfg.optimizer, cfg.scheduler
    assert optimizer is not None  # a rule of PolicyConfig
    cls = _class_at(optimizer.name, Optimizer, "policy.optimizer.name")
    built = _construct(cls, "policy.optimizer", parameters, optimizer.kwargs)
    parts: list[LRScheduler] = []
    milestones: list[int] = []
    for i, entry in enumerate(scheduler or []):
        if entry.name is not None:
            key = f"policy.scheduler[{i}]"
            part = _class_at(entry.name, LRScheduler, f"{key}.name")
            parts.append(_construct(part, key, built, entry.kwargs))
        milestones += entry.milestones or []
    if len(parts) > 1:
        return built, SequentialLR(built, parts, milestones)
    return built, parts[0] if parts else None


@contextmanager
def away(optimizer: Optimizer) -> Iterator[None]:
    """Keeps the state of `optimizer` in host memory for the duration; it must not be used then."""
    slots = [
        local_shard(x)
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, Tensor) and x.dim()
    ]
    kept = [(x, x.to("cpu", copy=True), x.untyped_storage().nbytes()) for x in slots]
    for x in slots:
        x.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for x, host, size in kept:
            x.untyped_storage().resize_(size)
            x.copy_(host)


def advance_(schedule: LRScheduler) -> None:
    """One step of the schedule."""
    with warnings.catch_warnings():
        # torch warns when no optimizer step came before. Here that is right: the updates of the
        # first step may all have been skipped, and the schedule counts steps of the algorithm.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        schedule.step()


def imported(module: str, name: str, key: str) -> object:
    """What `module` has under `name`; None if it has no such thing.

    Raises:
        ValueError: the module cannot be imported, or comes with Python: that is nobody's optimizer,
            and importing some of it has effects.
    """
    shown = f"{key}: cannot import {shorten(module)!r}"
    refuse(is_file_name(module), f"{shown}, a file; {module_instead(module)}")
    names = module.split(".")
    refuse(not all(map(str.isidentifier, names)), f"{shown}: it is no name of a module")
    refuse(
        names[0] in sys.stdlib_module_names,
        f"{shown}: it belongs to Python's standard library, which has nothing of that kind",
    )
    try:
        return vars(importlib.import_module(module)).get(name)
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(f"{shown} ({shorten(str(error))})") from error


def _class_at(path: str, base: type[C], key: str) -> type[C]:
    module, _, name = path.rpartition(".")
    found: object = imported(module, name, key) if module else None
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    is_what = "nothing" if found is None else shorten(f"{found!r}")
    raise ValueError(
        f"{key}: {shorten(path)!r} is no {base.__name__} but {is_what}; give the import path of "
        "one, such as torch.optim.AdamW or torch.optim.lr_scheduler.LinearLR"
    )


def _construct(cls: type[C], key: str, first: object, kwargs: dict[str, Any]) -> C:
    make = cast("Callable[..., C]", cls)
    try:
        return make(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{key}.kwargs: {cls.__name__} refuses {shorten(str(kwargs))} ({error})"
        ) from error
