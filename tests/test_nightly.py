"""What of `make nightly` needs no pre-trained model: its table in the README, its refusals."""

import json
import re
from pathlib import Path

import pytest
from models import policy_config
from nightly import BOUNDS, ENGINE, ROWS

from minirl.backends import check_policy
from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import DTensorConfig, OptimizerConfig

ROOT = Path(__file__).parent.parent
SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
"""Of SmolLM2-135M. Nothing but a config: what is refused is refused before weights are read."""
SIZES = "tensor_parallel_size", "tensor_model_parallel_size"


def refusal(folder: Path, size: int, *, megatron: bool) -> str:
    (folder / "config.json").write_text(json.dumps(SMOL))
    chosen = {
        "dtensor_cfg": DTensorConfig(enabled=False),
        "megatron_cfg": MegatronConfig(
            enabled=True,
            tensor_model_parallel_size=size,
            optimizer=MegatronOptimizerConfig(lr=1e-3),
        ),
        "optimizer": None,
    }
    if not megatron:
        chosen = {
            "dtensor_cfg": DTensorConfig(tensor_parallel_size=size),
            "optimizer": OptimizerConfig(kwargs={"lr": 1e-3}),
        }
    try:
        check_policy(policy_config(str(folder), **chosen))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("megatron", [False, True])
def test_nine_heads_on_two_ranks_are_refused_with_what_fits(tmp_path: Path, megatron: bool):
    found = refusal(tmp_path, 2, megatron=megatron)
    assert found.startswith(("policy.dtensor_cfg.", "policy.megatron_cfg.")[megatron])
    assert SIZES[megatron] in found
    assert re.search(r"\b9\b.*use a divisor", found)
    assert found.endswith("[1, 3, 9]" if megatron else "[1, 3]")


def test_three_ranks_fit_nine_heads(tmp_path: Path):
    assert refusal(tmp_path, 3, megatron=False) == ""


def test_the_readme_shows_every_row_within_its_bounds():
    text = (ROOT / "README.md").read_text()
    number = r"(\de-\d\d)"
    shown = re.findall(
        rf"^\| ([^|]+) \| \d \| {number} \| {number} \| {number} \| ([\d.]+|-) \|",
        text,
        re.MULTILINE,
    )
    assert {name for name, *_ in shown} == {row.layout.name for row in ROWS}
    for name, *errors, engine in shown:
        assert all(float(x) <= bound for x, bound in zip(errors, BOUNDS, strict=True)), name
        assert engine == "-" or float(engine) < ENGINE
