r"""The outer structure of an answer: a value, a list, a tuple, a set, an interval, a union or a relation.

Math-Verify's grammar parses `(0,1)`, `\{0,1\}` and `0,1` into objects that its comparison then takes for equal. But
brackets determine the kind of an answer. So the structure is parsed here, from the brackets and separators at depth 0,
and only the values inside go to Math-Verify's grammar. Time is linear in the text times its
depth, which `limits` bounds.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

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


Structure = Leaf | Collection | Relation | Union

NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|widehat|measuredangle|vec|hat|bar|mathbb|mathcal)(?![a-zA-Z])\s*)?"
    r"(?:[a-zA-Z]+|\\[a-zA-Z]+|\\text\{[^{}]*\}|\{[a-zA-Z]+\}|\|[a-zA-Z]+\|)'*"
    r"(?:_(?:\{[^{}]*(?:\{[^{}]*\})?\}|\w|\\[a-zA-Z]+))?'*(?:\([^()=]*\))?"
)
r"""Name of a quantity: `x`, `f(2)`, `a_1`, `\angle ABC`, `|AB|`."""

_TOKEN = re.compile(
    r"(?P<open>\\\{|\\begin\{[a-zA-Z*]+\}|\\(?:langle|lfloor|lceil)(?![a-zA-Z])|[({\[])"
    r"|(?P<close>\\\}|\\end\{[a-zA-Z*]+\}|\\(?:rangle|rfloor|rceil)(?![a-zA-Z])|[)}\]])"
    r"|(?P<cup>\\cup(?![a-zA-Z]))"
    r"|(?P<comma>[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
    r"|(?P<operator>\\(?:le|ge|ne|in|approx|equiv|sim)(?![a-zA-Z])|[<>=])"
    r"|(?P<other>\\[a-zA-Z]+|\\.)"
)
_SEPARATOR_KINDS = ("comma", "operator", "cup")
"""Loosest binding first."""
_REALS = Collection("(", ")", (Leaf(r"-\infty"), Leaf(r"\infty")))
_CLOSERS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}


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
    if re.fullmatch(r"\\mathbb\{R\}", text):
        return _REALS
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
            return Collection("", "", items) if len(items) > 1 else (items[0] if items else Leaf(text))
        if any(not part.strip() for part in parts):
            return Leaf(text)
        structures = tuple(parse_structure(part) for part in parts)
        if kind == "cup":
            return Union(structures)
        return Relation(structures, tuple(separator.text.strip() for separator in separators))
    return _parse_brackets(text)


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
    if opening is None or not text.endswith(tuple(_CLOSERS[opening])) or not _is_one_bracket(text):
        return Leaf(text)
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    inner = parse_structure(text[len(opening) : -len(closing)])
    left, right = opening[-1], closing[-1]
    if isinstance(inner, Collection) and not inner.opening:
        return Collection(left, right, inner.items)
    if left == "{":
        return Collection(left, right, (inner,))
    return inner


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
