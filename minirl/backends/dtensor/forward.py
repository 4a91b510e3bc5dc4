"""From rows to the head's view of them, through a Hugging Face model: one path for all passes."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minirl.backend import TokenHead, TokenOutput
from minirl.backends import output_layer
from minirl.backends.dtensor.setup import Meshes, Model, needs_own_attention
from minirl.backends.hf_model import check_length
from minirl.backends.layout import document_lengths, to_model, to_output
from minirl.backends.linear_logprobs import OutputLayer, linear_logprobs
from minirl.backends.vocab_parallel import Shard, check_temperature, vocab_logprobs
from minirl.types import Rows


@dataclass(frozen=True, slots=True)
class Forward:
    """A sharded model, and how its ranks cooperate."""

    model: Model
    meshes: Meshes
    vocabulary: Shard
    device: torch.device
    fused: bool
    """Log-probs are taken from hidden states, and logits never exist in full."""
    positions_at_once: int | None
    longest: int | None
    """Rows of more tokens would have other positions than in the engine."""


def open_forward(
    model: Model,
    meshes: Meshes,
    device: torch.device,
    *,
    fused: bool,
    positions_at_once: int | None,
    longest: int | None,
) -> Forward:
    """Looks at the model before it is cut. `fused` asks for `Forward.fused`."""
    return Forward(
        model=model,
        meshes=meshes,
        vocabulary=meshes.vocabulary(model.config.get_text_config().vocab_size),
        device=device,
        fused=fused and output_layer.gives_plain_logits(model),
        positions_at_once=positions_at_once,
        longest=longest,
    )


def view(on: Forward, rows: Rows, head: TokenHead) -> TokenOutput:
    """The head's view of a micro-batch, on the model's device.

    Collective over the ranks that share its samples.

    Raises:
        ValueError: the temperature is not positive, or a row is longer than the model's positions.
    """
    check_temperature(head.temperature)  # an error inside the model would leave it gathered
    check_length(int(rows.lengths.max()), on.longest)
    inputs, device = to_model(rows, on.meshes.layout), on.device
    documents: dict[str, Any] = {}
    if needs_own_attention(on.meshes):
        documents = {
            "document_lengths": document_lengths(inputs, on.meshes.layout),
            "context_group": on.meshes.context,
        }
    following = inputs.following.to(device)

    def from_hidden(hidden: Tensor, layer: OutputLayer) -> Tensor:
        values = linear_logprobs(
            hidden,
            layer,
            following,
            head.temperature,
            with_entropy=head.entropy,
            positions_at_once=on.positions_at_once,
        )
        return torch.stack(values, dim=-1)

    with output_layer.replaced(on.model, from_hidden, on.vocabulary) if on.fused else nullcontext():
        found = on.model(
            input_ids=inputs.tokens.to(device),
            position_ids=inputs.positions.to(device),
            use_cache=False,
            **documents,
        ).logits
    if on.fused:
        values = found.unbind(-1)
    else:
        values = vocab_logprobs(
            found, following, on.vocabulary, head.temperature, with_entropy=head.entropy
        )
    return to_output(values, inputs.place, rows, on.meshes.context, entropy=head.entropy)
