"""Packed sequences do not see each other, whichever kernel attends to them."""

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from minirl.backends import attention
from minirl.backends.attention import causal_attention
from minirl.backends.dtensor.fit import check_documents
from minirl.backends.dtensor.setup import ATTENTION, document_attention
from minirl.parallel import Axis

REAL = inspect.signature(varlen.varlen_attn)


def draw(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 4 heads that share 2, of width 8."""
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, 1, h, 8, generator=source).double() for h in (4, 2, 2))
    return q, k, v


def each_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    found = []
    for start, end in pairwise(ends):
        part = [x[start:end].permute(1, 2, 0, 3) for x in (q, k, v)]
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (back >= 0) & (back < (window or end - start))
        seen = scaled_dot_product_attention(*part, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(seen.permute(2, 0, 1, 3).flatten(2))
    return torch.cat(found)


windows = st.none() | st.integers(1, 7)
lengths_of = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(st.integers(0, 1000), lengths_of, st.sampled_from([None, 0.3]), windows)
def test_each_sequence_is_attended_to_alone(
    seed: int, lengths: list[int], scale: float | None, window: int | None
):
    q, k, v = draw(seed, sum(lengths))
    found = causal_attention(q, k, v, lengths, None, scale, window)
    torch.testing.assert_close(found, each_alone(q, k, v, lengths, scale, window))


def held_by(rank: int, num: int, lengths: list[int]) -> list[int]:
    """The tokens of a rank: of each sequence the chunks `rank` and 2 num - 1 - `rank`."""
    tokens, at = list[int](), 0
    for length in lengths:
        chunks = torch.arange(at, at + length).chunk(2 * num)
        tokens += torch.cat([chunks[rank], chunks[2 * num - 1 - rank]]).tolist()
        at += length
    return tokens


def attend_cut(
    axis: Axis,
    whole: tuple[Tensor, ...],
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> tuple[list[int], Tensor, list[Tensor]]:
    """A rank's tokens, their attention, and the gradients of what it holds."""
    tokens = held_by(axis.rank, axis.size, lengths)
    own = [x[tokens].requires_grad_() for x in whole[:3]]
    found = causal_attention(own[0], own[1], own[2], lengths, axis.group, scale, window)
    gradients = torch.autograd.grad(found, own, whole[3][tokens])
    return tokens, found.detach(), list(gradients)


@pytest.mark.parametrize(
    ("ranks", "lengths", "scale", "window"),
    [
        (2, [8, 4, 16], 0.3, None),
        (3, [12], None, None),
        (3, [6, 18], 1.0, None),
        (2, [8, 16], None, 5),
    ],
)
def test_ranks_attend_to_their_parts_of_sequences_as_one_does(
    ranks: int, lengths: list[int], scale: float | None, window: int | None
):
    q, k, v = (x.requires_grad_() for x in draw(ranks, sum(lengths)))
    alone = each_alone(q, k, v, lengths, scale, window)
    pull = torch.randn(alone.shape, generator=torch.Generator().manual_seed(9)).double()
    expected = torch.autograd.grad(alone, (q, k, v), pull)
    whole = tuple(x.detach() for x in (q, k, v, pull))
    seen: list[int] = []
    for tokens, found, gradients in run_ranks(ranks, attend_cut, whole, lengths, scale, window):
        torch.testing.assert_close(found, alone.detach()[tokens])
        for mine, those in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, those[tokens])
        seen += tokens
    assert sorted(seen) == list(range(sum(lengths)))


@pytest.mark.parametrize(
    ("width", "values", "dtype", "capability", "expected"),
    [
        (64, 64, torch.bfloat16, (8, 0), True),
        (256, 256, torch.float16, (9, 0), True),
        (264, 264, torch.bfloat16, (9, 0), False),
        (12, 12, torch.bfloat16, (9, 0), False),
        (64, 32, torch.bfloat16, (9, 0), False),
        (64, 64, torch.float32, (9, 0), False),
        (64, 64, torch.bfloat16, (7, 5), False),
        (64, 64, torch.bfloat16, None, False),
    ],
)
def test_a_gpu_has_such_a_kernel_for_half_precision_and_common_widths(
    width: int, values: int, dtype: torch.dtype, capability: tuple[int, int] | None, expected: bool
):
    class OnGpu(NamedTuple):
        shape: tuple[int, ...]
        dtype: torch.dtype
        is_cuda: bool
        device: str

    on_gpu = capability is not None
    query, value = (OnGpu((1, 1, 1, n), dtype, on_gpu, "cuda") for n in (width, values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        has_kernel = cast(Any, inspect.unwrap(attention._has_kernel))
        assert has_kernel(query, value) is expected


def as_documented(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, same: Tensor, *sizes: int, **keys: Any
) -> Tensor:
    """What torch documents of its kernel for packed sequences, by loops."""
    REAL.bind(query, key, value, ends, same, *sizes, **keys)
    assert ends.dtype == torch.int32
    assert ends[0] == 0
    before, after = keys["window_size"]
    assert after == 0, "causal"
    window = None if before == -1 else before + 1
    assert keys["enable_gqa"]
    assert sizes == (int(ends.diff().max()),) * 2
    tokens = [x[:, None] for x in (query, key, value)]
    found = each_alone(*tokens, ends.diff().tolist(), keys["scale"], window)
    return found.unflatten(-1, (query.shape[1], -1))[:, 0]


@given(st.integers(0, 1000), lengths_of, st.sampled_from([None, 0.3]), windows)
def test_the_gpu_s_kernel_is_given_the_same_sequences(
    seed: int, lengths: list[int], scale: float | None, window: int | None
):
    q, k, v = draw(seed, sum(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_has_kernel", lambda query, value: True)
        patch.setattr(varlen, "varlen_attn", as_documented)
        found = causal_attention(q, k, v, lengths, None, scale, window)
    torch.testing.assert_close(found, each_alone(q, k, v, lengths, scale, window))


def test_a_cpu_has_no_such_kernel():
    half = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert not attention._has_kernel(half, half)


# ---- models -------------------------------------------------------------------------------------


def config_of(folder: Path, family: str, **fields: Any) -> str:
    from transformers import AutoConfig

    untyped: Any = AutoConfig
    untyped.for_model(family, **fields).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "layers of the kinds ['linear_attention']"),
        ("granitemoehybrid", "layers of the kinds ['mamba']"),
        ("mamba2", "an attention of its own, or none"),
        ("llama4_text", "layers of the kinds ['chunked_attention']"),
        ("bloom", "an attention of its own, or none"),
    ],
)
def test_a_model_that_would_carry_one_sequence_into_the_next_is_refused(
    family: str, reason: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=r"sequence_packing\.enabled to false") as error:
        check_documents(config_of(tmp_path, family))
    assert f"models of type {family!r} have {reason}" in str(error.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "granite"])
def test_a_model_of_attention_only_is_not(family: str, tmp_path: Path):
    check_documents(config_of(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "fields", "option"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "softcap"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "sliding_window"),
        ("gpt_oss", {"layer_types": ["full_attention"], "num_local_experts": 2}, "s_aux"),
    ],
)
def test_attention_that_is_more_than_a_softmax_is_refused_when_it_runs(
    family: str, fields: dict[str, Any], option: str
):
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    untyped: Any = AutoConfig
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = untyped.for_model(family, **sizes, **heads, **fields, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config)
    AttentionInterface.register(ATTENTION, document_attention)
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(ValueError, match=f"a layer's attention has {option} set"):
        model(
            input_ids=torch.ones(1, 4, dtype=torch.long),
            position_ids=torch.arange(4)[None],
            use_cache=False,
            document_lengths=[4],
            context_group=None,
        )


def test_the_masks_that_a_gpu_needs_not_hold_are_those_that_a_cpu_does():
    from torch.nn.attention.bias import causal_lower_right

    for queries, keys in ((2, 5), (3, 3)):
        held = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
        assert torch.equal(causal_lower_right(queries, keys)._materialize(), held)
