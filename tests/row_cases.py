"""Models of every kind of positions and attention, and rows that must not depend on each other."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from models import policy_config

from minirl.backend import TokenHead
from minirl.backends.dtensor import backend as dtensor
from minirl.backends.stand_in import stand_in_model
from minirl.config.policy import GenerationConfig, SequencePackingConfig, VllmConfig
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
