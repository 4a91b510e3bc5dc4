"""Packing and balancing 8,192 lengths against two peers' algorithms, side by side.

    .venv/bin/python tests/bench/packing.py

TRL's best fit is its own installed function, as it is used (a table goes in and comes out) and,
for the time of the search alone, its own segment tree in the loop around it. NeMo-RL's modified
first fit is written out here as it works there: plain lists, and a last phase that looks into the
emptiest bin only. The sides take turns; the least of the rounds counts.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import pyarrow as pa
import torch
from trl.data_utils import _SegmentTree, pack_dataset

from minirl.cost import Cost
from minirl.data.packing import PACKERS, balance, pack
from minirl.rng import key_of

NUM, CAPACITY, ROUNDS, RANKS = 8192, 8192, 5, 8
COST = Cost(1.5e9, 4.3e4)
"""A model of 1.5 billion parameters: 28 layers, 12 heads of 128."""


def lengths_of(kind: str) -> list[int]:
    draw = torch.Generator().manual_seed(0)
    match kind:
        case "lognormal":
            x = torch.empty(NUM).log_normal_(7.0, 0.9, generator=draw)
        case "uniform":
            x = torch.empty(NUM).uniform_(1, CAPACITY, generator=draw)
        case _:
            low = torch.empty(NUM).normal_(600, 200, generator=draw)
            high = torch.empty(NUM).normal_(5000, 900, generator=draw)
            x = torch.where(torch.rand(NUM, generator=draw) < 0.6, low, high)
    return [int(n) for n in x.clamp(1, CAPACITY).tolist()]


def trl_search(lengths: list[int], capacity: int) -> list[list[int]]:
    """The loop of TRL 1.16's packing around its segment tree, without the tables."""
    tree = _SegmentTree(capacity)
    tree.add(capacity)
    by_space: dict[int, deque[list[int]]] = defaultdict(deque)
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        space = tree.search(lengths[i])
        if space < capacity:
            found = by_space[space].popleft()
        else:
            found = []
            bins.append(found)
        found.append(i)
        if space < capacity and not by_space[space]:
            tree.remove(space)
        space -= lengths[i]
        by_space[space].append(found)
        if space > 0:
            tree.add(space)
    return bins


Item = tuple[int, int]


def nemo_modified(lengths: list[int], capacity: int) -> list[list[Item]]:
    """Modified first fit as in NeMo-RL: worst fit in the end."""
    items = [(n, i) for i, n in enumerate(lengths)]
    large = sorted((x for x in items if x[0] > capacity / 2), reverse=True)
    medium = sorted((x for x in items if capacity / 3 < x[0] <= capacity / 2), reverse=True)
    small = sorted(x for x in items if capacity / 6 < x[0] <= capacity / 3)
    tiny = sorted(x for x in items if x[0] <= capacity / 6)
    bins = [[x] for x in large]
    room = [capacity - x[0] for x in large]

    def put(b: int, item: Item) -> None:
        bins[b].append(item)
        room[b] -= item[0]

    for b in range(len(bins)):
        for at, item in enumerate(medium):
            if item[0] <= room[b]:
                put(b, medium.pop(at))
                break
    for b in reversed(range(len(bins))):
        if len(bins[b]) == 1 and len(small) > 1 and small[0][0] + small[1][0] <= room[b]:
            put(b, small.pop(0))
            fits = [at for at, item in enumerate(small) if item[0] <= room[b]]
            put(b, small.pop(fits[-1]))
    rest = sorted(medium + small + tiny, reverse=True)
    for b in range(len(bins)):
        while rest and rest[-1][0] <= room[b]:
            put(b, rest.pop(next(at for at, item in enumerate(rest) if item[0] <= room[b])))
    return bins + worst_fit(rest, capacity)


def worst_fit(items: list[Item], capacity: int) -> list[list[Item]]:
    """Each item into the emptiest bin, if it fits there."""
    bins: list[list[Item]] = []
    emptiest: list[tuple[int, int]] = []  # minus the room, and the bin
    for item in items:
        room, b = (-capacity, len(bins))
        if emptiest and -emptiest[0][0] >= item[0]:
            room, b = heappop(emptiest)
        else:
            bins.append([])
        bins[b].append(item)
        heappush(emptiest, (room + item[0], b))
    return bins


def fewest(lengths: list[int], capacity: int) -> int:
    """A bound from below: the best L2 over all thresholds (Martello and Toth 1990).

    With threshold k, lengths over capacity - k share a bin with none of at least k, and lengths
    over capacity / 2 with none of their like.
    """
    x = torch.tensor(lengths).sort().values
    total = x.cumsum(0)
    best = 0
    for k in {0, *(n for n in lengths if 2 * n <= capacity)}:
        first, half, huge = (
            int(torch.searchsorted(x, torch.tensor(edge)))
            for edge in (max(k, 1), capacity // 2 + 1, capacity - k + 1)
        )
        middle = int(total[huge - 1]) - int(total[first - 1]) if first else int(total[huge - 1])
        best = max(best, len(x) - max(half, 0), len(x) - huge + -(-middle // capacity))
    return best


def race(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least milliseconds of each side; they take turns."""
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(ROUNDS):
        for side, run in sides.items():
            start = time.perf_counter()
            run()
            least[side] = min(least[side], 1e3 * (time.perf_counter() - start))
    return least


def trl_whole(lengths: list[int]) -> Callable[[], int]:
    """TRL's public function on a dataset of such rows; the number of bins."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = Dataset(pa.table({"input_ids": [[0] * n for n in lengths]}))
    return lambda: len(pack_dataset(rows, CAPACITY, "bfd", {"batch_size": NUM}))


def compare(kind: str) -> None:
    lengths = lengths_of(kind)
    least = fewest(lengths, CAPACITY)
    sides: dict[str, Callable[[], object]] = {
        name: partial(pack, lengths, CAPACITY, name, key=key_of(0)) for name in PACKERS
    }
    sides["TRL best fit, search only"] = partial(trl_search, lengths, CAPACITY)
    sides["NeMo-RL's modified first fit"] = partial(nemo_modified, lengths, CAPACITY)
    times = race(sides)
    print(f"\n{kind}: {NUM} lengths, capacity {CAPACITY}, no fewer than {least} bins")
    for side, ms in times.items():
        num = len(sides[side]())
        print(f"  {side:32} {num:5} bins, {least / num:.4f} of the optimum, {ms:7.1f} ms")
    start = time.perf_counter()
    num = trl_whole(lengths)()
    seconds = time.perf_counter() - start
    print(f"  {'TRL best fit, with its tables':32} {num:5} bins, {seconds:.1f} s, once")


def dealt(kind: str) -> None:
    lengths = lengths_of(kind)
    works = [COST.of(n) for n in lengths]
    start = time.perf_counter()
    shares = balance(works, RANKS)
    ms = 1e3 * (time.perf_counter() - start)
    loads = [sum(works[i] for i in share) for share in shares]
    parts = [len(pack([lengths[i] for i in share], CAPACITY)) for share in shares]
    print(
        f"  balance over {RANKS} ranks: max/mean work {max(loads) * RANKS / sum(loads):.5f}, "
        f"{ms:.1f} ms; {max(parts) * RANKS} bins with equally many a rank"
    )


def main() -> None:
    for kind in ("lognormal", "uniform", "bimodal"):
        compare(kind)
        dealt(kind)


if __name__ == "__main__":
    main()
