"""What Megatron Bridge drops or misreads of a Hugging Face config, put right in its provider.

Bridge reads scaled positions for some families only, and then some of their fields; and windows of
some families only. Here they are read for all of them, as transformers reads them. What this file
does not know either is seen when the model is compared (`megatron_compare`).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.hf import HfConfig
from minirl.megatron_fit import ROPE_TYPES


class Positions(NamedTuple):
    """What a provider says about positions."""

    fields: dict[str, Any]
    frequencies: Tensor | None = None
    """Of Core's rotary embedding, where its fields cannot say them."""


def positions_of(config: HfConfig) -> Positions:
    """Scaled rotary positions, as transformers computes them.

    Other types than `ROPE_TYPES` are refused earlier; those that differ by the kind of the layer
    are left to Bridge's own code for the family.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default" or kind not in ROPE_TYPES:
        return Positions({})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    factor = rope["factor"]
    if kind == "linear":
        return Positions({"seq_len_interpolation_factor": factor})
    if kind == "llama3":
        # Core has its other fields as constants, of Llama 3.1.
        return Positions({"rope_scaling": True, "rope_scaling_factor": factor}, frequencies)
    return Positions(_yarn_fields(rope, factor, scale))


def _yarn_fields(rope: Mapping[str, Any], factor: float, scale: float) -> dict[str, Any]:
    """`scale` of cosines and sines follows from several fields; of Core's, from two.

    scale = (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
    """
    fields = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        "yarn_mscale": (scale - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0,
        "yarn_mscale_all_dim": 0.0,
    }
    # Transformer Engine's kernel for packed rows leaves the scale out.
    return fields | ({"apply_rope_fusion": False} if scale != 1 else {})


def window_fields(config: HfConfig, provider: Any) -> dict[str, Any]:
    """Windows of layers that attend to the nearest tokens only, where Bridge has read none."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * provider.num_layers
    windowed = [int(kind == "sliding_attention") for kind in kinds]
    if window is None or provider.window_size is not None or not any(windowed):
        return {}
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": windowed,
        "cp_comm_type": "a2a",  # the only one of Transformer Engine's with windows
    }
