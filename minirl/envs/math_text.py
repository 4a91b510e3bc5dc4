r"""Final answers of mathematics as text: where a completion states one, and one typography for all.

`find_answer` picks the one place that counts; `typeset` makes spellings alike that differ in layout
alone (`10\,000` and `10000`, `90°` and `90^\circ`, `1.5e3`, `0.\overline{3}`). What answers mean
is decided in `minirl.envs.math_answers`.
"""

import re
from collections.abc import Callable

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATED = re.compile(
    r"<answer>(?P<tag>(?:(?!<answer>).)*?)</answer>"
    r"|(?:\banswer\b[^.:=\n]{0,60}?(?:\bis\b|[:=])|^####)[\s:*]*(?=(?P<line>[^\n]+))",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
_STATED_END = re.compile(r"(?:[.?]|(?<!\d)!)\**(?:\s|$)|,?\s+(?:because|since|so|as|which|where)\s")
_MATH = r"\$[^$]+\$|\\\([^\n]+?\\\)"
_NUMBER = r"-?(?:\\?\$|[€£¥])?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
_VERB = (
    r"(?:^|[a-z,:]\s+)[a-z]+\s*=|(?<!\d):(?=\s)|\b(?:is|are|was|were|equals?|makes?|made|has|have|had"
    r"|gets?|gives?|earns?|leaves?)\b"
)
_SUM = r"[-\d(][-\d\s.+*/()^\u00d7\u00f7]*=\s*"
_LAST_WORDS = re.compile(
    rf"(?:(?:{_VERB})\s*(?:only\s|just\s|exactly\s)?\s*|(?<!\S)(?={_SUM}))"
    rf"((?:{_MATH}|(?:{_SUM})?{_NUMBER})(?![\d./,])(?:\s*[a-z%°\\]+){{0,3}})$",
    re.IGNORECASE,
)


def find_answer(completion: str) -> str | None:
    r"""The text of the one answer that a completion states, or None.

    The last complete \boxed{} alone if there is any box; else the last <answer> tag, "the answer
    is ..." or "#### ..."; else the last line, if it is nothing but an answer, or ends in one ("She
    makes $18.", "so I choose **A**"). What stands before `</think>` counts only if nothing follows.
    """
    thought, _, said = completion.rpartition("</think>")
    said = said if said.strip() else thought
    if _BOX.search(said):
        return last_box(said)
    if stated := list(_STATED.finditer(said)):
        tag, line = stated[-1]["tag"], stated[-1]["line"]
        return _STATED_END.split(line.strip())[0] if tag is None else find_answer(tag) or tag
    display = r"(?:\\\[|\$\$)(.*?)(?:\\\]|\$\$)"
    said = re.sub(display, lambda m: f"${' '.join(m[1].split())}$", said, flags=re.DOTALL)
    return _last_words(said.strip().splitlines()[-1].strip()) if said.strip() else None


def last_box(text: str) -> str | None:
    r"""What stands in the last, outermost \boxed{} or \fbox{}; None if it is not closed."""
    found, at = None, 0
    while box := _BOX.search(text, at):
        found, at, depth = None, box.end(), 1
        for brace in re.finditer(r"\\[\\{}]|[{}]", text[box.end() :]):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                at = box.end() + brace.end()
                found = text[box.end() : at - 1]
                break
    return None if found is None else _BOX.sub("{", found)


def _last_words(line: str) -> str | None:
    if re.search(r"\*\*[.!]?$", line) and len(bold := re.findall(r"\*\*([^*]+)\*\*", line)) == 1:
        return str(bold[0])
    words = re.findall(
        r"[A-Za-z]{2,}", re.sub(rf"\\text\{{[^{{}}]*\}}|\\[a-zA-Z]+|{_MATH}", "", line)
    )
    sentence = re.split(r"[.!?]\s+", line.rstrip(".!* "))[-1]
    if words and (ending := _LAST_WORDS.search(sentence)):
        return ending[1]
    return line if len(words) <= 2 and line.count("{") == line.count("}") else None


_SIGNS = str.maketrans(
    {
        **{
            "\N{MINUS SIGN}": "-",
            "\N{EN DASH}": "-",
            "÷": "/",
            "\N{FULLWIDTH PERCENT SIGN}": "%",
            "\N{RIGHT SINGLE QUOTATION MARK}": "'",
            "\N{FULLWIDTH COMMA}": ",",
            "⟨": "(",
            "⟩": ")",
        },
        **{
            "\N{MULTIPLICATION SIGN}": r"\times ",
            "·": r"\cdot ",
            "⋅": r"\cdot ",
            "±": r"\pm ",
            "°": r"^\circ ",
        },
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "θ": r"\theta "},
        **{
            "∞": r"\infty ",
            "\N{UNION}": r"\cup ",
            "∈": r"\in ",
            "∅": r"\emptyset ",
            "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
        },
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}"},
        **{"⅔": r"\frac{2}{3}", "…": r"\ldots ", "\u00a0": " ", "\u2009": " ", "\u202f": " "},
        **{raised: f"^{{{digit}}}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)


def _repeating(number: re.Match[str]) -> str:
    whole, start, cycle = number.groups()
    top = int(whole + start + cycle) - int(whole + start)
    return rf"\frac{{{top}}}{{{'9' * len(cycle)}{'0' * len(start)}}}"


def _many(number: re.Match[str]) -> str:
    power = {"t": 3, "m": 6, "b": 9}[number[3][0].lower()]
    return rf"{number[1]}\cdot 10^{{{power}}}" + (number[2] or "")


_LAYOUT: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # roots, brackets that grow, spaces, fonts
    (
        r"√\s*\(([^()]*)\)|√\s*(\d+(?:\.\d+)?|[a-z])|(?<![\\a-z])sqrt\s*\(([^()]*)\)",
        r"\\sqrt{\1\2\3}",
    ),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?\s*", ""),
    (r"\\(?:displaystyle|textstyle)(?![a-z])|(?<!\\)\\[()\[\]!]|`", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~|\n", " "),
    (
        r"\\(?:text(?:bf|it|rm|tt|sf|normal)?|math(?:rm|bf|it|sf|tt)|mbox|underline|boldsymbol)\s*\{",
        r"\\text{",
    ),
    (r"\\text\{\s*([ei]|[\d.,-]+)\s*\}|(?<![\d\s}])\\text\{([a-zA-Z])\}", r"\1\2"),
    # one name for each command
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d|[a-z])", r"\1{\2}"),
    (r"\\log_\s*(\d+)", r"\\log_{\1}"),
    (r"^\s*\(?([A-Z])\)", r"(\1)"),
    (r"\b([AaPp])\.\s?[Mm]\b\.?", r"\1m"),
    (r"(\d)\s*:\s*(?=\d)", r"\1:"),
    (r"\\leq(?:slant)?(?![a-z])|<=", r"\\le "),
    (r"\\geq(?:slant)?(?![a-z])|>=", r"\\ge "),
    (r"\\neq(?![a-z])|!=", r"\\ne "),
    (r"\\approx(?![a-z])|\u2248", "="),
    (r"\((\w+)\)(?=_)", r"\1"),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\mid(?![a-z])", "|"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"\\langle(?![a-z])", "("),
    (r"\\rangle(?![a-z])", ")"),
    (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-z])", r"^\\circ "),
    (r"\\[lc]?dots(?![a-z])|\.\.\.", r"\\ldots "),
    (r"\+\s*\\infty", r"\\infty"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
    (r"(?i)\\%|\s*\\text\{\s*percent\s*\}|\s*\bpercent\b", "%"),
    # of two inequalities "and" may mean both or either
    (
        r"(?i)([<>]|\\[gl]e(?![a-z]))([^<>]*?)(?:\\text\s*\{\s*and\s*\}|\band\b|\\(?:land|wedge)(?![a-z]))",
        r"\1\2?",
    ),
    (
        r"(?i),?\s*\\text\s*\{\s*(?:or|and)\s*\}\s*|,?\s+(?:or|and)\s+|\\lor(?![a-z])|\\vee(?![a-z])",
        ", ",
    ),
    # numbers
    (r"\\?\$\s*(\d[\d,.]*\d|\d)", r"\1\\text{dollar}"),
    (r"€\s*(\d[\d,.]*\d|\d)", r"\1\\text{euro}"),
    (r"£\s*(\d[\d,.]*\d|\d)", r"\1\\text{pound sterling}"),
    (r"(\d)\{,\}(?=\d{3})", r"\1"),
    (r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?!\d|\s*/)", lambda m: m[1] + m[2].replace(" ", "")),
    (r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])", r"(\1\\cdot 10^{\2})"),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating),
    (r"(?<![\d./^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
    (r"(?i)(\d)\s*(\\text\{)?\s*(thousand|million|billion)s?\b", _many),
    (r"\*\*", "^"),
]
"""Patterns and what replaces them, in this order."""
_TYPOGRAPHY = [(re.compile(pattern), replacement) for pattern, replacement in _LAYOUT]
_MARGIN = re.compile(
    r"^[\s*_\"=]+|^(?:[Oo]ption|[Cc]hoice)\s+|[\s*_\"]+$|(?<![.\\])[.,;]\s*$|\\+\s*$"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")


def typeset(text: str) -> str:
    """The same answer in one typography: LaTeX without layout, fonts, dollars or thousands marks.

    Commas between digits are thousands marks, except within brackets, where they separate.
    """
    text = _bare(text.translate(_SIGNS))
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    if not text.lstrip().startswith(("(", "[", r"\{")):
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    return _bare(text)


def _bare(text: str) -> str:
    while (inner := _MARGIN.sub("", text)) != text:
        text = inner
    return text
