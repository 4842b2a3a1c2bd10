# ruff: noqa: RUF001, RUF002 (look-alike characters are this file's subject)
"""Normalization of a LaTeX answer: one form for its Unicode, fonts, spaces and synonyms.

Every step is linear in the text. Nothing here decides whether an answer is right: a step belongs here only if it keeps
the meaning for every reader (`1\\,000` is 1000, a full-width `５` is 5).
"""

import re
import unicodedata

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "±": r"\pm ", "°": r"^\circ ", "′": "'", "’": "'", "…": r"\dots ", "√": r"\sqrt ",
    "∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ",
    "¢": r"\text{ cents}", "€": "", "£": "", "¥": "", "\u00ad": "", "\ufeff": "", "\u2060": "", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "、": ",", "。": ".", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "→": r"\to ",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_TABLE = str.maketrans(
    _UNICODE
    # Zero-width and direction marks are invisible, so they cannot be part of an answer.
    | {chr(code): "" for code in (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
)

# Fonts without a meaning of their own; \mathbb, \mathcal and \mathfrak denote different things and stay.
_FONT = re.compile(
    r"\\(?:math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|pmb|text(?:bf|it|rm|sf|tt|normal|up|sc)?|mbox|hbox|emph|bold|underline)"
    r"\s*\{([^{}]*)\}"
)
_OLD_FONT = re.compile(r"\{?\\(?:rm|bf|it|sf|tt)(?![a-zA-Z])\s*~?\s*([^{}\\]*)\}?")
_NOISE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|strut|bigskip|medskip|smallskip|noindent)(?![a-zA-Z])"
    r"|\\(?:checkmark|blacksquare|square|qed)(?![a-zA-Z])(?:[\s.~$]|\\[,;:>!) ])*\Z"
    r"|\\(?:text)?color\s*\{[^{}]*\}|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?|\\!|\\[()]|\\\$|\$"
)
_SPACE = re.compile(r"\\[,;:> ]|~|\\(?:thinspace|enspace|medspace|thickspace|hspace\{[^{}]*\}|nbsp)(?![a-zA-Z])")
# The dataset MATH writes thousands as `32,\! 349`; the space after `\!` is not printed.
_THOUSANDS_GAP = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:> ]|~|\u202f|\xa0|(?:,|\{,\})\\! ?)(?=\d{3}(?!\d))")
_THOUSANDS_SPACE = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])")
_ROW_BREAK = re.compile(
    r"(?:\\\\\*?|\\(?:cr|newline|tabularnewline)(?![a-zA-Z]))"
    r"(?:\s{0,9}\[\s{0,9}-?[\d.]{1,9}\s{0,9}(?:[a-z]{2}|\\[a-z]{1,20})\s{0,9}\])?(?:\s*\\hline(?![a-zA-Z]))*"
)
"""`\\\\` with its optional length, `\\\\[2pt]`, and the commands that mean the same."""
_BREAK = r"\cr "
"""Row break during normalization: a command, because the rules for spaces could match half of a double backslash."""
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
"""The most frequent answers, which need no normalization."""
_THOUSANDS_COMMA = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"(?<![\d.}/])(\d+)\s+(\d+)/(\d+)(?![\d./])")
_QUAD = re.compile(r"(?<=[\w})\]])[\s,;]*\\q?quad(?![a-zA-Z])\s*(?=[-\w\\({\[])")
_SYMBOL_FONT = re.compile(r"\\(?:mathbf|bm|boldsymbol|vec)\s*(?:\{\s*([ijk])\s*\}|\s([ijk])(?![a-zA-Z]))")
"""A unit vector, as opposed to the imaginary unit or an index."""
_UNIT_FRACTION = re.compile(
    r"\\(?:text|mathrm)\s*\{\s*([a-zA-Z]+)\s*\}\s*/\s*\\(?:text|mathrm)\s*\{\s*([a-zA-Z]+)\s*\}"
)
# The lookbehind keeps a long run of commas linear: a match starts only at the run's first character.
_CASE_END = re.compile(r"(?<![\s,;.])[\s,;.]*(?:(&)[\s,]*|(\\\\|\\end\{cases\}))")
_NORMALIZED_BREAK = re.compile(r" ?\\cr(?![a-zA-Z]) ?")
_BRACED_ROWS = re.compile(
    r"\\\{\s*\\begin\{(array|aligned|gathered|matrix|split)\}(?:\s*\{[clr|]*\})?"
    r"((?:(?!\\begin|\\end).)*)\\end\{\1\}(?!\s*\\\})",
    re.DOTALL,
)
"""Rows behind one large brace, as in a `cases` environment."""
_ROWS = re.compile(
    r"\\begin\{(cases|aligned|align\*?|gathered|gather\*?|split|eqnarray\*?|array)\}(?:\s*\{[clr|]*\})?"
    r"((?:(?!\\begin|\\end).)*)\\end\{\1\}",
    re.DOTALL,
)
_BRACKETED_ROWS = re.compile(
    r"(?P<left>[(\[]) ?\\begin\{(array|matrix|smallmatrix)\}(?: ?\{[clr ]*\})?(?! ?\{[clr ]*\|)"
    r"(?P<rows>(?:(?!\\begin|\\end).)*)\\end\{\2\} ?(?P<right>[)\]])"
)
"""A matrix with brackets around an environment that has none; a block matrix, `{cc|c}`, does not match."""
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|equiv|in)(?![a-zA-Z])")
_ALIGNMENT = re.compile(r"\s*&\s*(?=[=<>]|\\(?:le|ge|ne|equiv|in)(?![a-zA-Z]))|(?<=[=<>])\s*&\s*")
_CASE_WORD = re.compile(r"(?:& ?)?\\text\{\s*(?:if|for|when)\b\s*([^{}]*)\}")
_BRACED = re.compile(r"^\{([^{}]*)\}$")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BRACED_ARGUMENT = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])\{(\([^(){}]*\))\}")
_UNIT_LETTERS = frozenset("mghslLNJWVCKF")
_UNIT_QUOTIENT = re.compile(r"[a-zA-Z]{1,3}/[a-zA-Z]{1,3}")
_AFTER_NUMBER = re.compile(r"[\d}]\s*\Z")
_SYNONYMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(frac|binom)\s*(\d|(?<=\s)[a-zA-Z])\s*([a-zA-Z\d])", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom)\s*(\d|\\pi(?![a-zA-Z]))", r"\\\1{\2}"),
        (r"\\(frac|binom)\s*(\{[^{}]*\})\s*([a-zA-Z\d]|\\(?:pi|theta|alpha)(?![a-zA-Z]))", r"\\\1\2{\3}"),
        (r"\.\.\.", r"\\dots "),
        # A vector between two points has a direction: AB is not BA.
        (r"\\vec\s*\{\s*([A-Z]{2})\s*\}", r"\\overrightarrow{\1}"),
        (r"\\vec\s*(?:\{([^{}]*)\}|([a-zA-Z]))", r"\1\2"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])|\\not\s*=|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:ldots|cdots|dotsc|dotsb|hdots)(?![a-zA-Z])", r"\\dots "),
        (r"\^\s*\{\s*\\circ\s*\}|\\degree(?![a-zA-Z])|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*\\prime\s*\}", "'"),
        (r"(?<!\\)%", r"\\%"),
        (r"\s*\\text\{\s*(?:percent(?:age)?|per cent|pct)\s*\}", r"\\%"),
        (r"\s*(?<![a-zA-Z\\])percent(?:age)?(?![a-zA-Z])", r"\\%"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\bar\s*(?:\{\s*([a-zA-Z])\s*\}|([a-zA-Z])(?![a-zA-Z]))", r"\\overline{\1\2}"),
        (r"\\math(bb|cal|frak)\s+([A-Za-z])(?![a-zA-Z])", r"\\math\1{\2}"),
        (r"\\(?:[bp]?mod(?![a-zA-Z])|text\{\s*mod\s*\})\s*(?:\{\s*([^{}]*?)\s*\}|(\d+|[a-zA-Z]))", r"\\pmod{\1\2}"),
        (r"\(\s*(\\pmod\{[^{}]*\})\s*\)", r"\1"),
        (
            r"\\mathbb\{Z\} ?/ ?(?:\( ?(\d{1,9}|[a-z]) ?\)|(\d{1,9}|[a-z]) ?\\mathbb\{Z\}|(\d{1,9}))",
            r"\\mathbb{Z}_{\1\2\3}",
        ),
        (r"\A\\text\{\s*(?:[Ff]or )?[Aa]ll\s*\}", ""),
        (r"\\(?:Reals|R)(?![a-zA-Z])|\\mathbb\s*R", r"\\mathbb{R}"),
        (r"\\text\{\s*all real(?:s| numbers)\s*\}|(?<![a-zA-Z])all real numbers", r"\\mathbb{R}"),
        (r"\\imath(?![a-zA-Z])", "i"),
        (
            r"\\text\{\s*(?:positive )?[iI]nfinity\s*\}|(?<![a-zA-Z\\])(?:positive )?[iI]nfinity(?![a-zA-Z])",
            r"\\infty ",
        ),
        (r"\+\s*\\infty", r"\\infty"),
        (
            r"\\operatorname\*?\s*\{\s*(arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|gcd|max|min|det)\s*\}",
            r"\\\1 ",
        ),
    )
)


def normalize_latex(text: str, *, commas_separate: bool = False) -> str:
    r"""Return the text in one spelling, without markup that has no meaning. Linear time; never raises.

    Around words `\text{...}` stays and replaces other font commands; around numbers and single letters it is removed.

    Args:
        text: An answer in LaTeX.
        commas_separate: `100,200` is a list of two numbers, not one number with a thousands separator.
    """
    if _PLAIN_NUMBER.fullmatch(text) is not None:
        return text
    if not text.isascii():
        text = _ascii(text)
    if text.lstrip().startswith("{"):
        text = _without_outer_braces(text.strip())
    has_breaks = "\\\\" in text or r"\cr" in text or r"\newline" in text or r"\tabularnewline" in text
    if has_breaks:
        # Outside an environment a line break separates values; a trailing one is removed with the commas.
        row_break = _BREAK if r"\begin" in text else ", "
        text = _ROW_BREAK.sub(lambda _: row_break, text)
    text = _THOUSANDS_GAP.sub("", text)
    text = _NOISE.sub("", text)
    text = _QUAD.sub(", ", text)
    text = " ".join(_SPACE.sub(" ", text.replace(r"\qquad", " ").replace(r"\quad", " ")).split())
    text = text.replace("{ ", "{").replace(" }", "}")
    if "\\" in text:
        text = _UNIT_FRACTION.sub(r"\\text{\1/\2}", text)
        text = _SYMBOL_FONT.sub(r"\\hat{\1\2}", text)
        text = _FONT.sub(_remove_font, text)
        text = _OLD_FONT.sub(_remove_font, text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    if has_breaks:
        text = _NORMALIZED_BREAK.sub(lambda _: "\\\\", text)
    if has_breaks and r"\begin" in text:
        text = _BRACED_ROWS.sub(r"\\begin{cases}\2\\end{cases}", text)
        text = _rewrite_systems(text)
    if r"\begin{" in text:
        text = _BRACKETED_ROWS.sub(_as_matrix, text)
    if r"\begin{cases}" in text:
        text = _CASE_WORD.sub(lambda match: rf"&\text{{{match[1]}}}" if match[1].strip() else "&", text)
        text = _CASE_END.sub(r"\1\2", text)
    text = _THOUSANDS_SPACE.sub(lambda match: match[1] + match[2].replace(" ", ""), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _BRACED_ARGUMENT.sub(r"\1\2", text)
    text = _BRACED.sub(r"\1", text.strip()).removeprefix(r"\approx ").lstrip("=:").rstrip(" .,;:\\").strip()
    if text.startswith("."):
        text = "0" + text
    # A bare 1,000 is one number; inside brackets or next to longer items the comma separates.
    grouped = not commas_separate and _THOUSANDS_COMMA.fullmatch(text)
    return text.replace(",", "") if grouped else text


def _without_outer_braces(text: str) -> str:
    r"""Return `5\text{ cm}` for `{{5\text{ cm}}}`: braces around the whole text only group it."""
    closed: dict[int, int] = {}  # position of a brace -> position of the one that closes it
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            closed[open_braces.pop()] = match.start()
    depth = 0
    while text[depth : depth + 1] == "{" and closed.get(depth) == len(text) - 1 - depth:
        depth += 1
    return text[depth : len(text) - depth]


def _rewrite_systems(text: str) -> str:
    r"""Write a system of equations, `\begin{cases} x=1 \\ y=2 \end{cases}`, as the list `x=1, y=2`.

    Each of several systems is put in parentheses. The text stays as it is if any rows are not equations, such as those
    of a piecewise formula.
    """
    systems = [None if (rows := _equations(match)) is None else ", ".join(rows) for match in _ROWS.finditer(text)]
    if not systems or None in systems:
        return text
    pieces = iter(systems)
    is_alone = len(systems) == 1
    return _ROWS.sub(lambda _: (next(pieces) or "") if is_alone else f"({next(pieces)})", text)


def _as_matrix(match: re.Match[str]) -> str:
    r"""Write rows in matching brackets as a `pmatrix`, the form that `linear` parses; leave others as they are."""
    is_pair = match["left"] + match["right"] in ("()", "[]")
    return rf"\begin{{pmatrix}}{match['rows']}\end{{pmatrix}}" if is_pair else match[0]


def _equations(match: re.Match[str]) -> list[str] | None:
    """Return the rows of an environment if each is an equation or inequality, else None."""
    equations: list[str] = []
    for row in match[2].split("\\\\"):
        equation = _ALIGNMENT.sub("", row).strip(" ,;.")
        relation = _RELATION.search(equation)
        if not equation:
            continue
        if relation is None or "&" in equation or "," in equation[: relation.start()]:
            return None
        if relation.start() == 0:
            # The row continues the equation above it.
            if not equations:
                return None
            equations[-1] += equation
        else:
            equations.append(equation)
    return equations or None


def strip_spacing(text: str) -> str:
    """Remove the spaces and single-character braces of a normalized text that never change its meaning."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)
    return re.sub(r"(?<![a-zA-Z])\{(\w)\}|(?<=[\^_])\{(\w)\}", lambda match: match[1] or match[2], text)


def _remove_font(match: re.Match[str]) -> str:
    """Return the content of a font command; words and units are wrapped in `\\text{...}`."""
    content = match[1].strip()
    if re.fullmatch(r"(?:and|or),?", content):
        return f" {content.rstrip(',')} "
    # Words keep a wrapper so that `5\text{ cm}` is never parsed as 5*c*m, and so does the m of `5\mathrm{~m}`.
    if (content in _UNIT_LETTERS or _UNIT_QUOTIENT.fullmatch(content)) and _AFTER_NUMBER.search(
        match.string, 0, match.start()
    ):
        return rf"\text{{{content}}}"
    return rf"\text{{{content}}}" if re.search(r"[a-zA-Z]{2}", content) and "\\" not in content else content


def _ascii(text: str) -> str:
    """Replace Unicode symbols and digits by LaTeX and ASCII; other characters stay."""
    text = re.sub(r"[⁰¹²³⁴-⁹⁻⁺ⁿ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = text.translate(_TABLE)
    if text.isascii():
        return text
    return "".join(
        str(unicodedata.decimal(char)) if not char.isascii() and unicodedata.category(char) == "Nd" else char
        for char in text
    )
