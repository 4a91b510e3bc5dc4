"""Whether settings suit a model, by its Hugging Face config, and a machine, by what it has."""

from typing import Any

import msgspec
import pytest
import yaml
from configs import MEGATRON, load_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.config.loader import dump
from minirl.config.megatron import Fp8Config, MegatronConfig, MegatronOptimizerConfig
from minirl.config.megatron_auto import decided
from minirl.config.megatron_fit import (
    MOE_KEYS,
    Machine,
    check_machine,
    check_model_rules,
    this_machine,
)

M = "policy.megatron_cfg"
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
}
MIXTURE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 63}


def refusal(model: dict[str, Any], **settings: Any) -> str:
    """Why settings do not suit a model; empty if they do."""
    try:
        check_model_rules(MegatronConfig(**settings), model)
    except ValueError as error:
        return str(error)
    return ""


# ---- the model ----------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    layers=st.integers(1, 24),
    stages=st.integers(2, 6),
    chunks=st.none() | st.integers(2, 3),
    ends=st.tuples(st.none() | st.integers(1, 6), st.none() | st.integers(1, 6)),
)
def test_accepted_stages_hold_all_layers_and_each_chunk_one_at_least(layers, stages, chunks, ends):
    text = refusal(
        {**DENSE, "num_hidden_layers": layers},
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        num_layers_in_first_pipeline_stage=ends[0],
        num_layers_in_last_pipeline_stage=ends[1],
    )
    middle = stages - (ends[0] is not None) - (ends[1] is not None)
    rest = layers - (ends[0] or 0) - (ends[1] or 0)
    possible = [n for n in range(1, layers + 1) if n * middle * (chunks or 1) == rest]
    assert (text == "") == (bool(possible) if middle else rest == 0)
    assert text == "" or text.startswith(f"{M}.pipeline_model_parallel_size is {stages}, ")


def test_a_layout_of_ones_own_is_left_to_core():
    own = {"pipeline_model_parallel_layout": "Et*3|(tt|)*28t|L"}
    assert refusal(DENSE, pipeline_model_parallel_size=5, model_overrides=own) == ""


@pytest.mark.parametrize(
    ("model", "key", "value", "part"),
    [
        (DENSE, "tensor_model_parallel_size", 16, "num_attention_heads 8; use a divisor"),
        ({**DENSE, "intermediate_size": 6}, "tensor_model_parallel_size", 4, "intermediate_size 6"),
        (
            {**DENSE, "num_attention_heads": 12, "intermediate_size": 6},
            "tensor_model_parallel_size",
            6,
            "neither a multiple nor a divisor of the model's num_key_value_heads 4",
        ),
        (MIXTURE, "expert_model_parallel_size", 3, "the model's 8 experts"),
        (MIXTURE, "expert_tensor_parallel_size", 5, "the width of an expert, 24"),
        ({"text_config": DENSE}, "tensor_model_parallel_size", 16, "num_attention_heads 8"),
        (DENSE, "offload_modules", ["core_attn", "moe_act"], "holds moe_act, but the model is d"),
        (DENSE, "recompute_modules", ["mlp", "moe"], "holds moe, but the model is dense"),
        (DENSE, "cuda_graph_modules", ["moe_router"], "holds moe_router, but the model is dense"),
    ],
)
def test_what_does_not_suit_the_model_is_refused_by_its_key(model, key, value, part):
    text = refusal(model, **{key: value})
    assert text.split()[0] == f"{M}.{key}"
    assert part in text


@pytest.mark.parametrize(
    "own",
    [
        {"rope_parameters": {"rope_type": "other"}},
        {"rope_scaling": {"type": "other", "factor": 2.0}},
        {"text_config": {**DENSE, "rope_scaling": {"rope_type": "other"}}},
    ],
)
def test_positions_that_megatron_does_not_compute_are_refused_however_they_are_written(own):
    text = refusal(DENSE | own)
    assert text.startswith("policy.model_name: the config's rope_parameters.rope_type is 'other'")
    assert "default, linear, dynamic, yarn, longrope, llama3" in text
    assert refusal(DENSE | {"rope_scaling": None, "attention_bias": False}) == ""


def test_a_mixture_with_tensor_parallelism_needs_sequence_parallelism():
    sizes: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    assert refusal(MIXTURE, **sizes).startswith(f"{M}.sequence_parallel is False")
    assert refusal(DENSE, **sizes) == ""
    assert refusal(MIXTURE, **(sizes | {"sequence_parallel": None})) == ""


OF_MOE: dict[str, Any] = {
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "freeze_moe_router": False,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_bias_update_rate": 0.1,
    "moe_per_layer_logging": True,
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "moe_shared_expert_overlap": True,
}


@pytest.mark.parametrize("key", MOE_KEYS)
def test_settings_of_mixtures_are_refused_for_a_dense_model(key):
    text = refusal(DENSE, **{key: OF_MOE[key]})
    assert text.startswith(f"{M}.{key} is ")
    assert "the model is dense" in text
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        assert refusal({**DENSE, name: 8}, **{key: OF_MOE[key]}) == ""


def test_every_key_that_is_named_for_mixtures_is_among_those():
    keys = {k for k in MegatronConfig.__struct_fields__ if "moe_" in k or k.startswith("expert_")}
    assert keys - {"moe_permute_fusion"} == set(MOE_KEYS)


@pytest.mark.parametrize("modules", [["core_attn", "attn_proj"], ["qkv_linear"]])
def test_modules_of_attention_suit_a_dense_model(modules):
    assert refusal(DENSE, offload_modules=modules) == ""


def test_facts_that_a_config_does_not_state_are_left_to_core():
    assert refusal({"model_type": "gpt2", "n_layer": 3}, pipeline_model_parallel_size=2) == ""


# ---- the machine --------------------------------------------------------------------------------

GPU = Machine((9, 0), "2.10.0", deep_ep=True, environ={"NVTE_CPU_OFFLOAD_V1": "1"})
OFFLOAD: dict[str, Any] = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
}
HYBRID = {"optimizer": MegatronOptimizerConfig(optimizer_cpu_offload=True)}
PRECISE = {"optimizer": MegatronOptimizerConfig(use_precision_aware_optimizer=True)}
FP8 = {"fp8_cfg": Fp8Config(enabled=True)}

NEEDS: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    # (settings, the key blamed, what the machine lacks, what the message says)
    (HYBRID, "optimizer.optimizer_cpu_offload", {"capability": None}, "HybridDeviceOptimizer"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl", {"capability": None}, "no CUDA GPU"),
    ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size", {"capability": None}, "gl"),
    ({"bias_activation_fusion": True}, "bias_activation_fusion", {"capability": None}, "GPU"),
    (
        {"moe_token_dispatcher_type": "flex"},
        "moe_token_dispatcher_type",
        {"capability": None},
        "no CUDA GPU",
    ),
    (
        {"moe_token_dispatcher_type": "flex"},
        "moe_token_dispatcher_type",
        {"deep_ep": False},
        "deep_ep is not installed",
    ),
    (
        OFFLOAD,
        "fine_grained_activation_offloading",
        {"transformer_engine": None},
        "only its layers can offload",
    ),
    (
        OFFLOAD,
        "fine_grained_activation_offloading",
        {"environ": {}},
        f'set {M}.env_vars.NVTE_CPU_OFFLOAD_V1: "1"',
    ),
    (
        {"cuda_graph_impl": "transformer_engine"},
        "cuda_graph_impl",
        {"transformer_engine": None},
        "it captures the graphs",
    ),
    (FP8, "fp8_cfg.enabled", {"transformer_engine": None}, "only its layers compute in FP8"),
    (FP8, "fp8_cfg.fp8_recipe", {"capability": (8, 9)}, "compute capability 9.0 or later"),
    (
        PRECISE,
        "optimizer.use_precision_aware_optimizer",
        {"transformer_engine": None},
        "FusedAdam",
    ),
    *(
        ({key: True}, key, {"transformer_engine": None}, "the kernel is its own")
        for key in ("apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")
    ),
]


@pytest.mark.parametrize(("given", "key", "lack", "part"), NEEDS)
def test_what_needs_a_part_is_refused_without_it_and_accepted_with_it(given, key, lack, part):
    check_machine(MegatronConfig(**given), GPU)
    with pytest.raises(ValueError, match=r"\S") as caught:
        check_machine(MegatronConfig(**given), GPU._replace(**lack))
    assert str(caught.value).split()[0].rstrip(",") == f"{M}.{key}"
    assert part in str(caught.value)


def test_the_variable_of_offloading_may_come_from_the_config_and_is_not_needed_before_2_10():
    bare = GPU._replace(environ={})
    check_machine(MegatronConfig(**OFFLOAD, env_vars={"NVTE_CPU_OFFLOAD_V1": "1"}), bare)
    check_machine(MegatronConfig(**OFFLOAD), bare._replace(transformer_engine="2.9.1+abc"))
    with pytest.raises(ValueError, match="NVTE_CPU_OFFLOAD_V1"):
        check_machine(MegatronConfig(**OFFLOAD, env_vars={"NVTE_CPU_OFFLOAD_V1": "0"}), GPU)


def test_the_hybrid_optimizer_keeps_masters_without_transformer_engine():
    both = msgspec.structs.replace(HYBRID["optimizer"], use_precision_aware_optimizer=True)
    check_machine(MegatronConfig(optimizer=both), GPU._replace(transformer_engine=None))


BARE = Machine(None, None, deep_ep=False, environ={})


@pytest.mark.parametrize("machine", [GPU, BARE, GPU._replace(transformer_engine=None)])
@pytest.mark.parametrize("model", [DENSE, MIXTURE])
def test_what_is_decided_for_a_machine_suits_it_and_every_model_and_can_be_loaded(machine, model):
    run = load_tree(MEGATRON)
    cfg = decided(run.policy, machine)
    check_machine(cfg.megatron_cfg, machine)
    check_model_rules(cfg.megatron_cfg, model)
    whole = msgspec.structs.replace(run, policy=cfg)
    assert load_tree(yaml.safe_load(dump(whole))) == whole


def test_the_defaults_run_on_this_machine():
    check_machine(MegatronConfig(), this_machine())
    check_machine(MegatronConfig(), BARE)
