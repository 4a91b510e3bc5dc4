"""The output layer of a model, run for log-probs instead of logits.

The model's own forward calls it, so that gathering and cutting of its weight happen as always; what
it returns there, the model hands out under the name of logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from minirl.backends.linear_logprobs import OutputLayer
from minirl.backends.vocab_parallel import Shard as VocabularyShard

FromHidden: TypeAlias = Callable[[Tensor, OutputLayer], Tensor]
"""From hidden states [batch, position, width] to [batch, position, any]."""


def gives_plain_logits(model: Any) -> bool:
    """Whether the model gives the logits of its output layer, a plain one, as they are.

    Some scale or cap them afterwards. Of most models nothing but the code after the layers is run.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or body is model:
        return False
    hidden = torch.zeros(1, 1, head.in_features, dtype=head.weight.dtype)
    given = torch.zeros(1, 1, 1)

    def ends(*_: Any, **__: Any) -> Any:
        return _Ends(hidden)

    def gives(_: Tensor) -> Tensor:
        return given

    try:
        with forward_replaced(body, ends), forward_replaced(head, gives), torch.no_grad():
            output = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # it does more between its layers and its output than hand states on
    return output.logits is given


class _Ends:
    """What the layers of a model give: hidden states, and nothing else that one may ask for."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: int | slice) -> Any:
        return (self.last_hidden_state,)[at]


@contextmanager
def replaced(model: Any, view: FromHidden, vocabulary: VocabularyShard) -> Iterator[None]:
    """While it is open, the model's logits are what `view` makes of its last hidden states."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if not isinstance(hidden, DTensor):
            return view(hidden, OutputLayer(weight, bias, vocabulary))
        # Through its columns a rank finds a part of the states' gradient.
        states = hidden.to_local(grad_placements=[Partial()])
        own = OutputLayer(weight.to_local(), None if bias is None else bias.to_local(), vocabulary)
        # What hooks expect of a layer that is cut by columns.
        return DTensor.from_local(
            view(states, own), hidden.device_mesh, [Shard(-1)], run_check=False
        )

    with forward_replaced(head, forward):
        yield


@contextmanager
def forward_replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for the module; its hooks stay."""
    own = cast("dict[str, Any]", module.__dict__)
    before = own.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
