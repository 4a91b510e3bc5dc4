"""Each field of a config under Megatron is either Hugging Face's to 1e-4, or refused by its name.

Models of two layers are read by Bridge and run on padded and packed rows, some of them beyond the
original length, and held against transformers on each row alone; and so is the stand-in that is
compared before a conversion.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL
from msgspec import structs
from parity import Layout, policy
from ranks import run_ranks
from torch import Tensor

from minirl.backend import TokenHead
from minirl.backends.hf_model import frozen
from minirl.backends.megatron import compare as megatron_compare
from minirl.backends.megatron import convert as megatron_convert
from minirl.backends.megatron import setup as megatron_setup
from minirl.backends.megatron.forward import forward, open_stage
from minirl.config.megatron import MegatronConfig
from minirl.config.megatron_fit import check_model_rules
from minirl.config.policy import PolicyConfig, SequencePackingConfig
from minirl.hf import model_facts
from minirl.parallel import SOLO, Axis
from minirl.rng import key_of
from minirl.types import Rows

pytestmark = pytest.mark.slow

LENGTHS = (10, 40, 3)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    if kind in ("llama3", "yarn", "longrope"):
        fields = {"original_max_position_embeddings": 16, **fields}
    if kind == "llama3":
        fields = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **fields}
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **fields}
    return {"rope_parameters": parameters}


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0, 8.0, 16.0, 32.0] * 2}
FAR = {"original_max_position_embeddings": 2048}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama", rope("linear")),
    "linear, qwen2": ("qwen2", rope("linear")),
    "dynamic": ("llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": 64}),
    "llama3": ("llama", rope("llama3")),
    "llama3, as released": ("llama", rope("llama3", original_max_position_embeddings=8192)),
    "llama3, other bounds": ("qwen3", rope("llama3", low_freq_factor=2.0, high_freq_factor=8.0)),
    "yarn": ("qwen3", rope("yarn")),
    "yarn, betas": ("qwen2", rope("yarn", beta_fast=8.0, beta_slow=2.0)),
    "yarn, attention_factor": ("qwen3", rope("yarn", attention_factor=1.7)),
    "yarn, mscale": ("llama", rope("yarn", mscale=2.0, mscale_all_dim=0.5)),
    "yarn, truncate": ("llama", rope("yarn", truncate=False, **FAR) | {"head_dim": 32}),
    "yarn, window": ("qwen2", rope("yarn") | WINDOW | {"max_window_layers": 1}),
    "longrope": ("llama", rope("longrope", **LONG)),
    "longrope, short": ("llama", rope("longrope", original_max_position_embeddings=64, **LONG)),
    "some windows": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "windows": ("qwen3", {**WINDOW, "max_window_layers": 0}),
    "windows, mistral": ("mistral", {"sliding_window": 8}),
    "windows, moe": ("qwen3_moe", MIXTURE | WINDOW),
    "biases and tied": ("qwen2", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "activation": ("llama", {"hidden_act": "gelu"}),
    "wide heads": ("llama", {"head_dim": 32}),
    "moe": ("qwen3_moe", MIXTURE),
    "moe, unnormed": ("qwen3_moe", {**MIXTURE, "norm_topk_prob": False}),
    "LayerNorm around one, partial positions": ("nemotron", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("llama", {"attention_bias": True}, "attention_bias is True"),
    "biases, qwen3": ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    "mlp biases": ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    "yarn, mistral": ("mistral", rope("yarn"), "rope_parameters.rope_type is 'yarn'"),
    "some experts": ("qwen3_moe", {**MIXTURE, "mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
    "sparse": ("qwen3_moe", {**MIXTURE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "activation": ("llama", {"hidden_act": "gelu_new"}, "gelu_new"),
    "caps": ("gemma2", {"head_dim": 16}, "attn_logit_softcapping"),
    "sinks": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, "softmax_type"),
    "scales": ("granite", {}, "no models of type 'granite'"),
}


def save(folder: Path, family: str, fields: dict[str, Any]) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SMALL, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def alone(cfg: PolicyConfig, rows: list[Tensor]) -> list[Tensor]:
    """By transformers, each row from a model that has seen nothing else."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = []
    for row in rows:
        config = frozen(AutoConfig.from_pretrained(cfg.model_name), 64).config
        model = AutoModelForCausalLM.from_pretrained(cfg.model_name, config=config)
        with torch.no_grad():
            logs = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(logs.gather(-1, row[1:, None])[:, 0])
    return found


def under_megatron(cfg: PolicyConfig, rows: list[Tensor]) -> list[Tensor]:
    described = megatron_setup.describe(cfg)
    chunks = megatron_setup.build_chunks(cfg, described, trained=False)
    described.bridge.load_hf_weights(chunks)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    [output] = forward(open_stage(cfg, described, chunks), [Rows(tokens, lengths)], TokenHead())
    return [x[: len(row) - 1] for x, row in zip(output.logprobs, rows, strict=True)]


def opened(model: str) -> PolicyConfig:
    """The policy, as it is converted; Megatron and its groups are ready."""
    check_model_rules(MegatronConfig(), model_facts(model))
    cfg = megatron_convert._alone(policy(Layout("", 1, {}), model, packed=False))
    megatron_setup.prepare_process(cfg.megatron_cfg)
    megatron_setup.open_groups(cfg.megatron_cfg, key_of(0))
    return cfg


def errors(axis: Axis, model: str) -> list[float]:
    """The largest differences of padded and of packed rows; the stand-in is compared as well."""
    cfg = opened(model)
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 64, (n,), generator=draw) for n in LENGTHS]
    expected, found = alone(cfg, rows), []
    for packed in (False, True):
        packing = SequencePackingConfig(enabled=packed)
        seen = under_megatron(structs.replace(cfg, sequence_packing=packing), rows)
        pairs = zip(seen, expected, strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    megatron_compare.check_log_probs(cfg)
    return found


@pytest.mark.parametrize("name", EQUAL)
def test_log_probs_are_those_of_hugging_face(tmp_path: Path, name: str):
    family, fields = EQUAL[name]
    [found] = run_ranks(1, errors, save(tmp_path, family, fields))
    assert max(found) < 1e-4, found


def refusal(axis: Axis, model: str) -> str:
    try:
        cfg = opened(model)
        megatron_setup.describe(cfg)
        megatron_compare.check_log_probs(cfg)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_would_lose_is_refused_by_its_name(tmp_path: Path, name: str):
    family, fields, part = REFUSED[name]
    [text] = run_ranks(1, refusal, save(tmp_path, family, fields))
    assert text.startswith("policy.model_name: ")
    assert part in text


def test_what_the_comparison_refuses_is_never_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    uncapped = {"head_dim": 16, "attn_logit_softcapping": None}
    model = save(tmp_path / "model", "gemma2", uncapped)
    with (
        pytest.raises(ValueError, match=r"could not be converted.*are not Hugging Face's"),
        megatron_convert.converted(policy(Layout("", 1, {}), model, packed=False), SOLO),
    ):
        pass
    assert not megatron_convert.folder_of(model).exists()


def misread(axis: Axis, model: str, field: str, value: object) -> str:
    """The refusal where Bridge, for once, misreads a field."""
    real = megatron_setup._provider_of

    def reading(bridge: Any, name: str) -> Any:
        provider = real(bridge, name)
        setattr(provider, field, value)
        return provider

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_setup, "_provider_of", reading)
        return refusal(axis, model)


def windowless(axis: Axis, model: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_setup, "window_fields", lambda config, provider: {})
        return refusal(axis, model)


def test_the_comparison_catches_what_no_rule_knows(tmp_path: Path):
    model = save(tmp_path / "windows", "qwen2", {**WINDOW, "max_window_layers": 1})
    [text] = run_ranks(1, windowless, model)
    assert "without layer_types = ['full_attention', 'sliding_attention'] they agree" in text
    plain = save(tmp_path / "plain", "llama", {})
    [text] = run_ranks(1, misread, plain, "layernorm_epsilon", 0.3)
    assert "no single field explains it" in text


def too_long(axis: Axis, model: str) -> str:
    cfg = opened(model)
    try:
        under_megatron(cfg, [torch.arange(60)])
    except ValueError as error:
        return str(error)
    return ""


def test_a_row_beyond_positions_that_end_is_refused(tmp_path: Path):
    fields = rope("dynamic", factor=2.0) | {"max_position_embeddings": 48}
    [text] = run_ranks(1, too_long, save(tmp_path, "llama", fields))
    assert "a row has 60 tokens, but the model's rope_parameters hold for 48" in text


def state(axis: Axis, model: str) -> dict[str, Any]:
    """What a comparison leaves: groups and random numbers are what they were."""
    from megatron.core import parallel_state

    cfg = opened(model)
    megatron_setup.describe(cfg)
    overrides = {"num_layers": 2, "init_method_std": 0.03}
    keys = structs.replace(cfg.megatron_cfg, model_overrides=overrides)
    group, before = parallel_state.get_tensor_model_parallel_group(), torch.get_rng_state()
    megatron_compare.check_log_probs(structs.replace(cfg, megatron_cfg=keys))
    same = parallel_state.get_tensor_model_parallel_group() is group
    return {"groups": same, "random": torch.equal(torch.get_rng_state(), before)}


def test_a_comparison_leaves_groups_and_random_numbers_and_bears_overrides(tmp_path: Path):
    [found] = run_ranks(1, state, save(tmp_path, "llama", {"num_hidden_layers": 2}))
    assert found == {"groups": True, "random": True}
