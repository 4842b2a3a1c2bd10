"""Tests of the guessing games: splits, ids and hints."""

import pytest

from grpo_ray.config.schema import DataConfig
from grpo_ray.data.guessing import GAMES, guessing_problems, hint
from grpo_ray.data.registry import open_dataset


def test_games_splits_have_no_problem_in_common_or_twice() -> None:
    problems = [problem for split in GAMES for problem in guessing_problems(split)]
    assert len({problem.id for problem in problems}) == len(problems) == sum(GAMES.values()) == 4200


@pytest.mark.parametrize(("split", "first"), [("heldout", 0), ("train", 200)])
def test_open_dataset_guessing_reads_numbered_games(split: str, first: int) -> None:
    (shard,) = open_dataset("guessing", split, DataConfig())
    problems = list(shard.read())
    assert len(problems) == shard.num_rows == GAMES[split]
    assert problems[0].prompt == [{"role": "user", "content": f"Game {first}: guess my number."}]
    assert problems[0].solution == ""


def test_hint_names_where_the_secret_lies() -> None:
    assert [hint(20, number) for number in (19, 20, 21)] == ["higher", "correct", "lower"]
