"""Tests of the table of built-in rewards against the tables of the config, and of classes that cannot be created."""

from pathlib import Path

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
        "reward 'unmakable_rewards:Short' cannot be created with rewards.settings of limit: ValueError: invalid literal "
        f"for int() with base 10: 'many' ({file}, line 3)"
    )
    with pytest.raises(RewardError, match=r"with no rewards\.settings: TypeError: .*missing 1 required positional"):
        load_reward("unmakable_rewards:Short")


def test_built_in_class_with_a_setting_of_another_type_is_one_line() -> None:
    with pytest.raises(RewardError, match=r"'code_tests' cannot be created with .* of cpu_seconds: Type"):
        load_reward("code_tests", cpu_seconds="five")
