"""How one update through the FSDP2 backend grows with the number and the length of sequences.

    .venv/bin/python tests/bench/growth.py

A fixed lognormal set of 16 sequences, taken 1, 2, 4 and 8 times over, then with every length 2 and
4 times as long; packed into micro-batches of 2048 tokens; a random Qwen3 of 4 layers (hidden 256),
float32, AdamW, one process, one thread. CPU seconds, medians of interleaved turns after a warm-up,
beside the model's work by `minirl.flops`: linear in tokens but for attention's quadratic part. The
quotient of the two is 1 where time grows as the work does. Also draws `runs/growth.png`.
"""

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib import pyplot
from models import save_model
from training import ours, shown

from minirl.cost import Cost, cost_of
from minirl.data.packing import pack
from minirl.flops import training_flops
from minirl.log import curve
from minirl.parallel import Axis, world

ROWS, LONGEST, CAPACITY, VOCABULARY, TURNS = 16, 512, 2048, 512, 5
PICTURE = Path(__file__).parents[2] / "runs" / "growth.png"


class Case(NamedTuple):
    """An update to time."""

    lengths: list[int]
    update: Callable[[], None]


def case(folder: str, axis: Axis, lengths: list[int]) -> Case:
    rows = [torch.randint(1, VOCABULARY, (n,)) for n in lengths]
    return Case(lengths, ours(folder, axis, shown(rows, pack(lengths, CAPACITY)), packed=True))


def cpu_seconds(cases: dict[str, Case]) -> dict[str, float]:
    """Median CPU seconds of each; they take turns."""
    seen: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(1 + TURNS):
        for name, (_, update) in cases.items():
            start = time.process_time()
            update()
            if turn:  # the first warms up
                seen[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in seen.items()}


def show(cases: dict[str, Case], seconds: dict[str, float], cost: Cost) -> None:
    """The table, and both growths over tokens: as characters and as a picture."""
    names = list(cases)
    tokens = [sum(cases[name].lengths) for name in names]
    work = [training_flops(cases[name].lengths, cost) for name in names]
    first = seconds[names[0]]
    print(f"{'':16}{'tokens':>8}{'work':>8}{'CPU time':>10}{'quotient':>10}{'GFLOP/s':>9}")
    for name, n, w in zip(names, tokens, work, strict=True):
        grown, took = w / work[0], seconds[name] / first
        rate = w / seconds[name] / 1e9
        print(f"{name:16}{n:8}{grown:8.2f}{took:10.2f}{took / grown:10.2f}{rate:9.1f}")
    print(f"the first took {first:.2f} s")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for kind, ax in zip(("sequences", "lengths"), axes, strict=True):
        chosen = [i for i, name in enumerate(names) if i == 0 or name.startswith(kind)]
        lines = {
            "work of the model": [(tokens[i], work[i] / work[0]) for i in chosen],
            "CPU seconds": [(tokens[i], seconds[names[i]] / first) for i in chosen],
            "tokens": [(tokens[i], tokens[i] / tokens[0]) for i in chosen],
        }
        print(curve(lines, f"more {kind}: relative to the first", label="tokens"))
        for (label, points), style in zip(lines.items(), ("o-", "x--", ":"), strict=True):
            ax.plot(*zip(*points, strict=True), style, label=label)
        ax.set(title=f"more {kind}", xlabel="tokens", ylabel="relative to the first")
        ax.legend()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    print(f"drawn: {PICTURE.relative_to(Path.cwd(), walk_up=True)}")


def main() -> None:
    warnings.simplefilter("ignore")
    matplotlib.use("agg")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = torch.empty(ROWS).log_normal_(4.6, 0.6).clamp(8, LONGEST).long().tolist()
    lengths = {f"sequences x{k}": base * k for k in (1, 2, 4, 8)}
    lengths |= {f"lengths x{k}": [k * n for n in base] for k in (2, 4)}
    with tempfile.TemporaryDirectory() as folder, world() as axis:
        save_model(
            Path(folder),
            vocab=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4 * LONGEST,
        )
        cases = {name: case(folder, axis, n) for name, n in lengths.items()}
        show(cases, cpu_seconds(cases), cost_of(folder))


if __name__ == "__main__":
    main()
