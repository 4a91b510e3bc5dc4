"""What Megatron Bridge drops or misreads of a Hugging Face config, put right in its provider.

Bridge reads scaled positions for some families only, and then some of their fields; and windows of
some families only. Here they are read for all of them, as transformers reads them. What this file
does not know either is seen when the model is compared (`minirl.backends.megatron.compare`).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.backends.hf_model import frozen
from minirl.hf import HfConfig


class Positions(NamedTuple):
    """A provider's rotary positions."""

    fields: dict[str, Any]
    frequencies: Tensor | None
    """Of Core's rotary embedding, where no fields can say them."""
    longest: int | None
    """See `Frozen.longest`."""


def positions_of(config: HfConfig, max_model_len: int, provider: Any) -> Positions:
    """Positions as transformers computes them from a config that is frozen.

    Those that differ by the kind of the layer, and latent attention's, are left to Bridge's own
    code for the family.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, longest = frozen(config.get_text_config(), max_model_len)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if provider.multi_latent_attention:
        return Positions({}, None, longest)
    kind, fields = rope.get("rope_type", "default"), dict[str, Any]()
    if "rope_theta" in rope:
        fields["rotary_base"] = rope["rope_theta"]
    if kind not in ROPE_INIT_FUNCTIONS:
        return Positions(fields, None, longest)
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    factor = rope.get("factor") or 1.0
    match kind:
        case "linear":
            return Positions(fields | {"seq_len_interpolation_factor": factor}, None, longest)
        case "yarn":
            return Positions(fields | _yarn_fields(rope, factor, scale), None, longest)
        case "llama3":  # Core has all but the factor as constants, of Llama 3.1
            fields |= {"rope_scaling": True, "rope_scaling_factor": factor}
        case _:
            fields |= _scale_fields(math.e, scale)
    return Positions(fields, frequencies, longest)


def _yarn_fields(rope: Mapping[str, Any], factor: float, scale: float) -> dict[str, Any]:
    return _scale_fields(factor, scale) | {
        "position_embedding_type": "yarn",
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _scale_fields(factor: float, scale: float) -> dict[str, Any]:
    """`scale` of cosines and sines, which Core has in two fields.

    scale = (0.1 yarn_mscale ln(factor) + 1) / (0.1 yarn_mscale_all_dim ln(factor) + 1)
    """
    fields = {
        "yarn_rotary_scaling_factor": factor,
        "yarn_mscale": (scale - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0,
        "yarn_mscale_all_dim": 0.0,
    }
    # Transformer Engine's kernel for packed rows leaves the scale out.
    return fields | ({"apply_rope_fusion": False} if scale != 1 else {})


def window_fields(config: HfConfig, provider: Any) -> dict[str, Any]:
    """Windows of layers that attend to the nearest tokens only, where Bridge has read none."""
    config = config.get_text_config()
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
