"""A model under Megatron held against Hugging Face before any of its weights are converted.

The stand-in of its config is written as a folder, read by Bridge, built and run by the code that
trains, on one process: padded rows and, where there is a float32 kernel, packed ones.
"""

import tempfile
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from minirl.backend import TokenHead
from minirl.backends.hf_model import frozen
from minirl.backends.megatron import setup as megatron_setup
from minirl.backends.megatron.bridge import has_transformer_engine, models_own_fields
from minirl.backends.megatron.forward import forward, open_stage
from minirl.backends.stand_in import compare, rows_of
from minirl.config.megatron_fit import STAGE_LAYOUTS
from minirl.config.policy import PolicyConfig, SequencePackingConfig
from minirl.hf import HfModel, read_config
from minirl.types import Rows


def check_log_probs(cfg: PolicyConfig) -> None:
    """Refuses a model of which Megatron would make another.

    On a single process, with its groups open and the model described.

    Raises:
        ValueError: log-probs of the stand-in differ, or there can be none; the message names the
            field by which, where it can be told.
    """
    max_model_len = cfg.generation.vllm_cfg.max_model_len
    config = frozen(read_config(cfg.model_name), max_model_len).config
    # Transformer Engine has no float32 kernel for packed rows.
    for packed in (False,) if has_transformer_engine() else (False, True):
        outcomes: list[Exception | None] = []
        try:
            unknown = compare("Megatron", config, partial(_attempt, cfg, outcomes, packed=packed))
        except ValueError as error:
            if outcomes[0] is None:
                raise
            said = f"{type(outcomes[0]).__name__}: {' '.join(str(outcomes[0]).split())}"
            if not all(outcomes):
                raise ValueError(f"{error} (Megatron says {said})") from outcomes[0]
            raise ValueError(  # whatever is left out: no field is to blame
                f"policy.model_name: Megatron cannot run a small stand-in of {cfg.model_name!r}: "
                f"{said}; use policy.dtensor_cfg.enabled=true"
            ) from outcomes[0]
        if unknown is not None:
            raise ValueError(
                f"policy.model_name: log-probs of {cfg.model_name!r} under Megatron cannot be "
                f"held against Hugging Face's: {unknown}; use policy.dtensor_cfg.enabled=true"
            )


def _attempt(
    cfg: PolicyConfig, outcomes: list[Exception | None], model: HfModel, *, packed: bool
) -> list[Tensor]:
    """Log-probs of the stand-in; NaN when Bridge or Core fail, since a field may be to blame."""
    try:
        found, failure = _log_probs(cfg, model, packed=packed), None
    except Exception as error:  # whatever third parties raise; it is reported
        found = [torch.full((len(row) - 1,), torch.nan) for row in rows_of(model.config)]
        failure = error
    outcomes.append(failure)
    return found


def _log_probs(cfg: PolicyConfig, model: HfModel, *, packed: bool) -> list[Tensor]:
    """Those of the stand-in's rows, in one micro-batch."""
    rows = [torch.tensor(row) for row in rows_of(model.config)]
    lengths = [len(row) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        small = _small(cfg, folder, packed=packed)
        described = megatron_setup.describe(small)
        chunks = megatron_setup.build_chunks(small, described, trained=False)
        described.bridge.load_hf_weights(chunks)
    # Rows of the stand-in may go where those of a run may not.
    described = described._replace(positions=described.positions._replace(longest=None))
    stage = open_stage(small, described, chunks)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    [output] = forward(stage, [Rows(tokens, torch.tensor(lengths))], TokenHead())
    return [output.logprobs[i, : n - 1] for i, n in enumerate(lengths)]


def _small(cfg: PolicyConfig, folder: str, *, packed: bool) -> PolicyConfig:
    # Overrides that repeat the model's own sizes are not those of the stand-in.
    sizes = {own for _, own in models_own_fields()} | set(STAGE_LAYOUTS)
    overrides = {k: v for k, v in cfg.megatron_cfg.model_overrides.items() if k not in sizes}
    return structs.replace(
        cfg,
        model_name=folder,
        precision="float32",
        sequence_packing=SequencePackingConfig(enabled=packed),
        megatron_cfg=structs.replace(
            cfg.megatron_cfg, pipeline_dtype="float32", model_overrides=overrides
        ),
    )
