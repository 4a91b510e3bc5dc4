"""What the Megatron backend keeps beside its numbers (test_parity.py): the contract's laws."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from backend_cases import (
    GRADIENT,
    distance,
    exported,
    gradient_of,
    make_rows,
    make_samples,
    make_work,
    plain_loop,
    real,
)
from models import save_model
from msgspec import structs
from parity import SIZES, Layout, policy
from ranks import run_ranks

from minirl.backend import TokenHead, after_draw
from minirl.backends import open_backend
from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from minirl.config.policy import PolicyConfig
from minirl.metrics import value, values
from minirl.parallel import Axis
from minirl.rng import key_of
from minirl.types import Rows

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "max_window_layers": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4,
    },
}
"""Half of the layers have windows; positions are scaled."""
PLAIN_SGD = MegatronOptimizerConfig(
    optimizer="sgd",
    lr=GRADIENT["optimizer"].kwargs["lr"],
    sgd_momentum=0.0,
    weight_decay=0.0,
    use_distributed_optimizer=False,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("megatron")
    # 62 tokens over two ranks and 63 over one: both are filled up.
    return {
        "qwen3": save_model(root / "qwen3", "qwen3", **SIZES),
        "qwen2": save_model(root / "qwen2", "qwen2", vocab=63, **SIZES),
        "qwen3_moe": save_model(root / "moe", "qwen3_moe", **SIZES),
        "windows": save_model(root / "windows", "qwen3", **SIZES, **WINDOWS),
    }


def config(model: str, *, packed: bool = False, **megatron: Any) -> PolicyConfig:
    import msgspec

    base = policy(Layout("", 1, {}), model, packed=packed)
    cfg = {"optimizer": base.megatron_cfg.optimizer, **megatron}
    return msgspec.structs.replace(base, megatron_cfg=MegatronConfig(enabled=True, **cfg))


# ---- log-probs and gradients --------------------------------------------------------------------


def look(axis: Axis, cfg: PolicyConfig, temperature: float) -> dict[str, Any]:
    """Log-probs, entropies and the gradient of an update."""
    import msgspec

    backend, state = open_backend(msgspec.structs.replace(cfg, max_grad_norm=None), axis, key_of(0))
    samples = make_samples(4, vocab=60)
    head = TokenHead(temperature, entropy=True)
    rows = [make_rows(samples[:3], junk=7), make_rows(samples[3:], padding=2)]
    outputs = backend.logprobs(state, rows, head, "policy")
    works = [make_work(samples[:3], head=head), make_work(samples[3:], head=head, padding=1)]
    gradients, norm = gradient_of(backend, state, works)
    chosen = [o.logprobs[i, : n - 1] for o, r in zip(outputs, rows, strict=True)
              for i, n in enumerate(r.lengths.tolist())]  # fmt: skip
    masked = [float(o.logprobs[~real(r)].abs().sum()) for o, r in zip(outputs, rows, strict=True)]
    entropy = [o.entropy[i, : n - 1] for o, r in zip(outputs, rows, strict=True)
               for i, n in enumerate(r.lengths.tolist())]  # fmt: skip
    return {
        "logprobs": torch.cat(chosen),
        "entropy": torch.cat(entropy),
        "padding": sum(masked),
        "gradients": gradients,
        "norm": norm,
    }


@pytest.mark.parametrize(
    ("family", "ranks", "megatron"),
    [
        ("qwen2", 1, {}),
        ("qwen2", 2, TP2),
        ("qwen3", 2, {**TP2, "use_fused_linear_logprobs": False}),
        ("qwen3", 2, {**TP2, "sequence_parallel": False}),
        ("qwen3", 2, {**PP2, "use_fused_linear_logprobs": False}),
        ("qwen3", 1, {"activation_checkpointing": True, "recompute_granularity": "selective"}),
        ("qwen3_moe", 1, {"freeze_moe_router": False}),
        ("windows", 2, TP2),
        ("windows", 2, PP2),
        ("windows", 2, CP2),
    ],
    ids=[
        *("qwen2", "ragged vocabulary", "logits", "no SP", "logits, PP", "selective", "moe"),
        *("windows, TP", "windows, PP", "windows, CP"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_equal_a_plain_loop(
    models: dict[str, str], family: str, ranks: int, megatron: dict[str, Any], packed: bool
) -> None:
    cfg = config(models[family], packed=packed, optimizer=PLAIN_SGD, **megatron)
    expected = plain_loop(models[family], make_samples(4, vocab=60), temperature=0.7)
    for found in run_ranks(ranks, look, cfg, 0.7):
        torch.testing.assert_close(
            found["logprobs"], torch.cat(expected.logprobs), rtol=1e-5, atol=2e-5
        )
        assert found["padding"] == 0.0
        assert distance(found["gradients"], expected.gradients) < 1e-5
        assert found["norm"] == pytest.approx(expected.norm, rel=1e-5)
        assert found["entropy"].min() > 0


def test_the_entropy_is_the_same_in_every_layout(models: dict[str, str]) -> None:
    one = run_ranks(1, look, config(models["qwen3"], optimizer=PLAIN_SGD), 1.0)[0]
    for layout in (TP2, CP2):
        two = run_ranks(2, look, config(models["qwen3"], optimizer=PLAIN_SGD, **layout), 1.0)[0]
        torch.testing.assert_close(one["entropy"], two["entropy"], rtol=1e-5, atol=1e-5)


# ---- the state ----------------------------------------------------------------------------------


def live(axis: Axis, cfg: PolicyConfig) -> dict[str, Any]:
    """Everything that one open backend can tell, so that it is opened once."""
    backend, state = open_backend(cfg, axis, key_of(0), with_reference=True)
    rows, found = [make_rows(make_samples(2))], {}
    samples = make_samples(4)[backend.data_axis.rank :: backend.data_axis.size]

    def seen(state: Any, weights: Any) -> torch.Tensor:
        return backend.logprobs(state, rows, TokenHead(), weights)[0].logprobs

    def refused(call: Any, *args: Any) -> str:
        try:
            call(*args)
        except ValueError as error:
            return str(error)
        return ""

    first, before = seen(state, "policy"), exported(backend, state)
    after, _ = backend.update_(state, [make_work(samples)])
    found["consumed"] = refused(seen, state, "policy")
    found["reference"] = torch.equal(seen(after, "reference"), first)
    found["policy moved"] = not torch.equal(seen(after, "policy"), first)
    found["empty"] = refused(backend.update_, after, [])

    kept = exported(backend, after)
    poisoned = make_work(samples)
    broken = poisoned._replace(loss=lambda out: (out.logprobs.sum() * math.nan, {}))
    skipped, metrics = backend.update_(after, [broken])
    found["skipped"] = value(metrics["nonfinite_updates"]) == float(backend.data_axis.rank == 0)
    found["kept"] = distance(exported(backend, skipped), kept) == 0.0
    found["updates"] = (after.updates, skipped.updates)
    found["moved"] = distance(kept, before) > 0
    detached = poisoned._replace(loss=lambda out: (out.logprobs.sum().detach() * 0, {}))
    _, metrics = backend.update_(skipped, [detached])
    found["idle norm"] = value(metrics["grad_norm"])
    found["loads"] = {k: v for k, v in values(metrics).items() if k.startswith("moe/")}
    found["axes"] = (backend.axis.size, backend.data_axis.size)
    return found


@pytest.mark.parametrize(
    ("ranks", "megatron"), [(1, {}), (2, TP2), (2, VPP2), (2, CP2)], ids=["1", "TP", "VPP", "CP"]
)
def test_states_are_consumed_and_bad_gradients_skipped(
    models: dict[str, str], ranks: int, megatron: dict[str, Any]
) -> None:
    for found in run_ranks(ranks, live, config(models["qwen3"], **megatron)):
        assert "was consumed" in found["consumed"]
        assert "at least one micro-batch" in found["empty"]
        assert found["updates"] == (1, 1)
        assert found["idle norm"] == 0.0
        assert found["axes"] == (ranks, 1)
        for law in ("reference", "policy moved", "skipped", "kept", "moved"):
            assert found[law], law


def test_a_mixture_reports_the_load_of_its_experts_layer_by_layer(models: dict[str, str]) -> None:
    cfg = config(models["qwen3_moe"], moe_per_layer_logging=True, **PP2)
    for found in run_ranks(2, live, cfg):
        assert set(found["loads"]) == {f"moe/layer_{i}/max_load" for i in (1, 2, 3, 4)}
        # Four experts of which two are chosen: between even and all tokens to the same two.
        assert all(1 <= x <= 2 for x in found["loads"].values())


def frozen(axis: Axis, cfg: PolicyConfig) -> dict[str, bool]:
    """Which tensors an update moves."""
    backend, state = open_backend(cfg, axis, key_of(0))
    before = exported(backend, state)
    state, _ = backend.update_(state, [make_work(make_samples(4))])
    return {k: torch.equal(x, before[k]) for k, x in exported(backend, state).items()}


def test_the_router_is_frozen_unless_asked(models: dict[str, str]) -> None:
    still = run_ranks(1, frozen, config(models["qwen3_moe"]))[0]
    assert {name for name, same in still.items() if same} == {
        name for name in still if name.endswith("mlp.gate.weight")
    }
    moving = run_ranks(1, frozen, config(models["qwen3_moe"], freeze_moe_router=False))[0]
    assert not any(moving.values())


def half(axis: Axis, cfg: PolicyConfig) -> tuple[float, set[torch.dtype], float]:
    backend, state = open_backend(cfg, axis, key_of(0))
    norms = []
    for _ in range(3):
        state, metrics = backend.update_(state, [make_work(make_samples(4))])
        norms.append(value(metrics["grad_norm"]))
    weights = exported(backend, state)
    return norms[0], {x.dtype for x in weights.values()}, norms[-1]


def test_bfloat16_computes_low_and_keeps_its_masters(models: dict[str, str]) -> None:
    import msgspec

    full = run_ranks(1, half, config(models["qwen3"]))[0]
    for megatron in ({}, {"defer_fp32_logits": True}):
        cfg = msgspec.structs.replace(config(models["qwen3"], **megatron), precision="bfloat16")
        norm, dtypes, last = run_ranks(1, half, cfg)[0]
        assert dtypes == {torch.bfloat16}
        assert norm == pytest.approx(full[0], rel=0.05)
        assert last == pytest.approx(full[2], rel=0.1)


# ---- checkpoints --------------------------------------------------------------------------------

SCHEDULE = MegatronSchedulerConfig(lr_decay_style="linear", lr_decay_iters=6, lr_warmup_iters=2)


def step(backend: Any, state: Any) -> tuple[Any, dict[str, float]]:
    axis = backend.data_axis
    samples = make_samples(4)[axis.rank :: axis.size]
    state, metrics = backend.update_(after_draw(state, state.cursor + 4), [make_work(samples)])
    return backend.end_step_(state), values(metrics)


def outcome(backend: Any, state: Any) -> dict[str, Any]:
    state, metrics = step(backend, state)
    kept = (state.step, state.updates, state.cursor, state.key, metrics["lr"])
    return {"kept": kept, "norm": metrics["grad_norm"], "weights": exported(backend, state)}


def save_midway(axis: Axis, cfg: PolicyConfig, folder: Path) -> dict[str, Any]:
    backend, state = open_backend(cfg, axis, key_of(0))
    for _ in range(3):
        state, _ = step(backend, state)
    backend.save(state, folder)
    return outcome(backend, state)


def load_and_go_on(axis: Axis, cfg: PolicyConfig, folder: Path) -> dict[str, Any]:
    backend, state = open_backend(cfg, axis, key_of(99))
    state, _ = step(backend, state)
    return outcome(backend, backend.load_(state, folder))


def test_a_state_saved_in_one_layout_goes_on_in_any_other(
    models: dict[str, str], tmp_path: Path
) -> None:
    # field failures 71 and 73
    base: dict[str, Any] = {"scheduler": SCHEDULE}
    straight = run_ranks(2, save_midway, config(models["qwen3"], **base, **TP2), tmp_path)[0]
    files = {file.suffix for file in tmp_path.iterdir()}
    assert ".pt" not in files, "a common file of Core's older format is a plain pickle"
    model = (tmp_path / "run_config.yaml").read_text()
    assert "num_layers: 4" in model
    for ranks, layout in ((2, TP2), (1, {}), (2, PP2), (2, VPP2), (2, {}), (2, CP2)):
        resumed = run_ranks(
            ranks, load_and_go_on, config(models["qwen3"], **base, **layout), tmp_path
        )[0]
        assert resumed["kept"] == straight["kept"], layout
        assert resumed["norm"] == pytest.approx(straight["norm"], rel=1e-5), layout
        assert distance(resumed["weights"], straight["weights"]) < 1e-5, layout


def load_error(axis: Axis, cfg: PolicyConfig, folder: Path) -> str:
    backend, state = open_backend(cfg, axis, key_of(0))
    try:
        backend.load_(state, folder)
    except ValueError as error:
        return str(error)
    return ""


def rates(axis: Axis, cfg: PolicyConfig, folder: Path | None) -> list[tuple[float, ...]]:
    """Rate, second beta and weight decay of each group in the fourth step, loaded or taken."""
    backend, state = open_backend(cfg, axis, key_of(0))
    for _ in range(0 if folder else 3):
        state, _ = step(backend, state)
    if folder:
        state = backend.load_(state, folder)
    groups = cast(Any, state.model).trainer.built.optimizer.param_groups
    return [(g["lr"], g["betas"][1], g["weight_decay"]) for g in groups]


def test_what_does_not_belong_to_the_run_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    saved, cfg = tmp_path / "saved", config(models["qwen3"], scheduler=SCHEDULE)
    saved.mkdir()
    run_ranks(1, save_midway, cfg, saved)
    whole = structs.replace(cfg.megatron_cfg.optimizer, use_distributed_optimizer=False)
    other = config(models["qwen3"], scheduler=SCHEDULE, optimizer=whole)
    [message] = run_ranks(1, load_error, other, saved)
    assert "policy.megatron_cfg.optimizer.use_distributed_optimizer True, not False" in message
    # Rates and their schedule are those of the config.
    faster = structs.replace(cfg.megatron_cfg.optimizer, lr=2.0, adam_beta2=0.5)
    slowing = structs.replace(faster, min_lr=1.0)
    constant = MegatronSchedulerConfig(lr_warmup_iters=9)
    for schedule, optimizer in ((SCHEDULE, slowing), (constant, faster)):
        other = config(models["qwen3"], scheduler=schedule, optimizer=optimizer)
        assert run_ranks(1, rates, other, saved) == run_ranks(1, rates, other, None)
    [message] = run_ranks(1, load_error, config(models["qwen2"], scheduler=SCHEDULE), saved)
    assert "does not hold the model of policy.model_name" in message
    [message] = run_ranks(1, load_error, cfg, tmp_path)
    assert "no complete checkpoint: it has no state.json" in message
    facts = saved / "state.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "param_groups": []}))
    [message] = run_ranks(1, load_error, cfg, saved)
    assert "was saved by the FSDP2 backend" in message
    facts.write_text(facts.read_text()[:20])
    [message] = run_ranks(1, load_error, cfg, saved)
    assert "no complete checkpoint: state.json" in message


def test_json_values_are_all_that_is_kept_beside_tensors(
    models: dict[str, str], tmp_path: Path
) -> None:
    run_ranks(1, save_midway, config(models["qwen3"]), tmp_path)
    facts = json.loads((tmp_path / "state.json").read_text())
    assert facts["step"] == 3
    assert facts["cursor"] == 12


# ---- long sequences -----------------------------------------------------------------------------


def long_row(axis: Axis, cfg: PolicyConfig) -> torch.Tensor:
    backend, state = open_backend(cfg, axis, key_of(0))
    tokens = torch.randint(2, 60, (1, 16384), generator=torch.Generator().manual_seed(0))
    rows = Rows(tokens, torch.tensor([16384 - 5]))
    return backend.logprobs(state, [rows], TokenHead(), "policy")[0].logprobs


def test_sixteen_thousand_tokens_cut_over_two_ranks(models: dict[str, str]) -> None:
    from msgspec.structs import replace

    def long(**keys: Any) -> PolicyConfig:
        cfg = config(models["qwen3"], packed=True, **keys)
        engine = replace(cfg.generation.vllm_cfg, max_model_len=16384)
        generation = replace(cfg.generation, vllm_cfg=engine)
        return replace(cfg, max_total_sequence_length=16384, generation=generation)

    [whole] = run_ranks(1, long_row, long())
    for found in run_ranks(2, long_row, long(**CP2)):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
