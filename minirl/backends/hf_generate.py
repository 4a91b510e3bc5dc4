"""The oracle engine: one request at a time through a plain Hugging Face model.

Slow and easy to check. Every request has its own forward passes and its own generator, so its
completion cannot depend on the others. It serves as the reference for vLLM in tests, and as the
engine where vLLM is not installed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from minirl.backends.hf_model import load_options
from minirl.config.policy import GenerationConfig
from minirl.engine import Engine, Request, Sampling, check_logprobs, check_requests
from minirl.types import Completion

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""What checkpoints call the weights of one expert."""
TextOf: TypeAlias = Callable[[Sequence[int]], str]


def open_engine(cfg: GenerationConfig, model_path: str, *, tokenizer: str | None = None) -> Engine:
    """An engine with the weights of `model_path` as version 0, on the current device.

    `tokenizer` (default: the model's) only serves stop strings. `sleep_` and `wake_` do nothing.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    dtype: torch.dtype = getattr(torch, cfg.vllm_cfg.precision)
    max_model_len = cfg.vllm_cfg.max_model_len
    options, longest = load_options(model_path, max_model_len)
    room = max_model_len if longest is None else min(max_model_len, longest)
    model = cast("Any", AutoModelForCausalLM).from_pretrained(model_path, dtype=dtype, **options)
    model.to(device).eval()
    text_of = _decoder(tokenizer or model_path)
    version = 0

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        check_requests(
            requests,
            sampling,
            vocabulary_size=model.config.vocab_size,
            max_model_len=room,
        )
        completions = [_sample(model, text_of, r, sampling, version) for r in requests]
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


def _decoder(tokenizer: str) -> TextOf:
    """Renders tokens, special ones included. The tokenizer is loaded when it is first needed."""

    @cache
    def load() -> Any:
        from transformers import AutoTokenizer

        return cast("Any", AutoTokenizer).from_pretrained(tokenizer)

    def text_of(tokens: Sequence[int]) -> str:
        text: str = load().decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    return text_of


@torch.no_grad()
def _sample(
    model: Any, text_of: TextOf, request: Request, sampling: Sampling, version: int
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
        stopped = token in sampling.stop_token_ids or (
            bool(sampling.stop_strings)
            and any(stop in text_of(tokens) for stop in sampling.stop_strings)
        )
        inputs = torch.tensor([[token]], device=model.device)
    return Completion(tuple(tokens), tuple(logprobs), not stopped, version)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Draws a token from softmax(logits / temperature), and its log-prob.

    An exponential race: argmax_v p_v / e_v with e_v ~ Exp(1) is distributed as p. vLLM draws the
    same numbers in the same order on a CPU, so equal seeds give equal tokens there.
    """
    if sampling.temperature == 0:
        scaled, token = logits, int(logits.argmax())
    else:
        scaled = logits / sampling.temperature
        noise = torch.empty_like(scaled).exponential_(generator=generator)
        token = int((scaled.softmax(-1) / noise).argmax())
    # In float32 torch's own is 6e-6 too large at a vocabulary of 49,152 on a CPU.
    return token, float(scaled.double().log_softmax(-1)[token])


@torch.no_grad()
def _load_(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into the parameter of its name, or an expert's into its part of one.

    Raises:
        ValueError: a name is unknown, a shape differs, or a parameter was not given.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    missing = {name: p.numel() for name, p in parameters.items()}
    for name, tensor in weights:
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        owner, place = _place(parameters, name)
        if place is None or place.shape != tensor.shape:
            raise ValueError(
                f"weight {name!r} of shape {tuple(tensor.shape)} does not belong to the engine's "
                "model; export Hugging Face names and full tensors of the same architecture"
            )
        place.copy_(tensor)
        missing[owner] -= tensor.numel()
    left = sorted(name for name, numbers in missing.items() if numbers)
    if left:
        raise ValueError(f"weights not given to the engine: {left}")


def _place(parameters: Mapping[str, Tensor], name: str) -> tuple[str, Tensor | None]:
    """The parameter that a weight belongs to, and the part of it that it is.

    transformers holds the experts of a mixture in two tensors, checkpoints one by one.
    """
    found = EXPERT.fullmatch(name)
    if found is None:
        return name, parameters.get(name)
    experts, number, part = found.groups()
    owner = f"{experts}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    whole = parameters.get(owner)
    if whole is None or int(number) >= len(whole):
        return owner, None
    own, half = whole[int(number)], whole.shape[1] // 2
    return owner, {"gate": own[:half], "up": own[half:], "down": own}[part]
