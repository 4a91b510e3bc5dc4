"""LoRA on the FSDP2 backend: what stays the base, what leaves, what a checkpoint holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import distance, exported, make_rows, make_samples, make_work, split
from lora_cases import Start, load_peft, make_start, policy
from models import policy_config, save_model
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from minirl.backend import TokenHead
from minirl.backends.dtensor import backend as dtensor
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.config.policy import PolicyConfig
from minirl.parallel import Axis
from minirl.rng import key_of

KEY = key_of(0)
HEAD = TokenHead()
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    roots = {family: tmp_path_factory.mktemp(family) for family in ("qwen3", "llama")}
    return {f: run_ranks(1, make_start, root, f, **SIZES)[0] for f, root in roots.items()}


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
    assert distance(merged, {n: wanted[n].detach() for n in merged}) < 1e-7
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
    assert distance(resumed, straight) <= (0.0 if saving == loading else 1e-6)


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
