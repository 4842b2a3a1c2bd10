"""Demonstrations of supervised fine-tuning: problems with a column `completion`, the turn that the policy learns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_ray.errors import DataError

if TYPE_CHECKING:
    from grpo_ray.data.problem import Problem

COMPLETION = "completion"
"""Column with the text of a demonstration, or with one chat message of the assistant (`data.columns` renames it)."""


def demonstrated_text(problem: "Problem") -> str:
    """Return the text that the policy learns to answer a prompt with.

    Raises:
        DataError: the problem has no completion, or one that is neither text nor one message of the assistant.
    """
    where = problem.where or f"problem {problem.id}"
    completion: Any = problem.columns.get(COMPLETION)
    if completion is None:
        raise DataError(
            f"{where}: no column '{COMPLETION}', which run.kind=sft trains on; the row has "
            f"{', '.join(sorted({'prompt', *problem.columns}))}; name the file's column in "
            f"data.columns={{{COMPLETION}: ...}}"
        )
    if hasattr(completion, "tolist"):  # parquet readers return lists as NumPy arrays
        completion = completion.tolist()
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        message = completion[0]
        completion = message.get("content") if message.get("role") == "assistant" else None
    if not isinstance(completion, str) or not completion.strip():
        raise DataError(
            f"{where}: '{COMPLETION}' must be a text that is not empty, or one chat message of the assistant, not "
            f"{problem.columns[COMPLETION]!r:.60}"
        )
    try:
        completion.encode()
    except UnicodeEncodeError:  # tokenizers refuse it
        raise DataError(f"{where}: '{COMPLETION}' contains an unpaired surrogate, which is no text") from None
    return completion
