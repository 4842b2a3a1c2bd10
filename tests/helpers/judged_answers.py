"""Judged answers (fooling and hostile completions with their rewards), and answers that exceed a verifier's limit."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = ROOT.parent / "shared" / "data"
"""Real problems and completions; tests that need them are skipped where they are absent."""

RIGHT = [(rf"\boxed{{{number}}}", f"${number}$") for number in range(200)]
"""(completion, solution) pairs that are right; each takes about a millisecond."""
HANGING = (
    r"\boxed{\int_0^1 \cos(x^{x})\sqrt{\tan(x)}\ln(\sin x+2)\,dx}",
    r"$\int_0^1 \sin(x^{x})\,dx$",
)
"""A pair on which Math-Verify does not return: two integrals. The guard passes it because both sides have one."""
OVER_LIMIT = frozenset({"trig_sum", "beyond_guard_0", "beyond_guard_1", "beyond_guard_2", "beyond_guard_3"})
"""Ids of the rows of hostile.jsonl that may take longer than any reasonable limit."""


def load(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file and write out each `{"repeat": [text, n]}` inside a completion."""
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
