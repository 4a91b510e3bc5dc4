"""Tiny random Hugging Face models, written as checkpoints, and the config of a policy for tests."""

from pathlib import Path
from typing import Any, Literal

import torch

from minirl.config.policy import (
    GenerationConfig,
    OptimizerConfig,
    PolicyConfig,
    TokenizerConfig,
    VllmConfig,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""The sizes of a tiny model."""
Family = Literal["qwen3", "qwen3_untied", "llama", "qwen2", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_untied", "llama", "qwen2")
"""The dense ones."""


def save_model(
    folder: Path, family: Family = "qwen3", *, seed: int = 0, vocab: int = 64, **sizes: Any
) -> str:
    """Writes a model of `family` into `folder` and returns the folder's name.

    `sizes` are fields of the family's Hugging Face config. The weights are wide (standard
    deviation 0.1, biases and norms included), so that the distributions are far from uniform.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    tied = family in ("qwen3", "qwen2")
    fields = {**SMALL, "vocab_size": vocab, "tie_word_embeddings": tied, **sizes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match family:
            case "qwen3" | "qwen3_untied":
                model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 32, **fields}))
            case "llama":
                model = LlamaForCausalLM(LlamaConfig(**fields))
            case "qwen2":
                model = Qwen2ForCausalLM(Qwen2Config(**fields))
            case "qwen3_moe":
                experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
                extra = {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1}
                model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**experts, **extra, **fields}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def policy_config(model_name: str, **fields: Any) -> PolicyConfig:
    """A float32 policy with AdamW at 1e-3 and clipping at 1, changed by `fields` of the section."""
    return PolicyConfig(
        **{
            "model_name": model_name,
            "tokenizer": TokenizerConfig(name=model_name),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "logprob_batch_size": 4,
            "max_total_sequence_length": 64,
            "precision": "float32",
            "optimizer": OptimizerConfig(kwargs={"lr": 1e-3}),
            "generation": GenerationConfig(
                max_new_tokens=8, vllm_cfg=VllmConfig(precision="float32", max_model_len=64)
            ),
            **fields,
        }
    )
