"""Redaction of secrets in everything that is written or shown: files of the run folder, messages, logs, pages.

Three kinds of secrets are hidden: values of settings with a secret's name (`hub_token`, `api_key`); credentials in
URIs, and texts of a known form (`s3://KEY:SECRET@bucket`, `?sig=...`, `hf_...`); and the exact values of secrets that
this process uses, which are those of its configs and of environment variables with a secret's name.

Redaction works on copies: workers get the real values, which Ray sends from process to process.

Names of metrics and files, which this package reads again, are not redacted, even if they equal the value of such an
environment variable (`METRIC_KEY=heldout/accuracy`). Names from users are redacted where they are built
(`rewards.metrics.reward_metric`).
"""

import base64
import functools
import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO, TypeVar
from urllib.parse import quote, unquote

T = TypeVar("T")

HIDDEN = "[hidden-secret]"
"""Text in place of a secret."""

MIN_CHARS = 8
"""Minimum length of known secrets that are searched for in texts. Shorter ones would also hide ordinary words and
numbers; they are hidden only where their setting or URI shows that they are secrets."""
BOUNDED_CHARS = 16
"""Length below which a known secret is hidden only as a whole word: "12345678" is not a secret within a checksum."""
PLAIN_WORD = re.compile(r"[a-z_]{1,24}")
"""Value of a `..._key` setting that is hidden there but not searched for in texts: it is often a column's name."""
MAX_DEPTH = 40
"""Maximum depth of nested settings. Deeper ones are hidden as a whole: they are recursive or malicious."""

SECRET_WORDS = frozenset(
    {
        "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials",
        "authorization", "auth", "apikey", "apikeys", "accesskey", "secretkey", "privatekey", "dsn", "cookie",
        "cookies",
        # Anyone who has the address of a chat's webhook can post there; `run.notify` is such an address.
        "webhook", "webhooks", "notify"
    }
)  # fmt: skip
KEY_OWNERS = frozenset(["api", "access", "secret", "private", "auth", "signing", "encryption", "ssh"])
"""Words before `keys` and `tokens` that make them secrets."""
KEY_KINDS = frozenset(
    {
        "", "sort", "primary", "foreign", "cache", "group", "partition", "public", "metric", "row", "column", "field",
        "index", "unique", "join", "split", "routing", "object", "message", "question", "answer", "problem", "prompt",
        "text", "label", "dict", "map", "registry", "state", "heldout", "config"
    }
)  # fmt: skip
"""Words before `key` that make it the key of an entry, not a secret. Any other `..._key` is a secret."""
SECRET_ENDINGS = (("webhook", "url"), ("webhook", "uri"), ("webhooks", "url"), ("account", "json"), ("account", "info"))
"""Last two words of further secrets' names: the address of a webhook, and the file of a service account."""
WORKING_FOLDER = "PWD"
"""Environment variable with the shell's working folder, which is not a secret; a setting `pwd` is a password."""
NAMES_IN_ROWS = ("event", "checkpoint", "name", "warning")
"""Entries of metrics, events and messages whose values are names that programs read again."""
TOKEN_KINDS = frozenset(
    {
        "bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "think", "stop", "start", "end",
        "begin", "special", "next", "new", "last", "prompt", "answer"
    }
)  # fmt: skip
"""Words before `token` that make it a token of a vocabulary."""

_KNOWN_FORMS = {
    "-----BEGIN ": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "AKIA": r"AKIA(?<!\wAKIA)[A-Z0-9]{16}\b",
    "ASIA": r"ASIA(?<!\wASIA)[A-Z0-9]{16}\b",
    "hf_": r"hf_(?<!\whf_)[A-Za-z0-9]{20,}+",
    "sk-": r"sk-(?<!\wsk-)[A-Za-z0-9_-]{20,}+",
    **{f"gh{kind}_": rf"gh{kind}_(?<!\wgh{kind}_)[A-Za-z0-9]{{30,}}+" for kind in "pousr"},
    "github_pat_": r"github_pat_(?<!\wgithub_pat_)\w{30,}+",
    "glpat-": r"glpat-(?<!\wglpat-)[\w-]{18,}+",
    "xox": r"xox(?<!\wxox)[abprs]-[\w-]{10,}+",
    "AIza": r"AIza(?<!\wAIza)[\w-]{35}",
    "npm_": r"npm_(?<!\wnpm_)[A-Za-z0-9]{36}",
    "gsk_": r"gsk_(?<!\wgsk_)[A-Za-z0-9]{20,}+",
    "r8_": r"r8_(?<!\wr8_)[A-Za-z0-9]{20,}+",
    "hooks.slack.com": r"https://hooks\.slack\.com/(?:services|workflows)/[\w/+-]{10,}+",
    "/api/webhooks/": r"https://(?:\w{1,20}\.)?discord(?:app)?\.com/api/webhooks/\d{1,30}/[\w-]+",
}
"""Fixed text in each kind of key or token that is recognised by its form alone -> pattern of the whole. Each pattern
begins with literal characters, and checks the character before them in a lookbehind, so that the search is fast."""
_KNOWN_FORMS_COMPILED = {text: re.compile(pattern) for text, pattern in _KNOWN_FORMS.items()}
_URL_SAFE = str.maketrans("-_", "+/")
"""Alphabet of URL-safe base64 -> the standard one."""
# Malicious texts may have megabytes, so the patterns avoid quadratic time: a repetition is possessive (`++`) where
# backtracking could not lead to a match, and no pattern begins with a repetition that can start at any character. Text
# before a keyword or a credential is kept, so the patterns do not include it.
_WEB_TOKEN = re.compile(r"(?<![\w-])[\w-]++(?:\.[\w-]++){2,}+")
"""Text that may be a JSON Web Token: one match for a whole run of such characters, of any length."""
_BEARER = re.compile(r"\b(Bearer\s{1,20})[\w.~+/-]{16,}+=*", re.IGNORECASE)
_BASIC = re.compile(r"\b(Basic\s{1,20})([\w.~+/-]{4,}+=*)", re.IGNORECASE)
"""HTTP credentials. "basic" also occurs in prose; `_hide_basic` distinguishes the two."""
_AUTHORIZATION = re.compile(r"authorization[\"']?\s{0,20}[:=]\s{0,20}[\"']?\Z", re.IGNORECASE)
"""Text before the credentials in an HTTP header."""
_S3_USER = re.compile(r"(s3[an]?:/{1,2})([^/?#@:\s\"']*+(?::[^@\s\"']{0,300}+)?)@")
"""Keys in an S3 URI. A bucket's name has no colon, so text after a colon is a key, even with slashes in it."""
_WEB_USER = re.compile(r"((?:https?|git|ssh|ftp):/{1,2})([^/?#@\s\"']++)@")
"""User or token in a web address."""
_PASSWORD = re.compile(r"((?<=[\w+.-]):/{1,2})([^/?#@:\s\"']*+:(?!\d{1,5}(?:[/?#]|$))[^@\s\"']{1,300}+)@")
"""User and password in any URI. Text whose part after the colon begins with a port is a host, not a user."""
_PARAMETER = re.compile(
    r"([?&](?=[\w.-]{1,60}=)(?:[\w.-]{0,40}?(?:signature|credential|token|secret|password|passwd|api[_-]?key"
    r"|access[_-]?key(?:[_-]?id)?|secret[_-]?key|accesskeyid)|sig|pwd)=)([^&\s\"'<>#]+)",
    re.IGNORECASE,
)
"""Query parameter of a URI that grants access."""
_ASSIGNMENT = re.compile(
    r"((?:api[_-]?key|secret[_-]?(?:access[_-]?)?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|passw(?:or)?d"
    r"|passphrase|client[_-]?secret|(?:hub|auth|access|api|refresh|session|security|bearer|bot|hf)[_-]token)"
    r"[\"']?\s{0,20}[=:]\s{0,20})([\"']?)(?!\s|\[hidden-secret)([^\s,;&\"'}\]]+)",
    re.IGNORECASE,
)
"""Setting of a secret within a text, such as a message about a malformed file."""
_ASSIGNED_WORDS = ("key", "passw", "passphrase", "secret", "token")
"""Words, in lower case, at least one of which occurs in each match of `_ASSIGNMENT`."""

_remembered: set[str] = set()
"""Secrets of this process's configs."""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if a setting of this name, such as `judge.api_key`, holds a secret."""
    before, last = _last_words(name)
    if (before, last) in SECRET_ENDINGS:
        return True
    if last == "key":
        return before not in KEY_KINDS
    if last == "keys":
        return before in KEY_OWNERS
    if last in ("token", "tokens"):
        return (last == "token" and before not in TOKEN_KINDS) or before in KEY_OWNERS
    return last in SECRET_WORDS


def _is_some_key(name: str) -> bool:
    """Return True if a setting's name ends with `key` and the word before it does not make it certainly a secret."""
    before, last = _last_words(name)
    return last == "key" and before not in KEY_OWNERS


def _last_words(name: str) -> tuple[str, str]:
    """Return the last two words of a name in lower case, without a number or `id` at its end; "" for missing ones."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    while words and (words[-1].isdigit() or (words[-1] == "id" and words[-2:-1] == ["key"])):
        words.pop()
    before, last = ["", "", *words][-2:]
    return before, last


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace credentials in URIs, secrets of a known form, and the given secrets by `HIDDEN`."""
    return (_redact_short if len(text) <= 200 else _redact_text)(text, frozenset(secrets))


def redact_record(text: str) -> str:
    """Redact a text of a dataset, of the policy or of a tool before it is recorded.

    Hides the known secrets of this process, credentials in URIs, and secrets of a known form, but no assignments: in
    mathematics and code, a text such as `password = 5` is not a secret.
    """
    return _redact_certain(text, known_secrets())


def _redact_text(text: str, secrets: frozenset[str]) -> str:
    text = _redact_certain(text, secrets)
    lower = text.lower()
    if any(word in lower for word in _ASSIGNED_WORDS):
        text = _ASSIGNMENT.sub(_hide_assigned, text)
    return text


def _redact_certain(text: str, secrets: frozenset[str]) -> str:
    if (known := _pattern(secrets)) is not None:
        text = known.sub(HIDDEN, text)
    if ":/" in text and "@" in text:  # a URI that was normalized as a path has only one slash
        for user in (_S3_USER, _WEB_USER, _PASSWORD):
            text = user.sub(lambda match: f"{match[1]}{HIDDEN}@", text)
    for part, form in _KNOWN_FORMS_COMPILED.items():
        if part in text:
            text = form.sub(HIDDEN, text)
    if "eyJ" in text:
        text = _WEB_TOKEN.sub(_hide_web_token, text)
    if any(scheme in text.lower() for scheme in ("bearer", "basic")):
        text = _BEARER.sub(lambda match: f"{match[1]}{HIDDEN}", text)
        text = _BASIC.sub(_hide_basic, text)
    if "=" in text:
        text = _PARAMETER.sub(lambda match: f"{match[1]}{HIDDEN}", text)
    return text


def _hide_basic(match: re.Match[str]) -> str:
    """Hide credentials after "Basic", which are base64 of user and password with a colon between."""
    before = match.string[max(0, match.start() - 60) : match.start()]
    is_secret = _AUTHORIZATION.search(before) is not None or _is_user_and_password(match[2])
    return f"{match[1]}{HIDDEN}" if is_secret else match[0]


def _is_user_and_password(text: str) -> bool:
    text = text.rstrip(".").rstrip("=")  # a sentence may end here
    try:
        decoded = base64.b64decode(text.translate(_URL_SAFE) + "=" * (-len(text) % 4), validate=True).decode()
    except ValueError:
        return False
    # An ordinary word may be valid base64 too, but it hardly ever decodes to printable text.
    return len(text) >= MIN_CHARS and ":" in decoded and decoded.isprintable()


def _hide_web_token(match: re.Match[str]) -> str:
    """Hide a JSON Web Token: header, payload and signature; the first two are JSON objects in base64."""
    parts = match[0].split(".")
    for index in range(len(parts) - 2):
        before, start, header = parts[index].partition("eyJ")
        if len(header) >= 10 and parts[index + 1].startswith("eyJ") and len(parts[index + 1]) >= 13:
            shown = [*parts[:index], before + HIDDEN, *parts[index + 3 :]]
            return ".".join(shown) if start else match[0]
    return match[0]


def redact_settings(value: Any, secrets: Iterable[str] = (), *, name: str = "") -> Any:
    """Redact nested settings: values of secret names, and all texts as in `redact_text`.

    In keys, only credentials and secrets of a known form are hidden: a key may happen to equal one of `secrets`.

    Args:
        value: mappings, lists, texts, numbers; other values are returned unchanged.
        secrets: secrets that are hidden in all texts.
        name: name of the setting that has the value.

    Returns:
        A copy in which mappings are dictionaries.
    """
    secrets = frozenset(secrets)

    def redacted(value: Any, is_secret: bool, depth: int) -> Any:
        if isinstance(value, Mapping | list | tuple) and not depth:
            return HIDDEN
        if isinstance(value, Mapping):
            return {
                redact_text(key) if isinstance(key, str) else key: redacted(
                    item, is_secret or is_secret_name(str(key)), depth - 1
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            items = [redacted(item, is_secret, depth - 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if is_secret and value not in (None, "") and not isinstance(value, bool):
            return HIDDEN
        return redact_text(value, secrets) if isinstance(value, str) else value

    return redacted(value, is_secret_name(name), MAX_DEPTH)


def redact_texts(value: Any, secrets: Iterable[str] = ()) -> Any:
    """Redact all texts in nested data except keys of mappings, whatever the keys: a metric may have a secret's name."""
    secrets = frozenset(secrets)
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {key: redact_texts(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [redact_texts(item, secrets) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def find_secrets(value: Any, *, name: str = "") -> set[str]:
    """Return the secrets in nested settings as texts: values of secret names, and credentials in URIs.

    Plain words are left out if the setting's name ends with `key` but need not be a secret's, as in
    `target_key: solution`: redaction would remove such words from all records.
    """
    return {
        part
        for secret in _find(value, _certainty(name), MAX_DEPTH)
        for part in {secret, unquote(secret)}
        if len(part) >= MIN_CHARS and HIDDEN not in part
    }


def _certainty(name: str) -> int:
    """Return 2 for the name of a secret, 1 for a `..._key` that may be the name of a column, 0 for any other."""
    return 0 if not is_secret_name(name) else 1 if _is_some_key(name) else 2


def _find(value: Any, certainty: int, depth: int) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items() if depth else ():
            yield from _find(item, max(certainty, _certainty(str(key))), depth - 1)
    elif isinstance(value, list | tuple):
        for item in value if depth else ():
            yield from _find(item, certainty, depth - 1)
    elif value is None or isinstance(value, bool):
        pass
    elif certainty == 2 or (certainty == 1 and PLAIN_WORD.fullmatch(str(value)) is None):
        yield str(value)
    if isinstance(value, str):
        for user in (_S3_USER, _WEB_USER, _PASSWORD):
            for match in user.finditer(value):
                yield from match[2].split(":", 1)
        yield from (match[2] for match in _PARAMETER.finditer(value))


def remember_secrets(settings: Any) -> None:
    """Remember the secrets in these settings, so that `redact` hides them in this process from now on."""
    _remembered.update(find_secrets(settings))


def redact(value: T) -> T:
    """Redact a text, or all texts in nested data, with the known secrets of this process."""
    redacted: T = redact_texts(value, known_secrets())
    return redacted


def redact_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Redact the texts of a row of metrics, of an event or of a message, but not its `NAMES_IN_ROWS`."""
    return redact(dict(row)) | {name: row[name] for name in NAMES_IN_ROWS if name in row}


def known_secrets() -> frozenset[str]:
    """Return the remembered secrets, and the values of environment variables with a secret's name or ending `_KEY`."""
    names = (name for name in os.environ if (is_secret_name(name) or name.endswith("_KEY")) and name != WORKING_FOLDER)
    return frozenset(_remembered.union(os.environ[name] for name in names if len(os.environ[name]) >= MIN_CHARS))


def hidden_settings(value: Any, path: str = "") -> list[str]:
    """Return the dotted paths of settings whose value contains `HIDDEN`."""
    if isinstance(value, str):
        return [path] if HIDDEN in value else []
    if isinstance(value, Mapping):
        items: Iterable[tuple[str, Any]] = ((f"{path}.{key}".lstrip("."), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((path, item) for item in value)
    else:
        return []
    return list(dict.fromkeys(found for key, item in items for found in hidden_settings(item, key)))


def strip_hidden(text: str) -> str:
    """Remove hidden user names and passwords from a redacted URI: `s3://[hidden-secret]@bucket` -> `s3://bucket`."""
    return text.replace(f"{HIDDEN}@", "")


def redact_stream(stream: TextIO) -> None:
    """Redact everything that Python code of this process writes to a stream such as `sys.stderr`."""
    if hasattr(stream.write, "__wrapped__"):
        return
    write = stream.write

    @functools.wraps(write)
    def write_redacted(text: str) -> int:
        write(redact(text))
        return len(text)

    stream.write = write_redacted  # type: ignore[method-assign]


_redact_short = functools.lru_cache(maxsize=16384)(_redact_text)
"""`_redact_text` with a cache, for short texts that recur in many rows."""


@functools.lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the secrets in all their spellings, longest first; None without secrets."""
    spellings = {each for secret in secrets if len(secret) >= MIN_CHARS for each in _spellings(secret)}
    ordered = sorted(spellings, key=lambda each: (-len(each), each))
    return re.compile("|".join(map(_bounded, ordered))) if ordered else None


def _spellings(secret: str) -> set[str]:
    """Return the spellings of a secret in plain text, URIs, JSON, `repr` and HTML."""
    escaped = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    return {secret, quote(secret), quote(secret, safe=""), html.escape(secret), *escaped}


def _bounded(secret: str) -> str:
    if len(secret) >= BOUNDED_CHARS:
        return re.escape(secret)
    return rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])"


def _hide_assigned(match: re.Match[str]) -> str:
    return match[0] if match[3] in ("null", "None", "true", "false", "...") else f"{match[1]}{match[2]}{HIDDEN}"
