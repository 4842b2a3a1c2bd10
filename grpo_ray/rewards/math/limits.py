r"""Limits on the text of an answer, checked before it is parsed.

Nearly every text that hangs or exhausts a computer-algebra system has one of a few forms: very long, deeply nested,
towers of powers, huge factorials, or an unevaluated sum, integral or limit. Final answers do not have these forms, so
such a text is rejected without parsing it, in linear time. This only saves the seconds until a timeout: all other texts
are still under the verifier pool's time and memory limits. A form that the solution itself has is always allowed.
"""

import re

MAX_LENGTH = 1_000
"""Characters of an answer; or four times the solution's, if that is more."""
MAX_DEPTH = 12
"""Nested brackets. Math-Verify's parser takes 7 s for 50 nested parentheses."""
MAX_DIGITS = 1_500
"""Consecutive digits: 2^{4096} written out has 1,234."""
MAX_EXPONENT_DIGITS = 5
"""Digits of a literal exponent: x^{99999} passes, 10^{100000} does not."""
MAX_OPERATORS = 80
"""Arithmetic operators; the time of parsing and evaluation grows with their number."""

_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_BIG_EXPONENT = re.compile(rf"(?:\^|\*\*)\s*[{{(\s]*[-+]?\s*\d(?:[,.]?\d){{{MAX_EXPONENT_DIGITS},}}")
_E_NOTATION = re.compile(r"\d\.?[eE]\s*[-+]?\s*\d{4,}")
_BIG_FACTORIAL = re.compile(r"\d{4,}\s*[})]*\s*!|!\s*[})]*\s*!(?!\s*=)")
_BIG_BINOMIAL = re.compile(r"binom\s*\{\s*\d{5,}|\(\d{4,}\)_")
_OPERATOR = re.compile(r"[-+*/=|]|\\(?:cdot|times|pm|frac|sqrt)(?![a-zA-Z])")
_TOKEN = re.compile(r"\\[{}]|\\(?:begin|end|left|right)(?![a-zA-Z])|[(){}\[\]]|[\^]")
_MANY_PM = re.compile(r"(?:\\[pm][mp](?![a-zA-Z]).*?){4,}", re.DOTALL)

UNEVALUATED_OPERATORS = {
    "integral": re.compile(r"\\(?:i{1,3}nt|oint)(?![a-zA-Z])"),
    "sum": re.compile(r"\\sum(?![a-zA-Z])"),
    "product": re.compile(r"\\prod(?![a-zA-Z])"),
    "limit": re.compile(r"\\(?:lim|limsup|liminf)(?![a-zA-Z])|(?<![a-zA-Z])lim(?:_|\s)"),
    "derivative": re.compile(
        r"\\frac\s*\{\s*(?:d|\\partial)(?:\^\{?\d\}?)?[^{}]{0,12}\}\s*\{\s*(?:d|\\partial)\s*\\?[a-zA-Z]"
        r"|\\nabla|\\frac\s*d\s*\{\s*d[a-z]"
    ),
    "matrix value": re.compile(
        r"(?:\\|operatorname\*?\{|text\{|(?<![a-zA-Z\\]))\s*(?:det|tr|trace|rank|rk|nullity)(?![a-zA-Z])"
        r"|\\begin\{[vV]matrix\}"
    ),
    "divisor": re.compile(
        r"(?:\\|operatorname\*?\{|text\{|(?<![a-zA-Z\\]))\s*(?:gcd|lcm|GCD|LCM|[bp]?mod)(?![a-zA-Z])"
    ),
    "extremum": re.compile(
        r"(?:\\|operatorname\*?\{|text\{|(?<![a-zA-Z\\]))\s*(?:max|min|sup|inf|arg(?:max|min))(?![a-zA-Z])"
    ),
    "rounding": re.compile(r"\\[lr]?(?:floor|ceil)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:floor|ceil|round)\s*\("),
}
"""Operators that state a task, not its result. An answer may have one only if the solution has it."""


def exceeds_limits(answer: str, solution: str) -> bool:
    """Return True if an answer exceeds a limit that its solution does not. Both normalized; linear time."""
    if answer == solution:
        return False
    if len(answer) > max(MAX_LENGTH, 4 * len(solution)):
        return True
    return (
        any(
            pattern.search(answer) is not None and pattern.search(solution) is None
            for pattern in (_DIGITS, _BIG_EXPONENT, _E_NOTATION, _BIG_FACTORIAL, _BIG_BINOMIAL, _MANY_PM)
        )
        or len(_OPERATOR.findall(answer)) > max(MAX_OPERATORS, 4 * len(_OPERATOR.findall(solution)))
        or _is_too_deep(answer, solution)
    )


def has_unevaluated_operator(answer: str, solution: str) -> bool:
    r"""Return True if the answer has an operator that states a task (`\int`, `\gcd`) and that the solution lacks."""
    return any(pattern.search(answer) and not pattern.search(solution) for pattern in UNEVALUATED_OPERATORS.values())


def _is_too_deep(answer: str, solution: str) -> bool:
    depth, tower = _depths(answer)
    solution_depth, solution_tower = _depths(solution)
    return depth > max(MAX_DEPTH, 2 * solution_depth) or tower > max(2, solution_tower)


def _depths(text: str) -> tuple[int, int]:
    """Return the deepest nesting of brackets, and the height of the highest tower of powers."""
    depth = deepest = tower = highest = 0
    powers: list[int] = []
    after_power = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "^":
            tower += 1
            highest = max(highest, tower)
            after_power = text[match.end() : match.end() + 1] in ("{", "(")
            if not after_power:
                tower -= 1
        elif token in ("{", "(", "[", r"\{", r"\begin"):
            depth += 1
            deepest = max(deepest, depth)
            powers.append(1 if after_power else 0)
            after_power = False
        elif token in ("}", ")", "]", r"\}", r"\end") and powers:
            depth -= 1
            tower -= powers.pop()
    return deepest, highest
