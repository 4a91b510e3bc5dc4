"""How transformers has to read a model, so that a row's log-probs depend on that row alone.

Left alone, it chooses the factors of some positions by the longest row that it sees, and its
default attention leaves out caps on scores. The trainer, the conversion and the oracle engine read
a config through this file; vLLM does what it says by itself.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from minirl.hf import HfConfig, read_config


class Frozen(NamedTuple):
    """A config whose positions are the same in every batch."""

    config: HfConfig
    longest: int | None
    """Rows may have so many tokens; beyond, transformers or vLLM would use other positions."""


def ropes(config: HfConfig) -> Iterator[dict[str, Any]]:
    """The parameters of rotary positions, of all layers or of each kind of them."""
    rope: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested: Any = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]


def frozen(config: HfConfig, max_model_len: int) -> Frozen:
    """Positions as vLLM has them in an engine of `max_model_len`, whatever the rows' lengths.

    `longrope`: the long factors for all rows if the engine may go beyond the original length, else
    the short ones. `dynamic`: those of `max_position_embeddings`, which is as far as they go.

    Source: vLLM's `Phi3LongRoPEScaledRotaryEmbedding`, `DynamicNTKScalingRotaryEmbedding` and
    `DynamicNTKAlphaRotaryEmbedding`.
    """
    config, longest = copy.deepcopy(config), list[int]()
    text = config.get_text_config()
    for rope in ropes(config):
        if rope.get("rope_type") == "dynamic":
            _freeze_dynamic_(rope, text)
            longest.append(text.max_position_embeddings)
        elif rope.get("rope_type") == "longrope":
            original = _original(rope, text)
            kind = "long" if max_model_len > original else "short"
            for name in ("factor", "mscale"):
                if f"{kind}_{name}" in rope:
                    rope[f"short_{name}"] = rope[f"long_{name}"] = rope[f"{kind}_{name}"]
            if kind == "short":
                longest.append(original)
    return Frozen(config, min(longest, default=None))


def _freeze_dynamic_(rope: dict[str, Any], text: HfConfig) -> None:
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    limit, factor = text.max_position_embeddings, rope.pop("factor", 1.0)
    trained = rope.pop("max_trained_positions", limit)
    stretch = rope.pop("alpha", None) or factor * limit / trained - (factor - 1)
    rope["rope_theta"] *= stretch ** (rotated / (rotated - 2))
    rope["rope_type"] = "default"


def _original(rope: dict[str, Any], text: HfConfig) -> int:
    return getattr(text, "original_max_position_embeddings", None) or cast(
        int, rope.get("original_max_position_embeddings", text.max_position_embeddings)
    )


def check_positions(config: HfConfig, max_model_len: int, *, vllm: bool) -> None:
    """Refuses positions that an engine of `max_model_len` could not share with the trainer.

    Raises:
        ValueError: names the field, the lengths and the remedy.
    """
    longest = frozen(config, max_model_len).longest
    if longest is not None and max_model_len > longest:
        raise ValueError(
            f"policy.generation.vllm_cfg.max_model_len {max_model_len} is more than the model's "
            f"max_position_embeddings {longest}, and its rope_type 'dynamic' would give a token "
            "another position as the sequence grows; lower it and "
            f"policy.max_total_sequence_length to {longest}, or set another rope_parameters by "
            "policy.hf_config_overrides"
        )
    text = config.get_text_config()
    for rope in ropes(config) if vllm else ():
        if rope.get("rope_type") != "longrope" or "long_mscale" in rope:
            continue
        original = _original(rope, text)
        ratio = text.max_position_embeddings / original
        factor = rope.get("factor") or ratio
        own = rope.get("attention_factor") or _attention_factor(factor, original)
        if not math.isclose(own, _attention_factor(ratio, original), rel_tol=1e-6):
            raise ValueError(
                f"policy.model_name: rope_parameters scale attention by {own:g}, where vLLM takes "
                f"{_attention_factor(ratio, original):g}, from max_position_embeddings "
                f"{text.max_position_embeddings} and original_max_position_embeddings {original} "
                "alone; set policy.generation.backend to hf, or correct these by "
                "policy.hf_config_overrides"
            )


def _attention_factor(ratio: float, original: int) -> float:
    return 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(original))


def check_length(tokens: int, longest: int | None) -> None:
    """Refuses a row beyond `Frozen.longest`.

    Raises:
        ValueError: it is.
    """
    if longest is not None and tokens > longest:
        raise ValueError(
            f"a row has {tokens} tokens, but the model's rope_parameters hold for {longest}: lower "
            "policy.max_total_sequence_length, or set others by policy.hf_config_overrides"
        )


def load_options(name: str, max_model_len: int) -> tuple[dict[str, Any], int | None]:
    """How `from_pretrained` has to read the model's folder or hub name; and `Frozen.longest`."""
    config, longest = frozen(read_config(name), max_model_len)
    attention = attention_for(config)
    options = {"config": config} | ({"attn_implementation": attention} if attention else {})
    return options, longest


def attention_for(config: HfConfig) -> str | None:
    """The attention that does all that the config asks; None: transformers' default.

    Only the plainest one caps scores.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
