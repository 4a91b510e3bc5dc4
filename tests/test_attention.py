"""Packed sequences do not see each other, whichever kernel attends to them."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from minirl.backends import attention
from minirl.backends.attention import causal_attention

REAL = inspect.signature(varlen.varlen_attn)


def draw(seed: int, tokens: int, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 4 heads that share 2, of width 8."""
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, rows, h, 8, generator=source).double() for h in (4, 2, 2))
    return q, k, v


def each_alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    found = []
    for start, end in pairwise(ends):
        part = [x[start:end].permute(1, 2, 0, 3) for x in (q, k, v)]
        seen = scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True)
        found.append(seen.permute(2, 0, 1, 3).flatten(2))
    return torch.cat(found)


lengths_of = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(st.integers(0, 1000), lengths_of, st.sampled_from([None, 0.3]))
def test_each_sequence_is_attended_to_alone(seed: int, lengths: list[int], scale: float | None):
    q, k, v = draw(seed, sum(lengths))
    found = causal_attention(q, k, v, lengths, None, scale)
    torch.testing.assert_close(found, each_alone(q, k, v, lengths, scale))


def as_documented(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, same: Tensor, *sizes: int, **keys: Any
) -> Tensor:
    """What torch documents of its kernel for packed sequences, by loops."""
    REAL.bind(query, key, value, ends, same, *sizes, **keys)
    assert ends.dtype == torch.int32
    assert keys["window_size"] == (-1, 0), "causal"
    assert keys["enable_gqa"]
    assert sizes == (int(ends.diff().max()),) * 2
    tokens = [x[:, None] for x in (query, key, value)]
    found = each_alone(*tokens, ends.diff().tolist(), keys["scale"])
    return found.unflatten(-1, (query.shape[1], -1))[:, 0]


@given(st.integers(0, 1000), lengths_of, st.integers(1, 3), st.sampled_from([None, 0.3]))
def test_the_gpu_s_kernel_is_given_the_same_sequences(
    seed: int, lengths: list[int], rows: int, scale: float | None
):
    q, k, v = draw(seed, sum(lengths), rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_has_kernel", lambda query: True)
        patch.setattr(varlen, "varlen_attn", as_documented)
        found = causal_attention(q, k, v, lengths, None, scale)
    torch.testing.assert_close(found, each_alone(q, k, v, lengths, scale))


def test_a_cpu_has_no_such_kernel():
    assert not attention._has_kernel(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16))
