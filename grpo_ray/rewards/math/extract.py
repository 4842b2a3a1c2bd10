r"""Where the answer stands in a completion, and in a solution. Text only, linear in its length.

What counts as the final answer, in this order:

1. Nothing inside `<think>` counts: only text after the last `</think>`; reasoning that never ends has no
answer.
2. If there is an `<answer>` tag, only what is inside the last one.
3. The last `\boxed{...}` (or `\fbox`). Boxes before it count only where they stand close and are joined like
a
   list (`\boxed{1}, \boxed{2}` or `\boxed{5} or \boxed{7}`): then all of them are the answer together, so
   hedging gains nothing. After `Wait,` or `so the answer is` the last one stands alone: the text corrects
   itself.
4. Without a box, the formula that follows the last `answer` (`The answer is $5$`), as Math-Verify reads it.

A bare `The answer is 5` has no answer: the prompt asks for a box, and digits in prose are not a commitment.
"""

import re

_BRACE = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)(?![a-zA-Z])\s*|[{}]")
_UNBRACED = re.compile(r"[^\s{}$\\,;.]+")
_CLOSE = 70
"""Characters between two boxes up to which they can belong to one answer (Math-Verify's own bound)."""
_MOVED_ON = re.compile(
    r"\b(?:wait|actually|no|not|correct(?:ion|ed)?|instead|sorry|mistake|rather|hmm|however|but|should|recheck|so|thus"
    r"|hence|therefore|final(?:ly)?|answer|total|simplif\w*|i\.e|conclu\w*)\b",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"\b(?:and|or)\b|[,;]|\\q?quad", re.IGNORECASE)
_FILLING = re.compile(r"\\[\[\]()]|\\(?:text|mbox)|\\q?quad|[\s$.,;:{}&*]|\b(?:and|or)\b", re.IGNORECASE)

_ANCHOR = re.compile(r"answer", re.IGNORECASE)
_ANCHOR_REACH = 100
_FORMULA_LIMIT = 4_000
"""Characters that a formula after `answer` may have; longer ones are a lost closing mark."""
_OPENERS = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"))
_OPENER = re.compile(r"\$\$|(?<!\\)\$|\\\[|\\\(")
_LINK = re.compile(r"\s*(?:,?\s*(?:and|or)\b|,)\s*")
_LAST_ANCHORS = 64
"""How many `answer`s from the end are looked at, so that a looping text costs no more than an honest one."""
_TAIL = 1 << 20
"""Characters at the end of a completion that are read at all."""


def extract_answers(completion: str) -> tuple[str, ...]:
    """What the completion answers: nothing, one text, or several boxes that together are one answer."""
    text = completion[-_TAIL:]
    end_of_thought = text.rfind("</think>")
    if end_of_thought >= 0:
        text = text[end_of_thought + len("</think>") :]
    elif "<think>" in text:
        return ()
    tagged = _tagged(text)
    if tagged is not None:
        text = tagged
    if r"\boxed" in text or r"\fbox" in text:
        return _boxed(text)
    formula = _after_anchor(text)
    if formula is not None:
        return (formula,)
    # An answer tag is a commitment of its own; prose without one is not.
    return (text.strip().strip("$"),) if tagged is not None and text.strip() else ()


def _tagged(text: str) -> str | None:
    start = text.rfind("<answer>")
    if start < 0:
        return None
    inside = text[start + len("<answer>") :]
    end = inside.find("</answer>")
    return inside[:end] if end >= 0 else inside


def _boxed(text: str) -> tuple[str, ...]:
    boxes = outer_boxes(text)
    if not boxes:
        return ()
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _belongs(text[box[1] : joined[-1][0]]):
            break
        joined.append(box)
    contents = [text[start + opening : end - closing].strip() for start, end, opening, closing in reversed(joined)]
    return tuple(dict.fromkeys(contents))


def _belongs(between: str) -> bool:
    """Whether two boxes with this text between them are one answer (a list, or a hedge)."""
    if len(between) > _CLOSE or _MOVED_ON.search(between):
        return False
    return not _FILLING.sub("", between) or _SEPARATOR.search(between) is not None


def outer_boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Each closed box that lies in no other: (start, end, length of its opening, of its closing)."""
    closed: list[tuple[int, int, int, int]] = []
    open_braces: list[tuple[int, int]] = []
    position = 0
    while (match := _BRACE.search(text, position)) is not None:
        position = match.end()
        token = match[0]
        if token.startswith((r"\boxed", r"\fbox")):
            if text[position : position + 1] == "{":
                position += 1
                open_braces.append((match.start(), position - match.start()))
            elif (bare := _UNBRACED.match(text, position)) is not None:
                closed.append((match.start(), bare.end(), position - match.start(), 0))
                position = bare.end()
        elif token == "{":
            open_braces.append((-1, 0))
        elif token == "}" and open_braces:
            start, opening = open_braces.pop()
            if start >= 0:
                closed.append((start, position, opening, 1))
    outer: list[tuple[int, int, int, int]] = []
    for box in sorted(closed):
        if not outer or box[0] >= outer[-1][1]:
            outer.append(box)
    return outer


def _after_anchor(text: str) -> str | None:
    anchors = [match.end() for match in _ANCHOR.finditer(text)][-_LAST_ANCHORS:]
    for anchor in reversed(anchors):
        opener = _OPENER.search(text, anchor, anchor + _ANCHOR_REACH)
        if opener is None:
            continue
        formulas = _linked_formulas(text, opener.start())
        if formulas:
            return ", ".join(formulas)
    return None


def _linked_formulas(text: str, position: int) -> list[str]:
    """The formula that opens at `position`, and those joined to it by a comma, `and` or `or`."""
    formulas: list[str] = []
    while True:
        found = _formula_at(text, position)
        if found is None:
            return formulas
        formulas.append(found[0])
        link = _LINK.match(text, found[1])
        if link is None:
            return formulas
        position = link.end()


def _formula_at(text: str, position: int) -> tuple[str, int] | None:
    for opener, closer in _OPENERS:
        if text.startswith(opener, position):
            start = position + len(opener)
            end = text.find(closer, start, start + _FORMULA_LIMIT)
            return (text[start:end].strip(), end + len(closer)) if end > start else None
    return None


def solution_text(solution: str) -> str:
    """The answer that a solution column states: the box if there is one, else its formulas, else all of it.

    Formulas with nothing but separators between them are one list; short words after the last are kept as its
    unit; a tail of prose (`$f(x)=ax+b$, where ...`) is dropped, as Math-Verify does.
    """
    text = solution.strip()
    boxes = outer_boxes(text) if r"\boxed" in text else []
    if boxes:
        return ", ".join(text[start + opening : end - closing] for start, end, opening, closing in boxes)
    first = _OPENER.search(text)
    if first is None or not text.startswith(first[0]):
        return text
    formulas: list[str] = []
    position = 0
    while (found := _formula_at(text, position)) is not None:
        formulas.append(found[0])
        position = found[1]
        gap = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*(?=\$|\\\(|\\\[)").match(text, position)
        if gap is None:
            break
        position = gap.end()
    tail = text[position:].strip(" .,;")
    if not formulas or text.count("$") % 2:
        return text.replace("$", "")
    answer = ", ".join(formulas)
    return rf"{answer}\text{{ {tail}}}" if re.fullmatch(r"[a-zA-Z]+(?: [a-zA-Z]+){0,2}", tail) else answer
