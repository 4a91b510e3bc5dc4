"""Laws of packing and balancing: nothing is lost, nothing overflows, and how many bins suffice."""

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.config.policy import PackingAlgorithm
from minirl.cost import Cost
from minirl.data.packing import PACKERS, balance, pack, round_up
from minirl.rng import key_of

NAMES = tuple(PACKERS)
DECREASING = [name for name in NAMES if name.endswith("decreasing")]
KEY = key_of(3)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths that fit, a capacity, and a multiple."""
    multiple = draw(st.sampled_from([1, 2, 3, 8]))
    capacity = multiple * draw(st.integers(1, 12))
    # Few values, so that there are ties and exact fits.
    lengths = draw(st.lists(st.integers(1, capacity), max_size=40))
    return lengths, capacity, multiple


@st.composite
def planted(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Bins cut into pieces and shuffled: lengths, capacity and the least number of bins."""
    capacity = draw(st.integers(6, 200))
    num = draw(st.integers(1, 20))
    pieces: list[int] = []
    for _ in range(num):
        cuts = draw(st.sets(st.integers(1, capacity - 1), max_size=6))
        edges = [0, *sorted(cuts), capacity]
        pieces += [b - a for a, b in pairwise(edges)]
    return draw(st.permutations(pieces)), capacity, num


def contents(bins: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return sorted(sorted(lengths[i] for i in b) for b in bins)


def fillings(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return sorted(sum(lengths[i] for i in b) for b in bins)


def test_every_name_of_the_config_is_a_packer():
    assert set(NAMES) == set(get_args(PackingAlgorithm))


@pytest.mark.parametrize("name", NAMES)
@given(problem=problems())
def test_every_sequence_is_in_one_bin_and_no_bin_overflows_or_is_empty(
    name: PackingAlgorithm, problem: tuple[list[int], int, int]
):
    lengths, capacity, multiple = problem
    bins = pack(lengths, capacity, name, multiple=multiple, key=KEY)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    filled = [sum(round_up(lengths[i], multiple) for i in b) for b in bins]
    assert all(0 < n <= capacity for n in filled)


@pytest.mark.parametrize("name", NAMES)
@given(problem=problems())
def test_bins_lie_between_the_sum_over_the_capacity_and_twice_it(
    name: PackingAlgorithm, problem: tuple[list[int], int, int]
):
    lengths, capacity, multiple = problem
    total = sum(round_up(n, multiple) for n in lengths)
    num = len(pack(lengths, capacity, name, multiple=multiple, key=KEY))
    assert math.ceil(total / capacity) <= num
    # Two bins that follow each other hold more than one capacity.
    assert num <= 2 * total / capacity + 1


BOUNDS = {
    "concatenative": (2.0, 0.0),
    "first_fit_shuffle": (1.7, 0.0),
    "first_fit_decreasing": (11 / 9, 6 / 9),
    "modified_first_fit_decreasing": (71 / 60, 1.0),
    "best_fit_decreasing": (11 / 9, 4.0),
}
"""At most a OPT + b bins. Sources beside the functions; the first two: Dosa and Sgall 2013."""


@pytest.mark.parametrize("name", NAMES)
@given(problem=planted())
def test_bins_are_within_the_proven_bound_of_the_least_number(
    name: PackingAlgorithm, problem: tuple[list[int], int, int]
):
    lengths, capacity, least = problem
    factor, constant = BOUNDS[name]
    num = len(pack(lengths, capacity, name, key=KEY))
    assert least <= num <= factor * least + constant + 1e-9


@pytest.mark.parametrize("name", DECREASING)
@given(problem=problems(), data=st.data())
def test_decreasing_packers_do_not_see_the_order(
    name: PackingAlgorithm, problem: tuple[list[int], int, int], data: st.DataObject
):
    lengths, capacity, multiple = problem
    shuffled = data.draw(st.permutations(lengths))
    assert contents(pack(lengths, capacity, name, multiple=multiple), lengths) == contents(
        pack(shuffled, capacity, name, multiple=multiple), shuffled
    )


# ---- each packer against what its name says, in plain Python ------------------------------------


def slow(lengths: list[int], order: list[int], capacity: int, prefer: str) -> list[list[int]]:
    """First, best or next fit by looking at every bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in order:
        fits = [b for b, room in enumerate(rooms) if room >= lengths[i]]
        if prefer == "next":
            fits = [b for b in fits if b == len(bins) - 1]
        if not fits:
            bins.append([])
            rooms.append(capacity)
            fits = [len(bins) - 1]
        at = min(fits, key=lambda b: rooms[b]) if prefer == "best" else fits[0]
        bins[at].append(i)
        rooms[at] -= lengths[i]
    return bins


@given(problem=problems())
def test_best_and_first_and_next_fit_are_what_they_are_called(
    problem: tuple[list[int], int, int],
):
    lengths, capacity, _ = problem
    order = list(range(len(lengths)))
    falling = sorted(order, key=lambda i: -lengths[i])
    assert pack(lengths, capacity, "concatenative") == slow(lengths, order, capacity, "next")
    assert pack(lengths, capacity, "first_fit_decreasing") == slow(
        lengths, falling, capacity, "first"
    )
    # Among bins with equal room any is best.
    best, expected = pack(lengths, capacity), slow(lengths, falling, capacity, "best")
    assert fillings(best, lengths) == fillings(expected, lengths)


def slow_modified(lengths: list[int], capacity: int) -> list[list[int]]:
    """The five phases, by looking at everything; bins of lengths."""
    large = sorted((n for n in lengths if n > capacity / 2), reverse=True)
    medium = sorted(n for n in lengths if capacity / 3 < n <= capacity / 2)
    small = sorted(n for n in lengths if capacity / 6 < n <= capacity / 3)
    tiny = [n for n in lengths if n <= capacity / 6]
    bins = [[n] for n in large]
    for b in bins:
        fits = [n for n in medium if n <= capacity - sum(b)]
        if fits:
            medium.remove(fits[-1])
            b.append(fits[-1])
    for b in [b for b in reversed(bins) if len(b) == 1]:
        if len(small) > 1 and small[0] + small[1] <= capacity - sum(b):
            b.append(small.pop(0))
            fits = [n for n in small if n <= capacity - sum(b)]
            small.remove(fits[-1])
            b.append(fits[-1])
    rest = sorted(medium + small + tiny)
    for b in bins:
        while fits := [n for n in rest if n <= capacity - sum(b)]:
            rest.remove(fits[-1])
            b.append(fits[-1])
    rest = rest[::-1]
    return bins + [[rest[i] for i in b] for b in slow(rest, [*range(len(rest))], capacity, "first")]


@settings(max_examples=200)
@given(
    large=st.lists(st.integers(31, 45), max_size=6),
    small=st.lists(st.integers(8, 22), max_size=9),
    other=st.lists(st.integers(1, 60), max_size=6),
)
def test_modified_first_fit_is_the_published_one(
    large: list[int], small: list[int], other: list[int]
):
    lengths, capacity = large + small + other, 60
    found = pack(lengths, capacity, "modified_first_fit_decreasing")
    assert contents(found, lengths) == sorted(map(sorted, slow_modified(lengths, capacity)))


def test_a_shuffle_depends_on_its_key_alone():
    lengths = [n % 7 + 1 for n in range(60)]
    one, again = (pack(lengths, 16, "first_fit_shuffle", key=KEY) for _ in range(2))
    assert one == again
    assert one != pack(lengths, 16, "first_fit_shuffle", key=key_of(4))
    with pytest.raises(ValueError, match="needs a key"):
        pack(lengths, 16, "first_fit_shuffle")


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("lengths", "multiple", "parts"),
    [
        ([4, 9], 1, ["sample 1 has 9 tokens", "the 8 tokens of a micro-batch"]),
        ([4, 0], 1, ["sample 1 has 0 tokens", "at least 1"]),
        ([-1, 4], 1, ["sample 0 has -1 tokens"]),
        ([7], 5, ["sample 0 has 7 tokens (filled up to 10, a multiple of 5)"]),
    ],
)
def test_lengths_that_cannot_be_packed_are_refused_by_sample(name, lengths, multiple, parts):
    with pytest.raises(ValueError, match="sample") as caught:
        pack(lengths, 8, name, multiple=multiple, key=KEY)
    assert [part for part in parts if part not in str(caught.value)] == []


# ---- ranks --------------------------------------------------------------------------------------


@given(
    works=st.lists(st.floats(0.5, 100), max_size=60),
    num_ranks=st.integers(1, 9),
)
def test_every_item_goes_to_one_rank_and_no_rank_is_an_item_above_the_mean(works, num_ranks):
    shares = balance(works, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == list(range(len(works)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(works[i] for i in share) for share in shares]
    mean, largest = sum(loads) / num_ranks, max(works, default=0.0)
    assert max(loads) <= mean + largest * (1 - 1 / num_ranks) + 1e-6
    if len(works) >= num_ranks:
        assert all(shares)


@given(groups=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), min_size=1))
def test_the_largest_load_is_at_most_four_thirds_of_a_perfect_deal(groups):
    """Loads that some deal makes equal: every rank's items, filled up to one sum."""
    best = max(map(sum, groups))
    works = [float(n) for g in groups for n in (*g, best - sum(g)) if n > 0]
    num = len(groups)
    loads = [sum(works[i] for i in share) for share in balance(works, num)]
    assert max(loads) <= best * (4 / 3 - 1 / (3 * num)) + 1e-9


def test_items_of_no_work_are_dealt_by_number():
    assert balance([0.0] * 4, 2) == [[0, 2], [1, 3]]


@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_thousands_of_sequences_are_dealt_within_one_percent(seed: int):
    import torch

    draw = torch.Generator().manual_seed(seed)
    lengths = torch.empty(8192).log_normal_(7.0, 0.9, generator=draw).clamp(1, 8192).int().tolist()
    works = [Cost(1.5e9, 8.6e4).of(n) for n in lengths]
    loads = [sum(works[i] for i in share) for share in balance(works, 8)]
    assert max(loads) / (sum(loads) / 8) <= 1.01
