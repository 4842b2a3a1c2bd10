"""Advantages of groups, by hand and against TRL's definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.learner.advantages import combine_rewards, trl_advantages

NAN = math.nan
ONE = torch.ones(1)


def groups(*rewards: list[float]) -> torch.Tensor:
    """Return rewards of one function, (N, G, 1)."""
    return torch.tensor(rewards)[..., None]


def test_combine_rewards_weighs_functions_and_skips_nan() -> None:
    rewards = torch.tensor([[1.0, 0.5], [NAN, 0.5], [NAN, NAN]])
    combined = combine_rewards(rewards, torch.tensor([2.0, 4.0]))
    assert combined[:2].tolist() == [4.0, 2.0] and combined[2].isnan()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # Deviations 0.7071 of the first group, 0 of the second; 0.5 of all four.
        ("none", [[0.5, -0.5], [0.0, 0.0]]),
        ("group", [[0.70700, -0.70700], [0.0, 0.0]]),
        ("batch", [[0.99980, -0.99980], [0.0, 0.0]]),
    ],
)
def test_centered_sum_worked_example(scale: str, expected: list[list[float]]) -> None:
    values, zero_std = trl_advantages(scale, "sum_then_normalize")(groups([1.0, 0.0], [1.0, 1.0]), ONE)
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=1e-4)
    assert zero_std.tolist() == ([[False, False]] * 2 if scale == "batch" else [[False] * 2, [True] * 2])


def test_centered_sum_reward_that_does_not_apply_is_left_out() -> None:
    values, _ = trl_advantages("none", "sum_then_normalize")(groups([1.0, NAN, 0.0]), ONE)
    assert values.tolist() == [[0.5, 0.0, -0.5]]


def test_sum_of_normalized_balances_rewards_of_different_scale() -> None:
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]])
    estimate = trl_advantages("group", "normalize_then_sum")
    values, scaled = (estimate(rewards * torch.tensor([1.0, scale]), torch.ones(2)).values for scale in (1.0, 1000.0))
    assert values.abs().max() > 1
    torch.testing.assert_close(scaled, values, rtol=0, atol=1e-3)
    plain = [trl_advantages("none", "sum_then_normalize")(rewards * s, ONE.expand(2)).values for s in (1.0, 1000.0)]
    assert (plain[1] - plain[0]).abs().max() > 100  # the plain sum follows the scale


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4),
    scale=st.sampled_from(["none", "group", "batch"]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_centered_sum_has_mean_zero_and_is_zero_without_signal(rewards: list[list[float]], scale: str) -> None:
    values, zero_std = trl_advantages(scale, "sum_then_normalize")(groups(*rewards), ONE)
    assert values.sum(dim=1).abs().max() < 1e-4
    for row, group, is_zero in zip(values, rewards, zero_std, strict=True):
        if len(set(group)) == 1:
            assert not row.any() and (scale == "batch" or is_zero.all())
