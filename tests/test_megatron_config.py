"""The section of the Megatron backend: choice of backend, names that are no keys, the launch."""

import pytest
from configs import MEGATRON, MINIMAL, edited, load_tree, message
from hypothesis import given, settings
from hypothesis import strategies as st
from tree import ROOT

from minirl.config.loader import load
from minirl.config.megatron import MegatronConfig, data_parallel_size
from minirl.config.megatron_fit import check_model_rules
from minirl.config.run import GrpoRun, check_launch

M = "policy.megatron_cfg"


def starts(text: str, key: str) -> bool:
    """Whether a refusal begins with a full key."""
    return text.split("run.yaml: ", 1)[-1].startswith(f"{key} ")


# ---- which backend ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtensor", "megatron"), [(False, False), (True, True)])
def test_neither_backend_and_both_are_refused_by_both_keys(dtensor, megatron):
    tree = edited(MEGATRON, {"policy.dtensor_cfg.enabled": dtensor, f"{M}.enabled": megatron})
    text = message(tree)
    assert f"policy.dtensor_cfg.enabled is {dtensor} and {M}.enabled {megatron}" in text


def test_each_backend_alone_is_accepted():
    assert load_tree(MEGATRON).policy.megatron_cfg.enabled
    assert load_tree(MINIMAL).policy.dtensor_cfg.enabled
    assert not load_tree(MINIMAL).policy.megatron_cfg.enabled


def test_float16_is_of_the_dtensor_backend():
    assert load_tree(edited(MINIMAL, {"policy.precision": "float16"}))
    text = message(edited(MEGATRON, {"policy.precision": "float16"}))
    assert "policy.precision is float16" in text
    assert "use bfloat16, or policy.dtensor_cfg" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer", {"kwargs": {"lr": 1e-6}}), ("scheduler", [{"name": "a.B"}])],
)
def test_an_optimizer_of_the_other_backend_is_refused_with_its_own_named(key, value):
    text = message(edited(MEGATRON, {f"policy.{key}": value}))
    assert starts(text, f"policy.{key}")
    assert f"set {M}.{key} instead" in text
    assert f"writes `{key}: null`" in text


def test_an_heir_of_a_dtensor_recipe_writes_the_optimizer_null():
    run = load_tree(
        MINIMAL,
        "policy.optimizer=null",
        "policy.dtensor_cfg.enabled=false",
        f"{M}.enabled=true",
        f"{M}.optimizer.lr=1e-6",
    )
    assert run == load_tree(MEGATRON)


def test_the_learning_rate_has_no_default():
    assert starts(message(MEGATRON, f"{M}.optimizer.lr=null"), f"{M}.optimizer.lr")


def test_nothing_in_the_section_counts_while_it_is_disabled():
    load_tree(
        MINIMAL,
        f"{M}.virtual_pipeline_model_parallel_size=2",
        f"{M}.fine_grained_activation_offloading=true",
        f"{M}.optimizer.optimizer_cpu_offload=true",
    )


# ---- names that are no keys ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("optimizer.bf16", "follows policy.precision"),
        ("optimizer.fp16", "follows policy.precision"),
        ("optimizer.params_dtype", "masters are float32"),
        ("optimizer.clip_grad", "clipped to policy.max_grad_norm"),
        ("distributed_data_parallel_config.use_custom_fsdp", "custom FSDP"),
        ("distributed_data_parallel_config.data_parallel_sharding_strategy", "custom FSDP"),
    ],
)
def test_a_setting_that_lives_elsewhere_is_refused_with_its_place(key, remedy):
    text = message(MEGATRON, f"{M}.{key}=1")
    assert f"{M}.{key}: " in text
    assert remedy in text
    assert "unknown key" not in text


def test_a_misspelt_key_is_refused_with_its_full_path_and_the_nearest():
    text = message(MEGATRON, f"{M}.tensor_model_paralel_size=2")
    assert f"{M}.tensor_model_paralel_size: unknown key; did you mean {M}.tensor_model_p" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_model_parallel_size", "0"),
        ("virtual_pipeline_model_parallel_size", "1"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("optimizer.optimizer", "lion"),
        ("optimizer.adam_beta1", "1.0"),
        ("env_vars", "{A: 1}"),
        ("recompute_granularity", "partial"),
        ("cuda_graph_impl", "global"),
        ("fp8_cfg.fp8_recipe", "custom"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key, value):
    assert f"{M}.{key}" in message(MEGATRON, f"{M}.{key}={value}")


# ---- the launch ---------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4)


@settings(max_examples=50)
@given(
    tensor=st.sampled_from(SIZES),
    pipeline=st.sampled_from(SIZES),
    context=st.sampled_from(SIZES),
    expert=st.sampled_from(SIZES),
    expert_tensor=st.sampled_from(SIZES),
    num_ranks=st.integers(1, 48),
)
def test_an_accepted_number_of_ranks_holds_whole_copies_of_model_and_experts(
    tensor, pipeline, context, expert, expert_tensor, num_ranks
):
    cfg = MegatronConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    model, experts = tensor * pipeline * context, expert * expert_tensor * pipeline
    if num_ranks % model == 0 and num_ranks % experts == 0:
        assert data_parallel_size(cfg, num_ranks) * model == num_ranks
    else:
        with pytest.raises(ValueError, match=rf"{M}\.\w+.* = ({model}|{experts})"):
            data_parallel_size(cfg, num_ranks)


def launch(num_ranks: int, *overrides: str) -> str:
    """Why a number of ranks is refused; empty if it is accepted."""
    try:
        check_launch(load_tree(MEGATRON, *overrides), num_ranks)
    except ValueError as error:
        return str(error)
    return ""


TP4_PP2 = (f"{M}.tensor_model_parallel_size=4", f"{M}.pipeline_model_parallel_size=2")


def test_too_few_ranks_are_refused_with_the_sum_spelled_out():
    assert (
        f"{M}.tensor_model_parallel_size 4 x {M}.pipeline_model_parallel_size 2 x "
        f"{M}.context_parallel_size 1 = 8 ranks hold one copy of the model, and there are 4"
    ) in launch(4, *TP4_PP2)


def test_ranks_that_hold_no_whole_copies_are_refused_with_what_would():
    text = launch(12, *TP4_PP2, "grpo.num_prompts_per_step=12", "grpo.num_generations_per_prompt=4",
                  "policy.train_global_batch_size=48")  # fmt: skip
    assert text.startswith("12 ranks are not a multiple of ")
    assert "= 8; use 8 or 16 ranks" in text


def test_batches_are_shared_by_copies_of_the_model_and_prompts_by_all_ranks():
    micro = "policy.train_micro_batch_size=64"
    # 32 ranks x 64 would be 2048 samples; there are 4 copies and 512 samples.
    assert launch(32, *TP4_PP2, micro) == ""
    text = launch(32, *TP4_PP2, "policy.train_micro_batch_size=256")
    assert "512 is not a multiple of 4 data-parallel ranks x" in text
    assert "ranks are more than grpo.num_prompts_per_step 32" in launch(64, *TP4_PP2, micro)
    # The samples of a rank: 32 prompts x 16 over the 4 copies.
    assert launch(32, *TP4_PP2, "policy.logprob_batch_size=128") == ""
    text = launch(32, *TP4_PP2, "policy.logprob_batch_size=256")
    assert "policy.logprob_batch_size 256 does not divide" in text
    assert "32 prompts / 4 data-parallel ranks x 16 = 128" in text


@pytest.mark.parametrize("key", ["train_micro_batch_size", "logprob_batch_size"])
def test_interleaved_stages_need_micro_batches_for_every_stage(key):
    chunks = f"{M}.virtual_pipeline_model_parallel_size=2"
    sizes = {"policy.train_micro_batch_size": 4, "policy.logprob_batch_size": 4}
    overrides = [f"{k}={v}" for k, v in (sizes | {f"policy.{key}": 128}).items()]
    assert launch(32, *TP4_PP2, chunks) == ""
    assert launch(32, *TP4_PP2, *overrides) == ""
    text = launch(32, *TP4_PP2, chunks, *overrides)
    assert text.startswith(f"policy.{key} makes 1 micro-batches")
    assert f"{M}.pipeline_model_parallel_size 2" in text


# ---- recipes ------------------------------------------------------------------------------------

RECIPES = {
    # name: (ranks, copies of the model, its layers, heads, groups, width)
    "grpo_qwen2.5_1.5b_megatron": (8, 8, 28, 12, 2, 8960),
    "grpo_llama3.1_8b_16k_megatron": (16, 2, 32, 32, 8, 14336),
    "grpo_llama3.1_70b_megatron": (32, 2, 80, 64, 8, 28672),
    "grpo_qwen3_30ba3b_megatron": (32, 16, 48, 32, 4, 6144),
    "grpo_tiny_cpu_megatron": (2, 1, 2, 2, 2, 192),
}
MIXTURE = {"num_experts": 128, "moe_intermediate_size": 768}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_suits_its_model_and_the_ranks_that_it_names(name):
    num_ranks, copies, layers, heads, groups, width = RECIPES[name]
    run = load(ROOT / "bin" / "recipes" / f"{name}.yaml", [], GrpoRun)
    check_launch(run, num_ranks)
    assert data_parallel_size(run.policy.megatron_cfg, num_ranks) == copies
    model = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": width,
    }
    check_model_rules(run.policy.megatron_cfg, model | (MIXTURE if "30ba3b" in name else {}))


def test_every_recipe_of_megatron_is_in_the_table():
    found = {path.stem for path in (ROOT / "bin" / "recipes").glob("*_megatron.yaml")}
    assert found == RECIPES.keys()
