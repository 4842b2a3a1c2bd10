"""Text from outside made fit to be shown: no credentials, nothing invisible, nothing without end.

Completions, prompts, names, settings and error texts are untrusted. Escaping for HTML is the template's part
(`page.html`, with autoescape); all that it prints comes through `plain` first.
"""

import re

from markupsafe import Markup

from grpo_ray.storage.run_folder import redact_credentials

MARGIN = 4096
"""Characters beyond a cut that are looked through for credentials, so that no half of one is left."""

_UNSEEN = re.compile(
    "([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e0fff\ud800-\udfff])\\1*"
)
"""Control characters, what turns the direction of text or has no width, halves of surrogate pairs; one or several."""
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}"
    r"|(?<=[?&\s])(?:X-Amz-(?:Signature|Credential|Security-Token)|X-Goog-(?:Signature|Credential))=[^&\s\"']+"
    r"|\b(?:aws_secret_access_key|aws_session_token|secret_key|access_key|password|passwd)[\"']?\s*[=:]\s*[^\s,;&]+",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(://[^/?@:\s]{0,100}):[^\s@]{1,200}@")
"""A password in a URL, even with a slash in it that nobody encoded."""
_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|secret|token|password|passwd|credentials?|authorization)(_|$)", re.IGNORECASE
)


def plain(value: object, limit: int = 20_000) -> str:
    """A value as text that shows all there is in it, credentials aside; the middle of a longer one is left out.

    limit: characters, before those that cannot be seen are written out as `⟨U+202E⟩`.
    """
    text = value if isinstance(value, str) else str(value)
    length = len(text)
    if length <= limit + MARGIN:
        text = _hide(text)
        if len(text) > limit:
            text = f"{text[: limit - limit // 3]} [... of {length} characters ...] {text[len(text) - limit // 3 :]}"
    else:
        begin, end = _hide(text[: limit + MARGIN]), _hide(text[-(limit + MARGIN) :])
        # What was hidden makes them shorter, but half of a credential may be left where they were cut out.
        begin = begin[: max(0, min(limit - limit // 3, len(begin) - MARGIN))]
        end = end[max(MARGIN, len(end) - limit // 3) :]
        text = f"{begin} [... of {length} characters ...] {end}"
    return _UNSEEN.sub(_written_out, text)


def shown(value: object) -> object:
    """What the template prints: numbers and its own markup as they are, all else through `plain`."""
    return value if isinstance(value, Markup | int | float) else plain(value)


def counted(count: float, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:.0f} {what}{'' if count == 1 else 's'}"


def is_secret(name: str) -> bool:
    """Whether a setting of that name (`reward.api_key`) holds what must not be shown."""
    return _SECRET_NAME.search(name.rpartition(".")[2]) is not None


def _hide(text: str) -> str:
    return _KEYS.sub("[hidden]", _PASSWORD.sub(r"\1@", redact_credentials(text)))


def _written_out(match: re.Match[str]) -> str:
    code, times = ord(match[1]), len(match[0])
    # Control characters have pictures of their own.
    seen = chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
    return seen if times == 1 else f"{seen}({times} times)"
