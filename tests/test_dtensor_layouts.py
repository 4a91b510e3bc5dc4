"""What the layouts of the FSDP2 backend keep beside their numbers (test_parity.py)."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from backend_cases import distance, exported, make_samples, make_work
from models import save_model
from parity import SIZES, Layout, policy
from ranks import run_ranks
from test_megatron import load_and_go_on, save_midway

from minirl.backends import check_policy, open_backend
from minirl.backends.dtensor import plans
from minirl.config.dtensor import DTensorConfig, LoraConfig, data_parallel_size
from minirl.config.policy import OptimizerConfig, PolicyConfig
from minirl.parallel import Axis
from minirl.rng import key_of

TP2 = {"tensor_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_parallel_size": 2}
TOO_SMALL: plans.Plan = {"model.norm": "norm"}
"""A plan that leaves nearly everything out."""
NO_EXPERTS: plans.Plan = {"model.norm": "experts"}
"""A plan that takes a norm for experts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("layouts")
    return {
        "qwen3": save_model(root / "qwen3", "qwen3", **SIZES),
        "qwen3_moe": save_model(root / "qwen3_moe", "qwen3_moe", **SIZES),
    }


def config(model: str, *, packed: bool = False, **dtensor: Any) -> PolicyConfig:
    return policy(Layout("", 1, dtensor=dtensor), model, packed=packed)


# ---- arithmetic ---------------------------------------------------------------------------------


def test_ranks_are_dealt_out_and_the_sum_is_spelled_out() -> None:
    assert data_parallel_size(DTensorConfig(**TP2, **CP2), 8) == 2
    assert data_parallel_size(DTensorConfig(dp_replicate_size=2), 8) == 8
    message = r"6 ranks are not a multiple of .*tensor_parallel_size 2 x .*parallel_size 2 = 4"
    with pytest.raises(ValueError, match=message):
        data_parallel_size(DTensorConfig(**TP2, **CP2), 6)
    message = r"12 ranks / .* = 6 data-parallel ranks, which .*dp_replicate_size 4 does not divide"
    with pytest.raises(ValueError, match=message):
        data_parallel_size(DTensorConfig(**TP2, dp_replicate_size=4), 12)
    with pytest.raises(ValueError, match=r"3 ranks are not a multiple of .*expert_parallel_size 2"):
        data_parallel_size(DTensorConfig(**EP2), 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sequence_parallel": True}, "sequence_parallel has no effect"),
        ({"custom_parallel_plan": "a:B"}, "custom_parallel_plan has no effect"),
        ({**EP2, **TP2}, "expert_parallel_size 2 and tensor_parallel_size 2 exclude"),
        ({**EP2, "dp_replicate_size": 2}, "expert_parallel_size 2 and dp_replicate_size 2 exclude"),
    ],
)
def test_what_has_no_effect_or_excludes_itself_is_refused(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DTensorConfig(**keys)


def test_under_megatron_core_owns_the_optimizers_state() -> None:
    cfg = policy(Layout("", 1, {}), "model", packed=False)
    with pytest.raises(ValueError, match=r"policy.offload_optimizer_for_logprob is true, but"):
        msgspec.structs.replace(cfg, offload_optimizer_for_logprob=True)


# ---- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "custom", "message"),
    [
        ("gpt2", None, r"models of type 'gpt2' have no plan"),
        ("llama", "nowhere:PLAN", r"cannot import 'nowhere' \(No module"),
        ("llama", "math", "names no plan"),
        ("llama", "math:pi", "it belongs to Python's standard library"),
        ("llama", ".math:pi", "it is no name of a module"),
        ("llama", "my/plans.py:PLAN", "a file; write plans, and start with its folder on the path"),
        ("llama", ":pi", "names no plan"),
        ("llama", "minirl.backends.dtensor.plans:PLANS", "names no plan"),
    ],
)
def test_a_plan_that_does_not_exist_is_refused(
    family: str, custom: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plans.find_plan(family, custom)


def test_a_plan_can_be_given_by_its_path() -> None:
    assert plans.find_plan("gpt2", "minirl.backends.dtensor.plans:LLAMA") is plans.LLAMA


def refusal(axis: Axis, cfg: PolicyConfig) -> str:
    try:
        open_backend(cfg, axis, key_of(0))
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_cut_is_refused_on_every_rank(
    models: dict[str, str], tmp_path: Path
) -> None:
    odd = save_model(tmp_path / "odd", "qwen3", num_attention_heads=3, num_key_value_heads=1)
    for model, keys, message in (
        (odd, TP2, "tensor_parallel_size 2 does not divide the model's 3 attention heads"),
        (
            models["qwen3"],
            {**TP2, "custom_parallel_plan": "test_dtensor_layouts:TOO_SMALL"},
            "the plan for tensor parallelism leaves out",
        ),
        (
            models["qwen3"],
            {**TP2, "custom_parallel_plan": "test_dtensor_layouts:NO_EXPERTS"},
            "'experts' is for modules that hold gate_up_proj and down_proj",
        ),
        (models["qwen3"], EP2, "the model has no experts"),
    ):
        for found in run_ranks(2, refusal, config(model, **keys)):
            assert message in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"num_experts": 6}, "4 does not divide the model's 6 experts"),
        ({"mlp_only_layers": [0]}, "4 does not divide the model's 63 columns"),
        ({"decoder_sparse_step": 2}, "4 does not divide the model's 63 columns"),
        ({"num_experts": 0}, "4 does not divide the model's 63 columns"),
    ],
)
def test_of_a_mixture_experts_are_dealt_out_and_columns_of_dense_layers_cut(
    change: dict[str, Any], message: str | None
) -> None:
    model = {"num_attention_heads": 8, "intermediate_size": 63, "num_experts": 8, **change}
    if message is None:
        plans.check_heads(model, 4)
        return
    with pytest.raises(ValueError, match=message):
        plans.check_heads(model, 4)


def test_a_mixture_whose_layers_are_not_all_alike_is_refused(tmp_path: Path) -> None:
    mixed = save_model(tmp_path, "qwen3_moe", **SIZES, mlp_only_layers=[1])
    message = "tensor_parallel_size is 2, but some layers of the model are mixtures"
    with pytest.raises(ValueError, match=message):
        check_policy(config(mixed, **TP2))


def save_any(folder: Path, model_type: str) -> str:
    """A tiny random model of any family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def trained(axis: Axis, cfg: PolicyConfig) -> tuple[float, dict[str, torch.Tensor]]:
    from minirl.metrics import value

    # Plain descent: Gemma's norms start at 0, where Adam makes much of a rounding error.
    sgd = OptimizerConfig("torch.optim.SGD", {"lr": 0.01})
    backend, state = open_backend(msgspec.structs.replace(cfg, optimizer=sgd), axis, key_of(0))
    data = backend.data_axis
    state, metrics = backend.update_(state, [make_work(make_samples(4)[data.rank :: data.size])])
    return value(metrics["grad_norm"]), exported(backend, state)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_family_without_a_plan_here_is_cut_by_hugging_faces(family: str, tmp_path: Path) -> None:
    model = save_any(tmp_path / family, family)
    [(norm, weights)] = run_ranks(1, trained, config(model))
    for found, cut in run_ranks(2, trained, config(model, **TP2)):
        assert found == pytest.approx(norm, rel=1e-5)
        assert distance(cut, weights) < 1e-5
    with pytest.raises(ValueError, match="does not say which blocks read whole sequences"):
        check_policy(config(model, **SP2))


def test_a_plan_that_misses_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = save_any(tmp_path, "gpt_neox")
    with pytest.raises(ValueError, match=r"cuts the vocabulary at \['model.embed_tokens'"):
        check_policy(config(model, **TP2))


def test_adapters_and_experts_that_do_not_fit_are_refused_before_weights_are_read(
    models: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(models["qwen3"], tmp_path / "m")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    lora = LoraConfig(enabled=True, match_all_linear=False, target_modules=["proj"])
    with pytest.raises(ValueError, match=r"target_modules: 'proj' fits no linear layer"):
        check_policy(config(str(folder), lora_cfg=lora))
    biased = save_any(tmp_path / "biased", "gpt_oss")
    with pytest.raises(ValueError, match="none in the form that can be cut"):
        check_policy(config(biased, **EP2))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [TP2, SP2])
def test_gemma_3_is_cut_like_the_others(keys: dict[str, Any], tmp_path: Path) -> None:
    model = save_any(tmp_path, "gemma3_text")
    [(norm, weights)] = run_ranks(1, trained, config(model))
    for found, cut in run_ranks(2, trained, config(model, **keys)):
        assert found == pytest.approx(norm, rel=1e-5)
        assert distance(cut, weights) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, {**SP2, "activation_checkpointing": True}),
        (2, {**TP2, "cpu_offload": True}),
        (4, {**TP2, "dp_replicate_size": 2}),
        (6, TP2),
    ],
    ids=["recomputed", "offloaded", "copies", "fewer experts than shards"],
)
def test_a_mixture_cut_in_any_way_is_trained_like_the_whole(
    models: dict[str, str], ranks: int, keys: dict[str, Any]
) -> None:
    moving: dict[str, Any] = {"freeze_moe_router": False}
    [(norm, weights)] = run_ranks(1, trained, config(models["qwen3_moe"], **moving))
    cut_up = config(models["qwen3_moe"], packed=True, **moving, **keys)
    for found, cut in run_ranks(ranks, trained, cut_up):
        assert found == pytest.approx(norm, rel=1e-5)
        assert distance(cut, weights) < 1e-5


# ---- states -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved", "others"),
    [
        ("qwen3", (2, TP2), [(2, TP2), (1, {}), (2, {}), (2, SP2), (2, CP2)]),
        ("qwen3", (4, SP2), [(1, {})]),
        ("qwen3_moe", (2, EP2), [(2, EP2), (1, {}), (2, CP2), (2, TP2)]),
        ("qwen3_moe", (4, SP2), [(1, {}), (2, EP2)]),
    ],
    ids=["dense", "cut and sharded", "mixture", "mixture, cut and sharded"],
)
def test_a_state_saved_in_one_layout_goes_on_in_any_other(
    models: dict[str, str],
    tmp_path: Path,
    family: str,
    saved: tuple[int, dict[str, Any]],
    others: list[tuple[int, dict[str, Any]]],
) -> None:
    ranks, layout = saved
    straight = run_ranks(ranks, save_midway, config(models[family], **layout), tmp_path)[0]
    for size, other in others:
        resumed = run_ranks(size, load_and_go_on, config(models[family], **other), tmp_path)[0]
        assert resumed["kept"] == straight["kept"], other
        assert resumed["norm"] == pytest.approx(straight["norm"], rel=1e-5), other
        assert distance(resumed["weights"], straight["weights"]) < 1e-5, other


def reference(axis: Axis, cfg: PolicyConfig) -> tuple[bool, bool]:
    """Whether the reference stays what was loaded while the policy moves."""
    from minirl.backend import TokenHead

    backend, state = open_backend(cfg, axis, key_of(0), with_reference=True)
    works = [make_work(make_samples(2))]

    def seen(weights: Any) -> torch.Tensor:
        return backend.logprobs(state, [works[0].rows], TokenHead(), weights)[0].logprobs

    first = seen("policy")
    state, _ = backend.update_(state, works)
    return torch.equal(seen("reference"), first), not torch.equal(seen("policy"), first)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [SP2, CP2], ids=["TP", "CP"])
def test_the_reference_is_swapped_in_under_any_layout(
    models: dict[str, str], keys: dict[str, Any]
) -> None:
    for found in run_ranks(2, reference, config(models["qwen3"], **keys)):
        assert found == (True, True)


def untrained(axis: Axis, cfg: PolicyConfig) -> dict[str, torch.Tensor]:
    backend, state = open_backend(cfg, axis, key_of(0))
    return exported(backend, state)


@pytest.mark.slow
def test_experts_are_exported_one_by_one_as_on_disk(models: dict[str, str]) -> None:
    from safetensors.torch import load_file

    disk = load_file(Path(models["qwen3_moe"]) / "model.safetensors")
    for ranks, keys in ((2, {}), (2, EP2), (4, TP2)):
        for found in run_ranks(ranks, untrained, config(models["qwen3_moe"], **keys)):
            assert found.keys() == disk.keys()
            assert all(torch.equal(found[name], x) for name, x in disk.items()), keys


def still(axis: Axis, cfg: PolicyConfig) -> set[str]:
    """Tensors that an update leaves as they are."""
    backend, state = open_backend(cfg, axis, key_of(0))
    before = exported(backend, state)
    state, _ = backend.update_(state, [make_work(make_samples(4))])
    return {k for k, x in exported(backend, state).items() if torch.equal(x, before[k])}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, TP2, SP2], ids=["whole", "TP", "TP and SP"])
def test_the_router_is_frozen_unless_asked(models: dict[str, str], keys: dict[str, Any]) -> None:
    ranks = keys.get("tensor_parallel_size", 1)
    for frozen in (True, False):
        cfg = config(models["qwen3_moe"], freeze_moe_router=frozen, **keys)
        for found in run_ranks(ranks, still, cfg):
            assert found == {n for n in found if n.endswith("mlp.gate.weight")}
            assert bool(found) == frozen


def half(axis: Axis, cfg: PolicyConfig) -> float:
    from minirl.metrics import value

    cfg = msgspec.structs.replace(cfg, precision="bfloat16")
    backend, state = open_backend(cfg, axis, key_of(0))
    _, metrics = backend.update_(state, [make_work(make_samples(4))])
    return value(metrics["grad_norm"])


@pytest.mark.slow
def test_bfloat16_is_close_in_every_layout(models: dict[str, str]) -> None:
    for family, layouts in (("qwen3", (SP2, CP2)), ("qwen3_moe", (SP2,))):
        [whole] = run_ranks(1, half, config(models[family]))
        for keys in layouts:
            for found in run_ranks(2, half, config(models[family], packed=True, **keys)):
                assert found == pytest.approx(whole, rel=0.05)
