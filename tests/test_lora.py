"""LoRA on the FSDP2 backend against peft and torch's AdamW in one process."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from backend_cases import exported, make_rows, make_samples, make_work, split
from models import policy_config, save_model
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from minirl.backend import TokenHead
from minirl.backends import dtensor, dtensor_lora
from minirl.backends.norms import local_shard
from minirl.dtensor_config import DTensorConfig, LoraConfig
from minirl.metrics import value
from minirl.parallel import Axis, reduce_metrics
from minirl.policy_config import OptimizerConfig, PolicyConfig, SequencePackingConfig
from minirl.rng import key_of

KEY = key_of(0)
HEAD = TokenHead()
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, SAMPLES, CLIP = 3, 8, 1.0
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
TOLERANCE = 1e-5


WITH_OUTPUT = {"match_all_linear": False, "target_modules": ["*_proj", "lm_head"]}
"""What is adapted where the output embedding is not tied."""


def policy(model: str, lora: dict[str, Any] | None = None, **fields: Any) -> PolicyConfig:
    """A policy with adapters; `dtensor` are more keys of its backend."""
    keys = fields.pop("dtensor", {})
    return policy_config(
        model,
        optimizer=OptimizerConfig(kwargs=ADAM),
        dtensor_cfg=DTensorConfig(lora_cfg=LoraConfig(enabled=True, **(lora or {})), **keys),
        **{"max_grad_norm": CLIP, **fields},
    )


def full_adapters(state: Any) -> dict[str, Tensor]:
    """The adapters by peft's names."""
    parameters = state.model.trainer.parameters()
    return {n.replace(".default", ""): dtensor_lora.full(p).clone() for n, p in parameters.items()}


def begin(axis: Axis, cfg: PolicyConfig, folder: Path) -> None:
    """A checkpoint in which no adapter is zero, or the gradient of A would be."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in state.model.trainer.parameters().items():
        if "lora_B" in name:
            shard = local_shard(parameter.detach())
            shard.copy_(torch.randn(shard.shape, generator=draw) * 0.05)
    backend.save(state, folder)


class Start(NamedTuple):
    """A model and the checkpoint to begin with."""

    model: str
    lora: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    found = {}
    for family, lora in (("qwen3", {}), ("llama", WITH_OUTPUT)):
        root = tmp_path_factory.mktemp(family)
        start = Start(save_model(root / "model", family, **SIZES), lora, root / "begin")
        start.folder.mkdir()
        run_ranks(1, begin, policy(start.model, start.lora), start.folder)
        found[family] = start
    return found


# ---- layouts ------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What three updates gave."""

    losses: list[float]
    norms: list[float]
    adapters: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How ranks cooperate."""

    name: str
    ranks: int
    dtensor: dict[str, Any] = field(default_factory=dict[str, Any])
    packed: bool = False
    family: str = "qwen3"


TP2, CP2 = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}
SP = {"sequence_parallel": True}
LAYOUTS = [
    Layout("1 rank", 1),
    Layout("FSDP2", 2),
    Layout("packed", 2, packed=True),
    Layout("activation checkpointing", 2, {"activation_checkpointing": True}),
    Layout("TP2", 2, TP2),
    Layout("TP2 + SP", 2, {**TP2, **SP}),
    Layout("TP2 + SP, untied, packed", 2, {**TP2, **SP}, packed=True, family="llama"),
    Layout("CP2, packed", 2, CP2, packed=True),
    Layout("HSDP 2x2", 4, {"dp_replicate_size": 2}),
    Layout("TP2 x DP2", 4, TP2),
]


def train(axis: Axis, layout: Layout, start: Start) -> Run:
    packing = SequencePackingConfig(enabled=layout.packed)
    cfg = policy(start.model, start.lora, dtensor=layout.dtensor, sequence_packing=packing)
    backend, state = dtensor.open_backend(cfg, axis, key_of(7))
    state = backend.load_(state, start.folder)
    data, losses, norms = backend.data_axis, [], []
    each = SAMPLES // data.size
    for step in range(STEPS):
        mine = make_samples(SAMPLES, seed=step)[data.rank * each : (data.rank + 1) * each]
        works = [make_work(p, padding=i, junk=5) for i, p in enumerate(split(mine, [2, 1, 1]))]
        state, metrics = backend.update_(state, works)
        metrics = reduce_metrics(metrics, data)
        losses.append(value(metrics["loss"]))
        norms.append(value(metrics["grad_norm"]))
    return Run(losses, norms, full_adapters(state), exported(backend, state))


def load_peft(start: Start, *, trained: bool = False) -> Any:
    """The base model with the adapters of the checkpoint, as peft reads them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(start.model, dtype=torch.float32)
    base.get_input_embeddings().padding_idx = None
    return PeftModel.from_pretrained(base, start.folder, is_trainable=trained).eval()


def oracle(start: Start) -> Run:
    """The same by peft and torch, one unpadded row at a time."""
    model = load_peft(start, trained=True)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for sample in make_samples(SAMPLES, seed=step):
            tokens = torch.tensor([sample.tokens])
            logs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logs.gather(-1, tokens[0, 1:, None])[:, 0]
            loss = -(chosen * torch.tensor(sample.weights)).sum()
            loss.backward()
            total += float(loss.detach())
        squares = sum(float(p.grad.double().square().sum()) for p in trained.values())
        norms.append(math.sqrt(squares))
        for parameter in trained.values():
            parameter.grad.mul_(min(1.0, CLIP / norms[-1]))
        optimizer.step()
        losses.append(total)
    adapters = {
        n.removeprefix("base_model.model.").replace(".default", ""): p.detach().clone()
        for n, p in trained.items()
    }
    return Run(losses, norms, adapters, dict(model.merge_and_unload().named_parameters()))


@pytest.fixture(scope="module")
def expected(starts: dict[str, Start]) -> dict[str, Run]:
    return {family: oracle(start) for family, start in starts.items()}


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[k] - w).double().norm() / w.double().norm()) for k, w in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_equals_peft_in_one_process(
    layout: Layout, starts: dict[str, Start], expected: dict[str, Run]
) -> None:
    wanted = expected[layout.family]
    assert max(wanted.norms) > CLIP
    for found in run_ranks(layout.ranks, train, layout, starts[layout.family]):
        assert found.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(wanted.norms, rel=TOLERANCE)
        assert farthest(found.adapters, wanted.adapters) < TOLERANCE
        assert farthest(found.weights, wanted.weights) < TOLERANCE


# ---- the base -----------------------------------------------------------------------------------


def look(backend: Any, state: Any, weights: Any = "policy") -> Tensor:
    rows = [make_rows(part) for part in split(make_samples(5), [2, 3])]
    return torch.cat([o.logprobs.flatten() for o in backend.logprobs(state, rows, HEAD, weights)])


def references(axis: Axis, cfg: PolicyConfig, plain: PolicyConfig) -> list[int]:
    """How many log-probs differ: at the start; of the reference before and after updates; of the
    policy around a look at it; of policy and reference at the end."""
    backend, state = dtensor.open_backend(plain, axis, KEY)
    base = look(backend, state)
    backend, state = dtensor.open_backend(cfg, axis, KEY, with_reference=True)
    assert state.model.trainer.reference is None
    # The very first pass: what needs a gradient is unknown to FSDP before it.
    early, start = look(backend, state, "reference"), look(backend, state)
    for _ in range(3):
        state, _ = backend.update_(state, [make_work(make_samples(4))])
    before, late = look(backend, state), look(backend, state, "reference")
    after = look(backend, state)
    pairs = [(start, base), (early, base), (late, base), (before, after), (late, after)]
    return [int((a != b).sum()) for a, b in pairs]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_is_the_base_to_the_bit(
    starts: dict[str, Start], ranks: int, precision: str
) -> None:
    model = starts["qwen3"].model
    cfg, plain = policy(model, precision=precision), policy_config(model, precision=precision)
    for *same, trained in run_ranks(ranks, references, cfg, plain):
        assert same == [0, 0, 0, 0]
        assert trained > 10


def test_a_first_ratio_is_one_and_only_adapters_change(
    solo: Axis, starts: dict[str, Start]
) -> None:
    backend, state = dtensor.open_backend(policy(starts["qwen3"].model), solo, KEY)
    state = backend.load_(state, starts["qwen3"].folder)
    model = state.model.trainer.model
    before = {n: dtensor_lora.full(p).clone() for n, p in model.named_parameters()}
    work = make_work(make_samples(4))
    (old,) = backend.logprobs(state, [work.rows], HEAD, "policy")
    seen: list[Tensor] = []

    def loss(output: Any) -> Any:
        seen.append(output.logprobs.detach())
        return work.loss(output)

    state, _ = backend.update_(state, [work._replace(loss=loss)])
    assert torch.equal(seen[0], old.logprobs)
    after = {n: dtensor_lora.full(p) for n, p in model.named_parameters()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == state.model.trainer.parameters().keys()
    assert changed == {name for name in before if "lora_" in name}
    assert {p.dtype for p in state.model.trainer.parameters().values()} == {torch.float32}


# ---- what leaves --------------------------------------------------------------------------------


def test_export_merges_and_leaves_the_live_weights(solo: Axis, starts: dict[str, Start]) -> None:
    # field failure 69
    start = starts["qwen3"]
    backend, state = dtensor.open_backend(policy(start.model), solo, KEY)
    base = exported(backend, state)
    disk = load_file(Path(start.model) / "model.safetensors")
    assert base.keys() == disk.keys()
    assert all(torch.equal(base[name], disk[name]) for name in disk)
    state = backend.load_(state, start.folder)
    live = state.model.trainer.model
    before = {n: dtensor_lora.full(p).clone() for n, p in live.named_parameters()}
    merged = exported(backend, state)
    assert all(torch.equal(before[n], dtensor_lora.full(p)) for n, p in live.named_parameters())
    wanted = dict(load_peft(start).merge_and_unload().named_parameters())
    assert farthest(merged, {n: wanted[n].detach() for n in merged}) < 1e-7
    changed = {name for name in merged if not torch.equal(merged[name], disk[name])}
    assert changed == {name for name in disk if name.endswith("_proj.weight")}


def test_peft_loads_a_checkpoint_with_the_same_logprobs(
    solo: Axis, starts: dict[str, Start]
) -> None:
    start = starts["llama"]
    backend, state = dtensor.open_backend(policy(start.model, start.lora), solo, KEY)
    state = backend.load_(state, start.folder)
    rows = make_rows(make_samples(1))
    (found,) = backend.logprobs(state, [rows], HEAD, "policy")
    logs = load_peft(start)(input_ids=rows.tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    plain = logs.gather(-1, rows.tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(found.logprobs, plain, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_holds_no_base_weights(starts: dict[str, Start]) -> None:
    for file in starts["qwen3"].folder.glob("*.safetensors"):
        assert all("lora_" in name for name in load_file(file))


def go_on(axis: Axis, cfg: PolicyConfig, folder: Path, *, save: bool) -> dict[str, Tensor]:
    """One update, a save or else a load, and one update more."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    if save:
        state, _ = backend.update_(state, [make_work(make_samples(4)[axis.rank :: axis.size])])
        backend.save(state, folder)
    else:
        state = backend.load_(state, folder)
    work = make_work(make_samples(4, seed=1)[axis.rank :: axis.size])
    return exported(backend, backend.update_(state, [work])[0])


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 1)])
def test_a_saved_state_goes_on_under_any_number_of_ranks(
    starts: dict[str, Start], tmp_path: Path, saving: int, loading: int
) -> None:
    cfg = policy(starts["qwen3"].model)
    straight = run_ranks(saving, go_on, cfg, tmp_path, save=True)[0]
    resumed = run_ranks(loading, go_on, cfg, tmp_path, save=False)[0]
    assert farthest(resumed, straight) <= (0.0 if saving == loading else 1e-6)


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(
    solo: Axis, starts: dict[str, Start], tmp_path: Path
) -> None:
    start = starts["qwen3"]
    other = save_model(tmp_path / "other", "qwen3", seed=1, **SIZES)
    lora = {"match_all_linear": False, "target_modules": ["q_proj"]}
    for cfg, message in (
        (policy(start.model, {"alpha": 16}), r"lora_cfg.alpha \(32 there, 16 here\); set"),
        (policy(start.model, {"dim": 4}), r"lora_cfg.dim \(8 there, 4 here\); set"),
        (policy(start.model, lora), "differs in the layers that policy.dtensor_cfg.lora_cfg"),
        (policy(other), "differs in the weights of policy.model_name; set"),
        (policy_config(start.model), "saved with LoRA: set policy.dtensor_cfg.lora_cfg.enabled"),
    ):
        backend, state = dtensor.open_backend(cfg, solo, KEY)
        with pytest.raises(ValueError, match=message):
            backend.load_(state, start.folder)
