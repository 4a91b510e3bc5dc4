"""The documentation of the Megatron backend as tests: each is named by the sentence it holds to.

The YAML of the documentation is loaded as it stands, by inheritance from a minimal run.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from configs import MEGATRON, MINIMAL

from minirl.backends.megatron.overrides import merge_overrides
from minirl.config.loader import load
from minirl.config.megatron import MegatronConfig
from minirl.config.megatron_fit import Machine, check_machine, check_model_rules
from minirl.config.policy import PolicyConfig
from minirl.config.run import GrpoRun

OVERRIDES = """
policy:
  megatron_cfg:
    enabled: true
    model_overrides:
      masked_softmax_fusion: false
"""
ACTIVATION_OFFLOAD = """
policy:
  megatron_cfg:
    enabled: true
    cuda_graph_impl: transformer_engine
    env_vars:
      NVTE_CPU_OFFLOAD_V1: "1"
    fine_grained_activation_offloading: true
    offload_modules: ["core_attn", "attn_proj"]
"""
OPTIMIZER_OFFLOAD = """
policy:
  megatron_cfg:
    optimizer:
      optimizer_cpu_offload: true
      optimizer_offload_fraction: 0.5
      overlap_cpu_optimizer_d2h_h2d: true
"""
RECONVERT = """
policy:
  megatron_cfg:
    force_reconvert_from_hf: True  # Default: False
"""
IN_FLIGHT = ", model_overrides: {fine_grained_offloading_max_inflight_offloads: 1}"


def loaded(folder: Path, text: str) -> PolicyConfig:
    """What a file says that inherits from a minimal run of the Megatron backend."""
    (folder / "base.yaml").write_text(yaml.safe_dump(MEGATRON))
    (folder / "run.yaml").write_text(f"defaults: base.yaml\n{text}")
    return load(folder / "run.yaml", [], GrpoRun).policy


def keys(text: str) -> str:
    """Keys of `policy.megatron_cfg` in one line."""
    return f"policy: {{megatron_cfg: {{{text}}}}}"


def offload(modules: str, more: str = "") -> str:
    return keys(f"fine_grained_activation_offloading: true, offload_modules: [{modules}]{more}")


FUSER = ", model_overrides: {use_transformer_engine_op_fuser: true}"
SELECTIVE = ", activation_checkpointing: true, recompute_granularity: selective"
MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act fused_group_mlp"

# ---- what must load -----------------------------------------------------------------------------

LOADS = [
    ("Set policy.megatron_cfg.enabled=True", keys("enabled: True")),
    ("options can be passed directly through policy.megatron_cfg.model_overrides", OVERRIDES),
    ("The following dense-model configuration is runnable", ACTIVATION_OFFLOAD),
    ("CUDA graphs are optional", offload("core_attn, attn_proj")),
    (
        "MCore permits transformer_engine or full_iteration for this dense module pair",
        offload("core_attn, attn_proj", f", cuda_graph_impl: full_iteration{IN_FLIGHT}"),
    ),
    (
        "local CUDA graphs support only partial MoE offload (expert_fc1, moe_act)",
        offload("expert_fc1, moe_act", ", cuda_graph_impl: local, cuda_graph_modules: [attn]"),
    ),
    (
        "local CUDA graphs support only partial MoE offload (fused_group_mlp)",
        offload("fused_group_mlp", f"{FUSER}, cuda_graph_impl: local, cuda_graph_modules: [attn]"),
    ),
    (
        "Supported module names are (all but the last three)",
        offload(", ".join(MODULES.split()[:5])),
    ),
    ("Supported module names are (expert_fc1, moe_act)", offload("expert_fc1, moe_act")),
    ("fused_group_mlp requires the Transformer Engine op fuser", offload("fused_group_mlp", FUSER)),
    (
        "Activation checkpointing is not blanket-incompatible with activation offload (full)",
        offload("core_attn", ", activation_checkpointing: true"),
    ),
    (
        "Activation checkpointing is not blanket-incompatible with activation offload (selective)",
        offload("mlp_norm", f"{SELECTIVE}, recompute_modules: [core_attn]"),
    ),
    (
        "recompute_modules: [moe] conflicts with MoE-internal offload modules (others may stay)",
        offload("core_attn", f"{SELECTIVE}, recompute_modules: [moe]"),
    ),
    ("HybridDeviceOptimizer keeps a fraction of optimizer state on CPU", OPTIMIZER_OFFLOAD),
    (
        "A value of 1.0 fully offloads the optimizer",
        keys("optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}"),
    ),
    (
        "supports optimizer CPU offload only with Adam and SGD",
        keys(
            "optimizer: {optimizer: sgd, optimizer_cpu_offload: true, "
            "optimizer_offload_fraction: 0.5}"
        ),
    ),
    (
        "Optimizer CPU offload is independent of activation CPU offload",
        offload(
            "core_attn",
            ", optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}",
        ),
    ),
    ("to force a fresh conversion set force_reconvert_from_hf", RECONVERT),
]


@pytest.mark.parametrize(("sentence", "text"), LOADS, ids=[sentence for sentence, _ in LOADS])
def test_loads(sentence, text, tmp_path):
    assert loaded(tmp_path, text).megatron_cfg.enabled


# ---- what must be refused -----------------------------------------------------------------------

M = "policy.megatron_cfg"
CPU = "optimizer_cpu_offload: true, optimizer_offload_fraction"

REFUSED = [
    (
        "the optimizer is configured through policy.megatron_cfg.optimizer",
        "policy: {optimizer: {kwargs: {lr: 1.0e-6}}}",
        f"policy.optimizer belongs to policy.dtensor_cfg and has no effect with {M}.enabled",
    ),
    (
        "the learning rate schedule is configured through policy.megatron_cfg.scheduler",
        "policy: {scheduler: [{name: a.B}]}",
        f"set {M}.scheduler instead",
    ),
    (
        "A key that duplicates another megatron_cfg field is rejected",
        keys("model_overrides: {sequence_parallel: true}"),
        f"{M}.model_overrides.sequence_parallel conflicts with {M}.sequence_parallel",
    ),
    (
        "optimizer, scheduler, and environment variables remain under their sections",
        keys("model_overrides: {env_vars: {A: b}}"),
        f"{M}.model_overrides.env_vars conflicts with {M}.env_vars",
    ),
    (
        "attn_proj must be paired with core_attn",
        offload("attn_proj"),
        f"{M}.offload_modules is ['attn_proj']: attn_proj needs core_attn",
    ),
    (
        "local CUDA graphs support only partial MoE offload",
        offload("core_attn, attn_proj", ", cuda_graph_impl: local, cuda_graph_modules: [attn]"),
        f"{M}.cuda_graph_impl is local",
    ),
    ("Supported module names are", offload("attention"), f"{M}.offload_modules holds attention;"),
    (
        "fused_group_mlp requires the Transformer Engine op fuser",
        offload("fused_group_mlp"),
        f"set {M}.model_overrides.use_transformer_engine_op_fuser: true",
    ),
    (
        "fused_group_mlp cannot be combined with expert_fc1",
        offload("fused_group_mlp, expert_fc1", FUSER),
        "excludes expert_fc1",
    ),
    (
        "fused_group_mlp cannot be combined with moe_act",
        offload("fused_group_mlp, moe_act", FUSER),
        "excludes moe_act",
    ),
    *(
        (
            f"selective recomputation of the whole MoE module conflicts with {name}",
            offload(name, f"{SELECTIVE}, recompute_modules: [moe]{FUSER}"),
            f"{M}.offload_modules holds {name}, but {M}.recompute_modules holds moe",
        )
        for name in ("expert_fc1", "moe_act", "fused_group_mlp")
    ),
    (
        "layer-level cpu_offloading conflicts with fine-grained activation offload",
        offload("core_attn", ", model_overrides: {cpu_offloading: true}"),
        f"{M}.model_overrides.cpu_offloading",
    ),
    *(
        (
            f"optimizer_offload_fraction must be greater than 0 and at most 1 ({fraction})",
            keys(f"optimizer: {{{CPU}: {fraction}}}"),
            f"{M}.optimizer.optimizer_offload_fraction is {fraction}",
        )
        for fraction in (0.0, -0.5, 1.5)
    ),
    (
        "Optimizer CPU offload requires use_distributed_optimizer: true",
        keys(f"optimizer: {{{CPU}: 0.5, use_distributed_optimizer: false}}"),
        f"{M}.optimizer.use_distributed_optimizer is False",
    ),
    (
        "supports optimizer CPU offload only with Adam and SGD",
        keys(f"optimizer: {{{CPU}: 0.5, optimizer: muon}}"),
        f'{M}.optimizer.optimizer = "muon": expected one of adam, sgd',
    ),
    (
        "overlap_cpu_optimizer_d2h_h2d lets Core overlap transfers of an offloaded optimizer",
        keys("optimizer: {overlap_cpu_optimizer_d2h_h2d: true}"),
        f"{M}.optimizer.overlap_cpu_optimizer_d2h_h2d is True, which has no effect",
    ),
]


@pytest.mark.parametrize(
    ("sentence", "text", "part"), REFUSED, ids=[sentence for sentence, _, _ in REFUSED]
)
def test_is_refused(sentence, text, part, tmp_path):
    with pytest.raises(ValueError, match=r"\S") as caught:
        loaded(tmp_path, text)
    assert part in str(caught.value)


# ---- what needs more than the file --------------------------------------------------------------


@dataclass
class Vision:
    depth: int = 2


@dataclass
class Provider:
    masked_softmax_fusion: bool = True
    vision: Vision | None = None


def merged(overrides: dict[str, object], provider: Provider) -> Provider:
    return merge_overrides(provider, overrides, MegatronConfig.__struct_fields__)


def test_these_values_are_merged_into_a_newly_constructed_model_provider(tmp_path):
    given = loaded(tmp_path, OVERRIDES).megatron_cfg.model_overrides
    provider = Provider()
    assert not merged(given, provider).masked_softmax_fusion
    assert provider.masked_softmax_fusion


def test_unknown_provider_fields_fail_with_their_full_config_path():
    for overrides, path in (({"masked": 1}, "masked"), ({"vision": {"dpth": 1}}, "vision.dpth")):
        with pytest.raises(ValueError, match=rf"^{M}\.model_overrides\.{path} does not match"):
            merged(overrides, Provider(vision=Vision()))


def test_nested_dictionaries_follow_the_hierarchy_of_nested_model_config_objects():
    assert merged({"vision": {"depth": 9}}, Provider(vision=Vision())).vision == Vision(9)


def test_the_last_three_are_moe_specific():
    for name in MODULES.split():
        cfg = MegatronConfig(fine_grained_activation_offloading=True, offload_modules=[name])
        check_model_rules(cfg, {"num_experts": 8})
        if name in MODULES.split()[-3:]:
            with pytest.raises(ValueError, match=rf"^{M}\.offload_modules holds {name}"):
                check_model_rules(cfg, {})
        else:
            check_model_rules(cfg, {})


def test_activation_offloading_requires_the_transformer_engine_model_implementation(tmp_path):
    cfg = loaded(tmp_path, ACTIVATION_OFFLOAD).megatron_cfg
    machine = Machine((9, 0), "2.10.0", deep_ep=False, environ={})
    check_machine(cfg, machine)
    with pytest.raises(ValueError, match=r"fine_grained_.*Transformer Engine is not installed"):
        check_machine(cfg, machine._replace(transformer_engine=None))


def test_the_training_backend_is_determined_by_the_configuration(tmp_path):
    assert loaded(tmp_path, OVERRIDES).megatron_cfg.enabled
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(MINIMAL))
    policy = load(tmp_path / "base.yaml", ["policy.dtensor_cfg.enabled=True"], GrpoRun).policy
    assert (policy.dtensor_cfg.enabled, policy.megatron_cfg.enabled) == (True, False)


def test_by_default_an_existing_conversion_is_kept():
    assert not MegatronConfig().force_reconvert_from_hf
