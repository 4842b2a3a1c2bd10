"""Calls of reward functions outside of training, with the arguments that training passes.

Used for the dry run of `grpo-ray check`, and for the scores of held-out completions.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_ray.data.problem import Problem, reward_columns
from grpo_ray.errors import RewardError
from grpo_ray.models.plain_prompts import plain_text
from grpo_ray.rewards.infinite import warn_of_infinite
from grpo_ray.rewards.metrics import reward_metric


def reward_arguments(
    problems: Sequence[Problem],
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    token_ids: Sequence[Sequence[int]],
    names: Collection[str],
) -> dict[str, Any]:
    """Return the keyword arguments that rewards get at step 0. Metrics that they log are checked, but not recorded.

    Args:
        problems: (B,) at least one; all with the same columns.
        completions: (B,) messages of the completion of each problem; or texts, and then prompts are plain text too.
        token_ids: (B,) its tokens.
        names: names of the run's rewards; a reward must not log a metric under the name of one of theirs.
    """
    from transformers import TrainerState

    rows = [reward_columns(problem.as_row(epoch=0, index=0)) for problem in problems]
    return {
        **{column: [row[column] for row in rows] for column in rows[0] if column != "prompt"},
        "prompts": [
            plain_text(problem.prompt) if isinstance(completion, str) else problem.prompt
            for problem, completion in zip(problems, completions, strict=True)
        ],
        "completions": [each if isinstance(each, str) else list(each) for each in completions],
        "completion_ids": [list(ids) for ids in token_ids],
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda metric, value: reward_metric(metric, value, names),  # raises as in training
    }


def read_rewards(name: str, returned: Any, completions: int) -> list[float | None]:
    """Convert the return value of a reward function to numbers.

    NaN becomes None, and so do infinite numbers, with a warning.

    Args:
        name: entry of `rewards.functions`, for messages.
        returned: a sequence, a NumPy array or a tensor.
        completions: number of completions, B.

    Raises:
        RewardError: it is not a sequence, or has another length.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or len(values) != completions:
        size = f"{len(values)} rewards" if isinstance(values, Sequence) else type(values).__name__
        raise RewardError(
            f"reward {name!r} returned {size} for {completions} completions; return a list with one reward for each, "
            "None where it does not apply"
        )
    numbers = [None if value is None else float(value) for value in values]
    warn_of_infinite(name, sum(number is not None and math.isinf(number) for number in numbers), completions)
    return [None if number is None or not math.isfinite(number) else number for number in numbers]
