"""From logits to the log-probs of given tokens, and to the entropy at every position.

Everything is computed in float32 whatever the logits' dtype (float64 stays float64): a log-softmax
in bfloat16 is off by 0.05, which is more than a policy moves in one update.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from minirl.types import Logits, TokenLogProbs


def token_logprobs(
    logits: Logits, next_tokens: Int[Tensor, "batch position"], temperature: float = 1.0
) -> TokenLogProbs:
    r"""Log-prob of the token that follows each position.

    log softmax(z / T)[y] = z_y / T - logsumexp(z / T)

    The temperature must be the sampler's. Temperature 0 has no log-probs.

    Raises:
        ValueError: the temperature is not positive.
    """
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_logprobs_and_entropy(
    logits: Logits, next_tokens: Int[Tensor, "batch position"], temperature: float = 1.0
) -> tuple[TokenLogProbs, TokenLogProbs]:
    r"""`token_logprobs`, and the exact entropy of the distribution at each position.

    H = logsumexp(z) - sum_v softmax(z)_v z_v,  z = logits / T

    The entropy carries no gradient: it is a metric.

    Raises:
        ValueError: the temperature is not positive.
    """
    scaled = _scaled(logits, temperature)
    normalizer = scaled.logsumexp(-1)
    chosen = scaled.gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        logs = scaled - normalizer.unsqueeze(-1)
        # A token that cannot be sampled (-inf) adds 0 to the entropy, not 0 * -inf.
        entropy = -(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1)
    return chosen - normalizer, entropy


def _scaled(logits: Logits, temperature: float) -> Logits:
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: log-probs exist for positive temperatures only;"
            " greedy sampling (0) has no policy gradient"
        )
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return precise if temperature == 1.0 else precise / temperature
