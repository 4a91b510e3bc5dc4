"""`policy`: the model, its batch sizes, the training backend and the engine.

Exactly one backend is enabled. Key names and defaults are NeMo-RL's.
"""

from collections.abc import Mapping
from math import lcm
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, field

from minirl.config import dtensor as dtensor_config
from minirl.config import megatron as megatron_config
from minirl.config.dtensor import DTensorConfig
from minirl.config.loader import Count, NonNegative, Positive, Section, default, refuse
from minirl.config.megatron import MegatronConfig, Precision
from minirl.config.megatron_rules import check_rules

TOTAL_LENGTH = "${policy.max_total_sequence_length}"


SpecialTokensInMessages: TypeAlias = Literal["literal", "refuse"]


class TokenizerConfig(Section, frozen=True):
    """`policy.tokenizer`."""

    name: Annotated[str, default("${policy.model_name}")]
    chat_template: str | None = "default"
    """default: the tokenizer's own; null: the messages as they are, one after the other; else a
    Jinja template, or the path of a file that holds one. What NeMo-RL means by each."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template, e.g. `{enable_thinking: false}`. A template that writes today's
    date needs `date_string`, so that a resumed run sees the same prompts."""
    special_tokens_in_messages: SpecialTokensInMessages = "literal"
    """Of a row or prompt file that spells special tokens: text like any other, or an error. Not in
    NeMo-RL, where such text becomes the tokens."""


PackingAlgorithm: TypeAlias = Literal[
    "concatenative",
    "first_fit_shuffle",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "best_fit_decreasing",
]


class SequencePackingConfig(Section, frozen=True):
    """`policy.sequence_packing`: the rows of a micro-batch as one sequence, without padding.

    Nothing else in it counts while `enabled` is false: recipes inherit.
    """

    moved: ClassVar[Mapping[str, str]] = {
        "sequence_length_round": "no key: a packed sample is filled up only as far as "
        "the backend's parallel sizes need; remove it",
        "microbatch_order": "no key: micro-batches with the longest samples run first; remove it",
    }

    enabled: bool = False
    train_mb_tokens: Count | None = None
    """Of one micro-batch; null: max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: Count | None = None
    """The same without a gradient; null: max_total_sequence_length x logprob_batch_size."""
    algorithm: PackingAlgorithm = "best_fit_decreasing"


class DynamicBatchingConfig(Section, frozen=True):
    """`policy.dynamic_batching`: as many rows of similar length as there is room for, padded.

    Nothing else in it counts while `enabled` is false: recipes inherit.
    """

    enabled: bool = False
    train_mb_tokens: Count | None = None
    """Of one micro-batch with its padding; null: as in `sequence_packing`, as is the next."""
    logprob_mb_tokens: Count | None = None
    sequence_length_round: Count = 64
    """Rows are padded to a multiple of this, so that few shapes occur."""


class OptimizerConfig(Section, frozen=True):
    """`policy.optimizer`: an optimizer class by import path, and its arguments."""

    name: str = "torch.optim.AdamW"
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """The learning rate is given: a library's default would be far too large here."""
        lr: object = self.kwargs.get("lr")
        refuse(lr is None, "kwargs has no lr, the learning rate; set one, for example lr: 5e-6")
        refuse(
            isinstance(lr, bool) or not isinstance(lr, int | float) or lr < 0,
            f"kwargs.lr is {lr!r}; a learning rate is a number >= 0",
        )


class ScheduleConfig(Section, frozen=True):
    """One entry of `policy.scheduler`: a schedule by import path, or the milestones between."""

    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    milestones: list[Count] | None = None

    def __post_init__(self) -> None:
        """An entry is one of the two."""
        refuse(
            (self.name is None) == (self.milestones is None),
            f"name is {self.name!r} and milestones {self.milestones}; an entry has one of the two",
        )
        refuse(
            self.milestones is not None and bool(self.kwargs),
            f"kwargs {self.kwargs} have no effect on milestones; remove them",
        )


class VllmConfig(Section, frozen=True, kw_only=True):
    """`policy.generation.vllm_cfg`: `precision` and `max_model_len` hold for `backend: hf` too."""

    precision: Annotated[Precision, default("${policy.precision}")]
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.6
    max_model_len: Annotated[Count, default(TOTAL_LENGTH)]
    enforce_eager: bool = False


class GenerationConfig(Section, frozen=True, kw_only=True):
    """`policy.generation`: the engine and how it samples."""

    backend: Literal["vllm", "hf"] = "vllm"
    max_new_tokens: Count
    temperature: NonNegative = 1.0
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    """In addition to the model's end token."""
    stop_strings: list[Annotated[str, Meta(min_length=1)]] | None = None
    vllm_cfg: VllmConfig
    vllm_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to `vllm.LLM` as they are."""


class PolicyConfig(Section, frozen=True, kw_only=True):
    """`policy`: model, batch sizes, optimizer, backend, generation."""

    moved: ClassVar[Mapping[str, str]] = {
        "make_sequence_length_divisible_by": "no key: sequences are filled up to what the "
        "backend's parallel sizes need; remove it",
    }

    model_name: str
    hf_config_overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the model's Hugging Face config, in training and in the engine."""
    tokenizer: TokenizerConfig
    train_global_batch_size: Count = 512
    """Samples of one optimizer update, over all ranks."""
    train_micro_batch_size: Count = 4
    """Samples of one forward and backward pass, on one rank."""
    logprob_batch_size: Annotated[Count, default("${policy.train_micro_batch_size}")]
    logprob_chunk_size: Count | None = None
    """Positions whose log-probs are taken from hidden states at a time; null: 1024."""
    max_total_sequence_length: Count = 512
    """Prompt and response together."""
    precision: Precision = "bfloat16"
    """Of forward and backward; masters are float32. float16 (dtensor backend) scales the loss."""
    max_grad_norm: Positive | None = 1.0
    offload_optimizer_for_logprob: bool = False
    """Keep the optimizer's state in host memory while log-probs are taken (dtensor backend)."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    """Exactly one of the two backends is enabled."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """At most one of the two is enabled. Micro-batches then hold as many rows as there is room for,
    on any rank any number, and the two sizes in rows serve as defaults only."""
    optimizer: OptimizerConfig | None = None
    """Of the dtensor backend, as is `scheduler`; megatron_cfg has its own two."""
    scheduler: list[ScheduleConfig] | None = None
    """Schedules, one after the other; with two or more, one entry of milestones. It advances once
    a step of the algorithm."""
    generation: GenerationConfig

    def __post_init__(self) -> None:
        """Rules among batch sizes, lengths, schedules and backends."""
        _check_backend(self)
        _check_batching(self)
        micro, batch = self.train_micro_batch_size, self.train_global_batch_size
        refuse(
            has_fixed_rows(self) and batch % micro != 0,
            f"train_micro_batch_size {micro} does not divide train_global_batch_size {batch}; "
            f"{multiples(batch, micro)} for the latter, or a divisor of {batch} for the former",
        )
        total, response = self.max_total_sequence_length, self.generation.max_new_tokens
        refuse(
            response >= total,
            f"generation.max_new_tokens {response} leaves no room for a prompt within "
            f"max_total_sequence_length {total}; lower the former or raise the latter",
        )
        engine = self.generation.vllm_cfg.max_model_len
        refuse(
            engine < total,
            f"generation.vllm_cfg.max_model_len {engine} is less than max_total_sequence_length "
            f"{total}; remove the former or raise it to {total}",
        )
        _check_scheduler(self.scheduler or [])


def data_parallel_size(policy: PolicyConfig, num_ranks: int) -> int:
    """The number of copies of the model among `num_ranks` ranks, by the enabled backend.

    Raises:
        ValueError: the ranks do not hold whole copies.
    """
    if policy.megatron_cfg.enabled:
        return megatron_config.data_parallel_size(policy.megatron_cfg, num_ranks)
    return dtensor_config.data_parallel_size(policy.dtensor_cfg, num_ranks)


def has_fixed_rows(policy: PolicyConfig) -> bool:
    """Whether every micro-batch has the same number of rows."""
    return not (policy.sequence_packing.enabled or policy.dynamic_batching.enabled)


def length_unit(policy: PolicyConfig) -> int:
    """What the backend fills the length of a sequence up to a multiple of.

    Every context-parallel rank has 2 chunks of it, and with sequence parallelism every
    tensor-parallel rank an equal share of each.
    """
    megatron, dtensor = policy.megatron_cfg, policy.dtensor_cfg
    if megatron.enabled:
        tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
        shared = tensor > 1 if megatron.sequence_parallel is None else megatron.sequence_parallel
    else:
        tensor, context = dtensor.tensor_parallel_size, dtensor.context_parallel_size
        shared = dtensor.sequence_parallel
    unit = 2 * context if context > 1 else 1
    return unit * tensor if shared else unit


def multiples(number: int, unit: int) -> str:
    """The remedy for a number that is no multiple of `unit`."""
    below = number // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def _check_batching(policy: PolicyConfig) -> None:
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    refuse(
        packing.enabled and dynamic.enabled,
        "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true, and "
        "rows are either packed or padded; set one to false",
    )
    chunks = policy.megatron_cfg.virtual_pipeline_model_parallel_size
    refuse(
        dynamic.enabled and policy.megatron_cfg.enabled and chunks is not None,
        "policy.dynamic_batching.enabled is true, but with policy.megatron_cfg."
        f"virtual_pipeline_model_parallel_size (is {chunks}) all micro-batches have one shape; use "
        "policy.sequence_packing, or set one of the two to its default",
    )
    rounding = lcm(length_unit(policy), dynamic.sequence_length_round if dynamic.enabled else 1)
    longest = -(-policy.max_total_sequence_length // rounding) * rounding
    filled = "" if rounding == 1 else f" (filled up to a multiple of {rounding}: {longest})"
    for section, cfg in (("sequence_packing", packing), ("dynamic_batching", dynamic)):
        for key, tokens in (
            ("train_mb_tokens", cfg.train_mb_tokens),
            ("logprob_mb_tokens", cfg.logprob_mb_tokens),
        ):
            refuse(
                cfg.enabled and tokens is not None and tokens < longest,
                f"policy.{section}.{key} {tokens} has no room for one sample of "
                f"max_total_sequence_length {policy.max_total_sequence_length}{filled}; use at "
                f"least {longest}, or lower the latter",
            )


def _check_scheduler(entries: list[ScheduleConfig]) -> None:
    num = sum(entry.name is not None for entry in entries)
    joints = [entry.milestones for entry in entries if entry.milestones is not None]
    steps = [step for joint in joints for step in joint]
    refuse(
        len(joints) > 1 or len(steps) != max(num - 1, 0) or steps != sorted(set(steps)),
        f"scheduler has {num} schedules and the milestones {steps} in {len(joints)} entries; one "
        f"entry with {max(num - 1, 0)} strictly increasing steps says where the next schedule "
        "begins (none for a single schedule)",
    )


def _check_backend(policy: PolicyConfig) -> None:
    dtensor, megatron = policy.dtensor_cfg.enabled, policy.megatron_cfg.enabled
    refuse(
        dtensor == megatron,
        f"policy.dtensor_cfg.enabled is {dtensor} and policy.megatron_cfg.enabled {megatron}; "
        "exactly one of the two is true",
    )
    refuse(
        dtensor and policy.optimizer is None,
        "policy.optimizer is null, and policy.dtensor_cfg needs one; set it, for example "
        "{kwargs: {lr: 5e-6}}",
    )
    for key, given in (("optimizer", policy.optimizer), ("scheduler", policy.scheduler)):
        refuse(
            megatron and given is not None,
            f"policy.{key} belongs to policy.dtensor_cfg and has no effect with "
            f"policy.megatron_cfg.enabled; set policy.megatron_cfg.{key} instead (a recipe that "
            f"inherits policy.{key} writes `{key}: null`)",
        )
    refuse(
        megatron and policy.offload_optimizer_for_logprob,
        "policy.offload_optimizer_for_logprob is true, but under policy.megatron_cfg.enabled "
        "Megatron Core owns where its optimizer's state lives; use policy.megatron_cfg.optimizer."
        "optimizer_cpu_offload, or set it to false",
    )
    refuse(
        megatron and policy.precision == "float16",
        "policy.precision is float16, which policy.megatron_cfg has no loss scaling for here; use "
        "bfloat16, or policy.dtensor_cfg",
    )
    if megatron:
        check_rules(policy.megatron_cfg, policy.precision)
