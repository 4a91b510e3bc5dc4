"""A training state on disk: what is read back is what was written, and nothing else is taken."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from minirl.backends.dtensor import shards
from minirl.parallel import Axis

SHAPES: dict[str, tuple[int, ...]] = {"norm": (5,), "up.weight": (3, 4), "bias": (1,)}


def opened(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def train(parameters: dict[str, Tensor], optimizer: Optimizer, seed: int, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def copies(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_what_was_saved_goes_on_as_if_nothing_had_happened(
    solo: Axis, tmp_path: Path, kind: type[Optimizer], steps: int
):
    more = {"momentum": 0.9} if kind is SGD else {"betas": (0.8, 0.9)}
    parameters = opened(0)
    optimizer = kind(parameters.values(), lr=0.1, **more)
    train(parameters, optimizer, seed=1, steps=steps)
    shards.save(tmp_path, parameters, optimizer, {"step": 7}, solo)
    optimizer.param_groups[0]["lr"] = 0.05
    train(parameters, optimizer, seed=2)
    other = opened(9)
    again = kind(other.values(), lr=0.05, **more)
    train(other, again, seed=3)
    values = shards.read_values(tmp_path)
    shards.load_(tmp_path, other, again, solo)
    assert values["step"] == 7
    assert again.param_groups[0]["lr"] == 0.05  # its own: whoever loads sets rates
    train(other, again, seed=2)
    assert equal(copies(other), copies(parameters))


def test_saving_changes_nothing(solo: Axis, tmp_path: Path):
    parameters = opened(0)
    optimizer = AdamW(parameters.values(), lr=0.1)
    train(parameters, optimizer, seed=1)
    before, state = copies(parameters), json.dumps(optimizer.state_dict(), default=str)
    shards.save(tmp_path, parameters, optimizer, {}, solo)
    assert equal(copies(parameters), before)
    assert json.dumps(optimizer.state_dict(), default=str) == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": (6,)}, r"'norm' has the shape torch.Size\(\[5\]\) there .*\[6\]\) here"),
        ({"up.weight": (4, 3)}, "'up.weight' has the shape"),
        ({"more": (2,)}, "'more' has the shape None there"),
        ({"bias": None}, "'bias' has the shape .* None here"),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    solo: Axis, tmp_path: Path, change: dict, message: str
):
    parameters = opened(0)
    shards.save(tmp_path, parameters, AdamW(parameters.values(), lr=0.1), {}, solo)
    other = opened(1, {k: v for k, v in {**SHAPES, **change}.items() if v is not None})
    before, optimizer = copies(other), AdamW(other.values(), lr=0.1)
    with pytest.raises(ValueError, match=f"holds another model.*{message}"):
        shards.load_(tmp_path, other, optimizer, solo)
    assert equal(copies(other), before)
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("text", [None, "", '{"step": 3', "null, 1"])
def test_values_that_are_missing_or_torn_are_refused_by_their_folder(
    tmp_path: Path, text: str | None
):
    if text is not None:
        (tmp_path / shards.VALUES).write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.* is no complete checkpoint"):
        shards.read_values(tmp_path)


def test_what_another_backend_saved_is_refused(tmp_path: Path):
    (tmp_path / shards.VALUES).write_text('{"step": 3}')
    with pytest.raises(ValueError, match=r"saved by the Megatron backend: set .*megatron_cfg"):
        shards.read_values(tmp_path)
