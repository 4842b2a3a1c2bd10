r"""Vectors, matrices and their linear combinations: `\frac12\begin{pmatrix}...`, `(1,2)+t(3,4)`, `2\hat{i}+3\hat{j}`.

Everything here is text: a combination is expanded entry by entry and compared as one vector or matrix. Products of two
matrices, inverses and determinants are unevaluated and are not parsed. Time is linear in the text.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from grpo_ray.rewards.math.notation import fraction_text

_MAX_ENTRIES = 100
"""Maximum entries of a vector or matrix."""

_MATRIX = re.compile(
    r"\\begin\{([pb]?matrix|smallmatrix|array)\*?\}(?:\s*\{[clr|]+\})?(.*)\\end\{\1\*?\}\s*(\^\s*\{?\s*(?:T|\\top)\s*\}?)?",
    re.DOTALL,
)
_TUPLE = re.compile(r"[(\[](.*)[)\]]\s*(\^\s*\{?\s*(?:T|\\top)\s*\}?)?", re.DOTALL)
_UNIT_VECTOR = re.compile(
    r"(.*?)\s*(?:\\cdot\s*)?(?:\\(?:hat|widehat|mathbf|vec|boldsymbol)\s*\{?\s*(?:\\[ij]math(?![a-zA-Z])|[ijk])\s*\}?"
    r"|(?<![a-zA-Z\\])[ijk])",
    re.DOTALL,
)
_BRACKET = re.compile(r"\\[{}]|\\begin\{[a-zA-Z*]+\}|\\end\{[a-zA-Z*]+\}|\\\\|[(){}\[\]]|[-+,&;]")
_RATIONAL = re.compile(
    r"([-+]?)(?:(\d{1,30}(?:\.\d{1,30})?)|\\frac\s*\{(\d{1,30})\}\s*\{(\d{1,30})\}|(\d{1,30})/(\d{1,30}))"
)


class Tensor(NamedTuple):
    """A vector or matrix, as rows of the texts of its entries."""

    kind: str
    """`matrix`, or `tuple` for a vector written in brackets and commas or with unit vectors."""
    rows: tuple[tuple[str, ...], ...]
    transposed: bool = False
    """True if it was written as a row with a transposition sign; `rows` is then the column that it denotes."""


def parse_tensor(text: str) -> Tensor | None:
    """Parse a text that is a matrix, a transposed row or a linear combination; None for any other text."""
    if r"\begin{" not in text and not _has_unit_vectors(text) and not (")" in text and "," in text):
        return None
    terms = _terms(text)
    if not 0 < len(terms) <= 8:
        return None
    if _has_unit_vectors(text):
        return _unit_vector_sum(terms)
    parsed = [_scaled_tensor(term) for term in terms]
    if len(terms) == 1:
        tensor = parsed[0]
        return None if tensor is None or (tensor.kind == "tuple" and not tensor.transposed) else tensor
    total: Tensor | None = None
    for tensor in parsed:
        total = tensor if total is None else _sum(total, tensor)
        if total is None:
            return None
    return total


def _terms(text: str) -> list[str]:
    """Split a sum at the signs outside brackets; each term keeps its sign."""
    starts, depth = [0], 0
    for match in _BRACKET.finditer(text):
        token = match[0]
        if token in "({[" or token.startswith(r"\begin") or token == r"\{":
            depth += 1
        elif token in ")}]" or token.startswith(r"\end") or token == r"\}":
            depth -= 1
        elif (
            depth == 0
            and token in "+-"
            and text[: match.start()].strip()
            and text[starts[-1] : match.start()].strip() not in ("", "+", "-")
        ):
            starts.append(match.start())
        elif depth == 0 and token in ",;":
            return []
    return [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _scaled_tensor(term: str) -> Tensor | None:
    r"""Parse `coefficient matrix` or `coefficient (a,b)`, with or without the coefficient; None for other terms."""
    begin = term.find(r"\begin{")
    start = begin if begin >= 0 else _last_bracket(term)
    if start < 0:
        return None
    coefficient = re.sub(r"\\(?:cdot|times)\s*\Z", "", term[:start].strip()).strip()
    tensor = _matrix(term[start:]) if begin >= 0 else _tuple(term[start:])
    if tensor is None or sum(map(len, tensor.rows)) > _MAX_ENTRIES or r"\end" in coefficient or "," in coefficient:
        return None
    if begin < 0 and re.fullmatch(r"[-+]?\s*\\?[a-zA-Z]{2,}", coefficient):
        return None  # a function of several arguments, such as \gcd(4,6)
    if coefficient in ("", "+"):
        return tensor
    rows = tuple(tuple(_product(coefficient, entry) for entry in row) for row in tensor.rows)
    return tensor._replace(rows=rows)


def _last_bracket(term: str) -> int:
    """Return the start of the bracket that closes at the end of a term, -1 without one."""
    body = re.sub(r"\s*\^\s*\{?\s*(?:T|\\top)\s*\}?\s*\Z", "", term)
    if not body.endswith((")", "]")):
        return -1
    depth = 0
    for position in range(len(body) - 1, -1, -1):
        depth += (body[position] in ")]") - (body[position] in "([")
        if depth == 0:
            return position
    return -1


def _matrix(text: str) -> Tensor | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None or r"\begin" in match[2]:
        return None
    rows = tuple(tuple(entry.strip() for entry in row.split("&")) for row in _split_rows(match[2]))
    if not rows or len({len(row) for row in rows}) != 1 or not all(entry for row in rows for entry in row):
        return None
    if match[3] is None:
        return Tensor("matrix", rows)
    return Tensor("matrix", tuple((entry,) for entry in rows[0]), transposed=True) if len(rows) == 1 else None


def _split_rows(body: str) -> list[str]:
    rows = body.split("\\\\")
    return rows[:-1] if rows and not rows[-1].strip() else rows


def _tuple(text: str) -> Tensor | None:
    match = _TUPLE.fullmatch(text.strip())
    if match is None:
        return None
    entries, depth, start = [], 0, 0
    for token in _BRACKET.finditer(match[1]):
        depth += (token[0] in ("(", "{", "[", r"\{")) - (token[0] in (")", "}", "]", r"\}"))
        if token[0] == "," and depth == 0:
            entries.append(match[1][start : token.start()].strip())
            start = token.end()
    entries.append(match[1][start:].strip())
    if len(entries) < 2 or not all(entries):
        return None
    if match[2] is not None:
        return Tensor("matrix", tuple((entry,) for entry in entries), transposed=True)
    return Tensor("tuple", (tuple(entries),))


def _sum(one: Tensor, other: Tensor | None) -> Tensor | None:
    if other is None or [len(row) for row in one.rows] != [len(row) for row in other.rows]:
        return None
    rows = tuple(
        tuple(f"{left}+({right})" for left, right in zip(row, other_row, strict=True))
        for row, other_row in zip(one.rows, other.rows, strict=True)
    )
    return one._replace(rows=rows)


def _product(coefficient: str, entry: str) -> str:
    """Return the text of a product, computed if both factors are rational numbers."""
    if coefficient == "-":
        coefficient = "-1"
    one, other = rational(coefficient), rational(entry)
    if one is not None and other is not None:
        return fraction_text(one * other)
    if one == -1:
        return f"-({entry})"
    return f"{entry}" if one == 1 else f"({coefficient.removeprefix('+')})({entry})"


def rational(text: str) -> Fraction | None:
    r"""Return the value of an integer, a decimal or a `\frac{p}{q}`, None for other texts."""
    match = _RATIONAL.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    denominator = int(match[4] or match[6] or 1)
    if denominator == 0:
        return None
    value = Fraction(match[2] or match[3] or match[5]) / denominator
    return -value if match[1] == "-" else value


# --- unit vectors


def _has_unit_vectors(text: str) -> bool:
    return (
        "hat" in text
        and re.search(r"\\(?:hat|widehat)\s*\{?\s*(?:\\[ij]math(?![a-zA-Z])|[ijk])(?![a-zA-Z])", text) is not None
    )


def _unit_vector_sum(terms: list[str]) -> Tensor | None:
    """Convert `a\\hat{i}+b\\hat{j}` to (a, b), or to three coordinates if `\\hat{k}` occurs."""
    coordinates: dict[str, str] = {}
    for term in terms:
        match = _UNIT_VECTOR.fullmatch(term)
        if match is None:
            return None
        axis = re.findall(r"[ijk](?=math)|[ijk]", term[match.end(1) :])[-1]
        if axis in coordinates:
            return None
        coefficient = match[1].strip().removeprefix("+").strip()
        coordinates[axis] = {"": "1", "-": "-1"}.get(coefficient, coefficient)
    size = 3 if "k" in coordinates else 2
    return Tensor("tuple", (tuple(coordinates.get(axis, "0") for axis in "ijk"[:size]),))
