"""Completions with known rewards, and answers that exceed a verifier's limit.

`tests/fixtures/fooling.jsonl` has wrong answers that look right, and right ones that look wrong; `hostile.jsonl` has
completions that hang, exhaust or crash a verifier. Columns: `solution`, `completion`, `reward` (null: 0.0 and 1.0 are
both acceptable), and in `hostile.jsonl` an `id`.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = ROOT.parent / "shared" / "data"
"""Real problems and completions; tests that need them are skipped if they are absent."""

RIGHT = [(rf"\boxed{{{number}}}", f"${number}$") for number in range(200)]
"""Right (completion, solution) pairs; grading one takes about a millisecond."""
HANGING = (
    r"\boxed{\int_0^1 \cos(x^{x})\sqrt{\tan(x)}\ln(\sin x+2)\,dx}",
    r"$\int_0^1 \sin(x^{x})\,dx$",
)
"""A pair on which Math-Verify does not return: two integrals. It is within `limits`, because both sides have one."""
OVER_LIMIT = frozenset({"trig_sum", "beyond_guard_0", "beyond_guard_1", "beyond_guard_2", "beyond_guard_3"})
"""Ids of rows in hostile.jsonl that may take longer than any reasonable time limit."""


def load(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; each `{"repeat": [text, n]}` in a list of parts becomes the text n times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if isinstance(row.get("completion"), list):
            row["completion"] = "".join(_expand(part) for part in row["completion"])
    return rows


def _expand(part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    text, times = part["repeat"]
    return str(text) * int(times)
