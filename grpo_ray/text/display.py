"""Untrusted text made safe to display: secrets masked, invisible characters visible, length bounded.

Completions, prompts, names, settings and error texts are untrusted. The report's templates (with autoescape) do the
HTML escaping; every value that they print passes through `safe_text` first.
"""

import unicodedata

from grpo_ray.text.redaction import redact, strip_hidden

CUT_MARGIN = 4096
"""Characters searched for secrets beyond each cut, so that a secret lying across the cut is masked as a whole."""
LINE_CHARS = 300
"""Default limit of `one_line`, characters."""

_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories without a glyph: control and format characters (text direction, zero width), lone surrogates,
line and paragraph separators."""
_ALLOWED_INVISIBLE = frozenset("\n\t\u200c\u200d")
"""Line breaks and tabs, and the joiners that emoji and some scripts need."""


def safe_text(value: object, limit: int = 20_000) -> str:
    """Convert a value to displayable text: mask secrets, shorten it, and write invisible characters as `⟨U+202E⟩`.

    Args:
        value: any object; converted with `str` unless it is a string.
        limit: maximum number of characters to keep, counted before invisible characters are written out. The middle of
            a longer text is replaced by a note with the original length.
    """
    text = value if isinstance(value, str) else str(value)
    length = len(text)
    if length <= limit + CUT_MARGIN:
        text = _mask_secrets(text)
        if len(text) > limit:
            text = f"{text[: limit - limit // 3]} [... of {length} characters ...] {text[len(text) - limit // 3 :]}"
    else:
        # A text may have megabytes, so only its two ends are searched for secrets. CUT_MARGIN characters at the inner
        # edge of each are dropped: the edge may cut through a secret, whose part no pattern matches. They are counted
        # after masking, which may have shortened the text.
        begin, end = _mask_secrets(text[: limit + CUT_MARGIN]), _mask_secrets(text[-(limit + CUT_MARGIN) :])
        begin = begin[: max(0, min(limit - limit // 3, len(begin) - CUT_MARGIN))]
        end = end[max(CUT_MARGIN, len(end) - limit // 3) :]
        text = f"{begin} [... of {length} characters ...] {end}"
    return make_visible(text)


def one_line(text: object, limit: int = LINE_CHARS) -> str:
    """Return a text of a worker, a file or a library as one safe line; `limit` as in `safe_text`."""
    return " ".join(safe_text(text, limit).split())


def pluralize(count: float, noun: str) -> str:
    """Return the count with its noun: `1 step`, `2 steps`."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def _mask_secrets(text: str) -> str:
    return strip_hidden(redact(text))


def make_visible(text: str) -> str:
    """Write invisible characters as `⟨U+202E⟩`."""
    return "".join(f"⟨U+{ord(char):04X}⟩" if _is_invisible(char) else char for char in text)


def _is_invisible(char: str) -> bool:
    return char not in _ALLOWED_INVISIBLE and unicodedata.category(char) in _INVISIBLE_CATEGORIES
