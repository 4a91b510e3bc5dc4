"""The records that travel between the stages of a run, and the names of tensor shapes.

Conventions. `batch` counts samples, `length` counts tokens of a padded row, and `position` is
`length - 1`: position t holds what concerns the prediction of token t + 1 from tokens 0..t. Every
per-token quantity of training (log-probs, masks, advantages) lives on positions. Rows are padded
on the right; which tokens are real is told by `lengths`, never by a token's id.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Scalar: TypeAlias = Float[Tensor, ""]
TokenIds: TypeAlias = Int[Tensor, "batch length"]
Lengths: TypeAlias = Int[Tensor, " batch"]
TokenLogProbs: TypeAlias = Float[Tensor, "batch position"]
TokenWeights: TypeAlias = Float[Tensor, "batch position"]
TokenMask: TypeAlias = Bool[Tensor, "batch position"]
SampleMask: TypeAlias = Bool[Tensor, " batch"]
SampleWeights: TypeAlias = Float[Tensor, " batch"]
Logits: TypeAlias = Float[Tensor, "batch position vocabulary"]


class Prompt(NamedTuple):
    """One problem of a dataset, tokenised once.

    `id` is the row's number in the dataset: it names the prompt everywhere (groups, seeds, logs).
    `example` is the dataset's own row; only reward functions read it.
    """

    id: int
    tokens: tuple[int, ...]
    example: Mapping[str, object]


class Completion(NamedTuple):
    """What the engine sampled for one request. The end token, if sampled, is the last token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability under the sampling distribution (temperature applied), one per token."""
    truncated: bool
    """True when the token budget ended the sample, not an end token or a stop string."""
    version: int
    """The number of optimizer updates behind the weights that sampled it."""


class Trajectory(NamedTuple):
    """One sample, from its prompt's first token to its last token. Nothing is re-tokenised.

    `sampled[t]` is True where token t was drawn from the policy (and is therefore trained);
    prompts and environment observations are False. `generation_logprobs[t]` is the engine's
    log-prob of token t where `sampled[t]`, else 0.0 and never read.
    """

    group: int
    """Which prompt of this step: samples of one prompt share it. Unique within a step."""
    sample: int
    prompt_id: int
    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    generation_logprobs: tuple[float, ...]
    truncated: bool
    version: int


class Score(NamedTuple):
    """A reward and how it came about."""

    reward: float
    components: Mapping[str, float] = {}
    """The named parts that a reward function gave, if it gave any."""
    timed_out: bool = False
    failed: bool = False
    """The verifier itself broke down; the reward is 0."""


class Sample(NamedTuple):
    """A scored trajectory: one record, so that no field can move without the others."""

    trajectory: Trajectory
    score: Score
    """As the verifier gave it."""
    reward: float
    """What the advantage is computed from: the score's reward after scaling and shaping."""


class Rows(NamedTuple):
    """What a model reads: right-padded token rows and their true lengths (each >= 1)."""

    tokens: TokenIds
    lengths: Lengths


class Batch(NamedTuple):
    """A micro-batch of the policy-gradient family: rows and what the loss needs for them."""

    rows: Rows
    token_mask: TokenMask
    """True on positions whose predicted token is trained."""
    sample_mask: SampleMask
    """False for samples left out of the loss (filtered, or added to fill a micro-batch)."""
    generation_logprobs: TokenLogProbs
    """The engine's, when it sampled."""
    prev_logprobs: TokenLogProbs | None
    """The trainer's, before the update; None when they are those of the update's own forward."""
    reference_logprobs: TokenLogProbs | None
    """The frozen reference policy's; None when no term uses it."""
    advantages: TokenWeights
    rewards: SampleWeights
