"""The patches that let Megatron-Core run without CUDA: quarantined, and equal to the real thing."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minirl.backends.attention import causal_attention
from minirl.backends.megatron.cpu import GroupStepAdam
from minirl.parallel import Axis

ROOT = Path(__file__).parent.parent


def test_only_the_set_up_of_megatron_imports_it() -> None:
    users = {
        str(path.relative_to(ROOT))
        for folder in ("minirl", "bin")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"import.*megatron_cpu", path.read_text())
    }
    assert users == {"minirl/backends/megatron/setup.py"}


def patched_names(axis: Axis) -> dict[str, bool]:
    """Whether torch is patched after a chosen Megatron backend, in a fresh look at its names."""
    from minirl.backends.megatron import setup as megatron_setup
    from minirl.config.megatron import MegatronConfig

    megatron_setup.prepare_process(MegatronConfig())
    return {
        "no cuda": not torch.cuda.is_available(),
        "factories": torch.zeros(1, device="cuda").device.type == "cpu",
        "meta": torch.zeros(1, device="meta").device.type == "meta",
        "type": torch.zeros(1).type() == "torch.cuda.FloatTensor",
    }


def meta_context(axis: Axis) -> str:
    with torch.device("meta"):
        return torch.zeros(1).device.type


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA is")
def test_without_cuda_its_names_mean_the_cpu_and_meta_stays_meta() -> None:
    assert all(run_ranks(1, patched_names)[0].values())
    assert run_ranks(1, meta_context) == ["meta"]


def qkv(tokens: int, batch: int = 1, heads: int = 4, groups: int = 2) -> list[Tensor]:
    source = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, batch, n, 8) for n in (heads, groups, groups)]
    return [torch.randn(s, generator=source, dtype=torch.float64) for s in shapes]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """One sequence at a time."""
    outputs, at = [], 0
    for n in lengths:
        q, k, v = (x[at : at + n].permute(1, 2, 0, 3) for x in (query, key, value))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(found.permute(2, 0, 1, 3).flatten(2))
        at += n
    return torch.cat(outputs)


def attend(axis: Axis, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """This rank's share of the output, and of the gradients of a weighted sum of it."""
    whole = qkv(sum(lengths))
    own = torch.cat([zigzag(n, axis) + at for n, at in zip(lengths, starts(lengths), strict=True)])
    local = [x[own].requires_grad_() for x in whole]
    output = causal_attention(*local, lengths, axis.group, None)
    (output * own[:, None, None]).sum().backward()
    return output.detach(), [x.grad for x in local if x.grad is not None]


def starts(lengths: list[int]) -> list[int]:
    return torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()


def zigzag(length: int, axis: Axis) -> Tensor:
    chunks = torch.arange(length).chunk(2 * axis.size)
    return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_equals_one_sequence_at_a_time(ranks: int) -> None:
    lengths = [8, 4, 12]
    whole = [x.requires_grad_() for x in qkv(sum(lengths))]
    expected = plain_attention(*whole, lengths)
    (expected * torch.arange(sum(lengths))[:, None, None]).sum().backward()
    for rank, (output, gradients) in enumerate(run_ranks(ranks, attend, lengths)):
        axis = Axis(rank, ranks, None)
        own = torch.cat(
            [zigzag(n, axis) + at for n, at in zip(lengths, starts(lengths), strict=True)]
        )
        torch.testing.assert_close(output, expected[own])
        for found, x in zip(gradients, whole, strict=True):
            assert x.grad is not None
            torch.testing.assert_close(found, x.grad[own])


@given(
    lr=st.floats(1e-4, 0.1),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.5, 0.999),
    decay=st.floats(0, 0.5),
    steps=st.integers(1, 5),
)
def test_the_optimizer_is_adamw(
    lr: float, beta1: float, beta2: float, decay: float, steps: int
) -> None:
    own, other = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    settings = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay, "eps": 1e-8}
    mine, torchs = GroupStepAdam([own], **settings), torch.optim.AdamW([other], **settings)
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        own.grad = torch.randn(6, generator=source)
        other.grad = own.grad.clone()
        mine.step()
        torchs.step()
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert mine.param_groups[0]["step"] == steps
