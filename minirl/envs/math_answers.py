r"""Whether two answers of mathematics are equal, and which references can be judged at all.

`math-verify` reads single expressions. Around it, both answers are brought into one typography
(`minirl.envs.math_text`) and taken apart: lists, tuples, sets, intervals, inequalities, names,
units. Words, option letters, numbers with a base, dates and times are compared letter by letter,
numbers exactly, the rest by algebra. What cannot be read is an error, never a guess.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from minirl.envs.math_text import find_answer, last_box, typeset
from minirl.envs.math_values import Value, expression, is_known, read_value, same_value


class _Answer(NamedTuple):
    kind: str
    """`value`, `list`, `union`, a relation's sign, or a pair of brackets such as `(]`."""
    items: tuple["_Answer", ...] = ()
    value: Value = Value("")
    """A value's own; of a relation the difference of its sides."""
    name: str = ""
    """What stands left of `=` or is bounded: x of `x = 5` and `x < 5`."""


def is_equal(reference: str, answer: str) -> bool:
    """Whether `answer` says what `reference` says.

    Raises:
        ValueError: one of them cannot be read.
    """
    return _same(_read(typeset(reference)), _read(typeset(answer)))


def judge(completion: str, reference: str) -> bool:
    """Whether the answer that `completion` states is the reference; False if it states none.

    Raises:
        ValueError: they cannot be compared.
    """
    answer = find_answer(completion)
    return answer is not None and is_equal(reference, answer)


def check_reference(reference: str) -> None:
    """Refuses a reference that no answer, or not even the same text, would be judged equal to.

    Raises:
        ValueError: says why.
    """
    if "####" in reference:
        raise ValueError("it holds ####, as GSM8K's solutions do")
    if last_box(reference) is not None:
        raise ValueError(r"it holds a \boxed{}")
    if reference.strip().lower() in ("nan", "null"):
        raise ValueError("it is how a missing value is spelled")
    if not _is_known(_read(typeset(reference))):
        raise ValueError("it is not one mathematical expression, word or option letter")
    if not judge(f"\\boxed{{{reference}}}", reference):
        raise ValueError("it is not judged equal to itself")


def reference_in(text: str, form: str) -> str:
    r"""The reference in a column of the form `plain`, `gsm8k` (after ####) or `boxed`.

    Raises:
        ValueError: there is none.
    """
    if form == "gsm8k":
        _, mark, answer = text.rpartition("####")
        if not mark:
            raise ValueError("it holds no ####")
        return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())
    box = last_box(text) if form == "boxed" else text
    if box is None:
        raise ValueError(r"it holds no complete \boxed{}")
    return box.strip()


# Taking answers apart

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = ("(", "[", "{", r"\{", r"\begin"), (")", "]", "}", r"\}", r"\end")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_REALS = _Answer(
    "()", (_Answer("value", value=Value(r"-\infty")), _Answer("value", value=Value(r"\infty")))
)
_BUILDER = re.compile(r"\\\{\s*\w\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:](.*)\\\}")
_ELEMENT = re.compile(r"\s*[A-Za-z]\s*\\in(?![a-z])(.*)")
_NAME = re.compile(
    r"(?:\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|angle|triangle|Delta)(?![a-z])"
    r"|\\(?:text|overline|vec|hat|bar|overrightarrow)\{[^{}]*\}|(?<=[A-Za-z])\^\{-1\}(?=\()"
    r"|[A-Za-z]\([\w ,+-]*\)|[A-Za-z]|_\{?\w+\}?|[(),|' ])+"
)


def _split(text: str, *separators: str) -> list[str]:
    """The parts of `text` outside brackets, with the separators between them."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth < 0:
            break
        if depth == 0 and token in separators:
            parts += [token, ""]
        else:
            parts[-1] += token
    if depth:
        raise ValueError(f"{text!r} has brackets without their other half")
    return parts


def _read(text: str) -> _Answer:
    text = text.strip()
    if special := _BUILDER.fullmatch(text) or _ELEMENT.fullmatch(text):
        return _read(special[1])
    if re.sub(r"\s", "", text) in (r"\mathbb{R}", r"(-\infty,\infty)"):
        return _REALS
    for kind, separators in (("list", ",;"), ("union", (r"\cup",))):
        parts = _split(text, *separators)[::2]
        if len(parts) > 1:
            return _Answer(kind, _flat(parts))
    if len(sides := _split(text, "=", r"\ne", *_FLIPPED)) > 1:
        return _relation([side.strip() for side in sides])
    if (inside := _inside(text)) is not None:
        return inside
    if re.search(r"\\(?:pm|mp)(?![a-z])", text):
        if len(re.findall(r"\\pm(?![a-z])", text)) > 1:
            raise ValueError(f"{text!r} has several signs to choose")
        other = {r"\pm": r"\mp", r"\mp": r"\pm"}
        mirrored = re.sub(r"\\[pm][mp](?![a-z])", lambda m: other[m[0]], text)
        signs = (re.sub(r"\\mp(?![a-z])", "-", t) for t in (text, mirrored))
        return _Answer("list", _flat([re.sub(r"\\pm(?![a-z])", "+", t) for t in signs]))
    return _Answer("value", value=read_value(text))


def _flat(parts: Sequence[str]) -> tuple[_Answer, ...]:
    read = [_read(part) for part in parts]
    return tuple(i for item in read for i in (item.items if item.kind == "list" else (item,)))


def _inside(text: str) -> _Answer | None:
    """A tuple, interval or set; what stands in superfluous brackets; None without brackets."""
    match = re.fullmatch(r"(\(|\[|\{|\\\{)(.*?)(\)|\]|\\\}|\})", text, re.DOTALL)
    try:
        parts = _split(match[2], ",", ";")[::2] if match else []
    except ValueError:  # The first bracket closes before the last: (x+1)(x-1).
        return None
    if match is None:
        return None
    brackets = (match[1] + match[3]).replace("\\", "")
    if len(parts) == 1 and (match[1] != r"\{"):
        return _read(match[2]) if brackets in ("()", "[]", "{}") else None
    if brackets == "{}":
        return _Answer("{}", _flat(parts))
    return _Answer(brackets, tuple(_read(part) for part in parts))


def _is_name(text: str) -> bool:
    return (
        bool(_NAME.fullmatch(text))
        and re.search(r"[A-Za-z]", text) is not None
        and text not in "ei"
    )


def _relation(sides: list[str]) -> _Answer:
    """An equation's value under its name, the interval of an inequality, or the relation itself."""
    terms, signs = sides[::2], sides[1::2]
    if not all(terms):
        raise ValueError(f"{' '.join(sides)!r} lacks a side")
    if signs[0] in (">", r"\ge"):
        terms, signs = terms[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
    if set(signs) == {"="}:
        if _is_name(terms[-1]) and not _is_name(terms[0]):
            terms.reverse()
        name, value = terms[0] if _is_name(terms[0]) else "", _read(terms[-1])
        if all(_is_name(term) or _same(_read(term), value) for term in terms[bool(name) : -1]):
            items = tuple(item._replace(name=name) for item in value.items)
            return (
                value._replace(items=items) if value.kind == "list" else value._replace(name=name)
            )
    elif (bounds := _bounds(terms, signs)) is not None:
        return bounds
    if len(signs) > 1:
        raise ValueError(f"{' '.join(sides)!r} is neither true nor a definition")
    return _Answer(signs[0], value=Value(f"({terms[0]})-({terms[1]})"))


def _bounds(terms: list[str], signs: list[str]) -> _Answer | None:
    """The interval that `x < 5`, `5 < x` or `1 < x < 5` says; the two of `x != 5`."""
    if _is_name(terms[0]):
        terms, signs = [r"-\infty", *terms], ["<", *signs]
    if _is_name(terms[-1]):
        terms, signs = [*terms, r"\infty"], [*signs, "<"]
    if len(terms) != 3 or not _is_name(terms[1]):
        return None
    low, high, name = _read(terms[0]), _read(terms[2]), terms[1]
    if r"\ne" in signs:
        value = high if signs[1] == r"\ne" else low
        below, above = (_REALS.items[0], value), (value, _REALS.items[1])
        halves = tuple(_Answer("()", ends, name=name) for ends in (below, above))
        return _Answer("union", halves) if "<" in signs else None
    if not set(signs) <= {"<", r"\le"}:
        return None
    brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
    return _Answer(brackets, (low, high), name=name)


# Comparing

_ALIKE = ({"list", "()"}, {"list", "{}"}, {"list", "union"})


def _same(gold: _Answer, said: _Answer) -> bool:
    if gold.name and said.name and gold.name.replace(" ", "") != said.name.replace(" ", ""):
        return False
    kinds = {gold.kind, said.kind}
    if "=" in kinds and kinds <= {"=", "value"}:
        gold, said = (_equation(a) if a.name else a for a in (gold, said))
    if gold.kind == said.kind and not gold.items and not said.items:
        return (
            same_value(gold.value, said.value)
            if gold.kind == "value"
            else _same_relation(gold, said)
        )
    if kinds == {"{}", "value"}:
        gold, said = (a.items[0] if len(a.items) == 1 else a for a in (gold, said))
        return gold.kind == said.kind and _same(gold, said)
    if kinds == {"{}"}:
        pairs = ((gold.items, said.items), (said.items, gold.items))
        return all(any(_same(x, y) for y in other) for one, other in pairs for x in one)
    if (len(kinds) > 1 and kinds not in _ALIKE) or len(gold.items) != len(said.items):
        return False
    if "list" in kinds and any(a.kind == "()" and a.name.isalnum() for a in (gold, said)):
        return False
    several = [len({item.name for item in a.items}) > 1 for a in (gold, said)]
    if "{}" in kinds and several[0] != several[1]:
        return False
    if kinds <= {"list", "{}", "union"} and several[0] == several[1]:
        return _same_items(gold.items, list(said.items))
    return all(_same(x, y) for x, y in zip(gold.items, said.items, strict=True))


def _same_items(gold: Sequence[_Answer], said: list[_Answer]) -> bool:
    """Whether both hold the same, each as often, in any order."""
    for item in gold:
        match = next((other for other in said if _same(item, other)), None)
        if match is None:
            return False
        said.remove(match)
    return True


def _equation(answer: _Answer) -> _Answer:
    return _Answer("=", value=Value(f"({answer.name})-({answer.value.text})"))


def _same_relation(gold: _Answer, said: _Answer) -> bool:
    """Whether the differences of the sides have a constant ratio, positive under an inequality."""
    differences = expression(gold.value.text), expression(said.value.text)
    if not differences[0].free_symbols:
        raise ValueError(f"{gold.value.text} {gold.kind} 0 holds nothing unknown")
    ratio = (differences[0] / differences[1]).simplify()
    return bool(
        ratio.is_number
        and ratio.is_finite
        and (ratio != 0 if gold.kind in ("=", r"\ne") else ratio > 0)
    )


def _is_known(answer: _Answer) -> bool:
    """Whether a reference consists of expressions, known words and known units."""
    return is_known(answer.value) and all(map(_is_known, answer.items))
