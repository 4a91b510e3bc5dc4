"""The oracle engine: one request at a time through a plain Hugging Face model.

Slow and easy to check. Every request has its own forward passes and its own generator, so its
completion cannot depend on the others. It serves as the reference for vLLM in tests, and as the
engine where vLLM is not installed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.config import GenerationConfig
from minirl.engine import Engine, Request, Sampling, check_logprobs, check_requests
from minirl.types import Completion


def open_engine(cfg: GenerationConfig, model_path: str) -> Engine:
    """An engine with the weights of `model_path` as version 0, on the current device.

    `sleep_` and `wake_` do nothing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtype: torch.dtype = getattr(torch, cfg.vllm_cfg.precision)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval()
    tokenizer: Any = None
    version = 0

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        nonlocal tokenizer
        check_requests(
            requests,
            sampling,
            vocabulary_size=model.config.vocab_size,
            max_model_len=cfg.vllm_cfg.max_model_len,
        )
        if sampling.stop_strings and tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model_path)
        completions = [_sample(model, tokenizer, request, sampling, version) for request in requests]
        for index, completion in enumerate(completions):
            check_logprobs(index, completion.logprobs, len(completion.tokens))
        return completions

    def load_(weights: Iterable[tuple[str, Tensor]], new_version: int) -> None:
        nonlocal version
        _load_(model, weights)
        version = new_version

    def nothing() -> None:
        pass

    return Engine(generate, load_, nothing, nothing, nothing)


@torch.no_grad()
def _sample(
    model: Any, tokenizer: Any, request: Request, sampling: Sampling, version: int
) -> Completion:
    """Samples one completion with a key-value cache of one row."""
    generator = torch.Generator().manual_seed(request.seed)
    inputs = torch.tensor([request.tokens], device=model.device)
    cache: Any = None
    tokens: list[int] = []
    logprobs: list[float] = []
    stopped = False
    while not stopped and len(tokens) < sampling.max_tokens:
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token, logprob = _draw(output.logits[0, -1].float().cpu(), sampling, generator)
        tokens.append(token)
        logprobs.append(logprob)
        stopped = token in sampling.stop_token_ids or _ends(tokenizer, tokens, sampling)
        inputs = torch.tensor([[token]], device=model.device)
    return Completion(tuple(tokens), tuple(logprobs), not stopped, version)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Draws a token from softmax(logits / temperature), and its log-prob.

    An exponential race: argmax_v p_v / e_v with e_v ~ Exp(1) is distributed as p. vLLM draws the
    same numbers in the same order on a CPU, so equal seeds give equal tokens there.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    scaled = logits / sampling.temperature
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    token = int((scaled.softmax(-1) / noise).argmax())
    return token, float(scaled.log_softmax(-1)[token])


def _ends(tokenizer: Any, tokens: Sequence[int], sampling: Sampling) -> bool:
    """Whether the text of `tokens`, special tokens included, contains a stop string."""
    if not sampling.stop_strings:
        return False
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return any(stop in text for stop in sampling.stop_strings)


@torch.no_grad()
def _load_(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into the parameter of its name.

    Raises:
        ValueError: a name is unknown, a shape differs, or a parameter was not given.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    missing = set(parameters)
    for name, tensor in weights:
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ValueError(
                f"weight {name!r} of shape {tuple(tensor.shape)} does not belong to the engine's "
                "model; export Hugging Face names and full tensors of the same architecture"
            )
        parameters[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"weights not given to the engine: {sorted(missing)}")
