"""Which layers get adapters, what they begin with, and which settings contradict each other."""

from typing import Any

import pytest
import torch
from models import policy_config
from torch import Tensor

from minirl.backends.dtensor import backend as dtensor
from minirl.backends.dtensor import lora as dtensor_lora
from minirl.config.dtensor import DTensorConfig, LoraConfig
from minirl.parallel import Axis
from minirl.rng import key_of


def chosen(model: Any, **keys: Any) -> list[str]:
    return dtensor_lora.choose(model, LoraConfig(enabled=True, **keys))


def test_layers_are_chosen_by_the_ends_of_their_names(folders: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    everywhere = chosen(model)
    assert len(everywhere) == 2 * 7
    assert "lm_head" not in everywhere
    some = {"match_all_linear": False}
    queries = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert chosen(model, **some, target_modules=["q_proj"]) == queries
    assert chosen(model, **some, target_modules=["0.self_attn.q_proj"]) == queries[:1]
    assert chosen(model, **some, target_modules=["layers.1.*", "lm_head"])[-1] == "lm_head"
    first = chosen(model, exclude_modules=["layers.1.*", "mlp.*"])
    assert first == [name for name in everywhere if "layers.0.self_attn" in name]


def test_names_that_fit_nothing_and_tied_embeddings_are_refused(folders: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"])
    some = {"match_all_linear": False}
    for keys, message in (
        ({**some, "target_modules": ["proj"]}, r"target_modules: 'proj' fits no linear layer"),
        ({"exclude_modules": ["norm"]}, r"exclude_modules: 'norm' fits no linear layer"),
        ({"exclude_modules": ["*"]}, "leaves no layer"),
        ({**some, "target_modules": ["lm_head"]}, "'lm_head' is tied to the input embedding"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(model, **keys)


def test_contradictions_are_refused_where_lora_is_on() -> None:
    for keys, message in (
        ({"dropout": 0.1}, "dropout 0.1 would give an update other log-probs"),
        ({"target_modules": ["q_proj"]}, "no effect with match_all_linear: true"),
        ({"match_all_linear": False}, "no layer is adapted"),
    ):
        LoraConfig(**keys)
        with pytest.raises(ValueError, match=message):
            LoraConfig(enabled=True, **keys)
    with pytest.raises(ValueError, match="LoRA is of this backend only"):
        DTensorConfig(enabled=False, lora_cfg=LoraConfig(enabled=True))
    with pytest.raises(ValueError, match="freeze_moe_router: false has no effect with lora_cfg"):
        DTensorConfig(freeze_moe_router=False, lora_cfg=LoraConfig(enabled=True))


def test_adapters_begin_alike_for_a_key_whatever_was_drawn_before(
    solo: Axis, folders: dict[str, str]
) -> None:
    def begun(key: int, **lora: Any) -> dict[str, Tensor]:
        torch.rand(1)
        keys = DTensorConfig(lora_cfg=LoraConfig(enabled=True, **lora))
        cfg = policy_config(folders["qwen3"], dtensor_cfg=keys)
        _, state = dtensor.open_backend(cfg, solo, key_of(key))
        adapters = state.model.trainer.parameters()
        return {name: dtensor_lora.full(p) for name, p in adapters.items()}

    one, again, other, uniform = begun(0), begun(0), begun(1), begun(0, lora_A_init="uniform")
    spreads: list[float] = []
    for name, weight in one.items():
        assert torch.equal(weight, again[name])
        if "lora_B" in name:
            assert not weight.any()
        else:
            rank, width = weight.shape
            assert not torch.equal(weight, other[name])
            spreads.append(float(weight.std()) / (2 / (rank + width)) ** 0.5)
            assert float(uniform[name].abs().max()) == pytest.approx(width**-0.5, rel=0.1)
    assert sum(spreads) / len(spreads) == pytest.approx(1.0, rel=0.03)
