"""Records of groups for tests of the files of a run and of what reads them."""

import math

from grpo_ray.storage.records.groups import GroupRecord

NAN = math.nan
A, B, C, D = (letter * 16 for letter in "abcd")
"""Ids of problems."""


def group(step: int, problem: str = A, correct: tuple[float, ...] | None = (1.0, 0.0), epoch: int = 0) -> GroupRecord:
    """Make a group of two completions."""
    return GroupRecord(
        step=step,
        epoch=epoch,
        problem=problem,
        rewards=(1.5, NAN),
        correct=correct,
        lengths=(3, 4096),
        truncated=(False, True),
    )
