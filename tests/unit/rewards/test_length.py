import importlib.util
import json

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards import load_reward
from grpo_ray.rewards.length import EasedConciseness, conciseness, cosine_length, repetition_penalty, soft_overlong

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


def ids(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


@needs_trl
def test_soft_overlong_falls_through_its_buffer() -> None:
    # max 100, buffer 20: free up to 80; 90 is half way down; 100 and more are -1
    assert soft_overlong(ids(50, 80, 90, 100, 120), max_length=100, buffer=20) == [0.0, 0.0, -0.5, -1.0, -1.0]


@needs_trl
def test_repetition_costs_the_share_of_repeated_ngrams() -> None:
    # 5 5 5 5 5 has 4 bigrams, 1 of them new: 1 - 1/4 repeated
    assert repetition_penalty([[1, 2, 3, 4], [5] * 5], ngram_size=2) == [0.0, -0.75]


def test_conciseness_is_a_line_from_target_to_maximum() -> None:
    # target 10, max 30: at 20 half is left
    assert conciseness(ids(0, 10, 20, 30, 99), target=10, max_length=30) == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_the_cosine_prefers_short_right_and_long_wrong_completions() -> None:
    completions = [r"\boxed{5}"] * 3 + [r"\boxed{6}"] * 3 + [r"\boxed{5}"]
    solutions = ["$5$"] * 6 + [""]
    rewards = cosine_length(completions, solutions, ids(0, 50, 200, 0, 50, 100, 1), max_length=100)
    # half way along the cosine is half way between the ends: right 1.0 -> 0.5, wrong -1.0 -> -0.5
    assert rewards == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5, None])


@pytest.mark.parametrize(
    ("reward", "settings"),
    [
        (soft_overlong, {"max_length": 10, "buffer": 20}),
        (repetition_penalty, {"max_penalty": 1.0}),
        (conciseness, {"target": 30, "max_length": 30}),
    ],
)
def test_settings_that_cannot_work_are_refused(reward, settings) -> None:
    with pytest.raises(RewardError):
        reward(ids(5), **settings)


class Logged:
    """What TRL passes as `trainer_state`, as far as it is read."""

    def __init__(self, step: int, rate: float) -> None:
        self.log_history = [{"step": step, "rewards/correctness/mean": rate}]


def test_brevity_counts_only_once_the_policy_succeeds() -> None:
    reward = EasedConciseness(target=10, max_length=30, begin=0.5, full=0.9, memory=0.5)
    assert reward(ids(10, 20)) == [0.0, 0.0]  # nothing is known of success yet
    assert reward(ids(10, 20), trainer_state=Logged(1, 0.5)) == [0.0, 0.0]
    # mean 0.5 * 0.5 + 0.5 * 0.9 = 0.7, half way from 0.5 to 0.9
    assert reward(ids(10, 20), trainer_state=Logged(2, 0.9)) == pytest.approx([0.5, 0.25])
    # The same step again is not counted twice.
    assert reward(ids(10), trainer_state=Logged(2, 0.9)) == pytest.approx([0.5])


def test_the_state_of_a_reward_survives_a_checkpoint() -> None:
    reward, again = (load_reward("eased_conciseness", target=10, max_length=30) for _ in range(2))
    reward(ids(10), trainer_state=Logged(7, 0.8))
    again.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    assert again.weight == reward.weight == pytest.approx(0.75)  # (0.8 - 0.5) / 0.4
    assert again.__name__ == "eased_conciseness"
