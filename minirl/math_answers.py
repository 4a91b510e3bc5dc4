r"""Whether two answers of mathematics are equal, and which references can be judged at all.

`math-verify` reads single expressions. Around it, both answers are brought into one typography
(`minirl.math_text`) and taken apart: lists, tuples, sets, intervals, inequalities, names, units.
Words, option letters, numbers with a base, dates and times are compared letter by letter, numbers
exactly, the rest by algebra. What cannot be read is an error, never a guess.
"""

import re
import string
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, cast

from minirl.math_text import find_answer, last_box, typeset


class _Answer(NamedTuple):
    kind: str
    """`value`, `list`, `union`, a relation's sign, or a pair of brackets such as `(]`."""
    items: tuple["_Answer", ...] = ()
    text: str = ""
    """Of a value; of a relation the difference of its sides."""
    unit: str = ""
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
_REALS = _Answer("()", (_Answer("value", text=r"-\infty"), _Answer("value", text=r"\infty")))
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
    if r"\pm" in text or r"\mp" in text:
        if len(re.findall(r"\\pm(?![a-z])", text)) > 1:
            raise ValueError(f"{text!r} has several signs to choose")
        other = {r"\pm": r"\mp", r"\mp": r"\pm"}
        mirrored = re.sub(r"\\[pm][mp](?![a-z])", lambda m: other[m[0]], text)
        signs = (re.sub(r"\\mp(?![a-z])", "-", t) for t in (text, mirrored))
        return _Answer("list", _flat([re.sub(r"\\pm(?![a-z])", "+", t) for t in signs]))
    return _value(text)


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
    return bool(_NAME.fullmatch(text)) and re.search(r"[A-Za-z]", text) is not None and text not in "ei"


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
            return value._replace(items=items) if value.kind == "list" else value._replace(name=name)
    elif (bounds := _bounds(terms, signs)) is not None:
        return bounds
    if len(signs) > 1:
        raise ValueError(f"{' '.join(sides)!r} is neither true nor a definition")
    return _Answer(signs[0], text=f"({terms[0]})-({terms[1]})")


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


# Values

_WORDS = r"[A-Za-z]+(?:(?: |'|(?<=[a-z]{2})-(?=[a-z]{2}))[A-Za-z]+)*"
_LITERAL = re.compile(
    rf"(?![b-df-hj-np-tv-z]{{2,3}}$)(?:[A-Z]|(?=.*[A-Za-z]\W*[A-Za-z]){_WORDS}"
    r"|[0-9A-Fa-f]+_\{?\w+\}?|\d+(?::\d+)+|\d+([-/.])\d+\1\d+"
    r"|.*(?:[A-Z]{2}|'|\\ldots|\^\{?(?:T(?![a-z])|\\top)|\\overline\{[A-Z]"
    r"|\\(?:angle|triangle|over(?:left)?(?:right)?arrow|parallel|perp|cong|sim|equiv|p?mod)).*)"
)
"""What is compared letter by letter: two of these are never equal by algebra."""
_ANSWERS = ("yes", "no", "true", "false", "none")
_OPTION = re.compile(r"\(([A-Z])\)(?!.*\b[A-J]\b).+|([A-Z])[.:](?!.*\b[A-J]\b)\s.+")
_SPELLINGS = (
    "m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|"
    "in inch inche|ft foot feet|yd yard|mi mile|g gram|kg kilogram|mg milligram|lb pound|oz ounce|"
    "s sec second|min minute|h hr hour|day|week|month|year yr|l liter litre|ml milliliter|"
    "dollar usd buck|cent|euro|degree deg|degreec|degreef|rad radian|unit|am|pm|km/h kmh kmph|"
    "mi/h mph|/ per|square sq|cubic cu|sterling|rupee|yen"
)
_UNITS = {word: words.split()[0] for words in _SPELLINGS.split("|") for word in words.split()}
_UNIT = re.compile(
    r"(.*?(?:[\d)}]|\\pi))((?:\s*(?:%|/|[-.]|\^\{?-?\d\}?|\\text\{[^{}]*\}|(?<![A-Za-z\\])[A-Za-z]+"
    r"|\\frac\{(?:\\text\{)?[ A-Za-z]+\}?\}\{(?:\\text\{)?[ A-Za-z]+\}?\}))+)"
)
_NO_UNIT = re.compile(
    r"(?i)\b(?:or|and|not|no|to|if|than|times|more|less|plus|minus|over|squared|cubed|factorial|mod|"
    r"hal(?:f|ves)|\w*(?:third|quarter|fourth|fifth|th)s?|hundreds?|thousands?|dozens?|pairs?|scores?)\b"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "max", "min", "gcd", "lcm", "det")


def _value(text: str) -> _Answer:
    """One expression and its unit."""
    if not text:
        raise ValueError("an expression is missing")
    text = re.sub(r"\s*\^\\circ\s*(?:\\text\{\s*)?([CF]?)\s*\}?$", r"\\text{degree\1}", text)
    if found := _UNIT.fullmatch(text):
        value, unit = found[1], _unit(found[1], found[2])
        if unit and not re.search("[A-Za-z]", re.sub(r"\\(?:[dt]?frac|sqrt|pi|cdot|times)", "", value)):
            return _Answer("value", text=value, unit=unit)
    angle = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ|(\d+)\\text\{degree\}", r"(\\frac{\1\2\\pi}{180})", text)
    return _Answer("value", text=angle.strip())


def _unit(value: str, phrase: str) -> str:
    """The unit's one spelling; with `?` before it if it is an unknown word; empty if it is none."""
    flat = re.sub(r"\\frac\{(.*?)\}\{(?=[^{}]*\}|\\text)", r"\1/", phrase)
    words = re.findall(r"[A-Za-z]+|/|%|\d", re.sub(r"\\text", " ", flat))
    spelled = [_UNITS.get(w.lower(), _UNITS.get(w.lower().rstrip("s"), "")) for w in words]
    if words == ["%"]:
        return "%"
    known = all(new or word.isdigit() for new, word in zip(spelled, words, strict=True))
    plain = re.findall(r"[A-Za-z]+", re.sub(r"\\(?:text|frac)\{[^{}]*\}(?:\{[^{}]*\})?", "", phrase))
    named = any(map(str.isalpha, words))
    if any(len(word) == 1 for word in plain) and not (phrase[0] == " " and _decimal(value) is not None):
        return ""
    if not named or "%" in words or _NO_UNIT.search(flat):
        return ""
    if known:
        joined = "".join(new or word for new, word in zip(spelled, words, strict=True))
        return re.sub(r"(square|cubic)(\w+)", lambda m: m[2] + {"s": "2", "c": "3"}[m[1][0]], joined)
    if plain and (phrase[0].isalpha() or max(map(len, plain)) < 3 or _decimal(value) is None):
        return ""
    return "?" * bool(plain) + "".join(word.lower().rstrip("s") for word in words)


def _is_literal(text: str) -> bool:
    return bool(re.fullmatch(r"\\text\s*\{[^{}]*[A-Za-z][^{}]*\}", text) or _LITERAL.fullmatch(_plain(text)))


def _plain(text: str) -> str:
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()


def _letters(text: str) -> str:
    """What is compared of a literal: no spaces, braces or full stops, no brackets of an option."""
    return re.sub(r"^\(([A-Z])\)$", r"\1", re.sub(r"[\s{}]|\.(?!\d)", "", _plain(text)))


def _is_prose(text: str) -> bool:
    words = _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}", "", text))
    return r"\text" in text or any(w not in _FUNCTIONS and w not in string.ascii_lowercase for w in words)


def _is_known(answer: _Answer) -> bool:
    """Whether a reference consists of expressions, known words and known units."""
    if answer.kind == "value" and not _is_literal(answer.text) and _is_prose(answer.text):
        return False
    return "?" not in answer.unit and all(map(_is_known, answer.items))


def _decimal(text: str) -> Fraction | None:
    number = re.fullmatch(r"([+-]?)\s*(\d+(?:\.\d*)?)", text)
    return Fraction(number[1] + number[2]) if number else None


_UNREADABLE = re.compile(r"\d\s+\d|\d\.|\.\d|(?<=\d)\{|[?'\"#@$]|\\text|\\ldots")
_SMALL = 1e-40

# Comparing

_ALIKE = ({"list", "()"}, {"list", "{}"}, {"list", "union"})


def _same(gold: _Answer, said: _Answer) -> bool:
    if gold.name and said.name and gold.name.replace(" ", "") != said.name.replace(" ", ""):
        return False
    kinds = {gold.kind, said.kind}
    if "=" in kinds and kinds <= {"=", "value"}:
        gold, said = (_equation(a) if a.name else a for a in (gold, said))
    if gold.kind == said.kind and not gold.items and not said.items:
        return _same_value(gold, said) if gold.kind == "value" else _same_relation(gold, said)
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
    return _Answer("=", text=f"({answer.name})-({answer.text})")


def _same_relation(gold: _Answer, said: _Answer) -> bool:
    """Whether the differences of the sides have a constant ratio, positive under an inequality."""
    import sympy

    ratio = sympy.simplify(_expression(gold.text) / _expression(said.text))
    return bool(ratio.is_number and ratio.is_finite and (ratio != 0 if gold.kind in ("=", r"\ne") else ratio > 0))


def _same_value(gold: _Answer, said: _Answer) -> bool:
    units = {gold.unit.strip("?"), said.unit.strip("?")} - {""}
    if _is_literal(gold.text):
        ours, theirs = _letters(gold.text), _letters(said.text)
        if len(ours) == 1 and (option := _OPTION.fullmatch(_plain(said.text))):
            theirs = option[1] or option[2]
        if re.search("[a-z]", ours) or ours.lower() in _ANSWERS:
            ours, theirs = ours.lower(), theirs.lower()
        return ours == theirs and len(units) < 2
    if _is_prose(said.text) or (_is_literal(said.text) and not re.fullmatch("[a-z]{2}", said.text)):
        return False
    if "%" in (gold.unit, said.unit) and gold.unit != said.unit:
        return not (gold.unit and said.unit) and _same_share(gold, said)
    return len(units) < 2 and _equal(gold.text, said.text)


def _same_share(gold: _Answer, said: _Answer) -> bool:
    """A percentage against a number: 50% is 0.5; and 50, where the question asks for percent."""
    share, number = (gold, said) if gold.unit else (said, gold)
    value = _decimal(share.text)
    bare = value is not None and abs(value) > 1 and _equal(share.text, number.text)
    return bare or _equal(rf"\frac{{{share.text}}}{{100}}", number.text)


def _equal(gold: str, said: str) -> bool:
    """Whether two expressions are equal: exactly, but that six right decimals stand for all."""
    numbers = _decimal(gold), _decimal(said)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    capitals = [set(re.findall(r"[A-Z]", re.sub(r"\\[a-zA-Z]+", "", text))) for text in (gold, said)]
    return capitals[0] == capitals[1] and _equal_expressions(gold, said)


def _equal_expressions(gold: str, said: str) -> bool:
    import sympy
    from math_verify import verify

    a, b = _expression(gold), _expression(said)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_is_zero, (a - b).doit()))
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return a == b or _is_zero(a - b) or _rounds_to(a, said) or _rounds_to(b, gold)
    sets = isinstance(a, sympy.Set) and isinstance(b, sympy.Set)
    return bool(a == b or (sets and verify(a, b, timeout_seconds=None)))


def _is_zero(difference: Any) -> bool:
    """Sixty digits decide where there are no unknowns and they show a difference, algebra else."""
    import sympy

    difference = difference.doit()
    if difference.has(sympy.zoo, sympy.nan, sympy.oo):
        return False
    if difference.is_Rational:
        return bool(difference == 0)
    if difference.is_number and abs(difference.evalf(60)) > _SMALL:
        return False
    return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


def _rounds_to(exact: Any, written: str) -> bool:
    """Whether `written` is `exact` to at least six decimals, six of them significant."""
    import sympy

    number, decimals = _decimal(written), written.partition(".")[2]
    if number is None or len(decimals) < 6 or abs(number) * 10 ** len(decimals) < 10**5:
        return False
    gap = exact - sympy.Rational(number.numerator, number.denominator)
    return bool(gap.is_number and abs(gap.evalf(60)) * 2 * 10 ** len(decimals) <= 1)


def _as_fraction(decimal: re.Match[str]) -> str:
    return rf"(\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}})"


@lru_cache(maxsize=4096)
def _expression(text: str) -> Any:
    """The one expression that `math-verify` reads in `text`, with decimals as fractions.

    Raises:
        ValueError: it reads none.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    exact = re.sub(r"(?<![\d.])(\d+)\.(\d+)(?![\d.])", _as_fraction, text)
    # It reads 5(2) as 5 + 2.
    exact = re.sub(r"((?<![_\d.}A-Za-z])\d+|\))\s*(?=\()|(\))\s*(?=\d)", r"\1\2\\cdot ", exact)
    config = NormalizationConfig(malformed_operators=True, boxed="last")
    found: list[Any] = []
    if not _UNREADABLE.search(exact):
        found = parse(
            f"\\boxed{{{exact}}}",
            [LatexExtractionConfig(normalization_config=config)],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=0,
        )
    if len(found) != 1:
        raise ValueError(f"{text!r} is not one mathematical expression")
    # It marks symbols as real or not by what else stands in the text.
    names = {s: sympy.I if s.name == "i" else sympy.Symbol(s.name, real=True) for s in found[0].free_symbols}
    return found[0].xreplace(names)
