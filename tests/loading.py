"""A small schema for tests of the loader, and ways to load it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, field

from minirl.config.loader import Section, default, load

Count = Annotated[int, Meta(gt=0)]


class Engine(Section, frozen=True, kw_only=True):
    precision: Annotated[Literal["fp32", "bf16"], default("${model.precision}")]
    length: Annotated[int, default("${sub:${model.length},${model.response}}")]


class Stage(Section, frozen=True, kw_only=True):
    name: str
    steps: Count = 1


class Model(Section, frozen=True, kw_only=True):
    name: str
    precision: Literal["fp32", "bf16"] = "bf16"
    length: Count = 512
    response: Count = 12
    rate: float = 0.1
    stages: list[Stage] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    ids: list[int] | None = None
    engine: Engine

    def __post_init__(self) -> None:
        if self.response >= self.length:
            raise ValueError("response leaves no room")


class Run(Section, frozen=True, kw_only=True):
    model: Model
    seed: int = 42
    title: str | None = None
    other: Model | None = None

    def __post_init__(self) -> None:
        if self.seed == 13:
            raise ValueError("seed 13 is unlucky")


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def loaded(folder: Path, text: str, *overrides: str) -> Run:
    return load(write(folder, text), overrides, Run)


def message(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        loaded(folder, text, *overrides)
    return str(caught.value)
