"""The comparison that every opened model goes through, and the small stand-ins it is made on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import policy_config, save_model
from msgspec import structs
from row_cases import (
    HEAD,
    MODELS,
    NOT_PACKED,
    POSITIONS,
    alone,
    check_rows,
    config_of,
    open_trainer,
    padded,
    rope,
    rows,
    saved,
)

from minirl.backends import check_policy, hf_model, stand_in
from minirl.backends.dtensor import compare as dtensor_compare
from minirl.backends.dtensor import setup as dtensor_setup
from minirl.backends.stand_in import Sizes, compare, rows_of, stand_in_config, stand_in_model
from minirl.config.policy import SequencePackingConfig


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
