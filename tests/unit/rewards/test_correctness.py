"""Tests of the correctness reward: rewards of lists, metrics, the share of boolean problems, and the verdict cache."""

import pytest

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.errors import RewardError
from grpo_ray.rewards.correctness import Grader, shared_grader
from grpo_ray.rewards.registry import accuracy_reward, heldout_correctness, start_grading
from grpo_ray.rewards.sandbox.pool import VerifierPool


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_accuracy_reward_plain_or_conversation_gives_same_rewards() -> None:
    texts = [r"\boxed{\frac12}", r"\boxed{2}", r"\boxed{5}"]
    solutions = ["$0.5$", "$0.5$", ""]
    expected = [1.0, 0.0, None]
    assert accuracy_reward(texts, solutions) == expected
    assert accuracy_reward([conversation(text) for text in texts], solutions, prompts=["p"] * 3, step=4) == expected


def test_accuracy_reward_metrics_separate_limits_from_unscorable() -> None:
    logged: dict[str, float] = {}
    answers = [r"\boxed{1}", r"\boxed{1}", r"\boxed{1}", r"\boxed{(fg)'}"]  # the last one cannot be parsed
    accuracy_reward(answers, ["$1$", "$2$", "", "$1$"], log_metric=logged.__setitem__)
    assert logged == {
        "reward/verifier_timeouts": 0.0,
        "reward/unscorable_share": 0.25,  # 1 of 4
        "reward/undecided_share": 0.25,  # 1 of 4
    }


def test_accuracy_reward_boolean_share_zero_drops_booleans_only() -> None:
    completions = [r"\boxed{Yes}", r"\boxed{No}", r"\boxed{1}"]
    solutions = ["Yes", "Yes", "$1$"]
    assert accuracy_reward(completions, solutions) == [1.0, 0.0, 1.0]
    assert accuracy_reward(completions, solutions, boolean_share=0.0) == [None, None, 1.0]


def test_heldout_correctness_counts_booleans_left_out_of_training() -> None:
    completions, solutions = [r"\boxed{Yes}", r"\boxed{No}"], ["Yes", "Yes"]
    reward = heldout_correctness(RewardsConfig(boolean_share=0.0))
    assert reward(completions=completions, solution=solutions) == [1.0, 0.0]


def test_accuracy_reward_boolean_share_half_drops_whole_groups() -> None:
    prompts = [f"Is {number} prime?" for number in range(40) for _ in range(2)]
    rewards = accuracy_reward([r"\boxed{Yes}"] * 80, ["Yes"] * 80, boolean_share=0.5, prompts=prompts)
    groups = [set(rewards[start : start + 2]) for start in range(0, 80, 2)]
    assert all(group in ({1.0}, {None}) for group in groups)
    assert 8 <= sum(group == {1.0} for group in groups) <= 32  # 20 of 40 expected; the choice by prompt is fixed


def test_accuracy_reward_impossible_boolean_share_raises() -> None:
    with pytest.raises(RewardError, match="0 to 1"):
        accuracy_reward([r"\boxed{Yes}"], ["Yes"], boolean_share=2.0)
    with pytest.raises(RewardError, match="prompts"):
        accuracy_reward([r"\boxed{Yes}"], ["Yes"], boolean_share=0.5)


def test_start_grading_then_reward_grades_once() -> None:
    grader = shared_grader()
    accuracy_reward([r"\boxed{1}"], ["$1$"])
    start_grading(conversation(r"early: \boxed{77}"), "$77$")
    grader.submit(r"early: \boxed{77}", "$77$").result()
    graded = sum(grader.pool.counts.values())
    assert accuracy_reward([r"early: \boxed{77}"], ["$77$"]) == [1.0]
    assert sum(grader.pool.counts.values()) == graded


def test_grader_same_characters_split_elsewhere_are_two_pairs(pool: VerifierPool) -> None:
    before = pool.counts["ok"]
    verdicts = Grader(pool).grade([r"\boxed{1}$", r"\boxed{1}"], ["1$", "$1$"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert pool.counts["ok"] == before + 2


def test_shared_grader_passes_time_limit_to_pool() -> None:
    assert shared_grader(True, 7.5).pool.time_limit == 7.5
