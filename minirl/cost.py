"""How much work a sequence is for a model, in multiply-adds of a forward pass.

A token is multiplied by the matrices of the model, which are counted on no device, without weights;
and in every layer of attention it meets the tokens before it. Backward is twice as much, for both.

Source: the counting of Narayanan et al. 2021, arXiv:2104.04473, section 5.1, made exact.
"""

from collections import Counter
from typing import Any, NamedTuple, cast

from torch import nn

from minirl.config.megatron_fit import num_experts
from minirl.hf import HfConfig, causal_class, read_config, skeleton

VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""What the number of experts that see a token is called, by family."""
WITHOUT_PAIRS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"}
"""Kinds of layers whose work grows with tokens only; that of their recurrences is not counted."""
UNLIKE = {"diffllama", "hrm_text", "laguna"}
"""Decoders whose layers run more than once, attend twice, or differ in their heads."""


class Cost(NamedTuple):
    """The work of a sequence of n tokens: `per_token` n + `per_pair` n^2, and that of windows.

    Half of all pairs of tokens meet, once for scores and once for values. With a window of w, and
    w less than n, that is w (2 n - w) instead of n^2.
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    per_near_pair: float = 0.0
    window: int = 0

    def of(self, length: int) -> float:
        """The work of one sequence.

        >>> Cost(per_token=2.0, per_pair=0.5).of(4)
        16.0
        >>> Cost(per_token=2.0, per_near_pair=0.5, window=1).of(4)
        11.5
        """
        near = min(length, self.window)
        return (
            self.per_token * length
            + self.per_pair * length * length
            + self.per_near_pair * near * (2 * length - near)
        )


TOKENS_ONLY = Cost()
"""For a model of a kind that is not known here."""


def cost_of(model_name: str) -> Cost:
    """The work of a Hugging Face model; `TOKENS_ONLY` where layers or experts are of strange kinds.

    Of a mixture's experts those count that see a token.
    """
    config = read_config(model_name).get_text_config()
    pairs = _pairs(config)
    if causal_class(config) is None or pairs is None:
        return TOKENS_ONLY
    number, visited = num_experts(config.to_dict()), _first(config, VISITED)
    per_token, mixtures = 0.0, 0
    for path, module in skeleton(config).named_modules():
        if isinstance(module, nn.Embedding):
            continue  # looked up
        for name, p in module.named_parameters(recurse=False):
            if p.ndim == 1 or name.endswith("bias"):
                continue  # added, or a factor
            if "experts" in path and not number:
                return TOKENS_ONLY
            if p.ndim == 2 or isinstance(module, nn.Conv1d):
                per_token += p.numel()
            elif p.shape[0] == number:
                per_token += p.numel() * visited / number
                mixtures += 1
            else:
                return TOKENS_ONLY
    if number and not (visited and mixtures):
        return TOKENS_ONLY
    return Cost(per_token, *pairs)


def _pairs(config: HfConfig) -> tuple[float, float, int] | None:
    """Per pair, per near pair, and the window; None if a kind of layer is not known."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0.0, 0.0, 0
    unlike = config.is_encoder_decoder or config.model_type in UNLIKE
    if unlike or not isinstance(heads, int):
        return None
    window = _first(config, ("sliding_window",))
    names = ("layer_types", "layers_block_type", "block_types")
    kinds: list[str] | None = next((x for n in names if (x := getattr(config, n, None))), None)
    if kinds is None:
        kind = "sliding_attention" if window else "attention"
        kinds = [kind] * _first(config, ("num_hidden_layers",))
    layers = Counter(kind for kind in kinds if kind not in WITHOUT_PAIRS)
    full = layers.pop("full_attention", 0) + layers.pop("attention", 0)
    near = layers.pop("sliding_attention", 0)
    if layers or (near and not window):
        return None
    narrow: float = _first(config, ("head_dim",)) or _first(config, ("hidden_size",)) // heads
    if _first(config, ("kv_lora_rank",)):
        key = _first(config, ("qk_nope_head_dim",)) + _first(config, ("qk_rope_head_dim",))
        narrow = (key + _first(config, ("v_head_dim",))) / 2
    wide = _first(config, ("global_head_dim",)) or narrow  # Gemma 4's layers without a window
    return full * heads * float(wide), near * heads * float(narrow), window


def _first(config: HfConfig, names: tuple[str, ...]) -> int:
    """The first of these fields that is there; 0 without one, or if layers differ in it."""
    found: Any = next((x for n in names if (x := getattr(config, n, None))), 0)
    values = cast("list[int]", found if isinstance(found, list) else [found])
    return int(values[0]) if len(set(values)) == 1 else 0
