"""The FSDP2 backend against a plain torch loop: same numbers for any split, padding and layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import (
    GRADIENT,
    Sample,
    distance,
    exported,
    gradient_of,
    make_rows,
    make_samples,
    make_work,
    plain_loop,
    real,
    split,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, Family, policy_config
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from minirl.backend import TokenHead, TokenOutput, Work, after_draw
from minirl.backends.dtensor import backend as dtensor
from minirl.config.policy import PolicyConfig, ScheduleConfig
from minirl.metrics import value
from minirl.parallel import Axis
from minirl.rng import key_of

HEAD = TokenHead()
KEY = key_of(0)
LINEAR = ScheduleConfig(
    "torch.optim.lr_scheduler.LinearLR", {"start_factor": 0.25, "total_iters": 3}
)


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norm_and_logprobs_equal_those_of_a_plain_loop(solo, folders, family: Family):
    samples = make_samples(5, longest=20)
    plain = plain_loop(folders[family], samples, temperature=0.7)
    backend, state = dtensor.open_backend(policy_config(folders[family], **GRADIENT), solo, KEY)
    head = TokenHead(temperature=0.7)
    rows = make_rows(samples, padding=3)
    (found,) = backend.logprobs(state, [rows], head, "policy")
    assert (found.logprobs[real(rows)] - torch.cat(plain.logprobs)).abs().max() < 1e-5
    gradients, norm = gradient_of(backend, state, [make_work(samples, padding=3, head=head)])
    assert distance(gradients, plain.gradients) < 5e-6
    assert norm == pytest.approx(plain.norm, rel=1e-6)


@settings(max_examples=15)
@given(
    order=st.permutations(range(7)),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    padding=st.integers(0, 9),
    junk=st.sampled_from([0, 5, 63, 64, 10**9, -100]),
)
def test_gradient_is_equal_for_any_split_order_and_padding(
    solo, folders, order, sizes, padding, junk
):
    samples = make_samples(7)
    cfg = policy_config(folders["qwen3"], **GRADIENT)
    whole, norm = gradient_of(*dtensor.open_backend(cfg, solo, KEY), [make_work(samples)])
    works = [make_work(part, padding, junk) for part in split([samples[i] for i in order], sizes)]
    again, norm_again = gradient_of(*dtensor.open_backend(cfg, solo, KEY), works)
    assert distance(again, whole) < 3e-6
    assert norm_again == pytest.approx(norm, rel=1e-6)


def test_the_padding_token_learns_where_it_is_a_real_token(solo, folders):
    # field failure 17: in these models the padding token (1) is also the end token.
    sample = Sample((5, 1, 7, 9), (0.0, 1.0, 1.0))
    cfg = policy_config(folders["llama"], **GRADIENT)
    gradients, _ = gradient_of(*dtensor.open_backend(cfg, solo, KEY), [make_work([sample])])
    assert gradients["model.embed_tokens.weight"][1].norm() > 1e-3


def test_the_first_ratio_is_exactly_one(solo, folders):
    # field failure 32
    for family in FAMILIES:
        for head in (TokenHead(0.9), TokenHead(0.9, entropy=True)):
            backend, state = dtensor.open_backend(policy_config(folders[family]), solo, KEY)
            assert _differing(backend, state, head) == 0


def _differing(backend: Any, state: Any, head: TokenHead) -> int:
    """How many log-probs of an update differ, in any bit, from those computed before it."""
    parts = split(make_samples(9), [4, 2, 3])
    rows = [make_rows(part) for part in parts]
    before = backend.logprobs(state, rows, TokenHead(head.temperature), "policy")
    seen: list[torch.Tensor] = []

    def loss(output: TokenOutput):
        seen.append(output.logprobs.detach())
        return output.logprobs.sum(), {}

    backend.update_(state, [Work(r, head, loss) for r in rows])
    return sum(int((a.logprobs != b).sum()) for a, b in zip(before, seen, strict=True))


def test_entropy_equals_the_plain_formula(solo, folders):
    from transformers import AutoModelForCausalLM

    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    rows = make_rows(make_samples(1))
    (found,) = backend.logprobs(state, [rows], TokenHead(0.8, entropy=True), "policy")
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    logs = (model(rows.tokens, use_cache=False).logits[:, :-1] / 0.8).log_softmax(-1)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy, -(logs.exp() * logs).sum(-1), atol=1e-5, rtol=1e-5)


# ---- layouts ------------------------------------------------------------------------------------


def _train(axis: Axis, cfg: PolicyConfig, num_updates: int) -> dict[str, Any]:
    """Updates on the ranks' shares of one global batch, and everything that can be seen of them."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    seen: dict[str, Any] = {"norms": []}
    samples = make_samples(8)[axis.rank :: axis.size]
    rows = make_rows(samples)
    seen["ratio"] = _differing(*dtensor.open_backend(cfg, axis, KEY), HEAD)
    (output,) = backend.logprobs(state, [rows], HEAD, "policy")
    seen["logprobs"] = output.logprobs[real(rows)]
    for _ in range(num_updates):
        state, metrics = backend.update_(state, [make_work(p) for p in split(samples, [1, 3])])
        seen["norms"].append(value(metrics["grad_norm"]))
    seen["weights"] = exported(backend, state)
    seen["units"] = len([m for m in state.model.trainer.model.modules() if _is_unit(m)])
    return seen


def _is_unit(module: torch.nn.Module) -> bool:
    return isinstance(module, FSDPModule)


@pytest.mark.parametrize(("name", "units"), [("qwen3", 1), ("qwen3_untied", 1), ("large", 3)])
def test_two_ranks_equal_one(folders, name, units):
    gradient = policy_config(folders[name], **GRADIENT)
    clipped = policy_config(folders[name], max_grad_norm=0.05)
    for cfg, num_updates, bound in ((gradient, 1, 3e-6), (clipped, 3, 2e-6)):
        (one,) = run_ranks(1, _train, cfg, num_updates)
        both = run_ranks(2, _train, cfg, num_updates)
        assert {r["units"] for r in (one, *both)} == {units}
        assert [r["ratio"] for r in (one, *both)] == [0, 0, 0]
        for rank in both:
            # field failure 70; gradients are sums in float32, whose order is the processor's
            assert rank["norms"][0] == pytest.approx(one["norms"][0], rel=1e-7)
            assert rank["norms"] == pytest.approx(one["norms"], rel=2e-6)
            assert distance(rank["weights"], one["weights"]) < bound


def test_clipping_scales_the_gradient_to_the_norm(solo, folders):
    cfg = policy_config(folders["qwen3"], **{**GRADIENT, "max_grad_norm": 0.05})
    gradients, norm = gradient_of(
        *dtensor.open_backend(cfg, solo, KEY), [make_work(make_samples(4))]
    )
    clipped = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert norm > 0.1
    assert clipped == pytest.approx(0.05, rel=1e-5)


def test_a_gradient_below_the_norm_is_not_scaled(solo, folders):
    work = make_work(make_samples(4))
    free = policy_config(folders["qwen3"], **GRADIENT)
    loose = policy_config(folders["qwen3"], **{**GRADIENT, "max_grad_norm": 1e6})
    one, _ = gradient_of(*dtensor.open_backend(free, solo, KEY), [work])
    two, _ = gradient_of(*dtensor.open_backend(loose, solo, KEY), [work])
    assert distance(one, two) == 0


def _uneven(axis: Axis, cfg: PolicyConfig) -> str:
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    rows = [make_rows(make_samples(1))] * (1 + axis.rank)
    with pytest.raises(ValueError, match=r"\[1, 2\]") as error:
        backend.logprobs(state, rows, HEAD, "policy")
    return str(error.value)


def test_ranks_with_different_numbers_of_micro_batches_are_refused(folders):
    first, second = run_ranks(2, _uneven, policy_config(folders["qwen3"]))
    assert first == second


def _with_idle_rank(axis: Axis, cfg: PolicyConfig) -> dict[str, torch.Tensor]:
    """Rank 1 has a loss that no weight changes."""
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    work = make_work(make_samples(3))
    idle = work._replace(loss=lambda _: (torch.tensor(0.0), {}))
    gradients, _ = gradient_of(backend, state, [work, idle] if axis.rank == 0 else [idle, idle])
    return gradients


def test_a_rank_without_trained_tokens_takes_part(folders, solo):
    # field failure 23
    cfg = policy_config(folders["qwen3"], **GRADIENT)
    alone, _ = gradient_of(*dtensor.open_backend(cfg, solo, KEY), [make_work(make_samples(3))])
    for gradients in run_ranks(2, _with_idle_rank, cfg):
        assert distance(gradients, alone) < 1e-6


# ---- states -------------------------------------------------------------------------------------


def test_a_consumed_state_is_refused(solo, folders, tmp_path):
    backend, old = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    work = make_work(make_samples(2))
    new, _ = backend.update_(old, [work])
    for use in (
        lambda: backend.logprobs(old, [work.rows], HEAD, "policy"),
        lambda: backend.update_(old, [work]),
        lambda: backend.end_step_(old),
        lambda: backend.export(old),
        lambda: backend.save(old, tmp_path),
        lambda: backend.load_(old, tmp_path),
        lambda: backend.end_step_(after_draw(old, 8)),
    ):
        with pytest.raises(ValueError, match="state of update 0 was consumed; now at 1"):
            use()
    ended = backend.end_step_(new)
    with pytest.raises(ValueError, match="consumed"):
        backend.end_step_(new)
    assert (ended.updates, ended.step, ended.cursor, ended.key) == (1, 1, 0, KEY)
    moved = after_draw(ended, 8)
    assert backend.end_step_(moved).cursor == 8


def test_an_update_needs_a_micro_batch(solo, folders):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        backend.update_(state, [])


def test_a_loss_that_raises_consumes_the_state(solo, folders):
    # What it has gathered stays inside the model, and would be added to the next gradient.
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    parts = [make_work(part) for part in split(make_samples(4), [2])]

    def broken(output: TokenOutput):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        backend.update_(state, [parts[0], parts[1]._replace(loss=broken)])
    with pytest.raises(ValueError, match="consumed"):
        backend.update_(state, parts)


# ---- the frozen reference -----------------------------------------------------------------------


def _reference(axis: Axis, cfg: PolicyConfig) -> tuple[int, int, int]:
    """How many log-probs differ: reference and start; policy before and after a look; and start."""
    backend, state = dtensor.open_backend(cfg, axis, KEY, with_reference=True)
    works = [make_work(part) for part in split(make_samples(4), [2])]
    rows = [w.rows for w in works]

    def look(weights: Any) -> torch.Tensor:
        return torch.cat(
            [o.logprobs.flatten() for o in backend.logprobs(state, rows, HEAD, weights)]
        )

    start = look("policy")
    for _ in range(3):
        state, _ = backend.update_(state, works)
    before, reference, after = look("policy"), look("reference"), look("policy")
    count = torch.count_nonzero
    return int(count(reference != start)), int(count(before != after)), int(count(before != start))


@pytest.mark.parametrize("name", ["qwen3", "large"])
def test_the_reference_stays_what_was_loaded_and_leaves_the_policy_alone(folders, name):
    for size in (1, 2):
        for reference, around, trained in run_ranks(size, _reference, policy_config(folders[name])):
            assert (reference, around) == (0, 0)
            assert trained > 10


def test_a_reference_that_was_not_loaded_is_refused(solo, folders):
    backend, state = dtensor.open_backend(policy_config(folders["qwen3"]), solo, KEY)
    with pytest.raises(ValueError, match="with_reference"):
        backend.logprobs(state, [make_rows(make_samples(1))], HEAD, "reference")
    assert state.model.trainer.reference is None


def test_a_look_at_the_reference_that_fails_leaves_the_policy(solo, folders):
    cfg = policy_config(folders["qwen3"])
    backend, state = dtensor.open_backend(cfg, solo, KEY, with_reference=True)
    work = make_work(make_samples(2))
    state, _ = backend.update_(state, [work])
    (before,) = backend.logprobs(state, [work.rows], HEAD, "policy")
    with pytest.raises(ValueError, match="temperature"):
        backend.logprobs(state, [work.rows, work.rows], TokenHead(0.0), "reference")
    (after,) = backend.logprobs(state, [work.rows], HEAD, "policy")
    assert torch.equal(before.logprobs, after.logprobs)


# ---- export -------------------------------------------------------------------------------------


def _exported_after(axis: Axis, cfg: PolicyConfig, num_updates: int) -> dict[str, torch.Tensor]:
    backend, state = dtensor.open_backend(cfg, axis, KEY)
    rows = make_rows(make_samples(3))
    backend.logprobs(state, [rows], HEAD, "policy")
    for _ in range(num_updates):
        state, _ = backend.update_(state, [make_work(make_samples(3))])
    backend.logprobs(state, [rows], HEAD, "policy")
    return exported(backend, state)


@pytest.mark.parametrize("name", [*FAMILIES, "large"])
def test_export_gives_the_names_and_values_on_disk(folders, name):
    disk = load_file(Path(folders[name]) / "model.safetensors")
    for size in (1, 2):
        for weights in run_ranks(size, _exported_after, policy_config(folders[name]), 0):
            assert weights.keys() == disk.keys()
            assert all(torch.equal(weights[k], disk[k]) for k in disk)
            assert ("lm_head.weight" in weights) == (name in ("qwen3_untied", "llama"))


def test_exported_weights_give_the_same_logprobs_in_transformers(solo, folders):
    from transformers import AutoModelForCausalLM

    for family in ("qwen3", "qwen3_untied"):
        backend, state = dtensor.open_backend(policy_config(folders[family]), solo, KEY)
        for _ in range(3):
            state, _ = backend.update_(state, [make_work(make_samples(3))])
        model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
        model.load_state_dict(exported(backend, state), strict=False)
        rows = make_rows(make_samples(1))
        logs = model(rows.tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        (found,) = backend.logprobs(state, [rows], HEAD, "policy")
        plain = logs.gather(-1, rows.tokens[:, 1:, None])[..., 0]
        torch.testing.assert_close(found.logprobs, plain, atol=1e-5, rtol=1e-5)
