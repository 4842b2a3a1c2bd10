"""A rollout function behind the interface of the sampler: what the learner, its rewards and its batches get of it."""

from typing import Any

import pytest
import torch
from scripted_tools import tool_tokenizer
from seeded_engine import NAME, SeededEngine
from transformers import TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.inference.rollout_function import FunctionSampler
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Completions, Rows
from grpo_ray.learner.rollouts.sampler import MultiTurn, SingleTurn
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.rewards.registry import load_reward
from grpo_ray.telemetry.profiler import PhaseProfiler

TOKENIZER = tool_tokenizer(NAME)
WORKERS = Workers(gather_objects=lambda own: [own])


def rows() -> Rows:
    problems = [
        Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"What is {n} + 2?"}], solution=f"${n + 2}$")
        for n in (4, 5, 8)
    ]
    return [problem.as_row(epoch=1, index=index) for problem in problems for index in range(2)]


def sampled(function: str, *overrides: str) -> tuple[Completions, dict[str, float]]:
    """Sample the rows by a function; return the completions and the metrics."""
    config = load_config(None, [f"rollout.function={function}", *overrides])
    source = FunctionSampler(config, TOKENIZER, max_model_len=96, vocabulary_size=384)
    metrics: dict[str, float] = {}
    engine: Any = SeededEngine()
    return MultiTurn(config, engine, source, None, WORKERS, PhaseProfiler(), metrics.update).sample(rows()), metrics


def scored(completions: Completions, *names: str) -> torch.Tensor:
    rewards = [Reward(name, load_reward(name)) for name in names]
    scorer = Scorer(
        rewards=rewards, functions=names, tokenizer=TOKENIZER, workers=WORKERS, profiler=PhaseProfiler(),
        state=TrainerState, notify=lambda line: None,
    )  # fmt: skip
    return scorer.score(rows(), completions).own


def test_function_of_one_turn_gives_the_batch_of_a_run_without_function() -> None:
    config, engine = load_config(None, []), SeededEngine()
    single: Any = SingleTurn(config, engine, TOKENIZER, None)  # type: ignore[arg-type]
    expected = Padding(0, None, 1.0).columns(single.sample(rows()))
    ours = Padding(0, None, 1.0).columns(sampled("grpo_ray.inference.rollout_examples:one_turn")[0])
    assert (ours.pop("tool_mask") == 1).all()
    assert ours.keys() == expected.keys()
    for name, column in expected.items():
        assert torch.equal(ours[name], column), name


def test_tokens_of_others_are_masked_and_metrics_count_turns() -> None:
    completions, metrics = sampled("rollout_functions:retrying", "grpo.max_completion_length=80")
    batch = Padding(0, None, 1.0).columns(completions)
    assert completions.own is not None
    for row, own in enumerate(completions.own):
        assert batch["tool_mask"][row, : len(own)].tolist() == own and 0 < sum(own) == completions.lengths[row]
    turns = [4 % 3 + 1, 5 % 3 + 1, 8 % 3 + 1]
    assert metrics["rollout/turns_mean"] == pytest.approx(sum(turns) / 3) and metrics["rollout/turns_max"] == 3


def test_rewards_get_the_functions_reward_columns_messages_and_own_tokens() -> None:
    completions, _ = sampled("rollout_functions:retrying", "grpo.max_completion_length=80")
    rewards = scored(completions, "environment", "rollout_functions:pay_requests")
    assert completions.conversations is not None
    for row, conversation in enumerate(completions.conversations):
        requests = sum(message["role"] == "assistant" for message in conversation.messages)
        paid = (requests + sum(conversation.own_ids)) % 5 / 5
        assert rewards[row].tolist() == pytest.approx([sum(conversation.token_ids) % 7 / 7, paid])
