"""The work that is estimated is what torch counts of real models of many families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minirl.cost import TOKENS_ONLY, Cost, cost_of
from minirl.flops import forward_flops, training_flops

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 24, "num_key_value_heads": 4, "head_dim": 8},
}
SHARED_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
DBRX = {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "moe_top_k": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 12},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "shared_expert_intermediate_size": 96,
    },
    "deepseek_v3": {**LATENT, **SHARED_EXPERTS},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
        **{"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2, 2]},
    "gemma4_text": {
        **{"global_head_dim": 16, "sliding_window": 6, "hidden_size_per_layer_input": 0},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        "num_kv_shared_layers": 0,
    },
    "gpt2": {},
    "gpt_neox": {},
    "phi": {},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "starcoder2": {"sliding_window": None},
}


def folder_of(path: Path, family: str, **keys: Any) -> tuple[str, Any]:
    from transformers import AutoConfig

    untyped: Any = AutoConfig
    fields = SIZES | keys
    for absent in {"falcon": ["head_dim"], "mamba": ["num_attention_heads"]}.get(family, []):
        del fields[absent]
    config = untyped.for_model(family, **fields)
    config.save_pretrained(path)
    return str(path), config


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_torch_counts_of_a_real_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, config = folder_of(tmp_path, family, **FAMILIES[family])
    cost = cost_of(folder)
    config._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    lengths = [7, 20]
    with FlopCounterMode(display=False) as forward:
        outputs = [model(input_ids=torch.zeros(1, n, dtype=torch.long)).logits for n in lengths]
    with FlopCounterMode(display=False) as backward:
        sum(x.sum() for x in outputs).backward()
    # Eager attention computes every pair, masked or not; RoPE is not counted.
    tokens = cost._replace(per_pair=0.0, per_near_pair=0.0)
    every = 4.0 * (cost.per_pair + cost.per_near_pair) * sum(n * n for n in lengths)
    masked = every - (forward_flops(lengths, cost) - forward_flops(lengths, tokens))
    counted = forward.get_total_flops() - masked
    assert forward_flops(lengths, cost) == pytest.approx(counted, rel=0.02)
    counted += backward.get_total_flops() - 2 * masked
    assert training_flops(lengths, cost) == pytest.approx(counted, rel=0.02)


@given(length=st.integers(0, 60), window=st.integers(1, 80))
def test_a_window_counts_the_pairs_inside_it(length: int, window: int) -> None:
    pairs = sum(i - j < window for i in range(length) for j in range(i + 1))
    near = Cost(0.0, per_near_pair=1.0, window=window)
    # Two visits a pair; as for n^2, those of a token to itself count once.
    assert near.of(length) == 2 * pairs - min(length, window)
    wide = Cost(0.0, per_near_pair=1.0, window=max(length, window))
    assert wide.of(length) == Cost(0.0, per_pair=1.0).of(length)


def test_the_published_size_without_embeddings_is_found(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1536, "num_attention_heads": 12, "num_hidden_layers": 28}
    sizes |= {"intermediate_size": 8960, "vocab_size": 151936, "head_dim": 128}
    folder, _ = folder_of(tmp_path, "qwen2", **sizes)
    cost = cost_of(folder)
    layer = 1536 * (1536 + 2 * 2 * 128 + 1536 + 3 * 8960)
    assert cost == (28 * layer + 1536 * 151936, 28 * 1536, 0.0, 0)
    # 1.31 billion by the card of Qwen2.5-1.5B.
    assert 28 * layer == pytest.approx(1.31e9, rel=0.01)
    unused = {"sliding_window": 4096, "use_sliding_window": False}
    assert cost_of(folder_of(tmp_path, "qwen2", **sizes, **unused)[0]) == cost


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 80}),  # chunks
        ("falcon_h1", {}),  # both kinds in one layer
        ("dbrx", DBRX),  # experts of a nested config, in two dimensions
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [1, 2, 2]}),  # layers that differ
        ("laguna", {"num_attention_heads_per_layer": [4, 4, 8]}),
        ("diffllama", {}),
        ("hrm_text", {}),
        ("bart", {"decoder_ffn_dim": 80, "encoder_ffn_dim": 80}),  # an encoder's keys
        ("doge", {"is_moe": True, "num_experts": 16}),  # experts that are looked up
        ("deepseek_v2", {**LATENT, "n_routed_experts": 4}),  # seen by nobody knows how many
        ("xlnet", {"d_head": 8, "d_model": 32, "n_head": 4}),  # matrices of three dimensions
    ],
)
def test_a_model_of_a_strange_kind_counts_tokens(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    assert cost_of(folder_of(tmp_path, family, **keys)[0]) == TOKENS_ONLY


def test_recurrent_layers_have_no_pairs(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    cost = cost_of(folder_of(tmp_path, "qwen3_next", layer_types=kinds, **experts)[0])
    assert cost.per_pair == 4 * 8
    assert cost.per_token > 1
    found = cost_of(folder_of(tmp_path, "mamba", intermediate_size=64)[0])
    assert found.per_token > 1
    assert found[1:] == (0.0, 0.0, 0)
