"""What the FSDP2 backend makes of a model, held against Hugging Face before weights are read.

On a small stand-in, uncut, on the CPU, through the forward and the attention that training uses.
"""

import json
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from minirl.backend import TokenHead
from minirl.backends.dtensor.fit import check_causal, check_documents
from minirl.backends.dtensor.forward import open_forward, view
from minirl.backends.dtensor.setup import Meshes, Model, use_own_attention_
from minirl.backends.hf_model import attention_for, frozen
from minirl.backends.layout import Layout
from minirl.backends.stand_in import compare, rows_of
from minirl.config.policy import PolicyConfig
from minirl.hf import read_config
from minirl.log import say
from minirl.parallel import Axis
from minirl.types import Rows

BATCHES = ([0], [1, 2], [3])
"""Which rows share a micro-batch: one alone, two of unequal length, and what comes after them."""
PADDING = 3


def check_logprobs(cfg: PolicyConfig) -> int | None:
    """Refuses a model whose log-probs would not be those of Hugging Face on rows alone.

    Returns how long rows may be, if the model's positions end somewhere. The same question is
    answered once a process. A model that has no stand-in is told.

    Raises:
        ValueError: names the field that the backend ignores, where it can be told; or rows are
            packed or cut and the model's layers would let sequences see each other.
    """
    max_model_len = cfg.generation.vllm_cfg.max_model_len
    config, longest = frozen(read_config(cfg.model_name), max_model_len)
    packed = cfg.sequence_packing.enabled or cfg.dtensor_cfg.context_parallel_size > 1
    if packed:
        check_documents(cfg.model_name)
    reason = _compared(
        cast(Any, type(config)),
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        cfg.logprob_chunk_size,
        fused=cfg.dtensor_cfg.use_fused_linear_logprobs,
        packed=packed,
    )
    if reason is not None:
        say(f"log-probs of {cfg.model_name} were not compared with Hugging Face's: {reason}")
    return longest


@cache
def _compared(kind: Any, facts: str, chunk: int | None, *, fused: bool, packed: bool) -> str | None:
    here = Meshes(
        data=Axis(0, 1, None),
        parameters=None,
        experts=None,
        tensor=None,
        context=None,
        layout=Layout(packed, unit=1),
    )

    def run(model: Model) -> list[Tensor]:
        check_causal(model)
        if packed:
            use_own_attention_(model)
        elif attention_for(model.config) is not None:
            model.set_attn_implementation(attention_for(model.config))
        forward = open_forward(
            model, here, torch.device("cpu"), fused=fused, positions_at_once=chunk, longest=None
        )
        rows, found = rows_of(model.config), list[Tensor]()
        with torch.no_grad():
            for batch in BATCHES:
                some = [rows[i] for i in batch]
                output = view(forward, _padded(some), TokenHead())
                found += [x[: len(r) - 1] for x, r in zip(output.logprobs, some, strict=True)]
        return found

    return compare("FSDP2", kind.from_dict(json.loads(facts)), run)


def _padded(rows: list[list[int]]) -> Rows:
    width = max(map(len, rows)) + PADDING
    tokens = torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])
    return Rows(tokens, torch.tensor([len(r) for r in rows]))
