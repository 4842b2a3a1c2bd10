"""Correction of misspelled names in error messages."""

import difflib


def suggestion(name: str, known: list[str]) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
