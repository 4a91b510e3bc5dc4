"""Reference answers: read from a dataset's column, and checked before anything is trained on them.

A reference that no answer can equal teaches nothing and looks like a hard problem. So each must be
judged equal to itself, in a worker of `minirl.envs.pool`, under the deadline of training.
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal

from minirl.config.data import DatasetConfig
from minirl.config.run import EnvConfig
from minirl.envs.math_answers import reference_in
from minirl.envs.pool import open_pool, run_

_NUM_SHOWN = 3


def references(
    values: Sequence[tuple[int, object]], cfg: DatasetConfig, name: str, env: EnvConfig
) -> list[str]:
    """The reference answers in the column's values, each with its row's number, as text.

    Raises:
        ValueError: some cannot be used; it says how many, shows the first, and what to do.
    """
    texts, why = list[str](), dict[int, str]()
    for row, value in values:
        try:
            texts.append(_text(value, cfg.output_form))
        except ValueError as error:
            texts.append("")
            why[row] = str(error)
    faults = _faults(texts, env)
    for (row, _), text in zip(values, texts, strict=True):
        if row not in why and text in faults:
            why[row] = faults[text]
    if why:
        shown = [(row, value) for row, value in values if row in why][:_NUM_SHOWN]
        shown_faults = "; ".join(f"row {row} holds {_excerpt(v)}: {why[row]}" for row, v in shown)
        raise ValueError(
            f"{name}.output_key={cfg.output_key!r}, output_form={cfg.output_form!r}: {len(why)} "
            f"of {len(values)} reference answers cannot be judged: {shown_faults}. Set "
            f"{name}.output_form to gsm8k (the answer follows the last ####), boxed (it is the "
            "last \\boxed{}) or plain (it is the whole text, such as 72 or \\frac{1}{2}); repair "
            "or leave out the other rows"
        )
    return texts


def _text(value: object, form: str) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("it is not a finite number")
        # All its digits and no exponent: 1e-05 would be read as e - 5.
        value = format(Decimal(repr(value)), "f")
    return reference_in(str(value), form)


def _faults(texts: Sequence[str], env: EnvConfig) -> dict[str, str]:
    """Why texts cannot be references, by text. Integers can: no process is started for them."""
    asked = [t for t in dict.fromkeys(texts) if not re.fullmatch(r"-?\d{1,15}", t)]
    if not asked:
        return {}
    with open_pool(
        "minirl.envs.verifiers:reference_checker",
        {},
        num_workers=env.num_workers,
        timeout_s=env.timeout_s,
        memory_gb=env.memory_gb,
    ) as pool:
        outcomes = run_(pool, [(text,) for text in asked])
    reasons = {
        "timed_out": f"judging it takes more than env.timeout_s={env.timeout_s} s",
        "died": "judging it ends the process that does, or takes more than env.memory_gb",
    }
    return {
        text: reasons.get(outcome.kind)
        or outcome.detail.strip().splitlines()[-1].partition(": ")[2]
        for text, outcome in zip(asked, outcomes, strict=True)
        if outcome.kind != "returned"
    }


def _excerpt(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:30]} ... {shown[-45:]}"
