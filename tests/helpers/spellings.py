# ruff: noqa: RUF001 (look-alike characters are this file's subject)
r"""Other spellings of an answer, made by rule: spacing, row breaks, brackets, fractions, delimiters, synonyms.

A rule is a function from an answer in LaTeX to a text with the same meaning for every reader, or None where the rule
does not apply. A right answer must stay right in every spelling, and a wrong one wrong.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Rule = Callable[[str], str | None]


class Variant(NamedTuple):
    """A pair of solution and completion in another spelling, with the reward of the pair that it is made from."""

    rule: str
    solution: str
    completion: str
    reward: float
    origin: tuple[str, str]
    """The solution and completion of the fixture."""


_PROTECTED = re.compile(r"\\(?:text|operatorname\*?|begin|end|mathrm|mathbb|mathcal|mbox)\s*\{[^{}]*\}")
"""Parts in which a space or a symbol is text."""


def _outside_text(pattern: str, replacement: str) -> Rule:
    """Make a rule that replaces a pattern outside `\\text{...}` and the names of environments."""
    found = re.compile(pattern)

    def rule(answer: str) -> str | None:
        pieces, position = [], 0
        for match in [*_PROTECTED.finditer(answer), None]:
            end = len(answer) if match is None else match.start()
            pieces.append(found.sub(replacement, answer[position:end]))
            if match is not None:
                pieces.append(match[0])
                position = match.end()
        spelled = "".join(pieces)
        return spelled if spelled != answer else None

    return rule


def _around(before: str, after: str) -> Rule:
    return lambda answer: f"{before}{answer}{after}"


def _row_breaks(row_break: str) -> Rule:
    """Make a rule that writes every `\\\\` of an environment in one way."""

    def rule(answer: str) -> str | None:
        if r"\\" not in answer or r"\begin" not in answer:
            return None
        return re.sub(r"\s*\\\\(?:\[[\d.]+[a-z]{2}\])?\s*", lambda _: row_break, answer)

    return rule


def _environment(opening: str, closing: str) -> Rule:
    """Make a rule that writes a matrix in round or square brackets in another environment."""

    def rule(answer: str) -> str | None:
        match = re.fullmatch(r"(.*)\\begin\{([pb])matrix\}(.*)\\end\{\2matrix\}(.*)", answer, re.DOTALL)
        if match is None or r"\begin" in match[1]:
            return None
        columns = "c" * (match[3].split(r"\\")[0].count("&") + 1)
        return match[1] + opening.replace("COLUMNS", columns) + match[3] + closing + match[4]

    return rule


def _brackets(left: str, right: str) -> Rule:
    """Make a rule that sizes all brackets, if they are balanced and none is sized or belongs to a command."""

    def rule(answer: str) -> str | None:
        if re.search(r"\\left|\\right|\\[bB]ig|\\sqrt\s*\[|\\\\\s*\[|\\[()\[\]]", answer):
            return None
        depth = 0
        for bracket in re.findall(r"[()\[\]]", answer):
            depth += 1 if bracket in "([" else -1
            if depth < 0:
                return None
        if depth != 0 or not re.search(r"[(\[]", answer):
            return None
        sized = re.sub(r"[(\[]", lambda match: left + match[0], answer)
        return re.sub(r"[)\]]", lambda match: right + match[0], sized)

    return rule


def _commas(comma: str) -> Rule:
    """Make a rule that writes the commas between values in one way; none where a comma may group digits."""

    def rule(answer: str) -> str | None:
        if re.search(r"\d\s*,\s*(?:\\[!,;: ]\s*)?\d{3}|\{,\}|\d,\d", answer) or "," not in answer:
            return None
        return _outside_text(r"\s*(?<!\{),(?!\})\s*", comma.replace("\\", r"\\"))(answer)

    return rule


def _thousands(separator: str) -> Rule:
    """Make a rule that groups the digits of an integer."""

    def rule(answer: str) -> str | None:
        if not re.fullmatch(r"-?[1-9]\d{3,14}", answer):
            return None
        return f"{int(answer):,}".replace(",", separator)

    return rule


def _reordered(answer: str) -> str | None:
    """Reverse the values of a set in braces, or the two sets of a union."""
    values = re.fullmatch(r"\\\{([^{}()\[\]:|]*)\\\}", answer)
    if values is not None and "," in values[1] and not re.search(r"dots|\\mid|\.\.\.|=", values[1]):
        return r"\{" + ",".join(reversed(values[1].split(","))) + r"\}"
    sets = answer.split(r"\cup")
    is_plain = len(sets) == 2 and not re.search(r"=|\\in(?![a-z])|\\setminus|\\cap|\\text|\\\{[^}]*[:|]|\\mid", answer)
    return rf"{sets[1].strip()}\cup {sets[0].strip()}" if is_plain and answer.count("(") + answer.count("[") else None


def _whole_text(command: str) -> Rule:
    """Make a rule that sets an answer in words in another font."""

    def rule(answer: str) -> str | None:
        match = re.fullmatch(r"\\text\{([^{}\\$]*)\}", answer)
        return None if match is None else rf"\{command}{{{match[1]}}}"

    return rule


_UNITS = "cm|m|km|mm|kg|g|hours|minutes|seconds|dollars|degrees|meters|feet|inches|miles|square units|units|cents|days"


def _unit(gap: str, command: str) -> Rule:
    """Make a rule that writes a known unit behind a number with another gap or font."""

    def rule(answer: str) -> str | None:
        match = re.fullmatch(rf"(-?\d+(?:\.\d+)?)\s*\\text\{{\s*({_UNITS})\s*\}}", answer)
        if match is None or (command == "mathrm" and " " in match[2]):
            return None
        return rf"{match[1]}{gap}\{command}{{{match[2]}}}"

    return rule


RULES: dict[str, Rule] = {
    "space around": _around(" ", " "),
    "newlines around": _around("\n", "\n"),
    "thin spaces around": _around(r"\,", r"\,"),
    "negative space before": _around(r"\!", ""),
    "control space before": _around(r"\ ", ""),
    "period behind": _around("", "."),
    "braces around": _around("{", "}"),
    "display style": _around(r"\displaystyle ", ""),
    "row break with spaces": _row_breaks(r" \\ "),
    "row break without spaces": _row_breaks(r"\\"),
    "row break with a newline": _row_breaks(" \\\\\n"),
    "row break with a length": _row_breaks(r" \\[4pt] "),
    "row break and a space": _row_breaks(r"\\ "),
    "spaces around columns": _outside_text(r"\s*(?<!\\)&\s*", " & "),
    "pmatrix": _environment(r"\begin{pmatrix}", r"\end{pmatrix}"),
    "bmatrix": _environment(r"\begin{bmatrix}", r"\end{bmatrix}"),
    "array in round brackets": _environment(r"\left(\begin{array}{COLUMNS}", r"\end{array}\right)"),
    "array in square brackets": _environment(r"\left[\begin{array}{COLUMNS}", r"\end{array}\right]"),
    "left and right": _brackets(r"\left", r"\right"),
    "left and right with spaces": _brackets(r"\left ", r"\right "),
    "bigl and bigr": _brackets(r"\bigl", r"\bigr"),
    "without left and right": _outside_text(r"\\(?:left|right)(?![a-zA-Z.])\s*(?=[(\[)\]|\\])", ""),
    "comma and space": _commas(", "),
    "comma without space": _commas(","),
    "comma and thin space": _commas(r",\,"),
    "comma and thick space": _commas(r",\; "),
    "comma and control space": _commas(r",\ "),
    "comma and quad": _commas(r",\quad "),
    "spaces around plus": _outside_text(r"(?<=[\w)}])\s*\+\s*(?=[\w(\\])", " + "),
    # Not in 2.5e-4, which with spaces is a difference.
    "thin spaces around minus": _outside_text(r"(?<=[\w)}])(?<!\de)\s*-\s*(?=[\w(\\])", r"\\,-\\,"),
    "spaces around the equals sign": _outside_text(r"\s*(?<!\\)=\s*", r" \\;=\\; "),
    "spaces around inequalities": _outside_text(r"\s*([<>])\s*", r" \1 "),
    "dfrac": _outside_text(r"\\[dt]?frac(?![a-zA-Z])", r"\\dfrac"),
    "tfrac": _outside_text(r"\\[dt]?frac(?![a-zA-Z])", r"\\tfrac"),
    "frac": _outside_text(r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    "fraction with braces": _outside_text(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    "fraction without braces": _outside_text(r"\\frac\{(\d)\}\{(\d)\}(?!\d)", r"\\frac\1\2"),
    "fraction with spaces": _outside_text(r"\\frac\{([^{}]+)\}\{([^{}]+)\}", r"\\frac{ \1 }{ \2 }"),
    "spaces inside braces": _outside_text(r"(?<!\\)\{([^{}\\]*[^{}\\\s])\}", r"{ \1 }"),
    "exponent in braces": _outside_text(r"\^(\d|[a-zA-Z])(?![a-zA-Z])", r"^{\1}"),
    "index in braces": _outside_text(r"(?<=[a-zA-Z])_(\d|[a-zA-Z])", r"_{\1}"),
    "root in braces": _outside_text(r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    "leq": _outside_text(r"\\leq?(?![a-zA-Z])", r"\\leq "),
    "leqslant": _outside_text(r"\\leq?(?![a-zA-Z])", r"\\leqslant "),
    "less or equal sign": _outside_text(r"\\leq?(?![a-zA-Z])", "≤"),
    "geq": _outside_text(r"\\geq?(?![a-zA-Z])", r"\\geq "),
    "greater or equal sign": _outside_text(r"\\geq?(?![a-zA-Z])", "≥"),
    "neq": _outside_text(r"\\neq?(?![a-zA-Z])", r"\\neq "),
    "minus sign": _outside_text(r"-", "−"),
    "pi sign": _outside_text(r"\\pi(?![a-zA-Z])", "π"),
    "infinity sign": _outside_text(r"\\infty(?![a-zA-Z])", "∞"),
    "union sign": _outside_text(r"\\cup(?![a-zA-Z])", "∪"),
    "times sign": _outside_text(r"\\times(?![a-zA-Z])", "×"),
    "plus-minus sign": _outside_text(r"\\pm(?![a-zA-Z])", "±"),
    "degree sign": _outside_text(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\\circ\})", "°"),
    "degree in braces": _outside_text(r"\^\s*\\circ(?![a-zA-Z])", r"^{\\circ}"),
    "spaces after commands": _outside_text(r"(\\(?:pi|infty|cup|cdot|times|pm))(?![a-zA-Z])\s*", r"\1 "),
    "space before a set": _outside_text(r"\\\{\s*", r"\\{ "),
    "sets with left and right": lambda answer: (
        re.sub(r"\\\{", r"\\left\\{", answer).replace(r"\}", r"\right\}")
        if answer.count(r"\{") == answer.count(r"\}") > 0 and r"\left" not in answer and r"\begin" not in answer
        else None
    ),
    "other order": _reordered,
    "textbf": _whole_text("textbf"),
    "textrm": _whole_text("textrm"),
    "mbox": _whole_text("mbox"),
    "unit after a space": _unit(" ", "text"),
    "unit after a tie": _unit("~", "text"),
    "unit after a thin space": _unit(r"\,", "text"),
    "unit in mathrm": _unit(r"\ ", "mathrm"),
    "bold number": lambda answer: rf"\mathbf{{{answer}}}" if answer.isdigit() else None,
    "thousands with commas": _thousands(","),
    "thousands with braced commas": _thousands("{,}"),
    "thousands with thin spaces": _thousands(r"\,"),
    "thousands with spaces": _thousands(" "),
    "thousands with ties": _thousands("~"),
    "thousands with negative spaces": _thousands(r",\!"),
    "thousands as in MATH": _thousands(r",\! "),
}

DELIMITERS = {
    "dollars": r"So $\boxed{ANSWER}$.",
    "double dollars": "So\n$$\\boxed{ANSWER}$$",
    "round delimiters": r"So \(\boxed{ANSWER}\).",
    "square delimiters": "So\n\\[\n\\boxed{ANSWER}\n\\]",
    "bold": r"**Final answer:** $\boxed{ANSWER}$",
    "space before the brace": r"So \boxed {ANSWER}.",
    "fbox": r"So \fbox{ANSWER}.",
    "dollars inside": r"So \boxed{$ANSWER$}.",
    "round delimiters inside": r"So \boxed{\(ANSWER\)}.",
}
SOLUTION_DELIMITERS = {
    "double dollars": "$$SOLUTION$$",
    "round delimiters": r"\(SOLUTION\)",
    "square delimiters": r"\[SOLUTION\]",
}
_BOXED = re.compile(r"[^\\$]{0,40}\\boxed\{(.*)\}[.\s]*", re.DOTALL)


def _boxed_answer(completion: str) -> str | None:
    """Return the answer of a completion with one box, which is all that it has besides a few words."""
    match = _BOXED.fullmatch(completion)
    return None if match is None or "boxed" in match[1] or match[1].count("{") != match[1].count("}") else match[1]


def variants(row: dict[str, Any]) -> Iterator[Variant]:
    """Yield the other spellings of a fixture's pair: each rule on the answer, and on the solution."""
    solution, completion, reward = row["solution"], row["completion"], row["reward"]
    answer = _boxed_answer(completion)
    if reward not in (0.0, 1.0) or answer is None or not answer.strip():
        return
    origin = (solution, completion)
    for name, rule in RULES.items():
        spelled = rule(answer)
        if spelled is not None and spelled != answer:
            yield Variant(name, solution, rf"So \boxed{{{spelled}}}.", reward, origin)
    for name, template in DELIMITERS.items():
        if "inside" not in name or not re.search(r"\$|\\[()]", answer):
            yield Variant(name, solution, template.replace("ANSWER", answer), reward, origin)
    formula = re.fullmatch(r"\$([^$]+)\$", solution)
    if formula is None or formula[1].endswith("\\"):
        return
    for name, rule in RULES.items():
        spelled = rule(formula[1])
        if spelled is not None and spelled != formula[1]:
            yield Variant(f"solution: {name}", f"${spelled}$", completion, reward, origin)
    for name, template in SOLUTION_DELIMITERS.items():
        if not re.search(r"\\[()\[\]]", formula[1]):
            yield Variant(f"solution: {name}", template.replace("SOLUTION", formula[1]), completion, reward, origin)
