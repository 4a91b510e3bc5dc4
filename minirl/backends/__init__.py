"""The choice of backend and engine from the config; each is imported only when it is chosen."""

from typing import Any

from minirl.backend import Backend, TrainState
from minirl.engine import Engine
from minirl.parallel import Axis
from minirl.policy_config import PolicyConfig
from minirl.rng import Key


def open_backend(
    cfg: PolicyConfig, axis: Axis, key: Key, *, with_reference: bool = False
) -> tuple[Backend[Any], TrainState[Any]]:
    """The training backend that `cfg` enables, with the model loaded, and a fresh state.

    The handle's type is opaque to callers. See the backend's own `open_backend`.

    Collective: every rank of `axis` calls this.

    Raises:
        ValueError: as the backend's own.
    """
    match cfg:
        case PolicyConfig() if cfg.dtensor_cfg.enabled:
            from minirl.backends import dtensor

            return dtensor.open_backend(cfg, axis, key, with_reference=with_reference)
        case _:
            from minirl.backends import megatron

            return megatron.open_backend(cfg, axis, key, with_reference=with_reference)


def check_policy(cfg: PolicyConfig) -> None:
    """Refuses what the chosen backend could not build, before any model is loaded.

    Raises:
        ValueError: an optimizer or a schedule does not exist or does not take its arguments.
    """
    from minirl.backends import optim

    optim.check(cfg)


def open_engine(cfg: PolicyConfig) -> Engine:
    """The engine that `policy.generation.backend` names, with the weights of `cfg.model_name`.

    Collective: every launched rank calls this, after the process group exists.

    Raises:
        ValueError: as the engine's own `open_engine`.
    """
    match cfg.generation.backend:
        case "vllm":
            from minirl.backends import vllm

            return vllm.open_engine(cfg.generation, cfg.model_name, tokenizer=cfg.tokenizer.name)
        case "hf":
            from minirl.backends import hf_generate

            return hf_generate.open_engine(
                cfg.generation, cfg.model_name, tokenizer=cfg.tokenizer.name
            )
