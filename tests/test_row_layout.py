"""Cutting rows for a model and putting its findings back is the identity, whatever the layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from minirl.backends.layout import (
    Layout,
    document_lengths,
    layout_of,
    size_of,
    to_model,
    to_output,
    to_rows,
)
from minirl.parallel import Axis
from minirl.types import Rows

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def rows_of(lengths: list[int], junk: int = 99, padding: int = 0) -> Rows:
    """Token t of row i is 10 i + t; what is behind a row's end must not matter."""
    width = max(2, *lengths) + padding
    tokens = torch.full((len(lengths), width), junk)
    for i, n in enumerate(lengths):
        tokens[i, :n] = 10 * i + torch.arange(n)
    return Rows(tokens, torch.tensor(lengths))


def following(rows: Rows) -> Tensor:
    """What every position of whole rows should see: the next token, 0 where there is none."""
    real = torch.arange(1, rows.tokens.shape[1]) < rows.lengths[:, None]
    return torch.where(real, rows.tokens[:, 1:], 0)


# field failure 15: the token at the border of two ranks has the right label
@given(
    lengths=lengths,
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2]),
    packed=st.booleans(),
    extra=st.integers(0, 2),
)
def test_all_ranks_together_see_every_next_token_once(
    lengths: list[int], cp: int, tp: int, packed: bool, extra: int
) -> None:
    rows = rows_of(lengths, padding=1)
    total = torch.zeros(rows.tokens.shape[0], rows.tokens.shape[1] - 1)
    for rank in range(cp):
        layout = layout_of(tp, cp, rank, packed=packed, sequence_parallel=tp > 1)
        height, width = size_of(rows, layout)
        size = (height if packed else height + extra, width + extra * layout.unit)
        found = to_model(rows, layout, size)
        assert found.tokens.shape == (size[0], size[1] // cp)
        assert found.tokens.shape[1] % tp == 0
        assert found.tokens[found.place < 0].count_nonzero() <= len(lengths), "last tokens only"
        assert not found.following[found.place < 0].any()
        total += to_rows(found.following.float(), found.place, tuple(total.shape), None)
    assert total.tolist() == following(rows).float().tolist()


@given(lengths=lengths, cp=st.sampled_from([1, 2, 3]), tp=st.sampled_from([1, 2]))
def test_rows_are_filled_up_no_further_than_cutting_asks(
    lengths: list[int], cp: int, tp: int
) -> None:
    rows, unit = rows_of(lengths), tp * (2 * cp if cp > 1 else 1)
    packed = layout_of(tp, cp, 0, packed=True, sequence_parallel=tp > 1)
    assert size_of(rows, packed) == (1, sum(-(-n // unit) * unit for n in lengths))
    assert document_lengths(to_model(rows, packed), packed) == [
        -(-n // unit) * unit for n in lengths
    ]
    padded = packed._replace(packed=False)
    width = -(-rows.tokens.shape[1] // unit) * unit
    assert size_of(rows, padded) == (len(lengths), width)
    assert document_lengths(to_model(rows, padded), padded) == [width]


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_entropies_come_back_as_whole_rows(entropy: bool) -> None:
    rows = rows_of([2, 3])
    cut = to_model(rows, Layout(packed=True, unit=1))
    values = torch.arange(1.0, 6.0)[None]
    view = to_output((values, -values), cut.place, rows, None, entropy=entropy)
    assert view.logprobs.tolist() == [[1, 0], [3, 4]]
    assert (view.entropy is None) is not entropy
    if view.entropy is not None:
        assert view.entropy.tolist() == [[-1, 0], [-3, -4]]


@given(lengths=lengths, cp=st.sampled_from([1, 2]), packed=st.booleans())
def test_what_is_behind_a_rows_end_does_not_matter(
    lengths: list[int], cp: int, packed: bool
) -> None:
    layout = layout_of(1, cp, 0, packed=packed, sequence_parallel=False)
    a, b = (to_model(rows_of(lengths, junk), layout) for junk in (5, 7))
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.following.tolist() == b.following.tolist()


@given(lengths=lengths, cp=st.sampled_from([1, 2, 4]))
def test_packed_sequences_are_told_apart_and_keep_their_positions(
    lengths: list[int], cp: int
) -> None:
    rows = rows_of(lengths)
    ranks = [to_model(rows, Layout(True, 2 * cp, rank, cp)) for rank in range(cp)]
    assert ranks[0].ends is not None
    bounds = ranks[0].ends.tolist()
    assert bounds[0] == 0
    assert all(end % (2 * cp) == 0 for end in bounds)
    for i, n in enumerate(lengths):
        start, stop = bounds[i] // cp, bounds[i + 1] // cp
        seen = {
            (int(p), int(t))
            for r in ranks
            for p, t in zip(r.positions[0, start:stop], r.tokens[0, start:stop], strict=True)
        }
        assert {(t, 10 * i + t) for t in range(n)} <= seen
        assert sorted(p for p, _ in seen) == list(range(bounds[i + 1] - bounds[i]))


def test_ranks_of_context_parallelism_have_equal_shares_of_the_causal_work() -> None:
    rows = rows_of([8])
    work = [
        int((to_model(rows, layout_of(1, 2, r, packed=True, sequence_parallel=False)).positions + 1)
            .sum())
        for r in range(2)
    ]  # fmt: skip
    assert work[0] == work[1]


def job(axis: Axis, packed: bool) -> tuple[Tensor, Tensor]:
    rows = rows_of([5, 8])
    layout = layout_of(1, axis.size, axis.rank, packed=packed, sequence_parallel=False)
    cut = to_model(rows, layout)
    local = cut.following.double().requires_grad_()
    whole = to_rows(local, cut.place, (2, 7), axis.group)
    (whole * torch.arange(14.0).view(2, 7)).sum().backward()
    assert local.grad is not None
    share = to_rows(local.grad, cut.place, (2, 7), None)
    return whole.detach(), share


@pytest.mark.parametrize("packed", [False, True])
def test_every_rank_gets_whole_rows_and_the_gradient_of_its_own_positions(packed: bool) -> None:
    rows = rows_of([5, 8])
    found = run_ranks(2, job, packed)
    for whole, _ in found:
        assert whole.tolist() == following(rows).double().tolist()
    real = torch.arange(1, 8) < rows.lengths[:, None]
    weights = torch.where(real, torch.arange(14.0).view(2, 7), 0.0)
    assert (found[0][1] + found[1][1]).tolist() == weights.double().tolist()
