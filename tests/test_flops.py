"""Model FLOPs are those that torch counts, and utilisation never exceeds the machine."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minirl.flops import forward_flops, listed_flops, measured_flops, peak_flops, training_flops
from minirl.packing import TOKENS_ONLY, Cost, cost_of

FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "shared_expert_intermediate_size": 96,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_that_torch_counts_of_a_real_model(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    untyped: Any = AutoConfig
    config = untyped.for_model(
        family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        attn_implementation="eager",
        experts_implementation="eager",
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config)
    lengths, cost = [7, 20], cost_of(config.to_dict())
    with FlopCounterMode(display=False) as forward:
        outputs = [model(input_ids=torch.zeros(1, n, dtype=torch.long)).logits for n in lengths]
    with FlopCounterMode(display=False) as backward:
        sum(x.sum() for x in outputs).backward()
    # What eager attention computes above the diagonal is not counted, nor RoPE nor routers.
    masked = 2.0 * cost.per_pair * sum(n * n for n in lengths)
    counted = forward.get_total_flops() - masked
    assert forward_flops(lengths, cost) == pytest.approx(counted, rel=0.02)
    counted += backward.get_total_flops() - 2 * masked
    assert training_flops(lengths, cost) == pytest.approx(counted, rel=0.02)


def test_frozen_weights_cost_no_gradient() -> None:
    cost = Cost(3.0, 0.5)
    assert training_flops([5], cost, frozen=True) == 2 * forward_flops([5], cost)


def test_a_cpu_is_measured_and_an_unknown_model_is_not() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has its peak from the table")
    measured = peak_flops("float32", Cost(1.0, 1.0))
    assert measured is not None
    assert 1e8 < measured < 1e13
    assert peak_flops("float32", TOKENS_ONLY) is None
    assert measured_flops(torch.float32, size=64) > 0


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L40", "bfloat16", 181e12),
        ("NVIDIA L400", "bfloat16", None),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("Some GPU of tomorrow", "bfloat16", None),
    ],
)
def test_the_longest_name_that_fits_counts(
    device: str, precision: str, expected: float | None
) -> None:
    assert listed_flops(device, precision) == expected
