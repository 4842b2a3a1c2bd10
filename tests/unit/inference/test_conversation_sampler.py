"""Tests of the start of a completion of several turns: seeds, columns and the environment of its problem."""

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_tools import tool_tokenizer

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.tools.conversation import Start

SEVERAL = "rollout.environment={game: grpo_ray.tools.examples:Guess, count: hostile_tools:Counter}"
PROBLEM = Problem(
    id="0123456789abcdef",
    prompt=[{"role": "user", "content": "Q"}],
    solution="4",
    columns={"environment": "count", "level": 3},
)


@pytest.fixture(scope="module")
def sampler() -> Iterator[ConversationSampler]:
    with ConversationSampler(load_config(None, [SEVERAL]), tool_tokenizer()) as sampler:
        yield sampler


def seeds(start: Start, turns: int = 3) -> list[Any]:
    return [start.sampling(turn, 9)["seed"] for turn in range(turns)]


def test_turns_are_sampled_with_seeds_of_their_own(sampler: ConversationSampler) -> None:
    starts = [sampler.start(PROBLEM.as_row(epoch=1, index=index), {"temperature": 0.5}) for index in range(4)]
    all_seeds = [seed for start in starts for seed in seeds(start)]
    assert len(set(all_seeds)) == 12
    again = sampler.start(PROBLEM.as_row(epoch=1, index=2), {"temperature": 0.5})
    assert seeds(again) == seeds(starts[2])
    assert again.sampling(0, 77) == {"temperature": 0.5, "max_tokens": 77, "seed": seeds(again)[0]}


def test_shortest_length_is_at_most_the_tokens_left(sampler: ConversationSampler) -> None:
    """vLLM refuses a `min_tokens` above `max_tokens`, and later turns have fewer tokens left."""
    start = sampler.start(PROBLEM.as_row(epoch=0, index=0), {"min_tokens": 8})
    assert [start.sampling(0, left)["min_tokens"] for left in (3, 8, 20)] == [3, 8, 8]


def test_group_faces_one_task_with_calls_of_their_own_seeds(sampler: ConversationSampler) -> None:
    starts = [sampler.start(PROBLEM.as_row(epoch=1, index=index), {}) for index in range(4)]
    assert len({start.seed for start in starts}) == 1
    assert len({start.call_seed for start in starts}) == 4
    assert sampler.start(PROBLEM.as_row(epoch=2, index=0), {}).seed != starts[0].seed


def test_column_environment_names_the_environment(sampler: ConversationSampler) -> None:
    start = sampler.start(PROBLEM.as_row(epoch=0, index=0), {})
    assert start.environment == "count" and start.columns["level"] == 3
    assert "environment" not in start.columns


def test_column_environment_is_a_column_beside_a_single_one() -> None:
    """Use one environment without a name: a column of this name means nothing special."""
    config = load_config(None, ["rollout.environment=hostile_tools:Counter"])
    with ConversationSampler(config, tool_tokenizer()) as sampler:
        start = sampler.start(PROBLEM.as_row(epoch=0, index=0), {})
    assert start.environment is None and start.columns["environment"] == "count"


def test_environment_that_is_the_only_reward_must_give_one() -> None:
    config = load_config(None, ["rollout.environment=hostile_tools:Narrow", "rewards.functions=[environment]"])
    with pytest.raises(ConfigError, match=r"rewards\.functions.*hostile_tools:Narrow has no method get_reward"):
        ConversationSampler(config, tool_tokenizer())


def test_environment_beside_another_reward_may_give_none() -> None:
    fields = ["rollout.environment=hostile_tools:Narrow", "rewards.functions=[environment, conciseness]"]
    with ConversationSampler(load_config(None, fields), tool_tokenizer()) as sampler:
        assert not sampler.definition.has_reward(None)
