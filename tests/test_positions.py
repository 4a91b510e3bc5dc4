"""Log-probs that depend on the row alone.

Three are held against each other: Hugging Face on a single unpadded row, the FSDP2 backend on rows
alone, padded, beside longer ones and packed, and the engines.
"""

import copy
from typing import Any

import pytest
import torch
from engines import save_tokenizer
from model_cases import (
    HEAD,
    LIMIT,
    MODELS,
    NOT_PACKED,
    POSITIONS,
    alone,
    check_rows,
    distance,
    generation,
    longrope,
    open_trainer,
    padded,
    rope,
    rows,
    same,
    saved,
)
from models import policy_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minirl.backends import (
    check_policy,
    hf_generate,
    hf_model,
    vllm,
)
from minirl.engine import Request, Sampling
from minirl.policy_config import SequencePackingConfig


def test_every_kind_of_positions_is_tried():
    assert {p.split("_")[0] for p in POSITIONS} == {*ROPE_INIT_FUNCTIONS, "default"}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_do_not_depend_on_the_batch(name, solo, tmp_path):
    case = POSITIONS[name]
    asked = rows(case.lengths)
    expected = alone(case.alone, asked)
    model = saved(case.config, tmp_path)
    for packed in (False, True):
        check_rows(open_trainer(model, solo, case.max_model_len, packed=packed), expected, asked)


def test_long_factors_are_not_those_of_a_short_row():
    # Else the cases above could not fail.
    short, long = POSITIONS["longrope"].config, POSITIONS["longrope"].alone
    asked = rows((10,))
    assert (alone(short, asked)[0] - alone(long, asked)[0]).abs().max() > 0.1


def test_a_row_beyond_the_positions_is_refused(solo, tmp_path):
    case = POSITIONS["dynamic_short"]
    backend, state = open_trainer(saved(case.config, tmp_path), solo, case.max_model_len)
    with pytest.raises(ValueError, match=r"17 tokens, but .* hold for 16: lower policy\.max_total"):
        backend.logprobs(state, [padded(rows((17,)))], HEAD, "policy")


REFUSED = {
    # vLLM reads beyond the end of its table there.
    "max_model_len 64 is more than .* 16, and its rope_type 'dynamic'": POSITIONS["dynamic_short"],
    "scale attention by 2, where vLLM takes 1.22474": same(longrope(attention_factor=2.0)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_positions_that_the_engine_does_not_have_are_refused_at_launch(message, tmp_path):
    model = saved(REFUSED[message].config, tmp_path)
    with pytest.raises(ValueError, match=message):
        check_policy(policy_config(model, generation=generation(64)))


def test_an_own_stretch_of_dynamic_positions_is_that_of_vllm():
    found = hf_model.frozen(rope("dynamic", factor=4.0, max_trained_positions=32), 64)
    # theta (4 x 64 / 32 - 3) ** (8 / 6), for heads of 8
    assert found.config.rope_parameters["rope_theta"] == pytest.approx(1e4 * 5 ** (8 / 6))
    found = hf_model.frozen(rope("dynamic", factor=1.0, alpha=100.0), 64)
    assert found.config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": pytest.approx(1e4 * 100 ** (8 / 6)),
    }


# ---- engines ------------------------------------------------------------------------------------


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
    facts = copy.deepcopy(config.to_dict())
    for name in ("short_factor", "long_factor"):
        if name in facts["rope_parameters"]:
            facts["rope_parameters"][name] *= 4
    return type(config).from_dict({**facts, "hidden_size": 128, "head_dim": 32})


ENGINES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "longrope_short"]


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ENGINES)
def test_engine_and_trainer_have_the_positions_of_hugging_face(kind, name, solo, tmp_path):
    case = POSITIONS[name]
    model = saved(wide(case.config), tmp_path)
    save_tokenizer(tmp_path)
    engine = {"hf": hf_generate, "vllm": vllm}[kind].open_engine(
        generation(case.max_model_len), model
    )
    try:
        said = completions(engine, case.max_model_len)
    finally:
        engine.close()
    whole = [prompt + answer for prompt, answer, _ in said]
    expected = alone(wide(case.alone), whole)
    for (prompt, _, logprobs), one in zip(said, expected, strict=True):
        assert (one[len(prompt) - 1 :] - logprobs).abs().max() < 5e-5
    opened = open_trainer(model, solo, case.max_model_len)
    assert distance(opened, padded(whole), expected) < LIMIT


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_a_row_alone(name, solo, tmp_path):
    asked = rows((10, 40, 5))
    expected = alone(MODELS[name], asked)
    model = saved(MODELS[name], tmp_path)
    check_rows(open_trainer(model, solo), expected, asked)
    if name in NOT_PACKED:
        with pytest.raises(
            ValueError, match=r"policy\.model_name: .*(window|softcap|mask|attention of its own)"
        ):
            check_policy(policy_config(model, sequence_packing=SequencePackingConfig(enabled=True)))
    else:
        check_rows(open_trainer(model, solo, packed=True), expected, asked)
