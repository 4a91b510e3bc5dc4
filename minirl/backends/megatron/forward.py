"""Core's pipeline schedules over micro-batches: the one path of log-probs and of updates.

Every rank is given the rows of its sample and gives them back as whole rows: ranks that hold other
layers, other parts of the sequence or of the vocabulary cooperate inside. The view of a row, and
its loss, exist on the last pipeline stage; what is found there is handed to all stages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.backend import TokenHead, TokenOutput, Work
from minirl.backends.hf_model import check_length
from minirl.backends.layout import (
    Layout,
    ModelRows,
    layout_of,
    size_of,
    to_model,
    to_output,
)
from minirl.backends.linear_logprobs import OutputLayer, linear_logprobs
from minirl.backends.megatron.bridge import core
from minirl.backends.megatron.setup import Chunk, Described
from minirl.backends.output_layer import forward_replaced
from minirl.backends.trainer import attached
from minirl.backends.vocab_parallel import Shard, vocab_logprobs
from minirl.config.policy import PolicyConfig
from minirl.metrics import Metrics
from minirl.types import Rows, Scalar


@dataclass(frozen=True, slots=True)
class Stage:
    """What this rank runs of the model, and how it cooperates."""

    chunks: list[Chunk]
    num_stages: int
    layout: Layout
    shard: Shard
    vocab_size: int
    """Of the tokenizer's ids; the output has more columns when it was filled up to divide."""
    context: dist.ProcessGroup | None
    """Ranks that hold other parts of the same sequences."""
    device: torch.device
    options: dict[str, Any]
    """Further arguments of a chunk's forward."""
    fused: bool
    """Log-probs are taken from hidden states, and logits never exist in full."""
    positions_at_once: int | None
    longest: int | None
    """Rows of more tokens would have other positions than in the engine."""


def open_stage(cfg: PolicyConfig, described: Described, chunks: list[Chunk]) -> Stage:
    """The stage of this rank in Core's open process groups."""
    groups, provider = core("parallel_state"), described.provider
    tensor, context = provider.tensor_model_parallel_size, provider.context_parallel_size
    columns = -(-provider.vocab_size // tensor)
    keys = cfg.megatron_cfg
    asked = keys.use_fused_linear_logprobs is not False and not keys.defer_fp32_logits
    defer = keys.defer_fp32_logits and provider.bf16
    return Stage(
        chunks=chunks,
        num_stages=provider.pipeline_model_parallel_size,
        layout=layout_of(
            tensor,
            context,
            groups.get_context_parallel_rank(),
            packed=cfg.sequence_packing.enabled,
            sequence_parallel=provider.sequence_parallel,
        ),
        shard=Shard(
            groups.get_tensor_model_parallel_rank() * columns,
            groups.get_tensor_model_parallel_group() if tensor > 1 else None,
        ),
        vocab_size=provider.vocab_size,
        context=groups.get_context_parallel_group() if context > 1 else None,
        device=torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu"),
        options={"fp32_output": False} if defer else {},
        fused=asked and not provider.use_mup and _is_bare(chunks[-1]),
        positions_at_once=cfg.logprob_chunk_size,
        longest=described.positions.longest,
    )


def _is_bare(chunk: Chunk) -> bool:
    """Whether logits, if this chunk gives any, are those of Core's own output layer."""
    plain = core("tensor_parallel").ColumnParallelLinear
    layers = [m for name, m in chunk.named_modules() if name.endswith("output_layer")]
    return all(type(layer).forward is plain.forward for layer in layers)


def forward(stage: Stage, rows: Sequence[Rows], head: TokenHead) -> list[TokenOutput]:
    """The head's view of every micro-batch, without gradient, on the device of its rows.

    Collective over the ranks that share the samples.
    """

    def handed_out(work: Work, view: TokenOutput) -> TokenOutput:
        device = work.rows.tokens.device
        entropy = None if view.entropy is None else view.entropy.to(device)
        return TokenOutput(view.logprobs.to(device), entropy)

    with torch.no_grad():
        found = _run(stage, [Work(r, head, _no_loss) for r in rows], handed_out, train=False)
    return found[: len(rows)]


def backward_(stage: Stage, works: Sequence[Work]) -> list[Metrics]:
    """Adds the gradients of all losses into the chunks' buffers, summed over all ranks.

    Collective: every rank calls this with equally many micro-batches.
    """

    def loss_of(work: Work, view: TokenOutput) -> Any:
        loss, metrics = work.loss(view)
        # No tokens are counted: the loss is already divided, and Core shall not divide it again.
        return attached(loss, view), torch.zeros((), dtype=torch.int, device=loss.device), metrics

    return _run(stage, works, loss_of, train=True)


Finish: TypeAlias = Callable[[Work, TokenOutput], Any]
"""What the last stage makes of the view of a micro-batch."""


def _run(stage: Stage, works: Sequence[Work], finish: Finish, *, train: bool) -> list[Any]:
    """Core's schedule; what `finish` gave for each micro-batch, on every stage."""
    check_length(max(int(work.rows.lengths.max()) for work in works), stage.longest)
    chunks, interleaved = stage.chunks, len(stage.chunks) > 1
    if interleaved:  # it takes micro-batches by groups of as many as there are stages
        fillers = [works[-1]._replace(loss=_no_loss)] * (-len(works) % stage.num_stages)
        works = [*works, *fillers]
    sizes = [size_of(work.rows, stage.layout) for work in works]
    largest = (max(h for h, _ in sizes), max(w for _, w in sizes))
    # Interleaved stages hand on micro-batches of one size only.
    size = largest if interleaved else None
    found: list[Any] = core("pipeline_parallel").get_forward_backward_func()(
        forward_step_func=partial(_forward_step, stage, finish, size),
        data_iterator=[iter(works) for _ in chunks] if interleaved else iter(works),
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(works),
        seq_length=largest[1],
        micro_batch_size=largest[0],
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return _from_last_stage(found, stage)


def _no_loss(output: TokenOutput) -> tuple[Scalar, Metrics]:
    return torch.zeros((), device=output.logprobs.device), {}


def _forward_step(
    stage: Stage,
    finish: Finish,
    size: tuple[int, int] | None,
    works: Iterator[Work],
    chunk: Chunk,
) -> tuple[Tensor, Callable[..., Any]]:
    """What Core's schedules ask for: the chunk's output, and what the last stage does with it."""
    work = next(works)
    inputs = to_model(work.rows, stage.layout, size)
    from_hidden = partial(_from_hidden, stage, inputs, work.head)
    processor = {"output_processor": from_hidden} if stage.fused else {}
    output = chunk(
        input_ids=inputs.tokens.to(stage.device),
        position_ids=inputs.positions.to(stage.device),
        attention_mask=None,
        packed_seq_params=_packed_params(inputs.ends, stage.device),
        **stage.options,
        **processor,
    )

    def last_stage(output: Tensor, non_loss_data: bool = False) -> Any:
        head = work.head
        values = output.unbind() if stage.fused else _from_logits(stage, inputs, head, output)
        view = to_output(values, inputs.place, work.rows, stage.context, entropy=head.entropy)
        return finish(work, view)

    return output, last_stage


def _packed_params(ends: Tensor | None, device: torch.device) -> Any:
    """Core's description of packed rows; None for padded ones."""
    if ends is None:
        return None
    bounds = ends.to(device, torch.int32)
    longest = int((ends[1:] - ends[:-1]).max())
    return core("packed_seq_params").PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _real(stage: Stage, columns: int) -> int:
    """How many of a rank's columns are tokens."""
    return max(0, min(columns, stage.vocab_size - stage.shard.start))


def _from_logits(
    stage: Stage, inputs: ModelRows, head: TokenHead, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies at this rank's positions."""
    following = inputs.following.to(logits.device)
    own = logits[..., : _real(stage, logits.shape[-1])]
    return vocab_logprobs(own, following, stage.shard, head.temperature, with_entropy=head.entropy)


def _from_hidden(
    stage: Stage,
    inputs: ModelRows,
    head: TokenHead,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    **ignored: Any,
) -> Tensor:
    """The same, stacked, without logits. Core calls this in the place of its output layer."""
    regions = core("tensor_parallel")

    def run(hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        # Every rank of the vocabulary has its own part of the hidden states' gradient.
        if output_layer.sequence_parallel:
            whole = regions.gather_from_sequence_parallel_region(hidden)
        else:
            whole = regions.copy_to_tensor_model_parallel_region(hidden)
        matrix, bias = output_layer.weight if weight is None else weight, output_layer.bias
        real = _real(stage, len(matrix))
        if real < len(matrix):
            matrix, bias = matrix[:real], None if bias is None else bias[:real]
        values = linear_logprobs(
            whole.transpose(0, 1),
            OutputLayer(matrix, bias, stage.shard),
            inputs.following.to(whole.device),
            head.temperature,
            with_entropy=head.entropy,
            positions_at_once=stage.positions_at_once,
        )
        return torch.stack(values)

    # Through the layer itself: its hooks wait for a weight that is still on its way.
    with forward_replaced(output_layer, run):
        found: Tensor = output_layer(hidden_states, weight=output_weight)
    return found


def _from_last_stage(items: list[Any], stage: Stage) -> list[Any]:
    """What the last pipeline stage has, on every stage. Collective over the pipeline."""
    if stage.num_stages == 1:
        return items
    groups, box = core("parallel_state"), [items]
    dist.broadcast_object_list(
        box,
        src=groups.get_pipeline_model_parallel_last_rank(),
        group=groups.get_pipeline_model_parallel_group(),
    )
    return box[0]
