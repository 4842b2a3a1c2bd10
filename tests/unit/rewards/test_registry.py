"""Tests of the table of built-in rewards against the tables of the config, and of classes that cannot be created."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.reward_names import SOLUTION_REWARDS
from grpo_ray.errors import RewardError
from grpo_ray.rewards.registry import REWARDS, _requires_solution, load_reward


def test_rewards_that_require_a_solution_are_named_in_the_config() -> None:
    # Otherwise rows without a solution would be accepted, and the reward would get None for them.
    assert {name for name, function in REWARDS.items() if _requires_solution(function)} == set(SOLUTION_REWARDS)


def test_unknown_setting_lists_those_of_the_reward() -> None:
    with pytest.raises(RewardError) as caught:
        load_reward("soft_overlong", max_lenght=9)
    assert str(caught.value) == (
        "reward 'soft_overlong' has no setting 'max_lenght', but max_length, buffer; did you mean max_length?"
    )


def test_function_named_with_a_dot_is_refused_with_its_form() -> None:
    with pytest.raises(RewardError, match=r"unknown reward 'my_rewards\.short'.* as package\.module:function$"):
        load_reward("my_rewards.short")


def test_class_that_cannot_be_created_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unmakable_rewards.py"
    file.write_text(
        "class Short:\n"
        "    def __init__(self, limit):\n"
        "        self.limit = int(limit)\n"
        "    def __call__(self, completions, **columns):\n"
        "        return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError) as caught:
        load_reward("unmakable_rewards:Short", limit="many")
    assert str(caught.value) == (
        "reward 'unmakable_rewards:Short' cannot be created with rewards.settings of limit: ValueError: invalid "
        f"literal for int() with base 10: 'many' ({file}, line 3)"
    )
    with pytest.raises(RewardError, match=r"with no rewards\.settings: TypeError: .*missing 1 required positional"):
        load_reward("unmakable_rewards:Short")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("soft_overlong", {"max_length": "4096", "buffer": 9}, "max_length='4096' must be a whole number"),
        ("cosine_length", {"max_length": 9, "right": [1.0]}, "right=[1.0] must be a list of 2 numbers"),
        ("code_tests", {"cpu_seconds": "five"}, "cpu_seconds='five' must be a number"),
        ("tag_format", {"tags": "<a>"}, "tags='<a>' must be a list of texts"),
        (
            "code_tests",
            {"partial": datetime.date(2026, 1, 2)},
            "partial=datetime.date(2026, 1, 2) must be true or false",
        ),
    ],
)
def test_setting_of_another_type_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward(name, **settings)
    assert str(caught.value) == f"rewards.settings.{name}.{message}"


def test_settings_are_accepted_as_a_yaml_has_them() -> None:
    load_reward("cosine_length", max_length=9, right=[1, 0.5])
    load_reward("tag_format", tags=["<a>", "</a>"], credit=1)
    load_reward("code_tests", parallel=None, partial=True)
    load_reward("json_format", schema={"type": "object"})
