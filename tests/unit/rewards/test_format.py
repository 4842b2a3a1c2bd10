"""Tests of the format rewards, of `completion_text`, and of loading rewards by name."""

import asyncio
import importlib.util
import inspect
import sys
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.errors import RewardError
from grpo_ray.rewards.completions import completion_text, transcript
from grpo_ray.rewards.format import TAGS, boxed_format, tag_format, think_format
from grpo_ray.rewards.registry import REWARDS, load_reward


def test_completion_text_of_plain_text_or_messages() -> None:
    assert completion_text("plain") == "plain"
    assert (
        completion_text([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "last"}]) == "last"
    )
    assert (
        completion_text([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]) == "a"
    )
    assert completion_text([]) == completion_text([{"role": "assistant", "content": None}]) == ""
    with pytest.raises(RewardError, match="string or a list"):
        completion_text(5)  # type: ignore[arg-type]


CONVERSATION: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Let me see.", "tool_calls": [
        {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
    ]},
    {"role": "tool", "name": "multiply", "content": r"\boxed{42}"},
]  # fmt: skip


def test_completion_text_result_of_a_tool_is_no_answer() -> None:
    assert completion_text(CONVERSATION) == ""
    assert completion_text([*CONVERSATION, {"role": "user", "content": r"\boxed{42}"}]) == ""
    assert completion_text([*CONVERSATION, {"role": "assistant", "content": "42"}]) == "42"


def test_transcript_has_calls_and_results_in_lines_of_their_own() -> None:
    assert transcript([*CONVERSATION, {"role": "assistant", "content": "It is 42."}]).splitlines() == [
        "Let me see.",
        '[call] multiply {"a": 6, "b": 7}',
        r"[tool multiply] \boxed{42}",
        "It is 42.",
    ]


def test_tag_format_text_after_the_last_tag_costs() -> None:
    whole = "<think>a</think><answer>b</answer>"
    texts = [whole, whole + " \n", whole + "c" * 100, whole + "c" * 5_000, "no tag at all" * 100]
    # 4 tags of 0.25; 100 characters cost 0.1, and 5,000 no more than the reward
    rewards = load_reward("tag_format", trailing_cost=0.001)(completions=texts)
    assert rewards == pytest.approx([1.0, 1.0, 0.9, 0.0, 0.0])
    assert tag_format(texts) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_tag_format_own_tags() -> None:
    tags = ["<plan>", "</plan>", "<code>"]
    # The third tag of the second text comes too early.
    texts = ["<plan>a</plan><code>b", "<code><plan></plan>", "<think></think>"]
    assert load_reward("tag_format", tags=tags, credit=0.5)(completions=texts) == [1.5, 1.0, 0.0]


@pytest.mark.parametrize("settings", [{"tags": []}, {"tags": ["a", ""]}, {"tags": ["a", "a"]}, {"trailing_cost": -1.0}])
def test_tag_format_bad_settings_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="must be"):
        load_reward("tag_format", **settings)(completions=["a"])


def test_boxed_format_one_closed_filled_box_earns_one() -> None:
    completions = [
        r"so \boxed{5}",  # 1.0
        r"\boxed{4} or \boxed{5}",  # 0.5: several boxes
        r"<think>\boxed{4}</think> \boxed{5}",  # 1.0: the first box is in the reasoning
        r"\boxed{ }",  # 0.0: empty
        r"\boxed{5",  # 0.0: not closed
        "5",
    ]
    assert boxed_format(completions) == [1.0, 0.5, 1.0, 0.0, 0.0, 0.0]


def test_tag_format_each_tag_in_order_adds_a_quarter() -> None:
    completions = [
        "<think>a</think><answer>b</answer>",  # 4 tags
        "<think>a</think> b",  # 2 tags
        "<answer>b</answer><think>a</think>",  # only the two think tags: no answer tag follows them
        "<think><think>a</think>",  # </think> alone: <think> occurs twice
        "nothing",
    ]
    assert tag_format(completions) == [1.0, 0.5, 0.5, 0.25, 0.0]
    assert tag_format(completions[:1], credit=0.5) == [2.0]


@given(st.lists(st.sampled_from([*TAGS, "text", " "]), max_size=8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tag_format_only_the_whole_format_earns_one(parts: list[str]) -> None:
    (reward,) = tag_format(["".join(parts)])
    tags = [part for part in parts if part in TAGS]
    assert reward in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert (reward == 1.0) == (tags == list(TAGS))


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_think_format_accepts_plain_text_and_messages() -> None:
    assert think_format(["<think>a</think> b", "<think>a b"]) == [1.0, 0.0]
    assert think_format([[{"role": "assistant", "content": "<think>a</think> b"}]]) == [1.0]


def test_load_reward_with_settings_keeps_name_and_settings() -> None:
    reward: Any = load_reward("tag_format", credit=0.5)
    assert reward.function is REWARDS["tag_format"]
    assert reward.__name__ == "tag_format"
    assert reward(completions=["<think>"], solution=["$5$"]) == [0.5]


def test_load_reward_wrong_name_or_setting_suggests_nearest() -> None:
    with pytest.raises(RewardError, match="did you mean boxed_format"):
        load_reward("boxed_formt")
    with pytest.raises(RewardError, match="did you mean credit"):
        load_reward("tag_format", credits=0.5)
    with pytest.raises(RewardError, match="needs a value for max_length, buffer"):
        load_reward("soft_overlong")


def test_load_reward_by_path_loads_function() -> None:
    reward: Any = load_reward("grpo_ray.rewards.format:boxed_format")
    assert reward.function is boxed_format and reward.__name__ == "boxed_format"
    with pytest.raises(RewardError, match=r"cannot be imported \(No module named 'no_such_module'\); is its folder on"):
        load_reward("no_such_module:reward")
    with pytest.raises(RewardError, match="did you mean boxed_format"):
        load_reward("grpo_ray.rewards.format:boxedformat")


def test_load_reward_async_function_stays_async(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(completions: list[str], *, bonus: float = 0.0, **kwargs: object) -> list[float]:
        return [bonus for _ in completions]

    module = types.ModuleType("users_rewards")
    module.slow = slow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_rewards", module)
    reward: Any = load_reward("users_rewards:slow", bonus=2.0)
    assert inspect.iscoroutinefunction(reward.__call__)
    assert asyncio.run(reward(completions=["a", "b"])) == [2.0, 2.0]
