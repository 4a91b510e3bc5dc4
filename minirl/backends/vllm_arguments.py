"""Which arguments of vLLM a config may set, told without importing it."""

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from minirl.files import shorten

OWNED = {
    "model": "set policy.model_name",
    "tokenizer": "set policy.tokenizer.name",
    "dtype": "set policy.generation.vllm_cfg.precision",
    "max_model_len": "set policy.generation.vllm_cfg.max_model_len",
    "gpu_memory_utilization": "set policy.generation.vllm_cfg.gpu_memory_utilization",
    "enforce_eager": "set policy.generation.vllm_cfg.enforce_eager",
    "logprobs_mode": "the trainer needs processed log-probs",
    "generation_config": "what policy.generation says is all",
    "seed": "every sample has its own, from grpo.seed",
    "distributed_executor_backend": "every rank drives its own engine",
    "tensor_parallel_size": "every rank drives its own engine",
    "pipeline_parallel_size": "every rank drives its own engine",
    "data_parallel_size": "every rank drives its own engine",
    "hf_overrides": "set policy.hf_config_overrides, which the trainer reads too",
    "trust_remote_code": "code that comes with a model is never run",
    "enable_sleep_mode": "the engine sleeps while the trainer works",
    "disable_log_stats": "metrics.jsonl has the engine's times",
    "use_tqdm_on_load": "the run's own log says what happens",
}
"""Arguments of `vllm.LLM` that `vllm_kwargs` may not set, and why or where else."""


def check_kwargs(kwargs: Mapping[str, object]) -> None:
    """Refuses arguments that vLLM does not know or that are not left to the user.

    Raises:
        ValueError: there is such an argument, or vLLM is not installed.
    """
    key, known = "policy.generation.vllm_kwargs", known_arguments()
    for name in kwargs:
        if name in OWNED:
            raise ValueError(f"{key}.{name} may not be set here: {OWNED[name]}")
        if name not in known:
            near = get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; remove it"
            raise ValueError(f"{key}.{shorten(name)}: vLLM's EngineArgs has no such field{hint}")


def known_arguments() -> frozenset[str]:
    """The fields of vLLM's EngineArgs, read from its source: to import it takes seconds."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError(
            "policy.generation.backend is vllm, which is not installed; install it, or set hf"
        )
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    [arguments] = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]
    fields = (node.target for node in arguments.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))
