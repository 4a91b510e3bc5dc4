"""Whose a folder is: of one process at a time, and of the same run whenever it goes on.

A checkpoint holds every setting of its run, and digests of the model's files and of the rows that
it trained on. Whoever goes on from it is compared with that, key by key: what changes results is
refused unless `checkpointing.allowed_changes` names it.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from minirl.checkpoint import IDENTITY
from minirl.config.loader import refuse
from minirl.config.run import GrpoRun
from minirl.data.datasets import Dataset
from minirl.files import read_object
from minirl.hf import model_facts, weight_files
from minirl.log import is_first_rank, prepare_folder

Identity: TypeAlias = dict[str, object]
"""Dotted keys and their values, as JSON holds them."""

FREE = (
    # How long, how often, how it is watched.
    *("grpo.max_num_epochs", "grpo.max_num_steps", "grpo.val_period", "grpo.val_at_start"),
    *("grpo.val_at_end", "grpo.val_greedy", "grpo.max_val_samples", "data.validation"),
    *("grpo.dynamic_sampling_max_gen_batches", "checkpointing", "logger", "env"),
    # The learning rate and its schedule.
    *("policy.optimizer.kwargs.lr", "policy.scheduler"),
    *("policy.megatron_cfg.optimizer.lr", "policy.megatron_cfg.optimizer.min_lr"),
    *(
        "policy.megatron_cfg.scheduler.lr_decay_style",
        "policy.megatron_cfg.scheduler.lr_decay_iters",
    ),
    *(
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        "policy.megatron_cfg.scheduler.lr_warmup_init",
    ),
    "policy.megatron_cfg.scheduler.lr_wsd_decay_style",
    "policy.megatron_cfg.scheduler.lr_wsd_decay_iters",
    # Where files lie; what is in them is compared instead.
    *("policy.model_name.path", "data.train.data_path", "data.train.prompt_file"),
    "data.train.system_prompt_file",
    # Memory: how many rows or tokens at once, in which order, and what is kept where.
    *("policy.train_micro_batch_size", "policy.logprob_batch_size", "policy.logprob_chunk_size"),
    *("policy.sequence_packing", "policy.dynamic_batching", "policy.offload_optimizer_for_logprob"),
    *("policy.dtensor_cfg.activation_checkpointing", "policy.dtensor_cfg.cpu_offload"),
    *("policy.dtensor_cfg.use_fused_linear_logprobs", "policy.generation.vllm_cfg.enforce_eager"),
    "policy.generation.vllm_cfg.gpu_memory_utilization",
    # Layouts: laws of the tests say that they change no number.
    *(
        f"policy.dtensor_cfg.{name}"
        for name in (
            *("dp_replicate_size", "tensor_parallel_size", "context_parallel_size"),
            *("expert_parallel_size", "sequence_parallel", "custom_parallel_plan"),
        )
    ),
    *(
        f"policy.megatron_cfg.{name}"
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("activation_checkpointing", "recompute_granularity", "recompute_modules"),
            *("moe_per_layer_logging", "moe_token_dispatcher_type", "moe_enable_deepep"),
            *("moe_shared_expert_overlap", "moe_permute_fusion", "apply_rope_fusion"),
            *("bias_activation_fusion", "gradient_accumulation_fusion", "defer_fp32_logits"),
            *("use_fused_linear_logprobs", "fine_grained_activation_offloading"),
            *("offload_modules", "cuda_graph_impl", "cuda_graph_modules"),
            *("cuda_graph_warmup_steps", "force_reconvert_from_hf"),
            *("optimizer.optimizer_cpu_offload", "optimizer.optimizer_offload_fraction"),
            "optimizer.overlap_cpu_optimizer_d2h_h2d",
            "distributed_data_parallel_config.overlap_grad_reduce",
            "distributed_data_parallel_config.overlap_param_gather",
        )
    ),
)
"""Keys and sections that may change when a run goes on; every other key changes its results."""


def identity_of(run: GrpoRun, train: Dataset, stop_token_ids: Sequence[int] = ()) -> Identity:
    """What is written into each checkpoint: settings, the model's files, the rows trained on.

    `stop_token_ids` are those that end an answer, whoever says so.
    """
    tree = json.loads(msgspec.json.encode(run))
    name = run.policy.model_name
    facts = dict(_settings(tree, ""))
    del facts["policy.model_name"]  # three keys take its place
    if run.policy.tokenizer.name == name:
        facts["policy.tokenizer.name"] = "${policy.model_name}"
    rows = [(p.id, p.tokens, p.example) for p in train.prompts]
    return facts | {
        "policy.model_name.path": name,
        "policy.model_name.config": _digest(model_facts(name)),
        "policy.model_name.weights": _digest(_weights(name)),
        "policy.generation.ends": list(stop_token_ids),
        "data.train.rows": _digest(rows),
        "data.train.env_name.code": _code_of(run.data.train.env_name),
    }


def _weights(name: str) -> object:
    """Of a folder: every file's name, size, beginning and end. Of the hub: its revision."""
    folder = Path(name)
    if not folder.is_dir():
        return weight_files(name)
    return [[f.name, f.stat().st_size, *_ends(f)] for f in sorted(folder.glob("*.safetensors"))]


def _ends(file: Path, size: int = 1 << 16) -> list[str]:
    with file.open("rb") as opened:
        first = opened.read(size)
        opened.seek(max(0, file.stat().st_size - size))
        return [hashlib.sha256(part).hexdigest() for part in (first, opened.read())]


def _code_of(env_name: str) -> str | None:
    """A digest of the file of a reward function of the user's."""
    module = env_name.partition(":")[0]
    spec = importlib.util.find_spec(module) if ":" in env_name else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def check_identity(folder: Path, now: Identity, allowed: Sequence[str]) -> list[str]:
    """What has changed since the checkpoint in `folder`, one phrase a key; all of it may change.

    Raises:
        ValueError: the checkpoint is of another run, field by field; it says nothing of its run.
    """
    file = folder / IDENTITY
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} has no {IDENTITY}, so nothing tells which run it is of (an earlier "
            "version of minirl saved it); name another checkpointing.checkpoint_dir"
        )
    try:
        saved = read_object(file, f"{str(folder)!r} is no complete checkpoint: {IDENTITY}")
    except ValueError as error:
        raise ValueError(f"{error}; remove it to go on from the one before") from error
    check_allowed(allowed, {**saved, **now})
    changed = {k: _phrase(k, saved, now) for k in {**saved, **now} if _differ(k, saved, now)}
    refused = [key for key in changed if not _within(key, (*FREE, *allowed))]
    refuse(
        bool(refused),
        f"checkpointing.checkpoint_dir: {str(folder)!r} was saved by another run:\n"
        + "".join(f"  {changed[key]}\n" for key in refused)
        + "name another folder; or, to go on from it all the same, set "
        f"checkpointing.allowed_changes: [{', '.join(refused)}]",
    )
    return list(changed.values())


def check_allowed(allowed: Sequence[str], now: Identity) -> None:
    """Refuses names in `checkpointing.allowed_changes` that allow nothing.

    Raises:
        ValueError: a name is of no setting, or of one that may change anyway.
    """
    compared = {key for key in now if not _within(key, FREE)}
    sections = {key.rsplit(".", n)[0] for key in compared for n in range(key.count(".") + 1)}
    for name in allowed:
        near = get_close_matches(name, sections)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        refuse(
            name not in sections,
            f"checkpointing.allowed_changes: {name!r} is no key that a checkpoint is compared by"
            f"{hint}",
        )


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Makes the folder that `key` names, and keeps every other run out while the context is open.

    The first rank alone does so. The lock goes with the process, however it ends.

    Raises:
        ValueError: the folder cannot be written, or another run is in it.
    """
    if not is_first_rank():
        yield
        return
    prepare_folder(folder, key)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"{key}: {str(folder)!r} is in use by {file.read() or 'another run'}; wait for its "
                "end, or name another folder"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _settings(tree: object, path: str) -> Iterator[tuple[str, object]]:
    """Dotted keys and their values; a list is one value."""
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for name, value in cast("dict[str, object]", tree).items():
        yield from _settings(value, f"{path}.{name}" if path else name)


def _within(key: str, names: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def _digest(facts: object) -> str:
    text = msgspec.json.encode(facts, order="deterministic", enc_hook=lambda x: type(x).__name__)
    return hashlib.sha256(text).hexdigest()[:16]


def _differ(key: str, saved: Identity, now: Identity) -> bool:
    return key not in saved or key not in now or saved[key] != now[key]


def _phrase(key: str, saved: Mapping[str, object], now: Mapping[str, object]) -> str:
    was, is_now = (json.dumps(x[key]) if key in x else "nothing" for x in (saved, now))
    return f"{key}: {was} when it was saved, {is_now} now"
