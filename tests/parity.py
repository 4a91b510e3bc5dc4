"""The parity matrix: every layout of both backends against one process of Hugging Face and torch.

A row of the matrix is a layout; a run of it is three updates with Adam and clipping, on rows of
uneven lengths that are shared out among the data-parallel ranks in uneven micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from backend_cases import Sample, by_expert, exported, make_samples, make_work, split
from lora_cases import ADAM, Start, full_adapters, load_peft, lora_keys
from models import policy_config
from torch import Tensor

from minirl.backend import Work
from minirl.backends import open_backend
from minirl.config.megatron import MegatronConfig, MegatronDdpConfig, MegatronOptimizerConfig
from minirl.config.policy import (
    DTensorConfig,
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from minirl.cost import cost_of
from minirl.data.plan import plan_step
from minirl.metrics import value
from minirl.parallel import Axis, reduce_metrics
from minirl.rng import key_of

STEPS, SAMPLES, CLIP = 3, 8, 1.0
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
"""What every layout divides."""


@dataclass(frozen=True)
class Layout:
    """A row of the matrix."""

    name: str
    ranks: int
    megatron: dict[str, Any] | None = None
    """Keys of `policy.megatron_cfg`; None: the FSDP2 backend."""
    dtensor: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of `policy.dtensor_cfg`, of the FSDP2 backend."""
    family: str = "qwen3"
    sharded_optimizer: bool = True
    lora: bool = False
    dynamic: bool = False
    """Micro-batches of rows of similar length, as the product cuts them."""


def tp(size: int = 2, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": size, **more}


PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
UNEVEN = {**PP, "num_layers_in_first_pipeline_stage": 1}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "freeze_moe_router": False}
RECOMPUTE = {"activation_checkpointing": True}
OVERLAP = {
    "distributed_data_parallel_config": MegatronDdpConfig(
        overlap_grad_reduce=True, overlap_param_gather=True
    )
}

MOVING = {"freeze_moe_router": False}
EP2 = {"expert_parallel_size": 2, **MOVING}
TP2, CP2 = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}

LAYOUTS = [
    Layout("FSDP2", 2),
    Layout("FSDP2, MoE", 2, dtensor=MOVING, family="qwen3_moe"),
    Layout("FSDP2, activation checkpointing", 2, dtensor={"activation_checkpointing": True}),
    Layout("FSDP2, cpu_offload, 1 rank", 1, dtensor={"cpu_offload": True}),
    Layout("FSDP2 TP2", 2, dtensor=TP2),
    Layout("FSDP2 TP2 + SP", 2, dtensor=SP2),
    Layout("FSDP2 TP2 + SP, untied", 2, dtensor=SP2, family="llama"),
    Layout("FSDP2 CP2", 2, dtensor=CP2),
    Layout("FSDP2 EP2 (MoE)", 2, dtensor=EP2, family="qwen3_moe"),
    Layout("FSDP2 EP2 x DP2 (MoE)", 4, dtensor=EP2, family="qwen3_moe"),
    Layout("FSDP2 EP2 x CP2 (MoE)", 4, dtensor={**EP2, **CP2}, family="qwen3_moe"),
    Layout("FSDP2 TP2 (MoE)", 2, dtensor={**TP2, **MOVING}, family="qwen3_moe"),
    Layout("FSDP2 TP2 + SP (MoE)", 2, dtensor={**SP2, **MOVING}, family="qwen3_moe"),
    Layout("FSDP2 TP2 x DP2 (MoE)", 4, dtensor={**TP2, **MOVING}, family="qwen3_moe"),
    Layout("FSDP2 TP2 + SP x CP2 (MoE)", 4, dtensor={**SP2, **CP2, **MOVING}, family="qwen3_moe"),
    Layout("FSDP2 HSDP 2x2", 4, dtensor={"dp_replicate_size": 2}),
    Layout("FSDP2 TP2 x DP2", 4, dtensor=TP2),
    Layout("FSDP2 TP2 + SP x CP2", 4, dtensor={**SP2, **CP2}),
    Layout(
        "FSDP2 CP2 x DP2, activation checkpointing",
        4,
        dtensor={**CP2, "activation_checkpointing": True},
    ),
    Layout("FSDP2, LoRA", 2, lora=True),
    Layout("FSDP2 TP2, LoRA", 2, dtensor=TP2, lora=True),
    Layout("FSDP2 TP2 + SP, untied, LoRA", 2, dtensor=SP2, family="llama", lora=True),
    Layout(
        "FSDP2 CP2, activation checkpointing, LoRA",
        2,
        dtensor={**CP2, "activation_checkpointing": True},
        lora=True,
    ),
    Layout(
        "FSDP2 EP2 (MoE), LoRA",
        2,
        dtensor={"expert_parallel_size": 2},
        family="qwen3_moe",
        lora=True,
    ),
    Layout("FSDP2 TP2 + SP (MoE), LoRA", 2, dtensor=SP2, family="qwen3_moe", lora=True),
    Layout("FSDP2 HSDP 2x2, LoRA", 4, dtensor={"dp_replicate_size": 2}, lora=True),
    Layout("FSDP2 TP2 x DP2, LoRA", 4, dtensor=TP2, lora=True),
    Layout("Megatron", 1, {}),
    Layout("DP2, distributed optimizer", 2, {}),
    Layout("DP2, whole optimizer", 2, {}, sharded_optimizer=False),
    Layout("DP2, overlapped communication", 2, OVERLAP, family="llama"),
    Layout("TP2", 2, tp(sequence_parallel=False)),
    Layout("TP2 + SP", 2, tp()),
    Layout("TP2 + SP, untied", 2, tp(), family="llama"),
    Layout("TP2 + SP, full recomputation", 2, {**tp(), **RECOMPUTE}),
    Layout("PP2", 2, PP),
    Layout("PP2, uneven stages", 2, UNEVEN),
    Layout("PP2 VPP2", 2, VPP),
    Layout("CP2", 2, CP),
    Layout("EP2 (MoE)", 2, EP, family="qwen3_moe"),
    Layout("TP2 x DP2", 4, tp()),
    Layout("TP2 x PP2", 4, {**tp(), **PP}),
    Layout("TP2 x CP2", 4, {**tp(), **CP}),
    Layout("PP2 x CP2", 4, {**PP, **CP}),
    Layout("PP2 VPP2 x DP2", 4, VPP),
    Layout("EP2 x TP2 (MoE)", 4, {**EP, **tp()}, family="qwen3_moe"),
    Layout("EP2 x PP2 (MoE)", 4, {**EP, **PP}, family="qwen3_moe"),
]


class Updates(NamedTuple):
    """What is trained on, and how fast. Of the three updates, `batches` has the samples."""

    batches: Sequence[Sequence[Sample]]
    lr: float = ADAM["lr"]
    dtype: torch.dtype = torch.float32
    """Of the oracle."""


class Run(NamedTuple):
    """What three updates gave."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """With adapters: merged into the others, and by themselves."""
    engine: float = math.nan
    """Engine against trainer before the first update, as `token_mult_prob_error`."""


class Errors(NamedTuple):
    """The largest relative differences from the oracle."""

    loss: float
    norm: float
    weights: float


def policy(
    layout: Layout,
    model: str,
    *,
    packed: bool,
    lora: dict[str, Any] | None = None,
    lr: float = ADAM["lr"],
) -> PolicyConfig:
    """The config of a row."""
    dynamic = DynamicBatchingConfig(enabled=layout.dynamic)
    fields: dict[str, Any] = {"max_grad_norm": CLIP, "dynamic_batching": dynamic}
    if layout.megatron is None:
        keys = DTensorConfig(**layout.dtensor)
        return policy_config(
            model,
            optimizer=OptimizerConfig(kwargs={**ADAM, "lr": lr}),
            dtensor_cfg=lora_keys(lora, **layout.dtensor) if layout.lora else keys,
            sequence_packing=SequencePackingConfig(enabled=packed),
            **fields,
        )
    beta1, beta2 = ADAM["betas"]
    optimizer = MegatronOptimizerConfig(
        lr=lr,
        weight_decay=0.0,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=ADAM["eps"],
        use_distributed_optimizer=layout.sharded_optimizer,
    )
    return policy_config(
        model,
        optimizer=None,
        dtensor_cfg=DTensorConfig(enabled=False),
        sequence_packing=SequencePackingConfig(enabled=packed),
        megatron_cfg=MegatronConfig(enabled=True, optimizer=optimizer, **layout.megatron),
        **fields,
    )


def samples_of(step: int) -> list[Sample]:
    return make_samples(SAMPLES, seed=step, longest=14)


TINY = Updates([samples_of(step) for step in range(STEPS)])
"""Of the models of the matrix."""


def share_works(cfg: PolicyConfig, samples: Sequence[Sample], data: Axis) -> list[Work]:
    """This rank's share of the samples in uneven micro-batches; or as the product cuts them."""
    if not cfg.dynamic_batching.enabled:
        each = len(samples) // data.size
        mine = samples[data.rank * each : (data.rank + 1) * each]
        return [make_work(part, padding=i, junk=5) for i, part in enumerate(split(mine, [2, 1, 1]))]
    lengths = [len(s.tokens) for s in samples]
    plan = plan_step(lengths, cfg, data, cost_of(cfg.model_name), key_of(0))
    rows = [samples[row] for row in plan.rows]
    nothing = [rows[0]._replace(weights=(0.0,) * len(rows[0].weights), engine=())]
    return [make_work([rows[i] for i in part] or nothing) for part in plan.updates[0]]


def run_layout(
    axis: Axis, layout: Layout, start: Start, *, packed: bool, updates: Updates = TINY
) -> Run:
    """The updates, on this rank's share. Collective."""
    cfg = policy(layout, start.model, packed=packed, lora=start.lora, lr=updates.lr)
    backend, state = open_backend(cfg, axis, key_of(0))
    if layout.lora:
        state = backend.load_(state, start.folder)
    data = backend.data_axis
    losses, norms, engine = [], [], []
    for samples in updates.batches:
        state, metrics = backend.update_(state, share_works(cfg, samples, data))
        metrics = reduce_metrics(metrics, data)
        losses.append(value(metrics["loss"]))
        norms.append(value(metrics["grad_norm"]))
        engine.append(value(metrics["token_mult_prob_error"]))
    adapters = full_adapters(state) if layout.lora else {}
    return Run(losses, norms, {**exported(backend, state), **adapters}, engine[0])


def oracle(start: Start, *, lora: bool, updates: Updates = TINY) -> Run:
    """The same by transformers, peft and torch, one unpadded row at a time."""
    from transformers import AutoModelForCausalLM

    if lora:
        model = load_peft(start, trained=True, dtype=updates.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(start.model, dtype=updates.dtype)
        model.get_input_embeddings().padding_idx = None
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **{**ADAM, "lr": updates.lr})
    losses, norms = [], []
    for samples in updates.batches:
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            tokens = torch.tensor([sample.tokens])
            logs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logs.gather(-1, tokens[0, 1:, None])[:, 0]
            loss = -(chosen * torch.tensor(sample.weights, dtype=updates.dtype)).sum()
            loss.backward()
            total += float(loss.detach())
        squares = sum(float(p.grad.double().square().sum()) for p in trained.values())
        norms.append(math.sqrt(squares))
        for parameter in trained.values():
            parameter.grad.mul_(min(1.0, CLIP / norms[-1]))
        optimizer.step()
        losses.append(total)
    weights = {n.removeprefix("base_model.model."): p.detach() for n, p in trained.items()}
    if lora:
        merged = model.merge_and_unload()
        weights |= {name: p.detach() for name, p in merged.named_parameters()}
    return Run(losses, norms, by_expert(weights))


def errors(found: Run, expected: Run) -> Errors:
    """How far a run is from the oracle."""

    def worst(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    assert found.weights.keys() == expected.weights.keys()
    weights = max(
        float((found.weights[k] - w).double().norm() / w.double().norm())
        for k, w in expected.weights.items()
    )
    return Errors(worst(found.losses, expected.losses), worst(found.norms, expected.norms), weights)
