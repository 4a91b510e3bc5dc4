"""Positions whose factors transformers chooses by the batch are those of the engine, on any rows.

Hugging Face runs each row alone and unpadded; the FSDP2 backend runs it alone, padded, beside
longer ones, packed, and alone again.
"""

import pytest
from models import policy_config
from row_cases import (
    HEAD,
    POSITIONS,
    alone,
    check_rows,
    generation,
    longrope,
    open_trainer,
    padded,
    rope,
    rows,
    same,
    saved,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minirl.backends import check_policy, hf_generate, hf_model
from minirl.engine import Request, Sampling


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
    engine = hf_generate.open_engine(generation(case.max_model_len), str(tmp_path))
    with pytest.raises(ValueError, match=r"10 prompt tokens .* do not fit max_model_len 16"):
        engine.generate([Request((7,) * 10, 0)], Sampling(1.0, 8, ()))


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
