"""Tests of the length rewards, and of the state that `EasedConciseness` saves in checkpoints."""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.errors import RewardError
from grpo_ray.rewards.length import EasedConciseness, conciseness, cosine_length, repetition_penalty, soft_overlong
from grpo_ray.rewards.registry import ConfiguredReward, load_reward, load_rewards

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


def ids(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


@needs_trl
def test_soft_overlong_falls_linearly_through_its_buffer() -> None:
    # Maximum 100, buffer 20: no penalty up to 80; 90 is half of the buffer; -1 from 100 on.
    assert soft_overlong(ids(50, 80, 90, 100, 120), max_length=100, buffer=20) == [0.0, 0.0, -0.5, -1.0, -1.0]


@needs_trl
def test_repetition_penalty_is_share_of_repeated_ngrams() -> None:
    # 5 5 5 5 5 has 4 bigrams, 1 of them new: 1 - 1/4 repeated
    assert repetition_penalty([[1, 2, 3, 4], [5] * 5], ngram_size=2) == [0.0, -0.75]


def test_conciseness_falls_linearly_from_target_to_maximum() -> None:
    # Target 10, maximum 30: one half at 20.
    assert conciseness(ids(0, 10, 20, 30, 99), target=10, max_length=30) == [1.0, 1.0, 0.5, 0.0, 0.0]


@given(
    target=st.integers(0, 50),
    span=st.integers(1, 50),
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=10).map(sorted),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_conciseness_longer_never_earns_more(target: int, span: int, lengths: list[int]) -> None:
    rewards = conciseness(ids(*lengths), target=target, max_length=target + span)
    assert rewards == sorted(rewards, reverse=True)
    assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_cosine_length_prefers_short_right_and_long_wrong() -> None:
    completions = [r"\boxed{5}"] * 3 + [r"\boxed{6}"] * 3 + [r"\boxed{5}"]
    solutions = ["$5$"] * 6 + [""]
    rewards = cosine_length(completions, solutions, ids(0, 50, 200, 0, 50, 100, 1), max_length=100)
    # The middle of the cosine is the mean of its ends: right 1.0 and 0.5, wrong -1.0 and -0.5.
    assert rewards == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5, None])


@pytest.mark.parametrize(
    ("reward", "bad_settings"),
    [
        (soft_overlong, {"max_length": 10, "buffer": 20}),
        (repetition_penalty, {"max_penalty": 1.0}),
        (conciseness, {"target": 30, "max_length": 30}),
    ],
)
def test_length_rewards_impossible_settings_raise(reward: Callable[..., Any], bad_settings: dict[str, Any]) -> None:
    with pytest.raises(RewardError):
        reward(ids(5), **bad_settings)


class FakeTrainerState:
    """The part of TRL's `trainer_state` that the reward reads."""

    def __init__(self, step: int, rate: float) -> None:
        self.log_history: list[dict[str, float]] = [{"step": step, "rewards/correctness/mean": rate}]


def test_eased_conciseness_weight_follows_the_success_rate() -> None:
    reward = EasedConciseness(target=10, max_length=30, begin=0.5, full=0.9, memory=0.5)
    assert reward(ids(10, 20)) == [0.0, 0.0]  # no success rate is known yet
    assert reward(ids(10, 20), trainer_state=FakeTrainerState(1, 0.5)) == [0.0, 0.0]
    # Mean 0.5 * 0.5 + 0.5 * 0.9 = 0.7, the middle of 0.5 and 0.9.
    assert reward(ids(10, 20), trainer_state=FakeTrainerState(2, 0.9)) == pytest.approx([0.5, 0.25])
    # The same step is not counted twice.
    assert reward(ids(10), trainer_state=FakeTrainerState(2, 0.9)) == pytest.approx([0.5])


def test_eased_conciseness_steps_without_a_success_rate_change_nothing() -> None:
    """Later steps on a generation batch are logged without rewards."""
    reward = EasedConciseness(target=10, max_length=30, begin=0.5, full=0.9, memory=0.5)
    state = FakeTrainerState(1, 0.7)  # the middle of 0.5 and 0.9
    state.log_history.append({"step": 2, "loss": 0.1})
    assert reward(ids(10), trainer_state=state) == pytest.approx([0.5])
    assert reward(ids(10), trainer_state=state) == pytest.approx([0.5]) and reward.success == 0.7


def test_eased_conciseness_state_survives_a_checkpoint() -> None:
    reward: Any = load_reward("eased_conciseness", target=10, max_length=30)
    again: Any = load_reward("eased_conciseness", target=10, max_length=30)
    reward(ids(10), trainer_state=FakeTrainerState(7, 0.8))
    again.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    assert again.weight == reward.weight == pytest.approx(0.75)  # (0.8 - 0.5) / 0.4
    assert again.__name__ == "eased_conciseness"


def test_cosine_length_grades_as_the_config_sets() -> None:
    settings = {"cosine_length": {"max_length": 9}}
    [reward] = load_rewards(
        RewardsConfig(functions=("cosine_length",), settings=settings, strict=False, time_limit=7.0)
    )
    assert isinstance(reward, ConfiguredReward)
    assert reward.settings == {"max_length": 9, "strict": False, "time_limit": 7.0}


def test_cosine_length_records_the_metrics_of_grading() -> None:
    recorded: dict[str, float] = {}
    completions = [r"\boxed{4}", r"\boxed{5}"]
    cosine_length(completions, ["$4$", "$4$"], ids(1, 1), max_length=9, log_metric=recorded.__setitem__)
    assert recorded == {f"reward/{name}": 0.0 for name in ("verifier_timeouts", "unscorable_share", "undecided_share")}


def test_load_rewards_field_of_the_config_among_the_settings_is_refused() -> None:
    """Held-out problems and early grading would be graded by the field."""
    config = RewardsConfig(functions=("correctness",), settings={"correctness": {"strict": False}})
    with pytest.raises(RewardError, match=r"rewards\.settings\.correctness\.strict: set rewards\.strict instead"):
        load_rewards(config)
