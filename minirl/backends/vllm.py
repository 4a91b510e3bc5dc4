"""vLLM inside every rank: the engine that samples.

The engine lives in the trainer's process (no child processes, no serialisation), so new weights
are handed over as tensors. The facts that shape this module hold for vLLM 0.30:

- It adopts the default process group if one exists, and creates a world of one otherwise; the
  trainer's must therefore exist first. Shutting down destroys that group: close the engine last.
- Building it reseeds, and sampling advances, the global generators. Building it also edits
  `os.environ` and replaces `torch.set_num_threads`. `_contained` and `_running` undo this. (On a
  CPU, `torch.accelerator.synchronize` and `empty_cache` stay replaced: the engine needs that.)
- Cached prefixes survive new weights unless they are reset.
- On a CPU it packs linear weights into handles and drops the originals; see `_keep_weights`.
- It adds the end tokens of the tokenizer and of generation_config.json, unless it ignores the end
  token: then a completion ends only where `Sampling` says.

All ids of the model's vocabulary may be sampled, also those above the tokenizer's size: masking
them here and not in the trainer would part the two log-probs by the log of the masked mass.
"""

import copy
import json
import os
import random
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.backends.vllm_arguments import check_kwargs
from minirl.config.policy import GenerationConfig
from minirl.engine import Engine, Request, Sampling, check_logprobs, check_requests
from minirl.hf import read_config
from minirl.parallel import launched_size
from minirl.types import Completion

Shape: TypeAlias = tuple[int, ...]
HEAD = "lm_head.weight"


def open_engine(cfg: GenerationConfig, model_path: str, *, tokenizer: str | None = None) -> Engine:
    """An engine with the weights of `model_path` as version 0.

    `tokenizer` (default: the model's) only serves stop strings.

    Raises:
        ValueError: several ranks were launched and no process group exists yet, or `vllm_kwargs`
            has an argument that vLLM does not know or that another key sets.
    Collective: every launched rank calls it, in the same order as other creators of groups.
    """
    if launched_size() > 1 and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE is {launched_size()} but no process group exists: open "
            "minirl.parallel.world before the engine, or vLLM makes a world of one in every rank"
        )
    check_kwargs(cfg.vllm_kwargs)
    with _contained():
        llm = _build(cfg, model_path, tokenizer or model_path)
    return _engine_of(llm, _weight_shapes(model_path), eager=cfg.vllm_cfg.enforce_eager)


def _engine_of(llm: Any, shapes: Mapping[str, Shape], *, eager: bool) -> Engine:
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    vocabulary_size: int = llm.model_config.get_vocab_size()
    max_model_len: int = llm.model_config.max_model_len
    version = 0

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        check_requests(
            requests, sampling, vocabulary_size=vocabulary_size, max_model_len=max_model_len
        )
        with _running(on_cpu=on_cpu, eager=eager):
            outputs = llm.generate(*_translate(requests, sampling), use_tqdm=False)
        return [_completion(index, output, version) for index, output in enumerate(outputs)]

    def load_(weights: Iterable[tuple[str, Tensor]], new_version: int) -> None:
        nonlocal version
        with _running(on_cpu=on_cpu, eager=eager):
            _load_(llm, _checked(weights, shapes), in_place=on_cpu)
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        version = new_version

    def sleep_() -> None:
        if not on_cpu:
            llm.sleep(level=1)

    def wake_() -> None:
        if not on_cpu:
            torch.cuda.empty_cache()  # what training cached would be missing for the KV cache
            llm.wake_up()

    def close() -> None:
        llm.llm_engine.engine_core.shutdown()

    return Engine(generate, load_, sleep_, wake_, close)


def _build(cfg: GenerationConfig, model_path: str, tokenizer: str) -> Any:
    """Imports vLLM and builds its engine; call inside `_contained`."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM
        from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _keep_weights()
    _inspect_here(model_path)
    kwargs: dict[str, Any] = {
        "model": model_path,
        "tokenizer": tokenizer,
        "dtype": cfg.vllm_cfg.precision,
        "max_model_len": cfg.vllm_cfg.max_model_len,
        "gpu_memory_utilization": cfg.vllm_cfg.gpu_memory_utilization,
        "enforce_eager": cfg.vllm_cfg.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if launched_size() > 1:
        # Only this executor takes the device from LOCAL_RANK.
        kwargs["distributed_executor_backend"] = "external_launcher"
    kwargs |= _cpu_defaults(cfg) if on_cpu else {"enable_sleep_mode": True}
    with _eager(on_cpu and cfg.vllm_cfg.enforce_eager):
        return LLM(**(kwargs | cfg.vllm_kwargs))


def _cpu_defaults(cfg: GenerationConfig) -> dict[str, Any]:
    """Arguments that only a CPU needs.

    A seeded request whose prompt is prefilled in chunks kills the engine there (CPU generators
    have no offset), so chunks are off and every prompt fits one step. An explicit cache size
    (instead of a share of the memory) saves the warm-up that measures one; `vllm_kwargs` may raise
    it. Prefixes are shared in whole blocks; 32 is the smallest.
    """
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, cfg.vllm_cfg.max_model_len),
        "kv_cache_memory_bytes": 512 << 20,
        "block_size": 32,
    }


def _keep_weights() -> None:
    """Makes vLLM on a CPU compute with the plain weights, so that they can be replaced.

    Its oneDNN kernels compute from packed copies, which new weights do not reach: outputs stay
    those of the old ones, silently where the head is tied. `_load_` checks that it worked.
    """
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False  # pyright: ignore[reportPrivateUsage]: there is no setting


def _inspect_here(model_path: str) -> None:
    """Registers the model's class as already imported.

    Otherwise vLLM's first start with an architecture imports everything once more, in a child
    process, to look at the class: 20 s and more on a CPU.
    """
    from vllm import ModelRegistry

    for name in cast("list[str]", read_config(model_path).architectures or []):
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _translate(requests: Sequence[Request], sampling: Sampling) -> tuple[list[Any], list[Any]]:
    """The prompts and parameters as vLLM wants them.

    Raises:
        ValueError: a temperature that vLLM would silently raise.
    """
    from vllm import SamplingParams, TokensPrompt

    if 0 < sampling.temperature < 0.01:
        raise ValueError(
            f"temperature {sampling.temperature}: vLLM samples at 0.01 instead; use 0 or >= 0.01"
        )
    shared = SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        skip_clone=True,  # a deep copy of each would cost a tenth of a short generation
    )
    params: list[Any] = []
    for request in requests:
        own = copy.copy(shared)
        own.seed = request.seed
        params.append(own)
    return [TokensPrompt(prompt_token_ids=list(r.tokens)) for r in requests], params


def _completion(index: int, output: Any, version: int) -> Completion:
    """The answer to request `index`.

    Raises:
        ValueError: it was aborted, or its log-probs are missing, not finite or positive.
    """
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):
        raise ValueError(f"request {index}: vLLM ended it with {sample.finish_reason!r}")
    logprobs = tuple(sample.logprobs.logprobs) if sample.logprobs is not None else ()
    check_logprobs(index, logprobs, len(sample.token_ids))
    return Completion(tuple(sample.token_ids), logprobs, sample.finish_reason == "length", version)


def _weight_shapes(model_path: str) -> dict[str, Shape]:
    """The weights that the model's safetensors files hold, from their headers."""
    import safetensors
    from transformers.utils import hub

    find = cast("Any", hub).cached_file
    index = find(
        model_path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False
    )
    files = {"model.safetensors"}
    if index is not None:
        files = set(json.loads(Path(index).read_text())["weight_map"].values())
    shapes: dict[str, Shape] = {}
    for file in files:
        with cast("Any", safetensors).safe_open(find(model_path, file), "pt") as weights:
            names: list[str] = weights.keys()
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    return shapes


def _checked(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Tensor]]:
    """Passes `weights` on, and fails if they are not the model's.

    vLLM itself fuses weights, and keeps the old part of a fused one that was not given. Buffers,
    which some checkpoints hold, and the head, which may be tied (then vLLM skips it), are not
    required.

    Raises:
        ValueError: a name is unknown, a shape differs, or a weight was not given.
    """
    missing = {name for name in shapes if name.endswith((".weight", ".bias"))} - {HEAD}
    for name, tensor in weights:
        if tuple(tensor.shape) != shapes.get(name) and name != HEAD:
            raise ValueError(
                f"weight {name!r} of shape {tuple(tensor.shape)}: the engine's model has "
                f"{shapes.get(name, 'none of that name')}; export Hugging Face names, full tensors"
            )
        yield name, tensor
        missing.discard(name)
    if missing:
        raise ValueError(f"weights not given to the engine: {sorted(missing)}")


def _load_(llm: Any, weights: Iterable[tuple[str, Tensor]], *, in_place: bool) -> None:
    """Replaces all weights of vLLM's model.

    `in_place` copies into the parameters, which is right where kernels read them as loaded.
    Otherwise vLLM reloads layer by layer and post-processes each (quantisation, absorbed MLA
    projections, shuffled experts) into the same memory, so that CUDA graphs stay valid.

    Raises:
        ValueError: in place, for a model whose weights are post-processed.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    layerwise = cast("Any", reload)
    config = llm.model_config
    if in_place and (config.is_moe or config.use_mla or config.is_hybrid or config.is_quantized):
        raise ValueError(
            f"{config.model!r}: on a CPU, vLLM 0.30 takes new weights only of dense, unquantised "
            "attention models; set policy.generation.backend=hf"
        )
    # Layer by layer, tensors are kept until their layer is complete, so they must be copies.
    ready = ((n, t.detach().to(config.dtype, copy=not in_place)) for n, t in weights)

    def replace(model: Any) -> None:
        if not in_place:
            layerwise.initialize_layerwise_reload(model)
        model.load_weights(ready)
        if not in_place:
            layerwise.finalize_layerwise_reload(model, config)

    with torch.no_grad(), set_current_vllm_config(llm.llm_engine.vllm_config):
        llm.apply_model(replace)


@contextmanager
def _contained() -> Generator[None]:
    """Undoes what importing and building vLLM does to the process."""
    environment = dict(os.environ)
    set_num_threads = torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with _fork_rng():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _running(*, on_cpu: bool, eager: bool) -> Generator[None]:
    """Around every use of the engine: global generators untouched, no compilation if eager."""
    with _fork_rng(), _eager(on_cpu and eager):
        yield


@contextmanager
def _fork_rng() -> Generator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _eager(active: bool) -> Generator[None]:
    """Runs torch.compile'd functions uncompiled.

    On a CPU, vLLM compiles two small sampling kernels even if eager: 2 to 20 s at the first call,
    for no gain.
    """
    with ExitStack() as stack:
        if active:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
