"""Loads the judged and the hostile answers that the tests share."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = ROOT.parent / "shared" / "data"
"""Real problems and completions; tests that want them are skipped where they are absent."""


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, `{"repeat": [text, n]}` inside a completion written out."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if isinstance(row.get("completion"), list):
            row["completion"] = "".join(_expanded(part) for part in row["completion"])
    return rows


def _expanded(part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    text, times = part["repeat"]
    return str(text) * int(times)
