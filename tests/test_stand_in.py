"""Log-probs that depend on the row alone, and the comparison that every opened model goes through.

Three are held against each other: Hugging Face on a single unpadded row, the FSDP2 backend on rows
alone, padded, beside longer ones and packed, and the engines.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engines import save_tokenizer
from models import policy_config, save_model
from msgspec import structs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minirl.backend import TokenHead
from minirl.backends import (
    check_policy,
    dtensor,
    dtensor_compare,
    dtensor_setup,
    hf_generate,
    hf_model,
    stand_in,
    vllm,
)
from minirl.backends.stand_in import Sizes, compare, rows_of, stand_in_config, stand_in_model
from minirl.engine import Request, Sampling
from minirl.policy_config import GenerationConfig, SequencePackingConfig, VllmConfig
from minirl.rng import key_of
from minirl.types import Rows

HEAD, KEY, LIMIT = TokenHead(), key_of(0), 2e-5
WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_of(kind: str, **fields: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**WIDTHS, **fields})


def rope(kind: str, **fields: Any) -> Any:
    return config_of("Llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **fields})


# ---- positions ----------------------------------------------------------------------------------

LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0], "factor": 4.0}
PHI = {"original_max_position_embeddings": 16}


def longrope(**changed: Any) -> Any:
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **LONG, **changed}
    return config_of("Phi3", rope_parameters=parameters, **PHI)


class Positions(NamedTuple):
    """A model, the engine's length, and the same model as Hugging Face has it on one row."""

    config: Any
    alone: Any
    max_model_len: int = 64
    lengths: tuple[int, ...] = (10, 40, 5)


def same(config: Any, *others: Any) -> Positions:
    return Positions(config, config, *others)


SHORT = (10, 16, 5)
POSITIONS = {
    "default": same(rope("default")),
    "linear": same(rope("linear", factor=4.0)),
    # Beyond max_position_embeddings vLLM's table ends, whatever the factor.
    "dynamic": same(rope("dynamic", factor=4.0)),
    "dynamic_short": same(
        config_of(
            "Llama",
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        ),
        64,
        SHORT,
    ),
    "yarn": same(rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama3": same(
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        )
    ),
    "proportional": same(rope("proportional", partial_rotary_factor=0.5)),
    # An engine that may go beyond the original length takes the long factors for every row.
    "longrope": Positions(longrope(), longrope(short_factor=LONG["long_factor"])),
    "longrope_short": same(longrope(), 16, SHORT),
}


def saved(config: Any, folder: Path) -> str:
    """A model of this config with wide weights."""
    stand_in_model(config).save_pretrained(folder)
    return str(folder)


def rows(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (n,), generator=draw).tolist() for n in lengths]


def padded(some: list[list[int]], width: int = 0) -> Rows:
    width = max(width, *map(len, some))
    tokens = torch.tensor([[*r, *[0] * (width - len(r))] for r in some])
    return Rows(tokens, torch.tensor([len(r) for r in some]))


@torch.no_grad()
def alone(config: Any, asked: list[list[int]]) -> list[torch.Tensor]:
    """By Hugging Face, with its plainest attention: a new model for every row, nothing frozen."""
    found = []
    for row in asked:
        tokens = torch.tensor([row])
        logs = stand_in_model(config, "eager")(tokens, use_cache=False).logits.log_softmax(-1)
        found.append(logs[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0])
    return found


def distance(opened: Any, batch: Rows, expected: list[torch.Tensor]) -> float:
    backend, state = opened
    (output,) = backend.logprobs(state, [batch], HEAD, "policy")
    pairs = zip(output.logprobs, expected, strict=True)
    return max(float((found[: len(e)] - e).abs().max()) for found, e in pairs)


def generation(max_model_len: int) -> GenerationConfig:
    cfg = VllmConfig(precision="float32", max_model_len=max_model_len, enforce_eager=True)
    return GenerationConfig(max_new_tokens=8, vllm_cfg=cfg)


def open_trainer(model: str, solo: Any, max_model_len: int = 64, *, packed: bool = False) -> Any:
    cfg = policy_config(
        model,
        generation=generation(max_model_len),
        max_total_sequence_length=max_model_len,
        sequence_packing=SequencePackingConfig(enabled=packed),
    )
    return dtensor.open_backend(cfg, solo, KEY)


def check_rows(opened: Any, expected: list[torch.Tensor], asked: list[list[int]]) -> None:
    """Each row alone, padded, beside the others, and alone again afterwards."""
    for row, one in zip(asked, expected, strict=True):
        assert distance(opened, padded([row]), [one]) < LIMIT
        assert distance(opened, padded([row], 40), [one]) < LIMIT
    assert distance(opened, padded(asked), expected) < LIMIT
    assert distance(opened, padded(asked[:1]), expected[:1]) < LIMIT


def test_every_kind_of_positions_is_tried():
    assert {p.split("_")[0] for p in POSITIONS} == {*ROPE_INIT_FUNCTIONS, "default"}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_do_not_depend_on_the_batch(name, solo, tmp_path):
    case = POSITIONS[name]
    asked = rows(case.lengths)
    expected = alone(case.alone, asked)
    model = saved(case.config, tmp_path)
    for packed in (False, True):
        check_rows(open_trainer(model, solo, case.max_model_len, packed=packed), expected, asked)


def test_long_factors_are_not_those_of_a_short_row():
    # Else the cases above could not fail.
    short, long = POSITIONS["longrope"].config, POSITIONS["longrope"].alone
    asked = rows((10,))
    assert (alone(short, asked)[0] - alone(long, asked)[0]).abs().max() > 0.1


def test_a_row_beyond_the_positions_is_refused(solo, tmp_path):
    case = POSITIONS["dynamic_short"]
    backend, state = open_trainer(saved(case.config, tmp_path), solo, case.max_model_len)
    with pytest.raises(ValueError, match=r"17 tokens, but .* hold for 16: lower policy\.max_total"):
        backend.logprobs(state, [padded(rows((17,)))], HEAD, "policy")


REFUSED = {
    # vLLM reads beyond the end of its table there.
    "max_model_len 64 is more than .* 16, and its rope_type 'dynamic'": POSITIONS["dynamic_short"],
    "scale attention by 2, where vLLM takes 1.22474": same(longrope(attention_factor=2.0)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_positions_that_the_engine_does_not_have_are_refused_at_launch(message, tmp_path):
    model = saved(REFUSED[message].config, tmp_path)
    with pytest.raises(ValueError, match=message):
        check_policy(policy_config(model, generation=generation(64)))


def test_an_own_stretch_of_dynamic_positions_is_that_of_vllm():
    found = hf_model.frozen(rope("dynamic", factor=4.0, max_trained_positions=32), 64)
    # theta (4 x 64 / 32 - 3) ** (8 / 6), for heads of 8
    assert found.config.rope_parameters["rope_theta"] == pytest.approx(1e4 * 5 ** (8 / 6))
    found = hf_model.frozen(rope("dynamic", factor=1.0, alpha=100.0), 64)
    assert found.config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": pytest.approx(1e4 * 100 ** (8 / 6)),
    }


# ---- engines ------------------------------------------------------------------------------------


def completions(engine: Any, room: int) -> list[list[Any]]:
    """Prompts and what the engine says about its answers: [prompt, answer, log-probs]."""
    prompts = rows((3, min(10, room - 8), room - 8))
    asked = [Request(tuple(p), i) for i, p in enumerate(prompts)]
    sampling = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())
    answers = engine.generate(asked, sampling)
    return [
        [p, list(a.tokens), torch.tensor(a.logprobs)] for p, a in zip(prompts, answers, strict=True)
    ]


def wide(config: Any) -> Any:
    """The same with heads of 32, the least that vLLM has a CPU kernel for."""
    facts = copy.deepcopy(config.to_dict())
    for name in ("short_factor", "long_factor"):
        if name in facts["rope_parameters"]:
            facts["rope_parameters"][name] *= 4
    return type(config).from_dict({**facts, "hidden_size": 128, "head_dim": 32})


ENGINES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "longrope_short"]


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ENGINES)
def test_engine_and_trainer_have_the_positions_of_hugging_face(kind, name, solo, tmp_path):
    case = POSITIONS[name]
    model = saved(wide(case.config), tmp_path)
    save_tokenizer(tmp_path)
    engine = {"hf": hf_generate, "vllm": vllm}[kind].open_engine(
        generation(case.max_model_len), model
    )
    try:
        said = completions(engine, case.max_model_len)
    finally:
        engine.close()
    whole = [prompt + answer for prompt, answer, _ in said]
    expected = alone(wide(case.alone), whole)
    for (prompt, _, logprobs), one in zip(said, expected, strict=True):
        assert (one[len(prompt) - 1 :] - logprobs).abs().max() < 5e-5
    opened = open_trainer(model, solo, case.max_model_len)
    assert distance(opened, padded(whole), expected) < LIMIT


# ---- every other field --------------------------------------------------------------------------

WINDOW = {"sliding_window": 16, "head_dim": 8}
MODELS = {
    "mistral": config_of("Mistral", sliding_window=16),
    "qwen2_window": config_of(
        "Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "gemma2": config_of(
        "Gemma2", **WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": config_of(
        "Gemma3Text", **WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": config_of("GptOss", **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": config_of("Qwen2"),
    "llama_biases": config_of("Llama", attention_bias=True, mlp_bias=True),
    "llama_tied": config_of("Llama", tie_word_embeddings=True),
    "llama_gelu": config_of("Llama", hidden_act="gelu", rms_norm_eps=0.1),
    "qwen3": config_of("Qwen3", head_dim=16),
    "olmo2": config_of("Olmo2"),
    "phi": config_of("Phi", partial_rotary_factor=0.5),
    "stablelm": config_of("StableLm", partial_rotary_factor=0.25, use_qkv_bias=True),
    "granite": config_of(
        "Granite",
        attention_multiplier=0.5,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "cohere": config_of("Cohere", logit_scale=0.5),
    "neox": config_of("GPTNeoX"),
    "starcoder2": config_of("Starcoder2", sliding_window=None),
    "qwen3_moe": config_of(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "deepseek_v3": config_of(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
    ),
}
NOT_PACKED = {"stablelm", "mistral", "qwen2_window", "gemma2", "gemma3", "gpt_oss"}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_a_row_alone(name, solo, tmp_path):
    asked = rows((10, 40, 5))
    expected = alone(MODELS[name], asked)
    model = saved(MODELS[name], tmp_path)
    check_rows(open_trainer(model, solo), expected, asked)
    if name in NOT_PACKED:
        with pytest.raises(
            ValueError, match=r"policy\.model_name: .*(window|softcap|mask|attention of its own)"
        ):
            check_policy(policy_config(model, sequence_packing=SequencePackingConfig(enabled=True)))
    else:
        check_rows(open_trainer(model, solo, packed=True), expected, asked)


# ---- what is compared ---------------------------------------------------------------------------


def test_the_plainest_attention_caps_scores_and_the_default_does_not(monkeypatch, tmp_path):
    model = saved(MODELS["gemma2"], tmp_path)
    monkeypatch.setattr(dtensor_compare, "attention_for", lambda config: "sdpa")
    dtensor_compare._compared.cache_clear()
    with pytest.raises(ValueError, match=r"FSDP2 .*without attn_logit_softcapping = 2\.0 they"):
        check_policy(policy_config(model))
    dtensor_compare._compared.cache_clear()


def test_an_attention_that_forgets_its_scale_is_refused(monkeypatch, tmp_path):
    own = dtensor_setup.causal_attention
    monkeypatch.setattr(dtensor_setup, "causal_attention", lambda *a: own(*a[:-1], None))
    dtensor_compare._compared.cache_clear()
    cfg = policy_config(
        saved(MODELS["granite"], tmp_path), sequence_packing=SequencePackingConfig(enabled=True)
    )
    with pytest.raises(ValueError, match=r"granite.* differ by \d.*without attention_multiplier"):
        check_policy(cfg)
    dtensor_compare._compared.cache_clear()


def plain(model: Any) -> list[torch.Tensor]:
    return stand_in.reference_logprobs(model, rows_of(model.config))


IGNORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "rope_parameters": (
        POSITIONS["llama3"].config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "sliding_window": (MODELS["mistral"], {"sliding_window": None}),
    "layer_types": (MODELS["qwen2_window"], {"layer_types": ["full_attention"] * 2}),
    "final_logit_softcapping": (MODELS["gemma2"], {"final_logit_softcapping": None}),
    "residual_multiplier": (MODELS["granite"], {"residual_multiplier": 1.0}),
    "attention_bias": (MODELS["llama_biases"], {"attention_bias": False}),
    "logits_scaling": (MODELS["granite"], {"logits_scaling": 1.0}),
    "query_pre_attn_scalar": (MODELS["gemma3"], {"query_pre_attn_scalar": 8}),
}


def blind(fields: dict[str, Any]) -> Callable[[Any], list[torch.Tensor]]:
    """A backend that has never heard of some fields."""

    def run(model: Any) -> list[torch.Tensor]:
        config = copy.deepcopy(model.config)
        for name, value in fields.items():
            setattr(config, name, value)
        other = stand_in_model(config, "eager")
        other.load_state_dict(model.state_dict(), strict=False)
        return stand_in.reference_logprobs(other, rows_of(model.config))

    return run


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_that_a_backend_ignores_is_named(field):
    config, neutral = IGNORED[field]
    assert compare("own", config, blind({})) is None
    message = rf"own backend's log-probs .*{config.model_type}.* without .*{field} = .* they agree"
    with pytest.raises(ValueError, match=message):
        compare("own", config, blind(neutral))


def test_a_difference_that_no_field_explains_is_refused_all_the_same():
    def run(model: Any) -> list[torch.Tensor]:
        return [x + 2e-4 for x in blind({})(model)]

    with pytest.raises(ValueError, match=r"differ by 0.0002\d* .* no single field explains it"):
        compare("own", MODELS["qwen2"], run)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"differ by inf"):
            compare("own", MODELS["qwen2"], lambda m, w=wrong: [x * w for x in blind({})(m)])


def test_positions_by_the_longest_row_are_refused():
    @torch.no_grad()
    def run(model: Any) -> list[torch.Tensor]:
        asked = rows_of(model.config)
        tokens = padded(asked).tokens
        logs = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        found = logs.gather(-1, tokens[:, 1:, None])[..., 0]
        return [f[: len(r) - 1] for f, r in zip(found, asked, strict=True)]

    config = POSITIONS["longrope"].config
    with pytest.raises(ValueError, match=r"without rope_parameters = .*'longrope'.* they agree"):
        compare("own", config, run)
    assert compare("own", hf_model.frozen(config, 64).config, run) is None


def test_a_model_without_a_stand_in_is_told_and_opened(solo, tmp_path, capsys):
    config = transformers.MambaConfig(
        hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=100, pad_token_id=0
    )
    model = saved(config, tmp_path)
    backend, state = open_trainer(model, solo)
    said = capsys.readouterr().out
    assert f"log-probs of {model} were not compared with Hugging Face's: no stand-in" in said
    assert backend.logprobs(state, [padded(rows((5,)))], HEAD, "policy")


def test_the_same_question_is_answered_once(monkeypatch, tmp_path):
    cfg = policy_config(save_model(tmp_path, "llama"))
    check_policy(cfg)
    monkeypatch.setattr(dtensor_compare, "compare", None)
    check_policy(cfg)
    with pytest.raises(TypeError):
        check_policy(structs.replace(cfg, logprob_chunk_size=7))


# ---- stand-ins ----------------------------------------------------------------------------------

# Layers of a stand-in: which of the model's, told by a list that has an item for each.
LAYERS = {
    "all alike": (config_of("Llama", num_hidden_layers=32), Sizes(), ["-", "-"]),
    "pipeline": (config_of("Llama", num_hidden_layers=32), Sizes(layers=4, multiple=3), ["-"] * 6),
    "more than the model has": (config_of("Llama"), Sizes(layers=9), ["-"] * 9),
    "one in six": (
        config_of("Gemma3Text", num_hidden_layers=24),
        Sizes(),
        ["sliding_attention"] * 5 + ["full_attention"],
    ),
    "after many": (
        config_of("Qwen2", use_sliding_window=True, num_hidden_layers=40, max_window_layers=28),
        Sizes(layers=3),
        ["full_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_is_in_a_stand_in(name):
    config, sizes, expected = LAYERS[name]
    small = stand_in_config(config, sizes)
    assert small.num_hidden_layers == len(expected)
    kinds = getattr(small, "layer_types", None) or ["-"] * small.num_hidden_layers
    assert kinds == expected
    if hasattr(small, "max_window_layers"):
        assert small.max_window_layers == kinds.count("full_attention")


def test_mixtures_beside_dense_layers_are_in_a_stand_in():
    small = stand_in_config(transformers.DeepseekV3Config())
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (3, 4)
    small = stand_in_config(transformers.DeepseekV3Config(first_k_dense_replace=20))
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 2)
    qwen = transformers.Qwen3MoeConfig(mlp_only_layers=[1, 20], num_experts=128)
    small = stand_in_config(qwen, Sizes(experts=8))
    assert small.mlp_only_layers == [1]
    assert (small.num_experts, small.num_experts_per_tok) == (16, 2)


@pytest.mark.parametrize("tensor", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_a_stand_in_is_narrow_and_can_be_cut(name, tensor):
    heads = {"num_attention_heads": 48, "num_key_value_heads": 24, "hidden_size": 48 * 64}
    config = getattr(transformers, f"{name}Config")(**heads)
    small = stand_in_config(config, Sizes(tensor=tensor))
    sizes = (small.hidden_size, small.num_attention_heads, small.num_key_value_heads)
    assert not any(n % tensor for n in (*sizes, small.intermediate_size, small.vocab_size))
    assert small.num_attention_heads == 2 * small.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // 48
    assert (getattr(small, "head_dim", None) or small.hidden_size // sizes[1]) == width


def test_no_other_field_is_lost():
    shrunk = {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "layer_types", "sliding_window", "architectures"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    }
    config = transformers.Gemma2Config(
        rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0},
        attn_logit_softcapping=7.0,
        attention_bias=True,
        rms_norm_eps=1e-3,
    )
    before, after = config.to_dict(), stand_in_config(config).to_dict()
    assert {n for n in before | after if before.get(n) != after.get(n)} <= shrunk


def test_rows_reach_beyond_windows_and_the_original_length():
    for config, longest in (
        (MODELS["mistral"], 40),
        (POSITIONS["longrope"].config, 40),
        (config_of("Mistral", sliding_window=4096, max_position_embeddings=8192), 40),
        (rope("yarn", factor=4.0, original_max_position_embeddings=50), 58),
        (rope("yarn", factor=4.0, original_max_position_embeddings=4096), 40),
        (config_of("Llama", max_position_embeddings=12), 12),
    ):
        lengths = [len(r) for r in rows_of(stand_in_config(config))]
        assert lengths == [10, longest, 5, 10]
