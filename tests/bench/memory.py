"""What one rank holds during an update, by layout: bytes against the formula.

    .venv/bin/python tests/bench/memory.py

Of P parameters in float32, cut over TP ranks and sharded over the others: parameters, gradients
and Adam's two moments take 4 P / ranks bytes each (norms stay whole under TP). What is kept for
backward is counted through autograd's own hooks, without weights that were gathered, and shown
against `activations_of`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from backend_cases import Sample, make_rows, make_work
from models import policy_config, save_model
from ranks import run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from minirl.backends.dtensor import backend as dtensor
from minirl.backends.dtensor.forward import view
from minirl.backends.norms import local_shard
from minirl.config.policy import DTensorConfig, OptimizerConfig
from minirl.parallel import Axis
from minirl.rng import key_of

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, activation checkpointing": (1, {"activation_checkpointing": True}),
    "FSDP, 2 ranks": (2, {}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "TP2 + SP": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "CP2": (2, {"context_parallel_size": 2}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
LENGTH, ROWS, VOCABULARY = 64, 8, 2048


def activations_of(tokens: int, keys: dict[str, Any]) -> int:
    """Bytes that a Llama keeps for backward on a rank, of so many tokens, in float32.

    Of each layer: what two norms keep (input, normalised, output: 6 h), queries and what attention
    gives (2 H d), keys and values (2 K d), and four products of the feed-forward layer (4 f). Then
    the last norm (3 h); log-probs keep hidden states and a number each. With checkpointing a layer
    keeps its input (h). Under SP a norm's output is gathered. Under CP keys and values are those of
    all ranks, and attention to the later chunk keeps its mask.
    """
    hidden, inner, layers = (
        SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    width = hidden // SIZES["num_attention_heads"]
    heads, shared = width * SIZES["num_attention_heads"], width * SIZES["num_key_value_heads"]
    tensor, context = (keys.get(f"{k}_parallel_size", 1) for k in ("tensor", "context"))
    stream = tensor if keys.get("sequence_parallel") else 1
    layer = 4 * hidden // stream + 2 * hidden + (2 * heads + 2 * shared + 4 * inner) // tensor
    if context > 1:
        layer += 2 * shared * (context - 1) + 2 * shared + LENGTH // 2
    if keys.get("activation_checkpointing"):
        layer = hidden
    return 4 * tokens // context * (layers * layer + 3 * hidden // stream)


def measure(axis: Axis, model: str, keys: dict[str, Any]) -> dict[str, int]:
    """Bytes on this rank, and the number of parameters of the whole model."""
    cfg = policy_config(
        model, dtensor_cfg=DTensorConfig(**keys), optimizer=OptimizerConfig(kwargs={"lr": 1e-3})
    )
    backend, state = dtensor.open_backend(cfg, axis, key_of(0))
    trainer, data = state.model.trainer, backend.data_axis
    each = ROWS // data.size
    rows = [Sample(tuple(range(5, 5 + LENGTH)), (1e-3,) * (LENGTH - 1))] * each
    work, kept = make_work(rows), dict[int, int]()
    own = {local_shard(p).untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        part = local_shard(x.detach())
        if isinstance(part, AsyncCollectiveTensor):  # a collective that may still run
            part = part.wait()
        storage = part.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = work.loss(view(trainer.forward, make_rows(rows), work.head))
    gathered = {local_shard(p).untyped_storage().data_ptr() for p in trainer.model.parameters()}
    activations = sum(size for at, size in kept.items() if at not in gathered)
    loss.backward()

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(local_shard(x).numel() * x.element_size() for x in tensors)

    parameters = list(trainer.model.parameters())
    gradients = size([p.grad for p in parameters if p.grad is not None])
    trainer.optimizer.step()
    slots = [x for s in trainer.optimizer.state.values() for x in s.values() if x.dim()]
    return {
        "parameters": size(parameters),
        "gradients": gradients,
        "optimizer": size(slots),
        "activations": activations,
        "expected": activations_of(each * LENGTH, keys),
        "total": sum(p.numel() for p in parameters),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), "llama", vocab=VOCABULARY, **SIZES)
        rows: dict[str, dict[str, int]] = {}
        for name, (ranks, keys) in LAYOUTS.items():
            rows[name] = run_ranks(ranks, measure, model, keys)[0]
    print(f"{'MB on a rank (over the formula)':36}{'parameters':>14}{'gradients':>14}"
          f"{'optimizer':>14}{'activations':>14}")  # fmt: skip
    for name, found in rows.items():
        share = 4 * found["total"] / LAYOUTS[name][0]
        cells = "".join(
            f"{found[k] / 1e6:8.2f} ({found[k] / (share * n):4.2f})"
            for k, n in (("parameters", 1), ("gradients", 1), ("optimizer", 2))
        )
        print(f"{name:36}{cells}{found['activations'] / 1e6:8.2f} "
              f"({found['activations'] / found['expected']:4.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
