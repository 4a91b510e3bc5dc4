"""Checkpoints of a run: one folder a step, complete or absent.

A folder is written under another name and renamed when every rank is done, so one that exists
under its own name can be read. What is inside is the backend's business, but for
the samples that wait to be trained on and what tells the run from others.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from minirl.backend import Backend, TrainState
from minirl.files import writing
from minirl.hf import check_safetensors
from minirl.parallel import Axis, barrier
from minirl.types import Sample

M = TypeVar("M")

SURPLUS = "surplus.json"
"""The samples that were drawn and not yet trained on."""
IDENTITY = "identity.json"
"""What tells the run from others: see `minirl.ownership`."""


def save(
    backend: Backend[M],
    state: TrainState[M],
    run: Path,
    axis: Axis,
    identity: Mapping[str, object],
) -> Path:
    """Writes the state into `run/step_N`, replacing what was there, and returns that folder.

    Collective: every rank of `axis` calls this; `run` is on a file system that they share.

    Raises:
        ValueError: the disk is full or may not be written.
    """
    folder = run / f"step_{state.step}"
    part = run / f"step_{state.step}.part"
    with writing(part):
        if axis.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        barrier(axis)
        backend.save(state, part)
        barrier(axis)
        if axis.rank == 0:
            (part / SURPLUS).write_bytes(msgspec.json.encode(state.surplus))
            (part / IDENTITY).write_bytes(msgspec.json.encode(identity))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
    barrier(axis)
    return folder


def load_(backend: Backend[M], state: TrainState[M], folder: Path) -> TrainState[M]:
    """The state that `save` wrote into `folder`.

    Consumes: the state. Collective: every rank calls this.

    Raises:
        ValueError: as the backend's own `load_`; or the surplus is missing or torn.
    """
    try:
        surplus = msgspec.json.decode((folder / SURPLUS).read_bytes(), type=tuple[Sample, ...])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"{str(folder)!r} is no complete checkpoint: {SURPLUS}: {error}; remove it to go on"
            " from the one before"
        ) from error
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file, f"{str(folder)!r} is no complete checkpoint")
    return replace(backend.load_(state, folder), surplus=surplus)


def latest(run: Path) -> tuple[int, Path] | None:
    """The highest step that has a complete checkpoint in `run`, and its folder."""
    steps = {
        int(folder.name.removeprefix("step_")): folder
        for folder in run.glob("step_*")
        if folder.name.removeprefix("step_").isdecimal()
    }
    return max(steps.items(), default=None)
