"""The gradient norm does not depend on how gradients are sharded, nor on their size."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minirl.backends.norms import global_norm, local_shard, scale_
from minirl.parallel import Axis

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)


@given(st.lists(numbers, max_size=5))
def test_it_is_the_root_of_all_squares(rows: list[list[float]]):
    found = global_norm([torch.tensor(row, dtype=torch.float64) for row in rows])
    assert found == pytest.approx(math.hypot(*(x for row in rows for x in row)))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_that_float32_cannot_hold_do_not_matter(size: float):
    gradients = [torch.full((3,), size), torch.full((1,), size)]
    assert global_norm(gradients) == pytest.approx(2 * size)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(bad: float):
    assert not math.isfinite(global_norm([torch.ones(2), torch.tensor([0.0, bad])]))


def test_scaling_changes_every_gradient_in_place():
    gradients = [torch.tensor([1.0, -2.0]), torch.tensor([[4.0]], requires_grad=True)]
    scale_(gradients, 0.5)
    assert [g.tolist() for g in gradients] == [[0.5, -1.0], [[2.0]]]


def full_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Three rows: one rank of two has one, and of a single row one rank has none.
    shapes: Sequence[tuple[int, ...]] = [(4, 3), (3, 2), (1, 5), (2,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _sharded(axis: Axis) -> tuple[float, float, list[list[float]]]:
    line = init_device_mesh("cpu", (2,))
    folded = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    placed = [
        distribute_tensor(full, mesh, placements)
        for full in full_tensors()
        for mesh, placements in (
            (line, [Shard(0)]),
            (line, [Shard(full.ndim - 1)]),
            (line, [Replicate()]),
            (folded, [Shard(0), Replicate()]),
            (folded, [Replicate(), Shard(0)]),
            (folded, [Shard(0), Shard(0)]),
        )
    ]
    gradients = [*placed, *full_tensors()]
    before = global_norm(gradients)
    scale_(gradients, 0.25)
    whole = [g.full_tensor() if g is not local_shard(g) else g for g in gradients]
    return before, global_norm(gradients), [w.flatten().tolist() for w in whole]


def test_shards_of_any_layout_count_once():  # field failure 70
    one, other = run_ranks(2, _sharded)
    times = 7  # six layouts, and plain
    plain = math.hypot(*(x for t in full_tensors() for x in t.flatten().tolist()))
    assert one == other
    assert one[0] == pytest.approx(plain * math.sqrt(times), rel=1e-6)
    assert one[1] == pytest.approx(one[0] / 4, rel=1e-6)
    quarters = [(t / 4).flatten().tolist() for t in full_tensors()]
    assert one[2] == [q for q in quarters for _ in range(times - 1)] + quarters


def test_a_plain_tensor_is_its_own_shard():
    x = torch.ones(2)
    assert local_shard(x) is x
