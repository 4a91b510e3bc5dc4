"""Settings of the Megatron backend that need a GPU, against the FSDP2 backend in float32.

A small random model takes three updates under each setting. They run Transformer Engine's layers,
fused kernels, activation and optimizer offload. Other tests join these where there is a GPU: see
`on_gpu` in pyproject.toml.
"""

from typing import Any, Literal, NamedTuple

import pytest
import torch
from ranks import run_ranks

from minirl.algos.tiny import save_random_model, save_tokenizer
from minirl.backend import Backend, TokenHead, TokenOutput, TrainState, Work
from minirl.backends import check_policy, open_backend
from minirl.config.dtensor import DTensorConfig
from minirl.config.megatron import MegatronConfig, MegatronOptimizerConfig
from minirl.config.policy import (
    GenerationConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
    VllmConfig,
)
from minirl.metrics import Metrics, Sum, value
from minirl.parallel import Axis
from minirl.rng import generator, key_of
from minirl.types import Rows, Scalar

pytestmark = pytest.mark.gpu

LENGTH, SAMPLES, UPDATES = 96, 4, 3
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ADAM = MegatronOptimizerConfig(lr=1e-3)
HALF_ON_CPU = MegatronOptimizerConfig(
    lr=1e-3,
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
    overlap_cpu_optimizer_d2h_h2d=True,
)
OFFLOAD: dict[str, Any] = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj"],
}


class Setting(NamedTuple):
    """One way to run the model."""

    megatron: dict[str, Any]
    """Of `policy.megatron_cfg`."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    packed: bool = False


SETTINGS = {
    "padded rows": Setting({}),
    "packed rows": Setting({}, packed=True),
    "full recomputation": Setting({"activation_checkpointing": True}),
    "log-probs from logits": Setting({"use_fused_linear_logprobs": False}),
    "float32": Setting({}, precision="float32"),
    "activation offload": Setting(OFFLOAD),
    "activation offload, packed": Setting(OFFLOAD, packed=True),
    "optimizer offload": Setting({"optimizer": HALF_ON_CPU}),
}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Of a log-prob against float32; bfloat16 has three digits, and logits here reach 10."""


def policy(model: str, setting: Setting | None) -> PolicyConfig:
    """The section `policy` of a setting; of the FSDP2 backend in float32 without one."""
    megatron = MegatronConfig()
    if setting is not None:
        offload = "fine_grained_activation_offloading" in setting.megatron
        env = {"NVTE_CPU_OFFLOAD_V1": "1"} if offload else {}
        keys: dict[str, Any] = {"optimizer": ADAM, "env_vars": env, **setting.megatron}
        megatron = MegatronConfig(enabled=True, **keys)
    return PolicyConfig(
        model_name=model,
        tokenizer=TokenizerConfig(name=model),
        train_global_batch_size=SAMPLES,
        train_micro_batch_size=SAMPLES // 2,
        logprob_batch_size=SAMPLES // 2,
        max_total_sequence_length=LENGTH,
        precision="float32" if setting is None else setting.precision,
        dtensor_cfg=DTensorConfig(enabled=setting is None),
        optimizer=OptimizerConfig(kwargs={"lr": 1e-3}) if setting is None else None,
        sequence_packing=SequencePackingConfig(enabled=setting is not None and setting.packed),
        megatron_cfg=megatron,
        generation=GenerationConfig(
            max_new_tokens=8, vllm_cfg=VllmConfig(precision="bfloat16", max_model_len=LENGTH)
        ),
    )


def random_rows() -> list[Rows]:
    """Two micro-batches of rows of uneven lengths."""
    source = generator(key_of(0))
    tokens = torch.randint(5, 90, (SAMPLES, LENGTH), generator=source)
    lengths = torch.tensor([LENGTH, LENGTH // 2, LENGTH - 7, 11])
    half = SAMPLES // 2
    return [Rows(tokens[part], lengths[part]) for part in (slice(half), slice(half, None))]


def real(rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """The values at positions that predict a token of the row."""
    return values[torch.arange(1, rows.tokens.shape[1]) < rows.lengths[:, None]]


def log_probs(backend: Backend[Any], state: TrainState[Any]) -> torch.Tensor:
    rows = random_rows()
    outputs = backend.logprobs(state, rows, TokenHead(), "policy")
    return torch.cat([real(r, o.logprobs) for r, o in zip(rows, outputs, strict=True)])


def exact(axis: Axis, model: str) -> torch.Tensor:
    """What the FSDP2 backend says in float32."""
    return log_probs(*open_backend(policy(model, None), axis, key_of(0)))


def trained(axis: Axis, model: str, name: str) -> tuple[torch.Tensor, list[float]]:
    """Log-probs before, and the losses of, some updates under a setting."""
    cfg = policy(model, SETTINGS[name])
    check_policy(cfg)
    backend, state = open_backend(cfg, axis, key_of(0))
    found = log_probs(backend, state)
    losses: list[float] = []
    for _ in range(UPDATES):
        state, metrics = backend.update_(state, [work(r) for r in random_rows()])
        losses.append(value(metrics["loss"]))
    return found, losses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpu")
    save_tokenizer(folder)
    save_random_model(folder, 0, **SIZES)
    return str(folder)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_gives_the_log_probs_of_the_other_backend_and_learns(name: str, model: str):
    (wanted,) = run_ranks(1, exact, model)
    ((found, losses),) = run_ranks(1, trained, model, name)
    assert float((found - wanted).abs().max()) < TOLERANCE[SETTINGS[name].precision]
    assert losses[-1] < losses[0]


def work(rows: Rows) -> Work:
    """Next-token prediction on all tokens of a micro-batch."""

    def loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
        total = -real(rows, output.logprobs.cpu()).sum() / (SAMPLES * LENGTH)
        return total, {"loss": Sum(total.detach())}

    return Work(rows, TokenHead(), loss)
