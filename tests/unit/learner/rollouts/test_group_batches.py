"""Batches of whole groups that the learner makes of a stream of problems."""

import pytest

from grpo_ray.data.problem import Problem
from grpo_ray.errors import DataError
from grpo_ray.learner.rollouts.group_batches import GroupBatches


def problems(count: int) -> list[tuple[Problem, int]]:
    """Make problems of epoch 0, with the number of each in its solution."""
    return [
        (
            Problem(
                id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n}?"}], solution=f"${n}$", columns={"topic": "t"}
            ),
            0,
        )
        for n in range(count)
    ]


def test_group_batches_repeats_whole_groups() -> None:
    batches = list(GroupBatches(problems(4), prompts=2, num_generations=3, repeats=2))
    assert len(batches) == 4  # 2 steps, each twice
    assert batches[0] is batches[1] and batches[2] is batches[3]
    assert [(row["solution"], row["index"]) for row in batches[0]] == [
        ("$0$", 0), ("$0$", 1), ("$0$", 2), ("$1$", 0), ("$1$", 1), ("$1$", 2),
    ]  # fmt: skip
    assert batches[2][0]["topic"] == "t" and batches[2][0]["epoch"] == 0


def test_group_batches_draw_continues_the_stream() -> None:
    batches = GroupBatches(problems(6), prompts=2, num_generations=1, repeats=2)
    steps = iter(batches)
    assert [row["solution"] for row in next(steps)] == ["$0$", "$1$"]
    assert [row["solution"] for row in batches.draw()] == ["$2$", "$3$"]
    assert [row["solution"] for row in next(steps)] == ["$0$", "$1$"]  # the step's second pass
    assert [row["solution"] for row in next(steps)] == ["$4$", "$5$"]
    with pytest.raises(DataError, match="0 of a step's 2 problems"):
        batches.draw()


def test_group_batches_stream_ends_inside_step_raises() -> None:
    with pytest.raises(DataError, match="1 of a step's 2 problems"):
        list(GroupBatches(problems(3), prompts=2, num_generations=2, repeats=1))
