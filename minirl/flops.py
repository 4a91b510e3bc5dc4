"""Model FLOPs: the floating-point operations a model needs, whatever machine or layout does them.

What is computed twice (activation checkpointing, log-probs from hidden states) and what is computed
for padding is not counted: utilisation says how much of a device's peak did useful work.

Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B.
"""

import re
import time
from collections.abc import Sequence

import torch

from minirl.cost import TOKENS_ONLY, Cost

PEAKS = {
    # name: (bfloat16 or float16 without sparsity, float32 without TF32), in TFLOP/s
    "A100": (312.0, 19.5),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H200 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.0, 82.6),
}
"""By words of the device's name; the longest that fits counts. Source: the makers' data sheets."""


def forward_flops(lengths: Sequence[int], cost: Cost) -> float:
    """Of one pass over sequences of these lengths: two operations a multiply-add.

    >>> forward_flops([4, 4], Cost(per_token=2.0, per_pair=0.5))
    64.0
    """
    return 2.0 * sum(cost.of(n) for n in lengths)


def training_flops(lengths: Sequence[int], cost: Cost, *, frozen: bool = False) -> float:
    """Forward and backward: the gradient of the inputs and that of the weights cost one pass each.

    `frozen`: the weights have none (low-rank adapters are too small to count).
    """
    return forward_flops(lengths, cost) * (2.0 if frozen else 3.0)


def peak_flops(precision: str, cost: Cost) -> float | None:
    """FLOP/s that one rank's device could do; None if it, or the model's work, is not known.

    By the table on a GPU; measured once, on the spot, on a CPU.
    """
    if cost == TOKENS_ONLY:
        return None
    if not torch.cuda.is_available():
        return measured_flops(torch.float32 if precision == "float32" else torch.bfloat16)
    return listed_flops(torch.cuda.get_device_name(), precision)


def listed_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device by name.

    >>> listed_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    >>> listed_flops("NVIDIA H100 PCIe", "float32")
    51000000000000.0
    >>> listed_flops("something new", "float32")
    """
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", device)]
    if not names:
        return None
    half, single = PEAKS[max(names, key=len)]
    return 1e12 * (single if precision == "float32" else half)


def measured_flops(dtype: torch.dtype, size: int = 1024, turns: int = 3) -> float:
    """The best of some products of two square matrices, on this process's CPU threads."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    seconds: list[float] = []
    for _ in range(turns):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
