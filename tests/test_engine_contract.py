"""What every engine promises, checked on the real ones: vLLM in process and the oracle.

One engine per kind and model serves the whole module; a test that needs given weights loads them
first. Prompts are longer than two blocks of vLLM's cache, so that a stale prefix would show.
"""

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from models import save_model

from minirl.backends import hf_generate, vllm
from minirl.config import GenerationConfig, VllmConfig
from minirl.engine import Engine, Request, Sampling, check_logprobs
from minirl.parallel import world
from minirl.rng import fold_in, key_of
from minirl.rollout import collate, rollout
from minirl.types import Prompt

VOCABULARY, NUM_CHARACTERS, MAX_MODEL_LEN = 128, 97, 224
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_token_ids=())
DRAWN = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())


class Case(NamedTuple):
    """An engine, and the trainer's model with the weights that its checkpoint has."""

    kind: str
    engine: Engine
    model: Any
    tokenizer: Any


def save_tokenizer(folder: Path) -> None:
    """One token a character: ids 0 to 96. Ids above are the model's alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>"]
    letters = list(string.printable[: NUM_CHARACTERS - len(special)])
    ids = {token: i for i, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=8,
        vllm_cfg=VllmConfig(precision="float32", max_model_len=MAX_MODEL_LEN, enforce_eager=True),
        **fields,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied and an untied model."""
    made = {}
    for name in ("qwen3", "llama"):
        folder = tmp_path_factory.mktemp(name)
        save_model(
            folder,
            name,
            vocab=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            head_dim=32,
            max_position_embeddings=256,
        )
        save_tokenizer(folder)
        # An engine that honours this ends almost at once; `Sampling` alone decides.
        hostile = {"eos_token_id": list(range(2, 120)), "max_new_tokens": 2, "top_k": 1}
        (folder / "generation_config.json").write_text(json.dumps(hostile))
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> Iterator[dict[tuple[str, str], Engine]]:
    """Engines by kind and model, opened when first asked for, closed last of all."""
    with ExitStack() as stack:
        stack.enter_context(world())
        engines = Engines(folders)
        stack.callback(engines.close)
        yield engines


class Engines(dict[tuple[str, str], Engine]):
    def __init__(self, folders: dict[str, Path]):
        super().__init__()
        self.folders = folders

    def __missing__(self, key: tuple[str, str]) -> Engine:
        kind, name = key
        module = {"vllm": vllm, "hf": hf_generate}[kind]
        self[key] = module.open_engine(config(), str(self.folders[name]))
        return self[key]

    def close(self) -> None:
        while self:
            self.popitem()[1].close()


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


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(2, VOCABULARY, (count, length), generator=generator)
    return [tuple(row) for row in draws.tolist()]


def requests(count: int, length: int = 70) -> list[Request]:
    return [
        Request(tokens, fold_in(key_of(0), i)) for i, tokens in enumerate(prompts(count, length))
    ]


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """An optimizer step, as far as an engine can tell."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def exported(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as a backend may export them: a tensor is valid until the next one."""
    room = torch.empty(max(p.numel() for p in model.parameters()))
    for name, parameter in model.named_parameters():
        room.fill_(float("nan"))
        yield name, room[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())


@torch.no_grad()
def greedy(model: Any, asked: list[Request], num_tokens: int) -> list[tuple[int, ...]]:
    """Every token from a full recompute."""
    rows = torch.tensor([r.tokens for r in asked])
    start = rows.shape[1]
    for _ in range(num_tokens):
        rows = torch.cat([rows, model(rows).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [tuple(row) for row in rows[:, start:].tolist()]


def tokens_of(engine: Engine, asked: list[Request], sampling: Sampling) -> list[tuple[int, ...]]:
    return [c.tokens for c in engine.generate(asked, sampling)]


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


# --- vLLM alone -------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dtype", "tensor_parallel_size", "max_num_seq"])
def test_vllm_kwargs_that_would_be_ignored_are_refused(folders, name):
    with pytest.raises(ValueError, match=rf"policy\.generation\.vllm_kwargs\.{name}\b"):
        vllm.open_engine(config(vllm_kwargs={name: 3}), str(folders["qwen3"]))


def test_the_trainers_process_group_must_exist_first(monkeypatch, folders):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but no process group exists"):
        vllm.open_engine(config(), str(folders["qwen3"]))


RANKS_SCRIPT = """
import os, random, sys
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
from minirl.backends import hf_generate, vllm
from minirl.config import GenerationConfig, VllmConfig
from minirl.engine import Sampling
from minirl.parallel import gather, world
from minirl.rng import key_of
from minirl.rollout import rollout
from minirl.types import Prompt

cfg = GenerationConfig(
    max_new_tokens=8,
    vllm_cfg=VllmConfig(precision="float32", max_model_len=128, enforce_eager=True),
)
sampling = Sampling(1.0, 8, (1,))
with world(60.0) as axis:
    trainers = dist.new_group([0, 1])
    before = dict(os.environ), random.getstate()
    engine = vllm.open_engine(cfg, sys.argv[1])
    assert (dict(os.environ), random.getstate()) == before
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    oracle = hf_generate.open_engine(cfg, sys.argv[1])
    prompts = [Prompt(i, tuple(range(2 + i, 72 + i)), {}) for i in range(4)]
    noise = torch.Generator().manual_seed(0)
    for version in range(3):
        ask = dict(num_generations=2, key=key_of(0), step=version)
        mine = prompts[2 * axis.rank : 2 * axis.rank + 2]
        got = gather(rollout(engine, mine, sampling, first_group=2 * axis.rank, **ask), axis)
        want = rollout(oracle, prompts, sampling, first_group=0, **ask)
        assert [t.tokens for t in got] == [t.tokens for t in want], version
        assert {t.version for t in got} == {version}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=noise))
        dist.barrier(group=trainers)
        engine.load_(model.named_parameters(), version + 1)
        oracle.load_(model.named_parameters(), version + 1)
    engine.close()
print("rank", axis.rank, "finished")
"""


@pytest.mark.slow
def test_two_ranks_sample_refit_twice_and_end_cleanly(folders, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS_SCRIPT)
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(script), str(folders["qwen3"])),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d finished", done.stdout)) == [
        "rank 0 finished",
        "rank 1 finished",
    ]
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_an_engine_leaves_no_trace_and_can_follow_another(opened, folders):
    opened.close()
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return module.forward

    with world():
        before = dict(os.environ), torch.set_num_threads, torch.get_rng_state()
        cfg = config(vllm_kwargs={"max_num_seqs": 3})
        cfg = msgspec.structs.replace(
            cfg, vllm_cfg=msgspec.structs.replace(cfg.vllm_cfg, precision="bfloat16")
        )
        engine = vllm.open_engine(cfg, str(folders["llama"]))
        answers = engine.generate(requests(7), DRAWN)
        assert len({a.tokens for a in answers}) == 7
        assert (dict(os.environ), torch.set_num_threads) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert len(compiled) == 1  # the trainer may compile, though the engine does not
        engine.close()


@pytest.mark.slow
def test_weights_that_a_cpu_engine_would_take_wrongly_are_refused(opened, tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=2,
            num_experts_per_tok=1,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
        )
    )
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    opened.close()
    with world():
        engine = vllm.open_engine(config(), str(tmp_path))
        with pytest.raises(ValueError, match=r"policy\.generation\.backend=hf"):
            engine.load_(model.named_parameters(), 1)
        engine.close()


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
