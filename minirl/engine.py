"""What generation offers: a frozen record of functions. Tokens in, tokens out.

Each request carries its own seed, derived from what is sampled, so a completion does not depend
on the batch it was in, on the rank that made it, or on the number of ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from minirl.types import Completion


class Request(NamedTuple):
    """One completion to sample."""

    tokens: tuple[int, ...]
    seed: int
    """63 bits; ignored when the temperature is 0."""


class Sampling(NamedTuple):
    """How to sample. Temperature 0 is greedy.

    A completion ends at the first token in `stop_token_ids` (kept as its last token), at the
    token that completes one of `stop_strings` (kept), or after `max_tokens`.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """Functions over one engine. Each rank drives its own; `load_` is collective."""

    generate: Callable[[Sequence[Request], Sampling], list[Completion]]
    """One completion per request, in order.

    Raises:
        ValueError: a prompt is empty or leaves no room for `max_tokens` within the model's
            length; or the engine returned a log-prob that is missing, not finite or positive
            (the message names the request).
    """

    load_: Callable[[Iterable[tuple[str, Tensor]], int], None]
    """Take (Hugging Face name, full tensor) pairs as weights of the given version; drops caches."""

    sleep_: Callable[[], None]
    """Give device memory back to the trainer."""

    wake_: Callable[[], None]
    """Undo `sleep_`. Weights are undefined until the next `load_`."""

    close: Callable[[], None]
    """Shut the engine down. Call it last: vLLM destroys the default process group with itself."""
