"""Which rank trains which rows: every row once, the same updates on any number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.algos.layout import cut, rows_of_rank, slices
from minirl.parallel import SOLO, Axis
from minirl.types import Batch, Rows


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_every_update_takes_its_own_slice_on_any_number_of_ranks(
    updates: int, ranks: int, per_rank: int, other_ranks: int
):
    batch = ranks * other_ranks * per_rank
    num_rows = updates * batch

    def rows_of_update(size: int, update: int) -> set[int]:
        each = batch // size
        parts = [rows_of_rank(num_rows, batch, Axis(r, size, None)) for r in range(size)]
        return {row for p in parts for row in p[update * each : (update + 1) * each]}

    for update in range(updates):
        expected = set(range(update * batch, (update + 1) * batch))
        assert rows_of_update(ranks, update) == rows_of_update(other_ranks, update) == expected


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_trained_once_and_ranks_have_equal_shares(updates: int, ranks: int, each: int):
    batch = ranks * each
    shares = [rows_of_rank(updates * batch, batch, Axis(r, ranks, None)) for r in range(ranks)]
    assert {len(share) for share in shares} == {updates * each}
    assert sorted(row for share in shares for row in share) == list(range(updates * batch))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 rows"):
        rows_of_rank(6, 4, SOLO)
    with pytest.raises(ValueError, match="3 ranks"):
        rows_of_rank(8, 4, Axis(0, 3, None))


@given(st.integers(0, 20), st.integers(1, 7))
def test_slices_are_consecutive_full_but_for_the_last_and_cover_all(num_rows: int, size: int):
    parts = list(slices(num_rows, size))
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == num_rows
    assert all(n == size for n in lengths[:-1])
    assert all(0 < n <= size for n in lengths[-1:])


@pytest.mark.parametrize("with_reference", [False, True])
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), size=st.integers(1, 4))
def test_cutting_keeps_every_real_token_and_no_useless_column(
    with_reference: bool, lengths: list[int], size: int
):
    num, width = len(lengths), max(lengths)
    tokens = torch.arange(num * width).view(num, width)
    numbers = torch.arange(num * (width - 1), dtype=torch.float64).view(num, width - 1)
    batch = Batch(
        rows=Rows(tokens, torch.tensor(lengths)),
        token_mask=numbers % 2 == 0,
        sample_mask=torch.arange(num) % 3 == 0,
        generation_logprobs=numbers + 1000,
        prev_logprobs=numbers + 2000,
        reference_logprobs=numbers + 3000 if with_reference else None,
        advantages=numbers + 4000,
        rewards=torch.arange(float(num)),
    )
    for part in slices(num, size):
        micro, longest = cut(batch, part), max(lengths[part])
        assert micro.rows.tokens.tolist() == tokens[part, :longest].tolist()
        assert micro.rows.lengths.tolist() == lengths[part]
        for name, whole in batch._asdict().items():
            found = getattr(micro, name)
            if name == "rows" or whole is None:
                continue
            expected = whole[part, : longest - 1] if whole.ndim == 2 else whole[part]
            assert found.tolist() == expected.tolist(), name
        assert (micro.reference_logprobs is None) != with_reference
