"""Supervised fine-tuning: answers are learnt, prompts are not, and any split gives one update."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backend_cases import GRADIENT, distance, exported
from hypothesis import given
from hypothesis import strategies as st
from models import policy_config, save_model
from ranks import run_ranks

from minirl.algos import sft
from minirl.algos.sft import Demonstration, collate
from minirl.backend import TokenHead
from minirl.backends.dtensor import backend as dtensor
from minirl.config.policy import (
    DynamicBatchingConfig,
    GenerationConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    VllmConfig,
)
from minirl.cost import Cost, cost_of
from minirl.metrics import values
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of

PAD = 1
tokens = st.lists(st.integers(0, 63), min_size=1, max_size=5).map(tuple)
SHOWN = [
    Demonstration((5, 6, 7), (8, 1)),
    Demonstration((9,), (10, 11, 12, 1)),
    Demonstration((1, 1), (1,)),  # the padding token as a real one
]


@given(st.lists(st.builds(Demonstration, prompt=tokens, answer=tokens), min_size=1, max_size=5))
def test_rows_hold_every_token_and_the_mask_predicts_the_answers(shown: list[Demonstration]):
    rows, mask = collate(shown, PAD)
    assert mask.shape == (len(shown), rows.tokens.shape[1] - 1)
    assert rows.tokens.shape[1] == max(rows.lengths)
    for row, length, trained, d in zip(*rows, mask, shown, strict=True):
        assert row[:length].tolist() == [*d.prompt, *d.answer]
        assert (row[length:] == PAD).all()
        assert row[1:][trained].tolist() == list(d.answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def learn(axis: Axis, name: str, parts: Sequence[Sequence[Demonstration]]) -> Any:
    """The weights after one plain gradient step, the metrics, and what the state counts."""
    backend, state = dtensor.open_backend(policy_config(name, **GRADIENT), axis, key_of(0))
    state, metrics = sft.step(state, [collate(part, PAD) for part in parts], backend)
    return exported(backend, state), values(metrics), (state.step, state.updates)


def _learn_shares(axis: Axis, name: str) -> Any:
    return learn(axis, name, [SHOWN[:2], SHOWN[2:]][axis.rank : axis.rank + 1])


def test_any_split_over_micro_batches_and_ranks_gives_one_update(solo: Axis, model: str):
    weights, metrics, counts = learn(solo, model, [SHOWN])
    assert counts == (1, 1)
    one_by_one = learn(solo, model, [[d] for d in reversed(SHOWN)])
    for other in (one_by_one, *run_ranks(2, _learn_shares, model)):
        assert distance(other[0], weights) < 3e-6
        assert other[1] == pytest.approx(metrics, rel=1e-5)
        assert other[2] == counts


DESCENT = {"optimizer": OptimizerConfig("torch.optim.SGD", {"lr": 0.01}), "max_grad_norm": None}
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "packed": {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=8)},
    "padded": {
        "dynamic_batching": DynamicBatchingConfig(
            enabled=True, train_mb_tokens=16, sequence_length_round=8
        )
    },
}


def small(name: str, kind: str) -> PolicyConfig:
    sizes = {"train_global_batch_size": 4, "train_micro_batch_size": 2, "logprob_batch_size": 2}
    generation = GenerationConfig(
        max_new_tokens=4, vllm_cfg=VllmConfig(precision="float32", max_model_len=8)
    )
    fields = {"max_total_sequence_length": 8, "generation": generation, **sizes}
    return policy_config(name, **{**fields, **DESCENT, **KINDS[kind]})


def learn_as(axis: Axis, name: str, kind: str) -> Any:
    cfg = small(name, kind)
    cost = cost_of(name)
    backend, state = dtensor.open_backend(cfg, axis, key_of(0))
    metrics = None
    for update in sft.cut(UNEVEN, PAD, cfg, axis, cost, key_of(0)):
        state, metrics = sft.step(state, update, backend)
    assert metrics is not None
    return exported(backend, state), values(metrics), (state.step, state.updates)


UNEVEN = [*SHOWN, Demonstration((5, 6), (7, 8, 9, 1)), *SHOWN[::-1], Demonstration((3,), (4,))]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_shared_demonstrations_give_the_same_updates(
    kind: str, solo: Axis, model: str
):
    backend, state = dtensor.open_backend(policy_config(model, **DESCENT), solo, key_of(0))
    metrics = None
    for part in (UNEVEN[:4], UNEVEN[4:]):
        state, metrics = sft.step(state, [collate(part, PAD)], backend)
    assert metrics is not None
    for other in run_ranks(2, learn_as, model, kind):
        assert distance(other[0], exported(backend, state)) < 3e-6
        assert other[1] == pytest.approx(values(metrics), rel=1e-5)
        assert other[2] == (2, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_demonstration_is_shown_once(kind: str, ranks: int, model: str):
    cfg, axes = small(model, kind), [Axis(r, ranks, None) for r in range(ranks)]
    parts = [p for a in axes for u in sft.cut(UNEVEN, PAD, cfg, a, Cost(), key_of(0)) for p in u]
    answers = [
        tuple(row[1:][trained].tolist())
        for part in parts
        for row, trained in zip(part.rows.tokens, part.token_mask, strict=True)
        if trained.any()
    ]
    assert sorted(answers) == sorted(d.answer for d in UNEVEN)


def test_what_cannot_be_shown_is_refused(model: str):
    whole = Demonstration((5,), (6, 1))
    for empty in (Demonstration((), (6, 1)), Demonstration((5,), ())):
        with pytest.raises(ValueError, match="demonstration 1 has an empty prompt or answer"):
            collate([whole, empty], PAD)
    cfg, long = small(model, "fixed"), Demonstration((5,) * 7, (6, 1))
    with pytest.raises(ValueError, match=r"demonstration 3 has 9 tokens.* is 8"):
        sft.cut([whole] * 3 + [long], PAD, cfg, SOLO, Cost(), key_of(0))
    with pytest.raises(ValueError, match="0 samples are no whole updates"):
        sft.cut([], PAD, cfg, SOLO, Cost(), key_of(0))


def test_of_nothing_a_row_is_shown_that_trains_nothing():
    rows, mask = collate([], PAD, width=4)
    assert rows.tokens.shape == (1, 4)
    assert rows.lengths.tolist() == [1]
    assert not mask.any()


def test_the_loss_is_the_mean_over_the_answers_tokens(solo: Axis, model: str):
    backend, state = dtensor.open_backend(policy_config(model), solo, key_of(0))
    rows, _ = collate(SHOWN, PAD)
    [seen] = backend.logprobs(state, [rows], TokenHead(), "policy")
    terms = torch.cat(
        [
            row[len(d.prompt) - 1 : len(d.prompt) - 1 + len(d.answer)]
            for row, d in zip(seen.logprobs, SHOWN, strict=True)
        ]
    )
    _, metrics, _ = learn(solo, model, [SHOWN])
    assert metrics["loss"] == pytest.approx(-terms.mean().item(), rel=1e-6)


def test_what_is_shown_is_learnt(solo: Axis, model: str):
    backend, state = dtensor.open_backend(policy_config(model), solo, key_of(0))
    losses = []
    for _ in range(20):
        state, metrics = sft.step(state, [collate(SHOWN, PAD)], backend)
        losses.append(values(metrics)["loss"])
    assert losses[-1] < losses[0] / 2
    assert (state.step, state.updates) == (20, 20)
