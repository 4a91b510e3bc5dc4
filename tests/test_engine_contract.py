"""What every engine promises, checked on the real ones: vLLM in process and the oracle.

One engine per kind and model serves the whole module; a test that needs given weights loads them
first. Prompts are longer than two blocks of vLLM's cache, so that a stale prefix would show.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import (
    DRAWN,
    GREEDY,
    MAX_MODEL_LEN,
    NUM_CHARACTERS,
    VOCABULARY,
    Case,
    Engines,
    exported,
    greedy,
    move,
    prompts,
    requests,
    save_models,
    tokens_of,
)

from minirl.backends import vllm
from minirl.engine import Request, Sampling, check_logprobs
from minirl.parallel import Axis, world
from minirl.rng import fold_in, key_of
from minirl.rollout.sample import collate, rollout
from minirl.types import Prompt

pytestmark = pytest.mark.on_gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory)


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> Iterator[Engines]:
    """Engines by kind and model, opened when first asked for, closed last of all."""
    with ExitStack() as stack:
        stack.enter_context(world())
        engines = Engines(folders)
        stack.callback(engines.close)
        yield engines


@pytest.fixture(
    params=[
        "hf-qwen3",
        "hf-llama",
        pytest.param("vllm-qwen3", marks=pytest.mark.slow),
        pytest.param("vllm-llama", marks=pytest.mark.slow),
    ]
)
def case(request, opened, folders) -> Case:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind, name = request.param.split("-")
    engine = opened[kind, name]
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    engine.load_(model.named_parameters(), 0)
    return Case(kind, engine, model, AutoTokenizer.from_pretrained(folders[name]))


# field failures 67, 68
def test_greedy_follows_the_weights_through_two_refits(case):
    asked = requests(12)
    seen = []
    for version in range(3):
        expected = greedy(case.model, asked, 8)
        completions = case.engine.generate(asked, GREEDY)
        assert [c.tokens for c in completions] == expected
        assert {c.version for c in completions} == {version}
        seen.append(expected)
        move(case.model, seed=version)
        case.engine.load_(exported(case.model), version + 1)
    assert seen[0] != seen[1] != seen[2]


def test_a_head_that_is_also_given_is_no_trouble(case):
    # field failure 68: some exports hold a tied weight twice
    move(case.model, seed=5)
    case.engine.load_(case.model.state_dict().items(), 1)
    asked = requests(4)
    assert tokens_of(case.engine, asked, GREEDY) == greedy(case.model, asked, 8)


# field failures 25, 26, 37
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_logprobs_are_the_trainers(case, temperature):
    trajectories = rollout(
        case.engine,
        [Prompt(i, p[: 40 + 9 * i], {}) for i, p in enumerate(prompts(6, 90))],
        DRAWN._replace(temperature=temperature),
        num_generations=3,
        key=key_of(1),
        first_group=0,
        step=0,
    )
    batch = collate(trajectories, pad_token_id=0)
    logits = case.model(batch.rows.tokens).logits[:, :-1] / temperature
    expected = logits.log_softmax(-1).gather(-1, batch.rows.tokens[:, 1:, None])[..., 0]
    error = (expected - batch.generation_logprobs)[batch.token_mask].abs()
    assert error.numel() == 6 * 3 * 8
    assert error.max() < 1.3e-5


def test_greedy_logprobs_are_those_of_temperature_one(case):
    (request,) = requests(1)
    (completion,) = case.engine.generate([request], GREEDY)
    rows = torch.tensor([[*request.tokens, *completion.tokens]])
    expected = case.model(rows).logits[0, 69:-1].log_softmax(-1).max(-1).values
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1.3e-5)


# field failure 57
def test_a_seed_decides_the_sample_whatever_the_batch(case):
    asked = requests(128 if case.kind == "vllm" else 16)
    whole = case.engine.generate(asked, DRAWN)
    assert [case.engine.generate([r], DRAWN)[0].tokens for r in asked[:6]] == [
        c.tokens for c in whole[:6]
    ]
    assert [c.tokens for c in case.engine.generate(asked[::-1], DRAWN)[::-1]] == [
        c.tokens for c in whole
    ]


def test_different_seeds_give_different_samples(case):
    (tokens,) = prompts(1, 70)
    asked = [Request(tokens, fold_in(key_of(0), i)) for i in range(16)]
    assert len(set(tokens_of(case.engine, asked, DRAWN))) == 16


def test_the_largest_seed_is_a_seed(case):
    (tokens,) = prompts(1, 70)
    asked = [Request(tokens, seed) for seed in (2**63 - 1, 2**63 - 2, 2**63 - 1, 0)]
    a, b, c, d = tokens_of(case.engine, asked, DRAWN)
    assert a == c
    assert len({a, b, d}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_vllm_draws_what_the_oracle_draws(opened, folders, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    move(model, seed=3)
    drawn = []
    for kind in ("vllm", "hf"):
        opened[kind, name].load_(model.named_parameters(), 0)
        drawn.append(
            opened[kind, name].generate(
                requests(16), Sampling(0.7, 12, tuple(range(6)), stop_strings=("a", "bc"))
            )
        )
    for ours, oracles in zip(*drawn, strict=True):
        assert ours.tokens == oracles.tokens
        assert ours.truncated == oracles.truncated
        assert np.allclose(ours.logprobs, oracles.logprobs, atol=1.3e-5)
    assert len({c.truncated for c in drawn[0]}) == 2


@pytest.mark.slow
@torch.no_grad()
def test_samples_have_the_distribution_of_the_softmax(opened, folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    opened["vllm", "llama"].load_(model.named_parameters(), 0)
    (tokens,) = prompts(1, 70)
    n = 2000
    asked = [Request(tokens, fold_in(key_of(0), i)) for i in range(n)]
    drawn = tokens_of(opened["vllm", "llama"], asked, Sampling(1.5, 1, ()))
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=VOCABULARY)
    expected = n * (model(torch.tensor([tokens])).logits[0, -1] / 1.5).softmax(-1)
    # Tokens expected less than 5 times share one cell of the chi-square statistic.
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    degrees = len(expected) - 1
    assert degrees > 10
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5


# field failure 16
def test_a_stop_token_ends_the_sample_and_is_kept(case):
    asked = requests(8)
    free = case.engine.generate(asked, GREEDY)
    assert all(c.truncated and len(c.tokens) == 8 for c in free)
    stops = (free[0].tokens[3], free[1].tokens[5])
    for full, ended in zip(
        free, case.engine.generate(asked, GREEDY._replace(stop_token_ids=stops)), strict=True
    ):
        at = next((i for i, t in enumerate(full.tokens) if t in stops), None)
        assert ended.tokens == full.tokens[: None if at is None else at + 1]
        assert len(ended.logprobs) == len(ended.tokens)
        assert ended.truncated == (at is None)


def test_an_end_on_the_last_allowed_token_is_no_truncation(case):
    asked = requests(8)
    free = tokens_of(case.engine, asked, GREEDY)
    at, last = next((i, t[-1]) for i, t in enumerate(free) if t[-1] not in t[:-1])
    ended = case.engine.generate(asked, GREEDY._replace(stop_token_ids=(last,)))[at]
    assert ended.tokens == free[at]
    assert not ended.truncated


def test_a_stop_string_ends_the_sample_at_the_token_that_completes_it(case):
    asked = requests(8)
    free = case.engine.generate(asked, GREEDY)
    texts = [case.tokenizer.decode(c.tokens) for c in free]
    text = next(t for t in texts if len(t) >= 6)
    stop = text[2:4]
    ended = case.engine.generate(asked, GREEDY._replace(stop_strings=("never seen", stop)))
    assert any(not c.truncated for c in ended)
    for full, short in zip(free, ended, strict=True):
        ends = [
            i + 1
            for i in range(len(full.tokens))
            if stop in case.tokenizer.decode(full.tokens[: i + 1])
        ]
        assert short.tokens == full.tokens[: min(ends, default=None)]
        assert short.truncated == (not ends)


def test_a_special_token_is_text_to_a_stop_string(case):
    # The model always answers <end>, whose id is not a stop token here.
    head = case.model.get_output_embeddings().weight
    weights = {n: p.detach().clone() for n, p in case.model.named_parameters()}
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])
    case.engine.load_(weights.items(), 1)
    assert head.shape == (VOCABULARY, 64)
    (only,) = case.engine.generate(requests(1), GREEDY)  # all logits are equal: id 0
    assert set(only.tokens) == {0}
    (ended,) = case.engine.generate(requests(1), GREEDY._replace(stop_strings=("<pad>",)))
    assert ended.tokens == (0,)
    assert not ended.truncated


def test_ids_above_the_tokenizers_are_sampled_like_any_other(case):
    asked = requests(32)
    drawn = tokens_of(case.engine, asked, DRAWN._replace(stop_strings=("never seen",)))
    assert any(t >= NUM_CHARACTERS for tokens in drawn for t in tokens)
    assert drawn == tokens_of(case.engine, asked, DRAWN)


# field failure 29
def test_weights_that_are_not_finite_are_an_error_that_names_the_request(case):
    weights = {n: p.detach().clone() for n, p in case.model.named_parameters()}
    weights["model.norm.weight"][0] = float("nan")
    case.engine.load_(weights.items(), 1)
    with pytest.raises(ValueError, match="request 0: the log-prob of sampled token 0 is nan"):
        case.engine.generate(requests(2), DRAWN)
    case.engine.load_(case.model.named_parameters(), 2)
    case.engine.generate(requests(2), DRAWN)


def test_the_process_keeps_its_random_numbers(case):
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    case.engine.generate(requests(2), DRAWN)
    case.engine.load_(case.model.named_parameters(), 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((), "request 1: the prompt is empty"),
        ((3,) * (MAX_MODEL_LEN - 7), f"request 1: 217 .* max_tokens 8 .* {MAX_MODEL_LEN}"),
        ((3, -1), "request 1: token id -1"),
        ((3, VOCABULARY), f"request 1: token id {VOCABULARY}"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(case, tokens, message):
    good = requests(1)[0]
    with pytest.raises(ValueError, match=message):
        case.engine.generate([good, Request(tokens, 0)], DRAWN)
    full = Request((3,) * (MAX_MODEL_LEN - 8), 0)
    assert len(case.engine.generate([good, full], DRAWN)) == 2


def test_nothing_asked_is_nothing_answered(case):
    assert case.engine.generate([], DRAWN) == []


def test_prompts_beyond_one_forward_pass_keep_their_samples(case):
    # More prompt tokens than vLLM schedules at once. Were the last prompt split, its generator
    # would have to be rewound, which a CPU's cannot.
    asked = requests(30 if case.kind == "vllm" else 3, length=MAX_MODEL_LEN - 8)
    whole = tokens_of(case.engine, asked, DRAWN)
    assert [case.engine.generate([r], DRAWN)[0].tokens for r in asked[-3:]] == whole[-3:]


def test_after_sleep_and_wake_the_engine_needs_only_weights(case):
    asked = requests(4)
    before = tokens_of(case.engine, asked, GREEDY)
    case.engine.sleep_()
    case.engine.wake_()
    case.engine.load_(case.model.named_parameters(), 1)
    assert tokens_of(case.engine, asked, GREEDY) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), "k_proj"),
        (lambda w: w.update({"model.layers.0.extra.weight": torch.zeros(2)}), "extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(2)}), r"norm\.weight.*\(2,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_of_another_model_are_refused(case, change, message):
    weights = {n: p.detach() for n, p in case.model.named_parameters()}
    change(weights)
    with pytest.raises(ValueError, match=message):
        case.engine.load_(weights.items(), 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.01])
def test_a_logprob_that_is_none_names_its_request(bad):
    check_logprobs(0, [-0.5, 0.0, 1e-6], 3)
    with pytest.raises(ValueError, match=r"request 7.*token 1"):
        check_logprobs(7, [-0.5, bad], 2)
    with pytest.raises(ValueError, match=r"request 7.*1 log-probs for 2"):
        check_logprobs(7, [-0.5], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_weights_reloaded_layer_by_layer_are_the_same_weights(opened, folders, name, monkeypatch):
    """The way of a GPU, which a CPU can go too."""
    from transformers import AutoModelForCausalLM

    load_ = vllm._load_
    monkeypatch.setattr(
        vllm, "_load_", lambda llm, weights, in_place: load_(llm, weights, in_place=False)
    )
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    asked = requests(8)
    for seed in (8, 9, 10):
        move(model, seed)
        # The last time, a tied head is given twice.
        weights = exported(model) if seed < 10 else model.state_dict().items()
        opened["vllm", name].load_(weights, seed)
        assert tokens_of(opened["vllm", name], asked, GREEDY) == greedy(model, asked, 8)


@pytest.mark.slow
def test_a_temperature_that_vllm_would_raise_is_refused(opened):
    with pytest.raises(ValueError, match=r"temperature 0\.001"):
        opened["vllm", "qwen3"].generate(requests(1), DRAWN._replace(temperature=0.001))


def test_the_oracle_takes_the_experts_of_a_mixture_one_by_one(opened, tmp_path):
    """As checkpoints, and exports, name them."""
    from models import policy_config, save_model

    from minirl.backends import hf_generate
    from minirl.backends.dtensor import backend as dtensor

    folders = [save_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (0, 1)]
    cfg = policy_config(folders[1])
    axis = Axis(0, 1, torch.distributed.group.WORLD)
    backend, state = dtensor.open_backend(cfg, axis, key_of(0))
    ask = [Request((2, 3, 4), 0)]
    first, second = (hf_generate.open_engine(cfg.generation, f) for f in folders)
    expected = second.generate(ask, GREEDY)
    assert first.generate(ask, GREEDY) != expected
    first.load_(backend.export(state), 0)
    assert first.generate(ask, GREEDY) == expected
    weights = dict(backend.export(state))
    del weights["model.layers.1.mlp.experts.0.up_proj.weight"]
    with pytest.raises(ValueError, match=r"not given.*mlp\.experts\.gate_up_proj"):
        first.load_(weights.items(), 1)
