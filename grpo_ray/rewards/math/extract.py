r"""Extraction of the final answer from a completion and from a solution, on text alone, in linear time.

The final answer of a completion is, in this order:

1. Only text after the last `</think>` counts; a completion whose reasoning never ends has no answer.
2. If there is an `<answer>` tag, only the text inside the last one counts.
3. The last `\boxed{...}` (or `\fbox`). Boxes before it count only if they are close to it and joined like a list
   (`\boxed{1}, \boxed{2}` or `\boxed{5} or \boxed{7}`): then all of them together are the answer, so hedging gains
   nothing. After `Wait,` or `so the answer is` only the last one counts: the text corrects itself.
4. Without a box, the formula after the last `answer` (`The answer is $5$`), as in Math-Verify.

A bare `The answer is 5` has no answer: the prompt asks for a box, and digits in prose are not a final answer.
"""

import re
from typing import NamedTuple

_BRACE = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)(?![a-zA-Z])\s*|[{}]")
_UNBRACED_CONTENT = re.compile(r"[^\s{}$\\,;.]+")
_MAX_GAP = 70
"""Characters between two boxes that can belong to one answer (Math-Verify's own bound)."""
_CORRECTION = re.compile(
    r"\b(?:wait|actually|no|not|correct(?:ion|ed)?|instead|sorry|mistake|rather|hmm|however|but|should|recheck|so|thus"
    r"|hence|therefore|final(?:ly)?|answer|total|simplif\w*|i\.e|conclu\w*)\b",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]|\\q?quad", re.IGNORECASE)
_FILLER = re.compile(r"\\[\[\]()\\]|\\(?:text|mbox)|\\q?quad|[\s$.,;:{}&*]|\b(?:and|or)\b", re.IGNORECASE)

_BLANK = re.compile(
    r"(?:\\(?:text[a-z]*|math[a-z]+|mbox|q?quad|square|checkmark|qed|[hv]?phantom|displaystyle)(?![a-zA-Z])"
    r"|\\[\\,;:!> _]|[\s{}~$.,;:=?_])*"
)
_MAX_BLANK = 200
"""Characters of an empty box, spacing included."""

_ANCHOR = re.compile(r"answer", re.IGNORECASE)
_MAX_ANCHOR_GAP = 100
"""Maximum characters between `answer` and the formula after it."""
_MAX_FORMULA = 4_000
"""Maximum characters of a formula after `answer`; a longer one is assumed to lack its closing delimiter."""
_OPENERS = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"))
_OPENER = re.compile(r"\$\$|(?<!\\)\$|\\\[|\\\(")
_DOLLAR = re.compile(r"(?<!\\)\$")
_FORMULA_GAP = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*(?=\$|\\\(|\\\[)")
_LINK = re.compile(r"\s*(?:,?\s*(?:and|or)\b|,)\s*")
_MAX_ANCHORS = 64
"""Maximum occurrences of `answer` that are searched, from the end; bounds the time for a repetitive text."""
_MAX_COMPLETION = 1 << 20
"""Characters of a completion, from its end, that are searched."""


class Box(NamedTuple):
    r"""Position of a `\boxed{...}` in a text."""

    start: int
    end: int
    opening: int
    r"""Length of `\boxed{`."""
    closing: int
    r"""Length of `}`; 0 for `\boxed 5`."""

    @property
    def is_braced(self) -> bool:
        return self.closing > 0

    def content(self, text: str) -> str:
        """Return the content of the box in its text."""
        return text[self.start + self.opening : self.end - self.closing]


def extract_answers(completion: str) -> tuple[str, ...]:
    """Return a completion's final answer: an empty tuple, one text, or several boxes that together are one answer."""
    text = completion[-_MAX_COMPLETION:]
    end_of_thought = text.rfind("</think>")
    if end_of_thought >= 0:
        text = text[end_of_thought + len("</think>") :]
    elif "<think>" in text:
        return ()
    tagged = _last_answer_tag(text)
    if tagged is not None:
        text = tagged
    if r"\boxed" in text or r"\fbox" in text:
        return _last_boxes(text)
    formula = _announced_formula(text)
    if formula is not None:
        return (formula,)
    # Text in an answer tag is a final answer even without a box; other prose is not.
    return (text.strip().strip("$"),) if tagged is not None and text.strip() else ()


def _last_answer_tag(text: str) -> str | None:
    """Return the text in the last `<answer>` tag, to the end if it is not closed; None without a tag."""
    start = text.rfind("<answer>")
    if start < 0:
        return None
    inside = text[start + len("<answer>") :]
    end = inside.find("</answer>")
    return inside[:end] if end >= 0 else inside


def _last_boxes(text: str) -> tuple[str, ...]:
    """Return the contents of the last box and of those joined to it, in their order and without duplicates."""
    boxes = outer_boxes(text)
    if not boxes:
        return ()
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _joins_boxes(text[box.end : joined[-1].start]):
            break
        joined.append(box)
    contents = [box.content(text).strip() for box in reversed(joined)]
    if is_blank(contents[-1]):
        # The last box is the answer: if it is empty, there is none. An empty box before it repeats the prompt's.
        return ()
    return tuple(dict.fromkeys(content for content in contents if not is_blank(content)))


def is_blank(content: str) -> bool:
    """Return True if a box has only spacing and punctuation in it."""
    return len(content) <= _MAX_BLANK and _BLANK.fullmatch(content) is not None


def _joins_boxes(between: str) -> bool:
    """Return True if two boxes with this text between them are one answer, a list or a hedge."""
    if len(between) > _MAX_GAP or _CORRECTION.search(between):
        return False
    return not _FILLER.sub("", between) or _SEPARATOR.search(between) is not None


def outer_boxes(text: str) -> list[Box]:
    """Return the closed boxes that are not inside another box, in their order."""
    closed: list[Box] = []
    open_braces: list[tuple[int, int]] = []  # (start of its box, or -1 for another brace; length of the box's opening)
    position = 0
    while (match := _BRACE.search(text, position)) is not None:
        position = match.end()
        token = match[0]
        if token.startswith((r"\boxed", r"\fbox")):
            if text[position : position + 1] == "{":
                position += 1
                open_braces.append((match.start(), position - match.start()))
            elif (bare := _UNBRACED_CONTENT.match(text, position)) is not None:
                closed.append(Box(match.start(), bare.end(), position - match.start(), 0))
                position = bare.end()
        elif token == "{":
            open_braces.append((-1, 0))
        elif token == "}" and open_braces:
            start, opening = open_braces.pop()
            if start >= 0:
                closed.append(Box(start, position, opening, 1))
    outer: list[Box] = []
    for box in sorted(closed):
        if not outer or box.start >= outer[-1].end:
            outer.append(box)
    return outer


def _announced_formula(text: str) -> str | None:
    """Return the formulas after the last `answer` that has one within reach, joined by commas."""
    anchors = [match.end() for match in _ANCHOR.finditer(text)][-_MAX_ANCHORS:]
    for anchor in reversed(anchors):
        opener = _OPENER.search(text, anchor, anchor + _MAX_ANCHOR_GAP)
        if opener is None:
            continue
        formulas = _linked_formulas(text, opener.start())
        if formulas:
            return ", ".join(formulas)
    return None


def _linked_formulas(text: str, position: int) -> list[str]:
    """Return the formula that starts at `position`, and those joined to it by a comma, `and` or `or`."""
    formulas: list[str] = []
    while True:
        match = _formula_at(text, position)
        if match is None:
            return formulas
        formula, end = match
        formulas.append(formula)
        link = _LINK.match(text, end)
        if link is None:
            return formulas
        position = link.end()


def _formula_at(text: str, position: int) -> tuple[str, int] | None:
    """Return the formula whose delimiter starts at `position`, and the position after it."""
    for opener, closer in _OPENERS:
        if text.startswith(opener, position):
            start = position + len(opener)
            end = _closing(text, closer, start)
            return (text[start:end].strip(), end + len(closer)) if end > start else None
    return None


def _closing(text: str, closer: str, start: int) -> int:
    r"""Return the position of a closing delimiter, -1 without one; `\$` is a currency sign."""
    end = text.find(closer, start, start + _MAX_FORMULA)
    while end > start and closer == "$" and text[end - 1] == "\\":
        end = text.find(closer, end + 1, start + _MAX_FORMULA)
    return end


def solution_text(solution: str) -> str:
    """Return the answer that a raw solution states: its boxes if there are any, else its formulas, else all of it.

    Formulas with only separators between them are one list. Up to three words after the last one are kept as its unit;
    longer prose (`$f(x)=ax+b$, where ...`) is dropped, as in Math-Verify.
    """
    text = solution.strip()
    boxes = outer_boxes(text) if r"\boxed" in text else []
    if boxes:
        return ", ".join(box.content(text) for box in boxes)
    first = _OPENER.search(text)
    if first is None or not text.startswith(first[0]):
        return text
    formulas: list[str] = []
    position = 0
    while (match := _formula_at(text, position)) is not None:
        formula, position = match
        formulas.append(formula)
        gap = _FORMULA_GAP.match(text, position)
        if gap is None:
            break
        position = gap.end()
    tail = text[position:].strip(" .,;")
    if not formulas or len(_DOLLAR.findall(text)) % 2:
        return _DOLLAR.sub("", text)
    answer = ", ".join(formulas)
    return rf"{answer}\text{{ {tail}}}" if re.fullmatch(r"[a-zA-Z]+(?: [a-zA-Z]+){0,2}", tail) else answer
