"""Correction of misspelled names in error messages."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return "; did you mean ...?" with the nearest known name, or "" if none is near.

    Args:
        likeness: least similarity of a near name, 0 to 1 (difflib's ratio).
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]}?" if near else ""
