"""A problem: a prompt in chat messages, a LaTeX solution, and an id that is its content.

The id is a hash of what the problem says, not of where it stands. So it survives a reordered or re-sharded
dataset, two runs agree on it without talking to each other, and the ledger can tell that a dataset has changed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_ray.errors import DataError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its reference answer."""

    id: str
    """16 hex digits, a hash of prompt and solution."""
    prompt: list[dict[str, str]]
    """Chat messages, each with `role` and `content`; the last one is not the assistant's."""
    solution: str
    """The reference answer, LaTeX as in DeepMath (`$\\frac{1}{2}$`) or plain words (`Yes`)."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row (topic, difficulty ...); rewards receive them as keyword arguments."""

    def told(self, system_prompt: str) -> "Problem":
        """The same problem with a system prompt, unless it has one; its id stays."""
        if self.prompt[0]["role"] == "system":
            return self
        return replace(self, prompt=[{"role": "system", "content": system_prompt}, *self.prompt])

    def row(self) -> dict[str, Any]:
        """The problem as one flat row of a Ray Dataset."""
        return {**self.columns, "id": self.id, "prompt": self.prompt, "solution": self.solution}


def problem_id(prompt: list[dict[str, str]], solution: str) -> str:
    """Hash a problem's content into 16 hex digits (64 bits: a collision among 10^8 problems has odds of 1 in 3,700).

    Raises UnicodeEncodeError for half of a surrogate pair.
    """
    content = json.dumps([[(m["role"], m["content"]) for m in prompt], solution], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse_problem(row: Mapping[str, Any], *, where: str, system_prompt: str | None = None) -> Problem:
    """Turn one row of a dataset into a `Problem`, or raise a `DataError` that names the field and `where`.

    row: must have `prompt` (text, or a list of chat messages) and `solution` (text). Other keys become columns.
    where: file and row, for the error message, such as `train.jsonl, row 17`.
    system_prompt: put before prompts that have no system message of their own.
    """
    for name in ("prompt", "solution"):
        if name not in row:
            raise DataError(f"{where}: no column '{name}'; the row has {', '.join(sorted(row)) or 'no columns'}")
    solution = row["solution"]
    if not isinstance(solution, str):
        raise DataError(f"{where}: 'solution' must be text, not {type(solution).__name__} ({solution!r:.60})")
    if not solution.strip():
        raise DataError(f"{where}: 'solution' is empty")
    prompt = _messages(row["prompt"], where)
    try:
        name = problem_id(prompt, solution)
    except UnicodeEncodeError:
        raise DataError(f"{where}: 'prompt' or 'solution' holds half of a surrogate pair, which is no text") from None
    columns = {key: value for key, value in row.items() if key not in ("id", "prompt", "solution")}
    problem = Problem(id=name, prompt=prompt, solution=solution, columns=columns)
    # After the id is taken: another system prompt does not make another problem.
    return problem.told(system_prompt) if system_prompt else problem


def _messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """Check a prompt and bring it into the form of chat messages."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if hasattr(prompt, "tolist"):  # parquet gives lists as NumPy arrays
        prompt = prompt.tolist()
    if not isinstance(prompt, list) or not prompt:
        kind = "an empty list" if prompt == [] else type(prompt).__name__
        raise DataError(f"{where}: 'prompt' must be text or a list of chat messages, not {kind}")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise DataError(f"{where}: 'prompt' message {i} must have 'role' and 'content', got {message!r:.60}")
        if message["role"] not in ROLES:
            role, roles = message["role"], ", ".join(ROLES)
            raise DataError(f"{where}: 'prompt' message {i} has role {role!r}, not one of {roles}")
        if not isinstance(message["content"], str):
            kind = type(message["content"]).__name__
            raise DataError(f"{where}: 'prompt' message {i} must have text as 'content', not {kind}")
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: 'prompt' ends with the assistant's words; nothing is left to complete")
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: 'prompt' is empty")
    return messages
