"""Time of the loss (forward and backward) and of the advantages, side by side with TRL.

    python tests/bench/losses.py

TRL's loss is `GRPOTrainer._compute_loss`, called with a stand-in for the trainer that returns given
log-probs, so neither side runs a model. Both sides turn their metrics into numbers: minirl 23, TRL
6, and one more with a KL term. TRL's advantages are not a function; its lines are repeated here
over its own `nanstd`.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd, selective_log_softmax

from minirl.backends.vocab_parallel import Shard, vocab_logprobs
from minirl.config.loss import LossConfig
from minirl.losses.groups import group_relative
from minirl.losses.policy import PolicyLossInputs, policy_loss
from minirl.metrics import values

BATCH, LENGTH = 16, 2048
GROUPS, MEMBERS = 512, 16


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':44}{'minirl':>12}{'peer':>12}{'peer/minirl':>14}")
    compare_losses()
    compare_advantages()
    compare_logprobs()


def row(what: str, ours: float, theirs: float) -> None:
    print(f"{what:44}{ours * 1e3:>9.2f} ms{theirs * 1e3:>9.2f} ms{theirs / ours:>14.2f}")


def race(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 30
) -> tuple[float, float]:
    """The least seconds of each; the two take turns, so that both meet the same machine."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, function in enumerate((ours, theirs)):
            start = time.perf_counter()
            function()
            best[side] = min(best[side], time.perf_counter() - start)
    return best[0], best[1]


def compare_losses() -> None:
    prev = -torch.rand(BATCH, LENGTH) * 3
    logprobs = prev + 0.1 * torch.randn(BATCH, LENGTH)
    reference = prev + 0.1 * torch.randn(BATCH, LENGTH)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    mask = torch.arange(LENGTH) < lengths
    advantages = torch.randn(BATCH)
    entropy = torch.rand(BATCH, LENGTH)
    num_tokens, num_sequences = float(mask.sum()), float(BATCH)
    for beta in (0.0, 0.01):
        cfg = LossConfig(reference_policy_kl_penalty=beta)
        leaf, their_leaf = (logprobs.clone().requires_grad_() for _ in range(2))
        inputs = PolicyLossInputs(
            leaf,
            prev,
            prev,
            reference,
            advantages.unsqueeze(-1).expand(BATCH, LENGTH),
            mask,
            torch.ones(BATCH, dtype=torch.bool),
            torch.zeros(BATCH),
            entropy,
        )
        trainer = stand_in(their_leaf, entropy, beta)
        their_inputs = {
            "prompt_ids": torch.zeros(BATCH, 1, dtype=torch.long),
            "prompt_mask": torch.ones(BATCH, 1, dtype=torch.long),
            "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": prev,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }

        def ours(inputs: PolicyLossInputs = inputs, cfg: LossConfig = cfg) -> Tensor:
            loss, metrics = policy_loss(
                inputs, cfg, num_tokens=num_tokens, num_sequences=num_sequences
            )
            (grad,) = torch.autograd.grad(loss, inputs.logprobs)
            values(metrics)
            return grad

        def theirs(
            trainer: Any = trainer, leaf: Tensor = their_leaf, given: Any = their_inputs
        ) -> Tensor:
            loss = GRPOTrainer._compute_loss(trainer, None, given)
            return torch.autograd.grad(loss, leaf)[0]

        # TRL's KL term lacks the score-function gradient: equal only without it.
        if beta == 0.0:
            torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-9)
        row(f"loss {BATCH} x {LENGTH}, forward + backward, beta {beta}", *race(ours, theirs))


def stand_in(logprobs: Tensor, entropy: Tensor, beta: float) -> Any:
    """What `_compute_loss` reads of a trainer, on one process."""

    def same(x: Tensor, **_: Any) -> Tensor:
        return x

    accelerator = SimpleNamespace(reduce=same, gather=same, num_processes=1)
    args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    return SimpleNamespace(
        accelerator=accelerator,
        args=args,
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=0.2,
        epsilon_low=0.2,
        importance_sampling_level="token",
        loss_type="dapo",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )


def compare_advantages() -> None:
    rewards = (torch.rand(GROUPS * MEMBERS) < 0.4).float()
    groups = torch.arange(GROUPS).repeat_interleave(MEMBERS)

    def theirs() -> Tensor:
        grid = rewards.view(-1, MEMBERS)
        mean = torch.nanmean(grid, dim=1).repeat_interleave(MEMBERS)
        std = nanstd(grid, dim=1).repeat_interleave(MEMBERS)
        return (rewards - mean) / (std + 1e-4)

    for loo in (False, True):

        def ours(loo: bool = loo) -> Tensor:
            return group_relative(rewards, groups, leave_one_out=loo, normalize=True)

        name = f"advantages {GROUPS} x {MEMBERS}, leave-one-out {loo}"
        row(name, *race(ours, theirs, rounds=200))
    constant = torch.full((7,), 0.3)
    zero = group_relative(
        constant, torch.zeros(7, dtype=torch.long), leave_one_out=False, normalize=True
    )
    residue = (constant - constant.mean()) / (nanstd(constant, dim=0) + 1e-4)
    print(f"constant group of 7 x 0.3: minirl {float(zero.abs().max())}, TRL's {float(residue[0])}")


def compare_logprobs() -> None:
    logits = torch.randn(8, 256, 4096) * 4
    tokens = torch.randint(4096, (8, 256))
    exact = logits.bfloat16().double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    for dtype in (torch.float32, torch.bfloat16):
        cast = logits.to(dtype)
        times = race(
            lambda x=cast: vocab_logprobs(x, tokens, Shard(0), with_entropy=False)[0],
            lambda x=cast: selective_log_softmax(x, tokens),
            rounds=5,
        )
        row(f"log-probs 8 x 256 x 4096, {str(dtype)[6:]}", *times)
    half = logits.bfloat16()
    ours = (vocab_logprobs(half, tokens, Shard(0))[0].double() - exact).abs().max()
    theirs = (selective_log_softmax(half, tokens).double() - exact).abs().max()
    print(f"largest error on bfloat16 logits: minirl {float(ours):.1e}, TRL {float(theirs):.1e}")


if __name__ == "__main__":
    main()
