"""A problem: a prompt in chat messages, a reference solution in LaTeX, and an id.

The id is a hash of the problem's content, not of its position. It therefore survives a reordered or re-sharded
dataset, is the same in every run and on every machine, and lets the ledger detect that a dataset has changed.

    problem = parse_problem({"prompt": "What is 2 + 3?", "solution": "$5$"}, where="train.jsonl, row 17")
    problem.prompt  # [{"role": "user", "content": "What is 2 + 3?"}]
    problem.id      # "ec45827914e419a0"
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_ray.data.demonstrations import COMPLETION
from grpo_ray.errors import DataError

ROLES = ("system", "user", "assistant")

RESERVED_COLUMNS = {
    **dict.fromkeys(("prompts", "completions", "completion_ids"), "is an argument that TRL passes to rewards"),
    **dict.fromkeys(("trainer_state", "log_extra", "log_metric"), "is an argument that TRL passes to rewards"),
    "environments": "is an argument that TRL passes to rewards",
    "environment_reward": "is the environment's reward, which is passed to rewards",
    "completion": "is not passed to rewards by TRL",
    **dict.fromkeys(("image", "images"), "makes TRL treat the problem as one with images, even if it is null"),
    "self": "is the name of the first argument of a reward that is a class",
    **dict.fromkeys(("grpo_ray_columns", "grpo_ray_source"), "is used by grpo_ray itself"),
}
"""Column of a file that is refused -> the reason. TRL's `GRPOTrainer._calculate_rewards` passes all columns to rewards,
and `_generate_and_score_completions` reads `image` and `images`."""

SOURCE = "grpo_ray_source"
"""Item of a row of TRL's inputs with the name of the problem's source; only rows of a mixture have it."""
_OWN_ITEMS = ("id", "epoch", "index")
"""Items that the learner reads from a row of TRL's inputs; columns of the same names are stored separately."""
_COLLIDING = "grpo_ray_columns"
"""Item of a row of TRL's inputs that stores the columns whose names are in `_OWN_ITEMS`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its reference answer."""

    id: str
    """Hash of everything that a reward can read, 16 hex digits; see `problem_id`."""
    prompt: list[dict[str, str]]
    """Chat messages, each with `role` and `content`; the last one is not the assistant's."""
    solution: str
    """The reference answer: LaTeX as in DeepMath (`$\\frac{1}{2}$`) or plain words (`Yes`); "" if the row has none, in
    which case rewards receive None."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row (topic, difficulty ...); rewards receive them as keyword arguments. All problems of a
    split have the same ones (`stream.Split.columns`)."""
    source: str = ""
    """Name of the source of a mixture that it belongs to; "" for a problem of a single dataset."""
    where: str = field(default="", compare=False, repr=False)
    """File and row, for error messages; "" if the problem is in no file."""
    question_id: str = field(default="", compare=False, repr=False)
    """Hash of prompt and solution alone, 16 hex digits; `id` if the columns determine the task (environments). Problems
    with equal question ids are held out together, because the answer to one reveals the answer to the other."""

    def __post_init__(self) -> None:
        if not self.question_id:
            object.__setattr__(self, "question_id", self.id)

    def with_system_prompt(self, system_prompt: str) -> "Problem":
        """Return the problem with a system prompt and the same id; unchanged if it already has a system prompt."""
        if self.prompt[0]["role"] == "system":
            return self
        return replace(self, prompt=[{"role": "system", "content": system_prompt}, *self.prompt])

    def of_source(self, source: str, environment: str | None = None) -> "Problem":
        """Return the problem as part of a source of a mixture.

        It gets another id, so that equal problems of two sources are counted separately. Its `question_id` stays.

        Args:
            environment: value of the column `environment`; None: as in the row.
        """
        digest = hashlib.sha256(f"{source}/{self.id}".encode()).hexdigest()[:16]
        columns = self.columns if environment is None else {**self.columns, "environment": environment}
        return replace(self, id=digest, source=source, columns=columns)

    def with_columns(self, names: Sequence[str]) -> "Problem":
        """Return the problem with these columns and no others, in this order; a column that it lacks is None."""
        if list(self.columns) == list(names):
            return self
        return replace(self, columns={name: self.columns.get(name) for name in names})

    def as_row(self, epoch: int, index: int) -> dict[str, Any]:
        """Return the row of TRL's inputs for one completion of the problem.

        Args:
            epoch: epoch that the group counts for.
            index: number of the completion in its group.
        """
        own: dict[str, Any] = {"id": self.id, "epoch": epoch, "index": index}
        if self.source:
            own[SOURCE] = self.source
        row = {**self.columns, "prompt": self.prompt, "solution": self.solution or None, **own}
        if colliding := {name: self.columns[name] for name in _OWN_ITEMS if name in self.columns}:
            row[_COLLIDING] = colliding
        return row


def reward_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that rewards receive for a row of `Problem.as_row`.

    These are the dataset's columns, the row's `id`, `epoch` and `index`, and in a mixture its `source`. A column of the
    dataset with one of these names takes precedence.
    """
    columns = {name: value for name, value in row.items() if name not in (_COLLIDING, SOURCE)} | row.get(_COLLIDING, {})
    return {"source": row[SOURCE]} | columns if SOURCE in row else columns


def problem_id(prompt: list[dict[str, str]], solution: str, columns: Mapping[str, Any] | None = None) -> str:
    """Hash a problem's content into 16 hex digits.

    The hash has 64 bits: among 10^8 problems, the odds of any collision are 1 in 3,700.

    Args:
        columns: further columns, in any order; one that is None counts as missing.

    Raises:
        UnicodeEncodeError: prompt or solution contains an unpaired surrogate.
    """
    content = json.dumps([[(m["role"], m["content"]) for m in prompt], solution], ensure_ascii=False).encode()
    if known := {name: value for name, value in sorted((columns or {}).items()) if value is not None}:
        content += json.dumps(known, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def parse_problem(
    row: Mapping[str, Any],
    *,
    where: str,
    system_prompt: str | None = None,
    needs_solution: bool = True,
    columns_decide: bool = False,
    is_demonstration: bool = False,
) -> Problem:
    """Convert one row of a dataset into a `Problem`.

    Args:
        row: has `prompt` (text, or a list of chat messages) and `solution` (text, a number, or a list of these, all of
            which are the answer). All other items become `Problem.columns`.
        where: file and row for the error message, such as `train.jsonl, row 17`.
        system_prompt: added to a prompt without a system message.
        needs_solution: if False, a row without a solution gets an empty one.
        columns_decide: True if the columns determine the task, as those of an environment do; rows with equal prompts
            and solutions are then different questions.
        is_demonstration: True for a row with a column `completion`, which no reward receives.

    Raises:
        DataError: the row cannot be used; the message names `where` and the field.
    """
    lacks_solution = not needs_solution and row.get("solution") is None
    for name in ("prompt",) if lacks_solution else ("prompt", "solution"):
        if name not in row:
            reader = ", which a reward or heldout.score reads" if name == "solution" else ""
            mend = ""
            if name == "solution" and is_demonstration:  # otherwise demonstrations need none
                mend = "; a part of data.train is held out: name other problems in data.heldout"
            raise DataError(
                f"{where}: no column '{name}'{reader}; the row has {', '.join(sorted(row)) or 'no columns'}{mend}"
            )
    solution = "" if lacks_solution else _parse_solution(row["solution"], where)
    prompt = _parse_messages(row["prompt"], where)
    columns = {key: value for key, value in row.items() if key not in ("prompt", "solution")}
    try:
        question_id = problem_id(prompt, solution)
        content_id = problem_id(prompt, solution, columns) if columns else question_id
    except UnicodeEncodeError:
        raise DataError(f"{where}: 'prompt' or 'solution' contains an unpaired surrogate, which is no text") from None
    allowed = (COMPLETION,) if is_demonstration else ()
    if reserved := next((name for name in columns if name in RESERVED_COLUMNS and name not in allowed), None):
        raise DataError(
            f"{where}: column '{reserved}' cannot be passed to rewards, because it {RESERVED_COLUMNS[reserved]}; "
            f"rename it in the file, or with data.columns={{source_{reserved}: {reserved}}}"
        )
    problem = Problem(
        id=content_id,
        prompt=prompt,
        solution=solution,
        columns=columns,
        where=where,
        question_id=content_id if columns_decide else question_id,
    )
    # Added after the id is computed: a problem keeps its id under another system prompt.
    return problem.with_system_prompt(system_prompt) if system_prompt else problem


def _parse_solution(solution: Any, where: str) -> str:
    """Return a solution as text; a text unchanged, the items of a list with commas between them.

    Raises:
        DataError: it is empty, or neither text, nor a number, nor a list of these.
    """
    if hasattr(solution, "tolist"):  # parquet readers return lists as NumPy arrays
        solution = solution.tolist()
    if isinstance(solution, list) and solution and not any(isinstance(item, list) for item in solution):
        return ", ".join(_parse_solution(item, where) for item in solution)
    if isinstance(solution, int):
        return str(solution)
    if isinstance(solution, float) and math.isfinite(solution):
        # A column of integers in which one is missing is read as floats.
        return str(int(solution)) if solution.is_integer() else str(solution)
    if not isinstance(solution, str):
        kind = "an empty list" if solution == [] else f"{type(solution).__name__} ({solution!r:.60})"
        raise DataError(f"{where}: 'solution' must be text, a number or a list of these, not {kind}")
    if not solution.strip():
        raise DataError(f"{where}: 'solution' is empty")
    return solution


def _parse_messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """Convert a prompt into chat messages that have only `role` and `content`. Raises DataError."""
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
