"""A problem: a prompt in chat messages, a reference solution in LaTeX, and an id.

The id is a hash of the problem's content, not of its position. It therefore survives a reordered or re-sharded
dataset, is the same in every run and on every machine, and lets the ledger detect that a dataset has changed.

    problem = parse_problem({"prompt": "What is 2 + 3?", "solution": "$5$"}, where="train.jsonl, row 17")
    problem.prompt  # [{"role": "user", "content": "What is 2 + 3?"}]
    problem.id      # "ec45827914e419a0"
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
    """16 hex digits; see `problem_id`."""
    prompt: list[dict[str, str]]
    """Chat messages, each with `role` and `content`; the last one is not the assistant's."""
    solution: str
    """The reference answer: LaTeX as in DeepMath (`$\\frac{1}{2}$`) or plain words (`Yes`)."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row (topic, difficulty ...); rewards receive them as keyword arguments."""

    def with_system_prompt(self, system_prompt: str) -> "Problem":
        """Return the problem with a system prompt and the same id; unchanged if it already has a system prompt."""
        if self.prompt[0]["role"] == "system":
            return self
        return replace(self, prompt=[{"role": "system", "content": system_prompt}, *self.prompt])

    def as_dict(self) -> dict[str, Any]:
        """Return `columns`, `id`, `prompt` and `solution` as one flat dictionary, the form of TRL's inputs."""
        return {**self.columns, "id": self.id, "prompt": self.prompt, "solution": self.solution}


def problem_id(prompt: list[dict[str, str]], solution: str) -> str:
    """Hash a problem's content into 16 hex digits.

    The hash has 64 bits: among 10^8 problems, the odds of any collision are 1 in 3,700.

    Raises:
        UnicodeEncodeError: a text contains an unpaired surrogate.
    """
    content = json.dumps([[(m["role"], m["content"]) for m in prompt], solution], ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse_problem(row: Mapping[str, Any], *, where: str, system_prompt: str | None = None) -> Problem:
    """Convert one row of a dataset into a `Problem`.

    Args:
        row: has `prompt` (text, or a list of chat messages) and `solution` (text). A column `id` is ignored; all
            others become `Problem.columns`.
        where: file and row for the error message, such as `train.jsonl, row 17`.
        system_prompt: is added to a prompt without a system message.

    Raises:
        DataError: the row cannot be used; the message names `where` and the field.
    """
    for name in ("prompt", "solution"):
        if name not in row:
            raise DataError(f"{where}: no column '{name}'; the row has {', '.join(sorted(row)) or 'no columns'}")
    solution = _parse_solution(row["solution"], where)
    prompt = _parse_messages(row["prompt"], where)
    try:
        content_id = problem_id(prompt, solution)
    except UnicodeEncodeError:
        raise DataError(f"{where}: 'prompt' or 'solution' contains an unpaired surrogate, which is no text") from None
    columns = {key: value for key, value in row.items() if key not in ("id", "prompt", "solution")}
    problem = Problem(id=content_id, prompt=prompt, solution=solution, columns=columns)
    # Added after the id is computed: a problem keeps its id under another system prompt.
    return problem.with_system_prompt(system_prompt) if system_prompt else problem


def _parse_solution(solution: Any, where: str) -> str:
    """Check that a solution is a text that is not empty."""
    if not isinstance(solution, str):
        raise DataError(f"{where}: 'solution' must be text, not {type(solution).__name__} ({solution!r:.60})")
    if not solution.strip():
        raise DataError(f"{where}: 'solution' is empty")
    return solution


def _parse_messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """Convert a prompt into chat messages that have `role` and `content` only."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if hasattr(prompt, "tolist"):  # parquet readers return lists as NumPy arrays
        prompt = prompt.tolist()
    if not isinstance(prompt, list) or not prompt:
        kind = "an empty list" if prompt == [] else type(prompt).__name__
        raise DataError(f"{where}: 'prompt' must be text or a list of chat messages, not {kind}")
    messages = [_parse_message(message, f"{where}: 'prompt' message {i}") for i, message in enumerate(prompt)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: 'prompt' ends with a message of the assistant; end it with a message of the user")
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: 'prompt' is empty")
    return messages


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise DataError(f"{where} must have 'role' and 'content', got {message!r:.60}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise DataError(f"{where} has role {role!r}, not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where} must have text as 'content', not {type(content).__name__}")
    return {"role": role, "content": content}
