r"""Single values of mathematics: an expression and its unit, or words, and whether two are equal.

Words, option letters, numbers with a base, dates and times are compared letter by letter, numbers
exactly, the rest by algebra on what `math-verify` reads. What cannot be read is an error.
"""

import re
import string
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

Expression: TypeAlias = Any
"""What `math-verify` reads: an object of sympy, which has no types."""


class Value(NamedTuple):
    """An expression in the typography of `minirl.envs.math_text`, and its unit."""

    text: str
    unit: str = ""
    """In one spelling, such as `km/h`; with `?` before it if it is an unknown word."""


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
    r"(?i)\b(?:or|and|not|no|to|if|than|times|more|less|plus|minus|over|squared|cubed|factorial|"
    r"mod|hal(?:f|ves)|\w*(?:third|quarter|fourth|fifth|th)s?|hundreds?|thousands?|dozens?|pairs?|"
    r"scores?|tens|trillions?|lakhs?|crores?)\b"
)
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|is|so|to|of|it|as|we|he)(?![A-Za-z])")
_FUNCTIONS = re.split(" ", "sin cos tan cot sec csc log exp max min gcd lcm det")


def read_value(text: str) -> Value:
    """One expression and its unit.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("an expression is missing")
    text = re.sub(r"\s*\^\\circ\s*(?:\\text\{\s*)?([CF]?)\s*\}?$", r"\\text{degree\1}", text)
    if found := _UNIT.fullmatch(text):
        value, unit = found[1], _unit(found[1], found[2])
        if unit and not re.search(
            "[A-Za-z]", re.sub(r"\\(?:[dt]?frac|sqrt|pi|cdot|times)", "", value)
        ):
            return Value(value, unit)
    angle = re.sub(
        r"(\d+(?:\.\d+)?)\s*\^\\circ|(\d+)\\text\{degree\}", r"(\\frac{\1\2\\pi}{180})", text
    )
    return Value(angle.strip())


def _unit(value: str, phrase: str) -> str:
    """The unit's one spelling; with `?` before it if it is an unknown word; empty if it is none."""
    flat = re.sub(r"\\frac\{(.*?)\}\{(?=[^{}]*\}|\\text)", r"\1/", phrase)
    words = re.findall(r"[A-Za-z]+|/|%|\d", re.sub(r"\\text", " ", flat))
    spelled = [_UNITS.get(w.lower(), _UNITS.get(w.lower().rstrip("s"), "")) for w in words]
    if words == ["%"]:
        return "%"
    known = all(new or word.isdigit() for new, word in zip(spelled, words, strict=True))
    plain = re.findall(
        r"[A-Za-z]+", re.sub(r"\\(?:text|frac)\{[^{}]*\}(?:\{[^{}]*\})?", "", phrase)
    )
    named = any(map(str.isalpha, words))
    if any(len(word) == 1 for word in plain) and not (
        phrase[0] == " " and _decimal(value) is not None
    ):
        return ""
    if not named or "%" in words or _NO_UNIT.search(flat):
        return ""
    if known:
        joined = "".join(new or word for new, word in zip(spelled, words, strict=True))
        return re.sub(
            r"(square|cubic)(\w+)", lambda m: m[2] + {"s": "2", "c": "3"}[m[1][0]], joined
        )
    if plain and (phrase[0].isalpha() or max(map(len, plain)) < 3 or _decimal(value) is None):
        return ""
    return "?" * bool(plain) + "".join(word.lower().rstrip("s") for word in words)


def _is_literal(text: str) -> bool:
    return bool(
        re.fullmatch(r"\\text\s*\{[^{}]*[A-Za-z][^{}]*\}", text) or _LITERAL.fullmatch(_plain(text))
    )


def _plain(text: str) -> str:
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()


def _letters(text: str) -> str:
    """What is compared of a literal: no spaces, braces or full stops, no brackets of an option."""
    return re.sub(r"^\(([A-Z])\)$", r"\1", re.sub(r"[\s{}]|\.(?!\d)", "", _plain(text)))


def _is_prose(text: str) -> bool:
    words = _WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\}", "", text))
    return r"\text" in text or any(
        w not in _FUNCTIONS and w not in string.ascii_lowercase for w in words
    )


def _decimal(text: str) -> Fraction | None:
    number = re.fullmatch(r"([+-]?)\s*(\d+(?:\.\d*)?)", text)
    return Fraction(number[1] + number[2]) if number else None


_UNREADABLE = re.compile(r"\d\s+\d|\d\.|\.\d|(?<=\d)\{|[?'\"#@$]|!\s*!|\\text|\\ldots")
_SMALL = 1e-40


def is_known(value: Value) -> bool:
    """Whether it is a word or an expression without unknown words."""
    return "?" not in value.unit and (_is_literal(value.text) or not _is_prose(value.text))


def same_value(gold: Value, said: Value) -> bool:
    """Whether `said` says what `gold` says; a unit may be left out, but not be another one.

    Raises:
        ValueError: one of them cannot be read.
    """
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


def _same_share(gold: Value, said: Value) -> bool:
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
    capitals = [
        set(re.findall(r"[A-Z]", re.sub(r"\\[a-zA-Z]+", "", text))) for text in (gold, said)
    ]
    return capitals[0] == capitals[1] and _equal_expressions(gold, said)


def _equal_expressions(gold: str, said: str) -> bool:
    sympy = _library("sympy")

    a, b = expression(gold), expression(said)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_is_zero, (a - b).doit()))
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return a == b or _is_zero(a - b) or _rounds_to(a, said) or _rounds_to(b, gold)
    sets = isinstance(a, sympy.Set) and isinstance(b, sympy.Set)
    return bool(a == b or (sets and _library("math_verify").verify(a, b, timeout_seconds=None)))


def _is_zero(difference: Expression) -> bool:
    """Algebra decides, unless sixty digits, at one value of each unknown, show a difference."""
    sympy = _library("sympy")

    difference = difference.doit()
    if difference.has(sympy.zoo, sympy.nan, sympy.oo):  # Infinities are equal or never.
        return False
    if difference.is_Rational:
        return bool(difference == 0)
    symbols = sorted(difference.free_symbols, key=str)
    point = {symbol: sympy.Rational(11 + 2 * i, 7) for i, symbol in enumerate(symbols)}
    size = abs(difference.subs(point).evalf(60))
    if size.is_comparable and size > _SMALL:
        return False
    return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


def _rounds_to(exact: Expression, written: str) -> bool:
    """Whether `written` is `exact` to at least six decimals, six of them significant."""
    sympy = _library("sympy")

    number, decimals = _decimal(written), written.partition(".")[2]
    if number is None or len(decimals) < 6 or abs(number) * 10 ** len(decimals) < 10**5:
        return False
    gap = exact - sympy.Rational(number.numerator, number.denominator)
    return bool(gap.is_number and abs(gap.evalf(60)) * 2 * 10 ** len(decimals) <= 1)


def _as_fraction(decimal: re.Match[str]) -> str:
    return rf"(\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}})"


def _library(name: str) -> Expression:
    # Seconds to import, and no types.
    return import_module(name)


@lru_cache(maxsize=4096)
def expression(text: str) -> Expression:
    """The one expression that `math-verify` reads in `text`, with decimals as fractions.

    Raises:
        ValueError: it reads none.
    """
    sympy, reader = _library("sympy"), _library("math_verify")

    exact = re.sub(r"(?<![\d.])(\d+)\.(\d+)(?![\d.])", _as_fraction, text)
    # It reads 5(2) as 5 + 2.
    exact = re.sub(r"((?<![_\d.}A-Za-z])\d+|\))\s*(?=\()|(\))\s*(?=\d)", r"\1\2\\cdot ", exact)
    config = reader.parser.NormalizationConfig(malformed_operators=True, boxed="last")
    found: list[Any] = []
    if not _UNREADABLE.search(exact):
        found = reader.parse(
            f"\\boxed{{{exact}}}",
            [reader.LatexExtractionConfig(normalization_config=config)],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=0,
        )
    if len(found) != 1 or found[0].has(sympy.zoo, sympy.nan):
        raise ValueError(f"{text!r} is not one mathematical expression")
    # It marks symbols as real or not by what else stands in the text.
    names = {
        s: sympy.I if s.name == "i" else sympy.Symbol(s.name, real=True)
        for s in found[0].free_symbols
    }
    return found[0].xreplace(names)
