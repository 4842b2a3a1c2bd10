r"""The outer shape of an answer: a value, a list, a tuple, a set, an interval, a union or a relation.

Math-Verify's grammar reads `(0,1)`, `\{0,1\}` and `0,1` into things that it then takes for one another. What
a bracket means is the answer's own kind, so the shape is read here, from the brackets and separators outside
all others, and only the values inside go to the parser. Linear in the text times its depth, which `guard`
bounds.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Leaf:
    """A value: text for the parser."""

    text: str


@dataclass(frozen=True)
class Items:
    r"""Several values, or one in set braces. `opening` and `closing` are `(`, `[`, `{` (a set) or empty (a
    bare list).
    """

    opening: str
    closing: str
    items: tuple["Structure", ...]


@dataclass(frozen=True)
class Chain:
    r"""`parts[0] ops[0] parts[1] ...` with ops among = < > \le \ge \ne \in \approx."""

    parts: tuple["Structure", ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Union:
    """Sets joined by a cup."""

    items: tuple["Structure", ...]


Structure = Leaf | Items | Chain | Union

_TOKEN = re.compile(
    r"(?P<open>\\\{|\\begin\{[a-zA-Z*]+\}|\\(?:langle|lfloor|lceil)(?![a-zA-Z])|[({\[])"
    r"|(?P<close>\\\}|\\end\{[a-zA-Z*]+\}|\\(?:rangle|rfloor|rceil)(?![a-zA-Z])|[)}\]])"
    r"|(?P<cup>\\cup(?![a-zA-Z]))"
    r"|(?P<comma>[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
    r"|(?P<op>\\(?:le|ge|ne|in|approx|equiv|sim)(?![a-zA-Z])|[<>=])"
    r"|(?P<other>\\[a-zA-Z]+|\\.)"
)
_REALS = Items("(", ")", (Leaf(r"-\infty"), Leaf(r"\infty")))
_CLOSERS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}


def parse_structure(text: str) -> Structure:
    """The shape of a cleaned answer. Unbalanced brackets leave it one leaf, which the parser then refuses."""
    text = text.strip()
    if re.fullmatch(r"\\mathbb\{R\}", text):
        return _REALS
    splits = _split(text)
    if splits is None:
        return Leaf(text)
    for kind in ("comma", "op", "cup"):
        cuts = [cut for cut in splits if cut[0] == kind]
        if not cuts:
            continue
        parts = _between(text, cuts)
        if kind == "comma":
            items = tuple(parse_structure(part) for part in parts if part.strip())
            return Items("", "", items) if len(items) > 1 else (items[0] if items else Leaf(text))
        if any(not part.strip() for part in parts):
            return Leaf(text)
        shapes = tuple(parse_structure(part) for part in parts)
        return Chain(shapes, tuple(cut[3].strip() for cut in cuts)) if kind == "op" else Union(shapes)
    return _unwrapped(text)


def _unwrapped(text: str) -> Structure:
    """Reads through one pair of brackets that spans the whole text."""
    if text.startswith("{") and text.endswith("}") and _spans(text):
        return parse_structure(text[1:-1])
    opening = next((mark for mark in ("(", "[", r"\{") if text.startswith(mark)), None)
    if opening is None or not text.endswith(tuple(_CLOSERS[opening])) or not _spans(text):
        return Leaf(text)
    closing = r"\}" if text.endswith(r"\}") else text[-1]
    inner = parse_structure(text[len(opening) : -len(closing)])
    mark, end = opening[-1], closing[-1]
    if isinstance(inner, Items) and not inner.opening:
        return Items(mark, end, inner.items)
    if mark == "{":
        return Items(mark, end, (inner,))
    return inner


def _spans(text: str) -> bool:
    """Whether the bracket that opens the text closes at its very end."""
    depth = 0
    for match in _TOKEN.finditer(text):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
            if depth == 0:
                return match.end() == len(text)
    return False


def _split(text: str) -> list[tuple[str, int, int, str]] | None:
    """The separators outside all brackets: (kind, start, end, text). None where brackets do not balance."""
    depth = 0
    found: list[tuple[str, int, int, str]] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and kind in ("comma", "op", "cup"):
            found.append((kind, match.start(), match.end(), match[0]))
    return found if depth == 0 else None


def _between(text: str, cuts: list[tuple[str, int, int, str]]) -> list[str]:
    starts = [0, *(cut[2] for cut in cuts)]
    ends = [*(cut[1] for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]
