"""From logits to the log-probs of given tokens, and to the entropy at every position.

Everything is computed in float32 whatever the logits' dtype (float64 stays float64): a log-softmax
in bfloat16 is off by 0.05, which is more than a policy moves in one update.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

from minirl.types import Logits, TokenLogProbs

CACHE_SIZED = 2**18
"""Elements of the chunks that a CPU works on: 1 MB in float32."""


def token_logprobs(
    logits: Logits, next_tokens: Int[Tensor, "batch position"], temperature: float = 1.0
) -> TokenLogProbs:
    r"""Log-prob of the token that follows each position.

    log softmax(z / T)[y] = z_y / T - log sum_v exp(z_v / T)

    The temperature must be the sampler's. Temperature 0 has no log-probs.

    Raises:
        ValueError: the temperature is not positive.
    """
    chosen = [found for found, _ in _chunks(logits, next_tokens, temperature)]
    return torch.cat(chosen).view(next_tokens.shape)


def token_logprobs_and_entropy(
    logits: Logits, next_tokens: Int[Tensor, "batch position"], temperature: float = 1.0
) -> tuple[TokenLogProbs, TokenLogProbs]:
    r"""`token_logprobs`, and the exact entropy of the distribution at each position.

    H = - sum_v p_v log p_v,  p = softmax(z / T)

    The entropy carries no gradient: it is a metric.

    Raises:
        ValueError: the temperature is not positive.
    """
    chosen: list[Tensor] = []
    entropy: list[Tensor] = []
    for found, logs in _chunks(logits, next_tokens, temperature):
        chosen.append(found)
        with torch.no_grad():
            # A token that cannot be sampled (-inf) adds 0 to the entropy, not 0 * -inf.
            entropy.append(-(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1))
    shape = next_tokens.shape
    return torch.cat(chosen).view(shape), torch.cat(entropy).view(shape)


def _chunks(
    logits: Logits, next_tokens: Int[Tensor, "batch position"], temperature: float
) -> Iterator[tuple[Float[Tensor, " row"], Float[Tensor, "row vocabulary"]]]:
    """Of some positions at a time: the log-probs of their tokens, and of the whole vocabulary."""
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: log-probs exist for positive temperatures only;"
            " greedy sampling (0) has no policy gradient"
        )
    precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows, tokens = logits.flatten(0, 1), next_tokens.reshape(-1, 1)
    size = max(len(rows), 1)
    if logits.device.type == "cpu":
        size = max(CACHE_SIZED // logits.shape[-1], 1)
    for start in range(0, len(rows), size):
        part, chosen = rows[start : start + size], tokens[start : start + size]
        scaled = part if temperature == 1.0 else part.to(precise) / temperature
        logs = log_softmax(scaled, -1, dtype=precise)
        yield logs.gather(-1, chosen).squeeze(-1), logs
