"""A model's small stand-in: what a backend makes of it is held against Hugging Face.

Nothing is trained whose log-probs were not compared. The stand-in has the fields of the model's
own config (positions, windows, caps, biases, norms, scales, ties, experts) and few, narrow layers
with random weights. A backend runs a few rows on it, through the code that training uses; Hugging
Face runs each of them alone, unpadded, with its plainest attention. A field that a backend ignores
shows here, however large the model is.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from minirl.backends.hf_model import ropes
from minirl.hf import HfConfig, HfModel, causal_class, skeleton

Run: TypeAlias = Callable[[HfModel], Sequence[Tensor]]
"""A backend's log-probs of `rows_of(model.config)`, one tensor a row, with that model's weights.

It may keep, change and cut the model."""

LIMIT = 1e-4
"""In nats: float32 rounding stays ten times below, and a lost field far above."""
LONGEST, WINDOW, VOCABULARY = 256, 16, 128
LARGEST = 30_000_000
"""Parameters; a stand-in that is larger could not be made small."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
LISTED = ("mlp_only_layers", "moe_layers")
"""Lists of the numbers of layers of one kind; other lists that are as long as the model have an
item a layer."""
THRESHOLDS = ("max_window_layers", "first_k_dense_replace")
"""Number of layers before another kind begins."""
PERIODS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "sliding_window_pattern",
    "moe_layer_freq",
    "no_rope_layer_interval",
    "full_attention_interval",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_qk_norm": (False,),
    "partial_rotary_factor": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "tie_word_embeddings": (False, True),
    "norm_topk_prob": (True, False),
}
"""Fields that a backend may ignore, and values under which they say nothing."""


class Sizes(NamedTuple):
    """What a layout asks of a stand-in."""

    layers: int = 2
    """At least so many."""
    multiple: int = 1
    """The number of layers is one of this."""
    tensor: int = 1
    """Heads, widths and vocabulary can be cut into so many parts."""
    experts: int = 1
    """So can the experts."""


PLAIN = Sizes()


def stand_in_config(config: HfConfig, sizes: Sizes = PLAIN) -> HfConfig:
    """The same kind of decoder, small: every kind of its layers occurs, and no field is lost.

    Kept are the width of a head, the fields of positions, and whether heads share keys. Windows
    are shortened, so that rows that one can afford reach beyond them.

    Raises:
        ValueError: transformers has no causal language model with such a config.
    """
    text = config.get_text_config()
    if causal_class(text) is None:
        raise ValueError(f"transformers has no causal language model of type {text.model_type!r}")
    small = copy.deepcopy(text)
    _choose_layers(small, sizes)
    _narrow(small, sizes)
    facts = small.to_dict()
    for name in ("quantization_config", "auto_map", "transformers_version"):
        facts.pop(name, None)
    return cast(Any, type(small)).from_dict(facts)


def _choose_layers(config: HfConfig, sizes: Sizes) -> None:
    total: int = config.num_hidden_layers
    fields = _fields(config)
    lists: dict[str, Any] = {
        n: v for n, v in fields.items() if isinstance(v, list) and n not in LISTED
    }
    lists = {n: v for n, v in lists.items() if len(v) == total}
    numbers = {n: fields[n] for n in LISTED if fields.get(n)}
    thresholds = {n: fields[n] for n in THRESHOLDS if isinstance(fields.get(n), int)}
    periods = [v for n in PERIODS if isinstance(v := fields.get(n), int) and v > 1]

    def kind(layer: int) -> tuple[Any, ...]:
        listed = [repr(v[layer]) for v in lists.values()]
        after = [layer >= v for v in thresholds.values()]
        among = [layer in v for v in numbers.values()]
        return (*listed, *after, *among, *((layer + 1) % p == 0 for p in periods))

    first = {kind(i): i for i in reversed(range(total))}
    prefix = max(first.values()) + 1
    chosen = list(range(prefix)) if prefix <= 8 else sorted(first.values())
    first_chosen = set(chosen)
    rest = chain((i for i in range(total) if i not in first_chosen), cycle(range(total)))
    while len(chosen) < sizes.layers or len(chosen) % sizes.multiple:
        chosen.append(next(rest))
    if len(chosen) <= total:
        chosen.sort()  # else the model's own order begins anew
    for name, value in lists.items():
        setattr(config, name, [value[i] for i in chosen])
    for name, bound in thresholds.items():
        setattr(config, name, sum(i < bound for i in chosen))
    for name, value in numbers.items():
        setattr(config, name, [new for new, old in enumerate(chosen) if old in value])
    config.num_hidden_layers = len(chosen)


def _narrow(config: HfConfig, sizes: Sizes) -> None:
    unit, heads, hidden = sizes.tensor, config.num_attention_heads, config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    small_shared = min(shared, 2) if unit == 1 else unit
    small_heads = small_shared * (1 if shared == heads else 2 if heads // shared % 2 == 0 else 3)
    even = hidden == heads * width
    values: dict[str, Any] = {
        "num_attention_heads": small_heads,
        "num_key_value_heads": small_shared,
        "hidden_size": small_heads * width if even else 64 * unit,
        "sliding_window": WINDOW,
        "attention_chunk_size": WINDOW,
        "vocab_size": VOCABULARY * unit,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    for name in _fields(config):
        if name.endswith(("intermediate_size", "ffn_dim", "n_inner")):
            values[name] = 32 * unit if name.startswith(("moe", "shared")) else 96 * unit
    values |= dict.fromkeys(EXPERTS, max(4, 2 * sizes.experts) // sizes.experts * sizes.experts)
    values |= dict.fromkeys(CHOSEN, 2)
    for name, value in values.items():
        _lower(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)  # they may lie outside the vocabulary


def _fields(config: HfConfig) -> dict[str, Any]:
    return dict(config.__dict__)


def _lower(config: HfConfig, name: str, value: int) -> None:
    """Sets a field that is there and larger."""
    now = getattr(config, name, None)
    if isinstance(now, list):
        setattr(config, name, [min(n, value) for n in cast("list[int]", now)])
    elif isinstance(now, int) and not isinstance(now, bool) and now > value:
        setattr(config, name, value)


def stand_in_model(config: HfConfig, attention: str | None = None) -> HfModel:
    """A model with this (small) config in float32, in evaluation mode; equal at every call.

    Weights are wide enough that attention prefers some positions and tokens some successors.
    `save_pretrained` writes it as a folder.
    """
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build.from_config(copy.deepcopy(config), dtype=torch.float32, **options)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.dim() > 1:
                weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5))
            else:
                weight.add_(noise * 0.2)
    return model.eval()


def rows_of(config: HfConfig) -> list[list[int]]:
    """Random tokens: a short row, a long one, a shorter one to stand beside it, the first again.

    What a model remembers of a long row shows in the last. The long one goes beyond a window, and
    beyond the length that positions were trained for where that is short.
    """
    longest = min(LONGEST, getattr(config, "max_position_embeddings", None) or LONGEST)
    bounds = [40, 2 * (getattr(config, "sliding_window", None) or 0) + 8]
    for positions in ropes(config):
        original = positions.get("original_max_position_embeddings") or 0
        bounds.append(original + 8 if original + 8 <= longest else 0)
    draw = torch.Generator().manual_seed(1)
    lengths = [min(n, longest) for n in (10, max(bounds), 5)]
    vocabulary = config.vocab_size
    drawn: Any = [torch.randint(vocabulary, (n,), generator=draw).tolist() for n in lengths]
    rows: list[list[int]] = drawn
    return [*rows, rows[0]]


@torch.no_grad()
def reference_logprobs(model: HfModel, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of every row alone, unpadded, from a copy of the model that has seen nothing else."""
    found = list[Tensor]()
    for row in rows:
        tokens = torch.tensor([row])
        logits = copy.deepcopy(model)(input_ids=tokens, use_cache=False).logits[0, :-1]
        found.append(logits.float().log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0])
    return found


def compare(backend: str, config: HfConfig, run: Run, sizes: Sizes = PLAIN) -> str | None:
    """Holds `run` against Hugging Face on a stand-in of `config`, which is the whole model's.

    Positions that depend on the batch have been frozen in it (`hf_model.frozen`).

    Returns None if they agree, or else why no stand-in could be made, as a part of a sentence.

    Raises:
        ValueError: they differ; the message names the field by which, where that can be told. What
            `run` raises is passed on.
    """
    try:
        small = stand_in_config(config, sizes)
        size = sum(p.numel() for p in skeleton(small).parameters())
        if size > LARGEST:
            return f"its stand-in would have {size:,} parameters"
        expected = _expected(small)
    except Exception as error:  # whatever the code of a model raises when it is small
        return f"no stand-in of type {config.model_type!r} can be made ({_first_line(error)})"
    check(backend, small, expected, run)
    return None


def _expected(small: HfConfig) -> list[Tensor]:
    return reference_logprobs(stand_in_model(small, "eager"), rows_of(small))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def check(backend: str, small: HfConfig, expected: Sequence[Tensor], run: Run) -> None:
    """Refuses log-probs of `run` that are not the `expected` ones.

    Raises:
        ValueError: names the field that makes the difference: without it there is none.
    """
    worst = _difference(expected, run(stand_in_model(small)))
    if worst <= LIMIT:
        return
    guilty = sorted({name for name, changed in _without(small) if _agrees(changed, run)})
    held = " or ".join(f"{n} = {getattr(small, n)!r}" for n in guilty)
    cause = f"without {held} they agree" if held else "no single field explains it"
    raise ValueError(
        f"policy.model_name: the {backend} backend's log-probs of models of type "
        f"{small.model_type!r} with this config.json are not Hugging Face's: they differ by "
        f"{worst:.3g} on a small stand-in, and at most {LIMIT:g} is rounding; {cause}. Train it "
        "with the other backend, or use a model without it"
    )


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    gaps = [(a.cpu() - b.cpu()).abs().max() for a, b in zip(expected, found, strict=True)]
    worst = float(torch.stack(gaps).max())
    return worst if worst == worst else float("inf")


def _without(small: HfConfig) -> Iterator[tuple[str, HfConfig]]:
    """The config with one field after the other that says nothing."""
    width = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    neutral = {
        "rope_parameters": (_plain_positions(small),),
        "layer_types": (["full_attention"] * small.num_hidden_layers,),
        "query_pre_attn_scalar": (width,),
        "attention_multiplier": (width**-0.5, 1.0),
        **NEUTRAL,
    }
    for name, values in neutral.items():
        now = getattr(small, name, None)
        for value in values:
            if now is not None and now != value:
                changed = copy.deepcopy(small)
                setattr(changed, name, copy.deepcopy(value))
                yield name, changed


def _plain_positions(small: HfConfig) -> dict[str, Any]:
    rope = cast("dict[str, Any]", getattr(small, "rope_parameters", None) or {})
    plain = [{"rope_type": "default", "rope_theta": r.get("rope_theta", 1e4)} for r in ropes(small)]
    kinds = [name for name, value in rope.items() if isinstance(value, dict)]
    return dict(zip(kinds, plain, strict=True)) if kinds else plain[0]


def _agrees(changed: HfConfig, run: Run) -> bool:
    try:
        return _difference(_expected(changed), run(stand_in_model(changed))) <= LIMIT
    except Exception:  # a config that no model can have says nothing
        return False
