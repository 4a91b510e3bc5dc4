"""Log-probs from hidden states against the plain path: memory, time, error.

    .venv/bin/python tests/bench/logprobs.py

4,096 positions of width 512, a vocabulary of 131,072, one thread, forward and backward, with both
gradients. The plain path is torch's: the product in float32, log_softmax, gather. minirl runs as in
training, with the exact entropy that the plain path does not give, and without it. Each side runs
in a process of its own, by turns; memory is the peak of resident memory above that before the call,
time its CPU seconds. Errors are the largest, relative, of log-probs against float64 on the first
128 positions.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import partial

import torch
from torch import Tensor

POSITIONS, WIDTH, VOCABULARY, TURNS, CHECKED = 4096, 512, 131_072, 3, 128


def plain(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = hidden.float() @ weight.float().t()
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def fused(hidden: Tensor, weight: Tensor, tokens: Tensor, *, with_entropy: bool = True) -> Tensor:
    from minirl.backends.linear_logprobs import OutputLayer, linear_logprobs
    from minirl.backends.vocab_parallel import Shard

    layer = OutputLayer(weight, None, Shard(0))
    return linear_logprobs(hidden[None], layer, tokens[None], with_entropy=with_entropy)[0][0]


SIDES = {"plain": plain, "minirl": fused, "no entropy": partial(fused, with_entropy=False)}


def resident() -> float:
    """MB now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def one_side(side: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH, generator=source).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=source) / 16).to(dtype).requires_grad_()
    tokens = torch.randint(VOCABULARY, (POSITIONS,), generator=source)
    few = [x.detach()[:CHECKED] for x in (hidden, tokens)]
    SIDES[side](hidden[:4], weight, tokens[:4]).sum().backward()  # kernels are loaded
    hidden.grad = weight.grad = None
    before, start = resident(), time.process_time()
    found = SIDES[side](hidden, weight, tokens)
    found.sum().backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3
    exact = (few[0].double() @ weight.detach().double().t()).log_softmax(-1)
    expected = exact.gather(-1, few[1][:, None])[:, 0]
    error = (found.detach()[:CHECKED].double() - expected).abs() / expected.abs()
    print(json.dumps({"MB": peak - before, "s": seconds, "error": error.max().item()}))


def main() -> None:
    if len(sys.argv) == 3:
        one_side(sys.argv[1], {"float32": torch.float32, "bfloat16": torch.bfloat16}[sys.argv[2]])
        return
    for dtype in ("float32", "bfloat16"):
        seen: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(TURNS):
            for side, found in seen.items():
                done = subprocess.run(
                    [sys.executable, __file__, side, dtype],
                    capture_output=True, text=True, check=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
                found.append(json.loads(done.stdout.splitlines()[-1]))
        middle = {
            side: {name: statistics.median(f[name] for f in found) for name in found[0]}
            for side, found in seen.items()
        }
        for side, m in middle.items():
            print(f"{dtype:9} {side:10} {m['MB']:8.0f} MB {m['s']:7.2f} s   error {m['error']:.1e}")
        for side in ("minirl", "no entropy"):
            ours, theirs = middle[side], middle["plain"]
            memory, seconds = theirs["MB"] / ours["MB"], ours["s"] / theirs["s"]
            print(f"{dtype:9} {side} / plain: memory 1/{memory:.1f}, time {seconds:.2f}")


if __name__ == "__main__":
    main()
