"""Preparation of texts of problems, completions and tools for records: without secrets, and of a bounded size."""

from grpo_ray.text.redaction import redact_record


def recorded_text(text: str, limit: int) -> str:
    """Return a text without secrets, shortened to at most `limit` bytes of UTF-8.

    Secrets are hidden before the text is shortened: a secret that is cut in half is not recognised.
    """
    return truncate_middle(redact_record(text), limit)


def truncate_middle(text: str, limit: int) -> str:
    """Shorten a text to at most `limit` bytes of UTF-8; keep the beginning (question) and the end (answer).

    An unpaired surrogate, which UTF-8 cannot encode, becomes "?".
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    gap = f"\n[... of {len(data)} bytes ...]\n"
    kept_bytes = limit - len(gap)
    # "ignore" drops a character that is cut in half.
    if kept_bytes <= 0:
        return data[:limit].decode("utf-8", "ignore")
    end_bytes = kept_bytes // 3
    begin, end = data[: kept_bytes - end_bytes], data[len(data) - end_bytes :]
    return gap.join(part.decode("utf-8", "ignore") for part in (begin, end))
