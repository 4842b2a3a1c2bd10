import importlib.util

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards import REWARDS, load_reward
from grpo_ray.rewards.format import boxed_format, tag_format, think_format
from grpo_ray.rewards.text import text_of


def test_a_completion_is_read_in_both_of_trls_shapes() -> None:
    assert text_of("plain") == "plain"
    assert text_of([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "last"}]) == "last"
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]) == "a"
    assert text_of([]) == text_of([{"role": "assistant", "content": None}]) == ""
    with pytest.raises(RewardError, match="string or a list"):
        text_of(5)  # type: ignore[arg-type]


def test_one_closed_box_after_the_reasoning_earns_the_format_reward() -> None:
    completions = [
        r"so \boxed{5}",  # 1.0
        r"\boxed{4} or \boxed{5}",  # 0.5: there are several
        r"<think>\boxed{4}</think> \boxed{5}",  # 1.0: the first was a thought
        r"\boxed{ }",  # 0.0: empty
        r"\boxed{5",  # 0.0: not closed
        "5",
    ]
    assert boxed_format(completions) == [1.0, 0.5, 1.0, 0.0, 0.0, 0.0]


def test_each_tag_in_its_place_adds_a_quarter() -> None:
    completions = [
        "<think>a</think><answer>b</answer>",  # 4 tags
        "<think>a</think> b",  # 2 tags
        "<answer>b</answer><think>a</think>",  # only the two think tags: after them no answer tag follows
        "<think><think>a</think>",  # </think> alone: <think> stands twice
        "nothing",
    ]
    assert tag_format(completions) == [1.0, 0.5, 0.5, 0.25, 0.0]
    assert tag_format(completions[:1], credit=0.5) == [2.0]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_think_format_is_trls_for_plain_text_too() -> None:
    assert think_format(["<think>a</think> b", "<think>a b"]) == [1.0, 0.0]
    assert think_format([[{"role": "assistant", "content": "<think>a</think> b"}]]) == [1.0]


def test_a_reward_is_found_by_name() -> None:
    assert load_reward("boxed_format").function is REWARDS["boxed_format"]


def test_settings_are_filled_in_and_the_name_stays() -> None:
    reward = load_reward("tag_format", credit=0.5)
    assert reward.__name__ == "tag_format"
    assert reward(completions=["<think>"], solution=["$5$"]) == [0.5]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RewardError, match="did you mean 'boxed_format'"):
        load_reward("boxed_formt")
    with pytest.raises(RewardError, match="did you mean 'credit'"):
        load_reward("tag_format", credits=0.5)
    with pytest.raises(RewardError, match="needs a value for max_length, buffer"):
        load_reward("soft_overlong")


def test_a_function_of_ones_own_is_loaded_by_its_path() -> None:
    reward = load_reward("grpo_ray.rewards.format:boxed_format")
    assert reward.function is boxed_format and reward.__name__ == "boxed_format"
    with pytest.raises(RewardError, match="no module 'no_such_module'"):
        load_reward("no_such_module:reward")
    with pytest.raises(RewardError, match="did you mean 'boxed_format'"):
        load_reward("grpo_ray.rewards.format:boxedformat")


def test_an_asynchronous_reward_stays_asynchronous_with_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    import inspect
    import sys
    import types

    async def slow(completions: list[str], *, bonus: float = 0.0, **kwargs: object) -> list[float]:
        return [bonus for _ in completions]

    module = types.ModuleType("own_rewards")
    module.slow = slow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    reward = load_reward("own_rewards:slow", bonus=2.0)
    assert inspect.iscoroutinefunction(reward.__call__)
    assert asyncio.run(reward(completions=["a", "b"])) == [2.0, 2.0]
