r"""The outer structure of an answer: a value, list, tuple, set, interval, set operation, relation, matrix or ratio.

Math-Verify's grammar parses `(0,1)`, `\{0,1\}` and `0,1` into objects that its comparison treats as equal. But brackets
determine the kind of an answer. So the structure is parsed here, from the brackets and separators at depth 0, and only
the values inside are parsed by Math-Verify. Time is linear in the text times its depth, which `limits` bounds.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from grpo_ray.rewards.math.linear import parse_tensor

INEQUALITIES = frozenset({"<", ">", r"\le", r"\ge", r"\ne"})
MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
"""Operator of the same inequality with its sides exchanged."""


@dataclass(frozen=True)
class Leaf:
    """A single value, as text for the formula parser."""

    text: str


@dataclass(frozen=True)
class Collection:
    r"""Several values, or one value in set braces."""

    opening: str
    r"""`(`, `[`, `{` (written `\{`), or "" for a bare list."""
    closing: str
    items: tuple["Structure", ...]
    joiner: str = field(default=",", compare=False)
    """`and` or `or` if the items are joined by this word alone, else a comma."""


@dataclass(frozen=True)
class Relation:
    r"""`operands[0] operators[0] operands[1] ...`, with at least two operands."""

    operands: tuple["Structure", ...]
    operators: tuple[str, ...]
    r"""Each one of = < > \le \ge \ne \in \approx \equiv \sim."""


@dataclass(frozen=True)
class Union:
    r"""Sets joined by `\cup`."""

    items: tuple["Structure", ...]


@dataclass(frozen=True)
class SetOperation:
    r"""Sets joined by `\cap`, `\setminus` or, as a direct product, `\times`."""

    operator: str
    items: tuple["Structure", ...]


@dataclass(frozen=True)
class SetBuilder:
    r"""`\{variable : condition\}`."""

    variable: str
    condition: "Structure"


@dataclass(frozen=True)
class Matrix:
    """A matrix or a column or row vector, as rows of entries."""

    rows: tuple[tuple["Structure", ...], ...]
    transposed: bool = False
    """Written as a row with a transposition sign; `rows` is the column."""


@dataclass(frozen=True)
class Ratio:
    """`3:4` or `1:2:3`."""

    terms: tuple["Structure", ...]


Structure = Leaf | Collection | Relation | Union | SetOperation | SetBuilder | Matrix | Ratio

NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|widehat|measuredangle|vec|hat|bar|mathbb|mathcal)(?![a-zA-Z])\s*)?"
    r"(?:[a-zA-Z]+|\\[a-zA-Z]+|\\text\{[^{}]*\}|\{[a-zA-Z]+\}|\|[a-zA-Z]+\|)'*"
    r"(?:_(?:\{[^{}]*(?:\{[^{}]*\})?\}|\w|\\[a-zA-Z]+))?'*(?:(?:\^\s*\{(?:-1|\([^(){}]*\))\})?\([^()=]*\))?"
    r"|\\frac\s*\{d(?:\^\{?\d\}?)?[a-zA-Z]\}\s*\{d[a-zA-Z](?:\^\{?\d\}?)?\}"
)
r"""Name of a quantity: `x`, `f(2)`, `f^{-1}(x)`, `a_1`, `\angle ABC`, `|AB|`, `\frac{dy}{dx}`."""
_POINT = re.compile(r"([ABDEIJKLMOQRSTVWXYZ](?:_\{?\d\}?)?)\s*(\([^()]*,[^()]*\))")
"""A point with its name, `A(1,2)`. Other letters name functions, distributions and binomials."""

_TOKEN = re.compile(
    r"(?P<open>\\\{|\\begin\{[a-zA-Z*]+\}|\\(?:langle|lfloor|lceil)(?![a-zA-Z])|[({\[])"
    r"|(?P<close>\\\}|\\end\{[a-zA-Z*]+\}|\\(?:rangle|rfloor|rceil)(?![a-zA-Z])|[)}\]])"
    r"|(?P<setminus>\\setminus(?![a-zA-Z]))|(?P<cup>\\cup(?![a-zA-Z]))|(?P<cap>\\cap(?![a-zA-Z]))"
    r"|(?P<times>\\times(?![a-zA-Z]))|(?P<colon>:)"
    r"|(?P<comma>[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
    r"|(?P<operator>\\(?:le|ge|ne|in|approx|equiv|sim)(?![a-zA-Z])|[<>=])"
    r"|(?P<other>\\[a-zA-Z]+|\\.)"
)
_SEPARATOR_KINDS = ("comma", "operator", "colon", "setminus", "cup", "cap", "times")
"""Loosest binding first."""
_REALS = Collection("(", ")", (Leaf(r"-\infty"), Leaf(r"\infty")))
_CLOSERS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}
_GROUP = re.compile(r"\\math(?:bb|cal|frak)\s*\{?[A-Z]\}?.*|[A-Z](?:_\{?\w+\}?)", re.DOTALL)
"""A named set or group, the factor of a direct product."""
_OUTWARD_INTERVAL = re.compile(
    r"(^|\\(?:cup|cap|in|setminus)\s*|[=:]\s*)([\[(\]])([^\[\]();:<>=,]+[,;][^\[\]();:<>=,]+)([\[)\]])(?=\s*(?:$|\\(?:cup|cap|setminus)(?![a-zA-Z])))"
)
r"""An interval, perhaps in outward brackets: `]0,1]` is `(0,1]`."""
_REALS_MINUS = re.compile(r"(\\mathbb\{R\}|\))\s*(?:\\backslash(?![a-zA-Z])|-|\\)\s*(?=\\\{)")
_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z](?:_\{?\w\}?)?)\s*(?:\\in\s*(\\mathbb\{[A-Z]\}))?\s*(?::|\\mid(?![a-zA-Z])|\||\\colon(?![a-zA-Z]))(.*)\\\}",
    re.DOTALL,
)


class Separator(NamedTuple):
    """A separator outside all brackets."""

    kind: str
    """Kind of the separator, from `_SEPARATOR_KINDS`."""
    start: int
    end: int
    text: str


def parse_structure(text: str) -> Structure:
    """Parse the structure of a normalized answer. Unbalanced brackets give one leaf, which the grammar then rejects."""
    text = text.strip()
    if text == r"\mathbb{R}":
        return _REALS
    if "[" in text or "]" in text:
        text = _OUTWARD_INTERVAL.sub(_inward, text)
    if r"\{" in text and _REALS_MINUS.search(text) is not None:
        text = _REALS_MINUS.sub(r"\1\\setminus ", text)
    all_separators = _separators(text)
    if all_separators is None:
        return Leaf(text)
    for kind in _SEPARATOR_KINDS:
        separators = [separator for separator in all_separators if separator.kind == kind]
        if not separators:
            continue
        parts = _split_at(text, separators)
        if kind == "comma":
            items = tuple(parse_structure(part) for part in parts if part.strip())
            if len(items) < 2:
                return items[0] if items else Leaf(text)
            words = {separator.text for separator in separators}
            return Collection("", "", items, words.pop() if len(words) == 1 and words <= {"and", "or"} else ",")
        if any(not part.strip() for part in parts):
            return Leaf(text)
        if kind == "times" and not all(_GROUP.fullmatch(part.strip()) for part in parts):
            continue
        structures = tuple(parse_structure(part) for part in parts)
        if kind == "operator":
            return Relation(structures, tuple(separator.text.strip() for separator in separators))
        if kind == "colon":
            return Ratio(structures)
        if kind == "cup":
            return Union(structures)
        return SetOperation("\\" + kind, structures)
    tensor = parse_tensor(text)
    if tensor is not None:
        rows = tuple(tuple(parse_structure(entry) for entry in row) for row in tensor.rows)
        return Collection("(", ")", rows[0]) if tensor.kind == "tuple" else Matrix(rows, tensor.transposed)
    return _parse_brackets(text)


def _inward(match: re.Match[str]) -> str:
    opening, closing = match[2].replace("]", "("), match[4].replace("[", ")")
    return f"{match[1]}{opening}{match[3]}{closing}"


def is_name(structure: Structure) -> TypeGuard[Leaf]:
    r"""Return True if the structure is the name of a quantity; `e` and `\pi` are numbers."""
    return (
        isinstance(structure, Leaf)
        and NAME.fullmatch(structure.text) is not None
        and structure.text not in ("e", r"\pi")
    )


def _parse_brackets(text: str) -> Structure:
    """Parse a text without separators outside brackets: one pair of brackets around all of it, or a leaf."""
    if text.startswith("{") and text.endswith("}") and _is_one_bracket(text):
        return parse_structure(text[1:-1])
    opening = next((mark for mark in ("(", "[", r"\{") if text.startswith(mark)), None)
    if opening is None and (point := _POINT.fullmatch(text)) is not None:
        return Relation((Leaf(point[1]), parse_structure(point[2])), ("=",))
    if opening is None or not text.endswith(tuple(_CLOSERS[opening])) or not _is_one_bracket(text):
        return Leaf(text)
    if opening == r"\{" and (builder := _BUILDER.fullmatch(text)) is not None:
        domain = f"{builder[1]}\\in {builder[2]}, " if builder[2] else ""
        return SetBuilder(builder[1], parse_structure(domain + builder[3]))
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    inner = parse_structure(text[len(opening) : -len(closing)])
    left, right = opening[-1], closing[-1]
    if isinstance(inner, Collection) and not inner.opening:
        return Collection(left, right, inner.items, inner.joiner)
    is_group = (left, right) == ("(", ")") or not isinstance(inner, Leaf | Collection)
    # `[5]` is a list or a rounded value, and `(5]` has no meaning; a matrix in square brackets is the matrix.
    return inner if is_group and left != "{" else Collection(left, right, (inner,))


def _is_one_bracket(text: str) -> bool:
    """Return True if the bracket that opens the text closes at its very end."""
    depth = 0
    for match in _TOKEN.finditer(text):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
            if depth == 0:
                return match.end() == len(text)
    return False


def _separators(text: str) -> list[Separator] | None:
    """Return the separators outside all brackets, None if the brackets do not balance."""
    depth = 0
    separators: list[Separator] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and kind in _SEPARATOR_KINDS:
            separators.append(Separator(kind, match.start(), match.end(), match[0]))
    return separators if depth == 0 else None


def _split_at(text: str, separators: list[Separator]) -> list[str]:
    starts = [0, *(separator.end for separator in separators)]
    ends = [*(separator.start for separator in separators), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]
