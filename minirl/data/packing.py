"""Which sequences share a micro-batch, and which a rank: pure functions of their lengths.

A *packer* puts lengths into bins of one capacity, each length filled up to a multiple first; a bin
is a list of indices. `balance` deals sequences to ranks by the work they are, not by their number.

It does not know what a sequence is, which ranks exist, or what happens to a bin.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import TypeAlias, cast

import torch

from minirl.config.policy import PackingAlgorithm
from minirl.rng import Key, generator

Bins: TypeAlias = list[list[int]]

# ---- packers ------------------------------------------------------------------------------------


def pack(
    lengths: Sequence[int],
    capacity: int,
    algorithm: PackingAlgorithm = "best_fit_decreasing",
    *,
    multiple: int = 1,
    key: Key | None = None,
) -> Bins:
    """Bins of at most `capacity`, every length filled up to a multiple of `multiple`.

    `key` is read by `first_fit_shuffle` only. The decreasing packers give the same bins of lengths
    for any order of the sequences.

    >>> pack([5, 4, 3, 2, 2], 8)
    [[0, 2], [1, 3, 4]]
    >>> pack([5, 4, 3, 2, 2], 8, "concatenative")
    [[0], [1, 2], [3, 4]]

    Raises:
        ValueError: a length is not positive, or does not fit into a bin.
    """
    sizes = [round_up(n, multiple) for n in lengths]
    for i, (n, size) in enumerate(zip(lengths, sizes, strict=True)):
        if n <= 0 or size > capacity:
            filled = "" if n == size else f" (filled up to {size}, a multiple of {multiple})"
            raise ValueError(
                f"sample {i} has {n} tokens{filled}; a packed sample has at least 1 and at most "
                f"the {capacity} tokens of a micro-batch: shorten it, or allow more tokens"
            )
    order = list(range(len(sizes)))
    if algorithm == "first_fit_shuffle":
        if key is None:
            raise ValueError("first_fit_shuffle needs a key, which says how to shuffle")
        order = cast("list[int]", torch.randperm(len(sizes), generator=generator(key)).tolist())
    elif algorithm != "concatenative":
        order.sort(key=lambda i: -lengths[i])
    return PACKERS[algorithm](sizes, order, capacity)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below `n`.

    >>> round_up(65, 64), round_up(64, 64)
    (128, 64)
    """
    return -(-n // multiple) * multiple


def next_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """Fills one bin after the other, in the given order; never looks back."""
    bins: Bins = []
    space = 0
    for i in order:
        if sizes[i] > space:
            bins.append([])
            space = capacity
        bins[-1].append(i)
        space -= sizes[i]
    return bins


def first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """Puts each size into the first bin with room, found in logarithmic time.

    With sizes in decreasing order it needs at most 11/9 OPT + 6/9 bins.

    Source: Dosa 2007, "The tight bound of first fit decreasing bin-packing algorithm".
    """
    # No two bins are half empty, so this many suffice.
    leaves = 1 << (2 * sum(sizes) // capacity + 1).bit_length()
    largest = [capacity] * (2 * leaves)  # of the spaces below each node of a binary tree
    bins: Bins = [[] for _ in range(leaves)]
    for i in order:
        node, size = 1, sizes[i]
        while node < leaves:
            node *= 2
            node += largest[node] < size
        bins[node - leaves].append(i)
        largest[node] -= size
        while node > 1:
            node //= 2
            left, right = largest[2 * node], largest[2 * node + 1]
            best = left if left >= right else right
            if largest[node] == best:
                break
            largest[node] = best
    return [b for b in bins if b]


def best_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """Puts each size, largest first, where the least room is left, found in logarithmic time.

    At most 11/9 OPT + 4 bins.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms", doi:10.1137/0203025.
    """
    bins: Bins = []
    spaces: list[int] = []  # those that some bin has, sorted
    with_space: dict[int, list[list[int]]] = {}
    smallest = sizes[order[-1]] if order else 0
    for i in order:
        size = sizes[i]
        at = bisect_left(spaces, size)
        if at == len(spaces):
            space, found = capacity, [i]
            bins.append(found)
        else:
            space = spaces[at]
            same = with_space[space]
            found = same.pop()
            found.append(i)
            if not same:
                del spaces[at]
        space -= size
        if space < smallest:
            continue  # nothing will ever fit
        same = with_space.setdefault(space, [])
        if not same:
            insort(spaces, space)
        same.append(found)
    return bins


Sized: TypeAlias = list[tuple[int, int]]
"""Sizes with their items, smallest first."""


def modified_first_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Bins:
    """First fit for the rest of what a bin for each large size cannot take; largest first.

    A bin for each large size (over 1/2); into these, a medium size (over 1/3) where one fits, else
    two small ones (over 1/6), then whatever fits; the rest, first fit, into new bins. At most
    71/60 OPT + 1 bins. NeMo-RL's packer of this name ends with a worst fit instead, which looks
    into the emptiest of the new bins only.

    Source: Johnson and Garey 1985, "A 71/60 theorem for bin packing",
    doi:10.1016/0885-064X(85)90022-6; the constant from Yue and Zhang 1995.
    """
    items = [(sizes[i], i) for i in reversed(order)]
    half, third, sixth = (bisect_right(items, (capacity // n, len(sizes))) for n in (2, 3, 6))
    large, medium, small = items[half:], items[third:half], items[sixth:third]
    bins = [[i] for _, i in reversed(large)]
    rooms = [capacity - size for size, _ in reversed(large)]

    def put(at: int, item: tuple[int, int]) -> None:
        bins[at].append(item[1])
        rooms[at] -= item[0]

    for at in range(len(bins)):
        if medium and medium[0][0] <= rooms[at]:
            put(at, _largest(medium, rooms[at]))
    for at in reversed(range(len(bins))):
        if len(bins[at]) == 1 and len(small) > 1 and small[0][0] + small[1][0] <= rooms[at]:
            put(at, small.pop(0))
            put(at, _largest(small, rooms[at]))
    rest = items[:sixth] + small + medium
    for at in range(len(bins)):
        while rest and rest[0][0] <= rooms[at]:
            put(at, _largest(rest, rooms[at]))
    return bins + first_fit(sizes, [i for _, i in reversed(rest)], capacity)


def _largest(items: Sized, room: int) -> tuple[int, int]:
    """Takes the largest item of at most `room`; there is one."""
    return items.pop(bisect_right(items, room, key=lambda item: item[0]) - 1)


PACKERS: dict[PackingAlgorithm, Callable[[Sequence[int], Sequence[int], int], Bins]] = {
    "concatenative": next_fit,
    "first_fit_shuffle": first_fit,
    "first_fit_decreasing": first_fit,
    "modified_first_fit_decreasing": modified_first_fit,
    "best_fit_decreasing": best_fit,
}
"""From sizes, the order to look at them in, and the capacity of a bin."""

# ---- ranks --------------------------------------------------------------------------------------


def balance(works: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deals items to ranks so that their works are nearly equal; each rank's items in order.

    The heaviest item goes to the rank with the least work, again and again; so the largest sum is
    at most 4/3 of the best possible one, and at most one item above the mean.

    >>> balance([3.0, 3.0, 2.0, 2.0, 2.0], 2)
    [[0, 2, 4], [1, 3]]

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", doi:10.1137/0117039.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, 0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        load, count, rank = loads[0]
        shares[rank].append(i)
        heapreplace(loads, (load + works[i], count + 1, rank))
    return [sorted(share) for share in shares]
