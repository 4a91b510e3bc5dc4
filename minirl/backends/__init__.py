"""The choice of backend and engine from the config; each is imported only when it is chosen."""

import os
from pathlib import Path
from typing import Any

from msgspec import structs

from minirl.backend import Backend, TrainState
from minirl.backends.hf_model import check_positions
from minirl.config import megatron_auto
from minirl.config.megatron_fit import check_machine, check_model_rules, this_machine
from minirl.config.policy import PolicyConfig
from minirl.engine import Engine
from minirl.hf import model_facts, read_config, with_overrides
from minirl.parallel import Axis
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
    cfg = with_own_config(cfg)
    if cfg.dtensor_cfg.enabled:
        from minirl.backends.dtensor import backend as dtensor

        return dtensor.open_backend(cfg, axis, key, with_reference=with_reference)
    from minirl.backends.megatron import backend as megatron

    return megatron.open_backend(cfg, axis, key, with_reference=with_reference)


def with_own_config(cfg: PolicyConfig) -> PolicyConfig:
    """The same policy, its model one whose config has the overrides in it."""
    home = os.environ.get("HF_HOME", "").strip() or str(Path.home() / ".cache" / "huggingface")
    name = with_overrides(
        cfg.model_name, cfg.hf_config_overrides, Path(home).expanduser() / "minirl_overrides"
    )
    return structs.replace(cfg, model_name=name, hf_config_overrides={})


def decided(cfg: PolicyConfig) -> PolicyConfig:
    """The same settings with nothing left open that code decides (`null` in Megatron's section)."""
    return megatron_auto.decided(cfg, this_machine()) if cfg.megatron_cfg.enabled else cfg


def check_policy(cfg: PolicyConfig) -> None:
    """Refuses what the chosen backend could not build, before any model is loaded.

    The model's folder has been checked by then.

    Raises:
        ValueError: an optimizer or a schedule does not exist or does not take its arguments; or
            the layout, overrides or Megatron's settings do not fit the model, the machine or the
            installed packages; or the engine does not know its arguments.
    """
    if cfg.generation.backend == "vllm":
        from minirl.backends import vllm_arguments

        vllm_arguments.check_kwargs(cfg.generation.vllm_kwargs)
    cfg = with_own_config(cfg)
    check_positions(
        read_config(cfg.model_name),
        cfg.generation.vllm_cfg.max_model_len,
        vllm=cfg.generation.backend == "vllm",
    )
    if cfg.dtensor_cfg.enabled:
        from minirl.backends.dtensor import compare as dtensor_compare
        from minirl.backends.dtensor import fit as dtensor_fit
        from minirl.backends.dtensor import optim

        optim.check(cfg)
        packed = cfg.sequence_packing.enabled
        dtensor_fit.check_layout(cfg.dtensor_cfg, model_facts(cfg.model_name), packed=packed)
        dtensor_fit.check_modules(cfg.dtensor_cfg, cfg.model_name)
        dtensor_compare.check_logprobs(cfg)
        return
    from minirl.backends.megatron import setup as megatron_setup

    check_machine(cfg.megatron_cfg, this_machine())
    cfg = decided(cfg)
    check_model_rules(cfg.megatron_cfg, model_facts(cfg.model_name))
    megatron_setup.prepare_process(cfg.megatron_cfg)
    megatron_setup.describe(cfg)


def open_engine(cfg: PolicyConfig) -> Engine:
    """The engine that `policy.generation.backend` names, with the weights of `cfg.model_name`.

    Collective: every launched rank calls this, after the process group exists.

    Raises:
        ValueError: as the engine's own `open_engine`.
    """
    cfg = with_own_config(cfg)
    match cfg.generation.backend:
        case "vllm":
            from minirl.backends import vllm

            return vllm.open_engine(cfg.generation, cfg.model_name, tokenizer=cfg.tokenizer.name)
        case "hf":
            from minirl.backends import hf_generate

            return hf_generate.open_engine(
                cfg.generation, cfg.model_name, tokenizer=cfg.tokenizer.name
            )
