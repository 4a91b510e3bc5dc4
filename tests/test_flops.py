"""What a device could do, and what frozen weights save; test_cost.py counts models."""

import pytest
import torch

from minirl.cost import TOKENS_ONLY, Cost
from minirl.flops import forward_flops, listed_flops, measured_flops, peak_flops, training_flops


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
