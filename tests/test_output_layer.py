"""What the FSDP2 backend measures of a model: causality, and that its logits are plain."""

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_cases import make_rows, make_samples
from models import policy_config, save_model
from ranks import RankError, run_ranks
from torch import Tensor, nn

from minirl.backend import TokenHead
from minirl.backends import output_layer
from minirl.backends.dtensor import fit as dtensor_fit
from minirl.backends.dtensor.backend import open_backend
from minirl.backends.vocab_parallel import Shard
from minirl.config.policy import DTensorConfig
from minirl.parallel import Axis
from minirl.rng import key_of

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def model_of(family: str, **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    untyped: Any = AutoConfig
    return AutoModelForCausalLM.from_config(untyped.for_model(family, **SIZES | sizes)).eval()


PLAIN = "qwen2 qwen3 llama mistral gemma3_text gpt2 gpt_neox opt phi3 bloom olmo2 gpt_oss"


@pytest.mark.parametrize("family", PLAIN.split())
def test_a_plain_output_layer_is_the_last(family: str) -> None:
    model = model_of(family)
    assert output_layer.gives_plain_logits(model)
    tokens = torch.arange(6)[None]
    expected = model(input_ids=tokens).logits
    assert expected.shape == (1, 6, 32), "and the model is as it was"

    def view(hidden: Tensor, layer: Any) -> Tensor:
        return nn.functional.linear(hidden, layer.weight) * 2

    with output_layer.replaced(model, view, Shard(0)):
        assert torch.equal(model(input_ids=tokens).logits, expected * 2)
    assert torch.equal(model(input_ids=tokens).logits, expected)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 2.0}),
        ("cohere", {"logit_scale": 0.5}),
        ("electra", {"embedding_size": 8, "is_decoder": True}),
    ],
)
def test_a_model_that_changes_its_logits_is_told(family: str, keys: dict[str, Any]) -> None:
    assert not output_layer.gives_plain_logits(model_of(family, **keys))


def test_an_output_layer_of_another_kind_is_told() -> None:
    model = model_of("llama")
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    assert not output_layer.gives_plain_logits(model)


@pytest.mark.parametrize("family", [*PLAIN.split(), "gpt_neox_japanese", "mamba", "qwen3_next"])
def test_a_decoder_is_causal_whatever_its_config_says(family: str) -> None:
    dtensor_fit.check_causal(model_of(family))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("bert", {}),
        ("xlnet", {"d_head": 8}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("cpmant", {"dim_head": 8, "dim_ff": 32}),
    ],
)
def test_a_model_that_sees_what_follows_is_refused(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    model_of(family, **keys).save_pretrained(tmp_path)
    with pytest.raises(RankError, match=f"models of type '{family}'.* attend to both sides"):
        run_ranks(1, look, str(tmp_path), None, {})


def test_a_model_that_gives_nan_is_refused_as_damaged() -> None:
    model = model_of("llama")
    model.get_input_embeddings().weight.data[:] = torch.nan
    with pytest.raises(ValueError, match="NaN; its weights are damaged"):
        dtensor_fit.check_causal(model)


def test_a_model_that_writes_into_its_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rwkv'.* change their weights"):
        dtensor_fit.check_causal(model_of("rwkv", num_hidden_layers=4, rescale_every=2))


def test_layers_that_run_on_gpus_only_are_not_asked_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(**_: Any) -> None:
        raise RuntimeError("a kernel for GPUs")

    model = model_of("llama")
    model.forward = forward
    with pytest.raises(RuntimeError, match="a kernel for GPUs"):
        dtensor_fit.check_causal(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dtensor_fit.check_causal(model)


def look(axis: Axis, model: str, chunk: int | None, keys: dict[str, Any]) -> list[Tensor]:
    cfg = policy_config(model, dtensor_cfg=DTensorConfig(**keys), logprob_chunk_size=chunk)
    backend, state = open_backend(cfg, axis, key_of(0))
    head = TokenHead(0.7, entropy=True)
    outputs = backend.logprobs(state, [make_rows(make_samples(3))], head, "policy")
    return [x for o in outputs for x in o if x is not None]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"tensor_parallel_size": 2, "sequence_parallel": True}])
def test_log_probs_and_entropies_are_those_of_the_logits(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    model = save_model(tmp_path, "llama", num_key_value_heads=2)
    whole = run_ranks(2, look, model, None, {**keys, "use_fused_linear_logprobs": False})
    for chunk in (None, 5):
        for found in run_ranks(2, look, model, chunk, keys):
            for value, expected in zip(found, whole[0], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
