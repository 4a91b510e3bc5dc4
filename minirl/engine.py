"""What generation offers: a frozen record of functions. Tokens in, tokens out.

Each request carries its own seed, derived from what is sampled, so a completion does not depend
on the batch it was in, on the rank that made it, or on the number of ranks.
"""

import math
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


def check_requests(
    requests: Sequence[Request], sampling: Sampling, *, vocabulary_size: int, max_model_len: int
) -> None:
    """Refuses requests that no engine could answer, before any of them starts.

    Raises:
        ValueError: names the request and the rule.
    """
    room = max_model_len - sampling.max_tokens
    for index, request in enumerate(requests):
        length = len(request.tokens)
        if length == 0:
            raise ValueError(f"request {index}: the prompt is empty; give at least one token")
        if length > room:
            raise ValueError(
                f"request {index}: {length} prompt tokens + max_tokens {sampling.max_tokens} do "
                f"not fit max_model_len {max_model_len}; shorten the prompt or raise max_model_len"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary_size:
            outside = next(t for t in request.tokens if not 0 <= t < vocabulary_size)
            raise ValueError(
                f"request {index}: token id {outside} is outside the model's vocabulary "
                f"[0, {vocabulary_size}); do model and tokenizer belong together?"
            )


POSITIVE_TOLERANCE = 1e-4
"""x - logsumexp(x) in float32 rounds by about 2^-23 |x|: below this for every |logit| < 800."""


def check_logprobs(index: int, logprobs: Sequence[float], num_tokens: int) -> None:
    """Refuses the log-probs of a completion that cannot be trained on.

    Raises:
        ValueError: names the request: one is missing, not finite or positive.
    """
    if len(logprobs) != num_tokens:
        raise ValueError(
            f"request {index}: the engine gave {len(logprobs)} log-probs for {num_tokens} tokens"
        )
    for at, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= POSITIVE_TOLERANCE):
            raise ValueError(
                f"request {index}: the log-prob of sampled token {at} is {logprob}; it must be "
                "finite and at most 0. Are the weights in the engine finite?"
            )
