"""Supervised losses: from per-token values to this batch's share of the global loss."""

import torch

from minirl.metrics import Metrics, Sum
from minirl.types import Scalar, TokenLogProbs, TokenMask


def nll_loss(
    logprobs: TokenLogProbs, token_mask: TokenMask, *, num_tokens: float
) -> tuple[Scalar, Metrics]:
    r"""Next-token negative log-likelihood over trained tokens.

    L = - sum_t m_t logp_t / N,  N = `num_tokens`, the trained tokens of the global batch.

    Values outside `token_mask` are never read, so they may be anything, NaN included.
    """
    loss = -torch.where(token_mask, logprobs, 0.0).sum() / num_tokens
    return loss, {"loss": Sum(loss.detach())}
