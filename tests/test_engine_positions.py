"""The engines have the positions of Hugging Face on the row alone, and so has the trainer."""

from typing import Any

import pytest
import torch
from engines import save_tokenizer
from row_cases import (
    LIMIT,
    POSITIONS,
    alone,
    distance,
    generation,
    open_trainer,
    padded,
    rows,
    saved,
)

from minirl.backends import hf_generate, vllm
from minirl.engine import Request, Sampling
from minirl.parallel import world


def completions(engine: Any, room: int) -> list[list[Any]]:
    """Prompts and what the engine says about its answers: [prompt, answer, log-probs]."""
    prompts = rows((3, min(10, room - 8), room - 8))
    asked = [Request(tuple(p), i) for i, p in enumerate(prompts)]
    sampling = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=())
    answers = engine.generate(asked, sampling)
    return [
        [p, list(a.tokens), torch.tensor(a.logprobs)] for p, a in zip(prompts, answers, strict=True)
    ]


def wide(config: Any) -> Any:
    """The same with heads of 32, the least that vLLM has a CPU kernel for."""
    facts = config.to_dict()
    rope = facts["rope_parameters"]
    longer = {n: 4 * rope[n] for n in ("short_factor", "long_factor") if n in rope}
    facts |= {"hidden_size": 128, "head_dim": 32, "rope_parameters": {**rope, **longer}}
    return type(config).from_dict(facts)


ENGINES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "longrope_short"]


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ENGINES)
def test_engine_and_trainer_have_the_positions_of_hugging_face(kind, name, tmp_path):
    case = POSITIONS[name]
    model = saved(wide(case.config), tmp_path)
    save_tokenizer(tmp_path)
    module = {"hf": hf_generate, "vllm": vllm}[kind]
    with world() as axis:
        engine = module.open_engine(generation(case.max_model_len), model)
        said = completions(engine, case.max_model_len)
        whole = [prompt + answer for prompt, answer, _ in said]
        expected = alone(wide(case.alone), whole)
        opened = open_trainer(model, axis, case.max_model_len)
        assert distance(opened, padded(whole), expected) < LIMIT
        engine.close()
    for (prompt, _, logprobs), one in zip(said, expected, strict=True):
        assert (one[len(prompt) - 1 :] - logprobs).abs().max() < 5e-5
