"""Advantages of groups, by hand and against TRL's definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.checks import BUILT_IN_ADVANTAGES
from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.learner.advantages import ADVANTAGES, Advantages, combine_rewards, load_advantage, trl_advantages

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


# Other functions


def compute(name: str, rewards: torch.Tensor) -> Advantages:
    return load_advantage(name, "group", "sum_then_normalize")(rewards, torch.ones(rewards.size(-1)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [[0.75, -0.25, -0.25, -0.25], [0.0] * 4]),
        ("rloo", [[1.0, -1 / 3, -1 / 3, -1 / 3], [0.0] * 4]),
        # Mean 5/8; five ones and three zeros: standard deviation 0.5175.
        ("reinforce_pp", [[0.7245, -1.2076, -1.2076, -1.2076], [0.7245] * 4]),
    ],
)
def test_advantages_worked_example(name: str, expected: list[list[float]]) -> None:
    values, zero_std = compute(name, groups([1.0, 0.0, 0.0, 0.0], [1.0] * 4))
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=1e-3)
    # With a baseline over the step, a group of equal rewards has a gradient.
    assert zero_std.tolist() == [[False] * 4, [name != "reinforce_pp"] * 4]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_reward_that_does_not_apply_is_left_out(name: str) -> None:
    values, _ = compute(name, groups([1.0, NAN, 0.0], [NAN, NAN, 0.5], [NAN, NAN, NAN]))
    assert values.isfinite().all() and values[0, 1] == values[1, 0] == 0 and not values[2].any()
    assert values[0, 0] == pytest.approx({"dr_grpo": 0.5, "rloo": 1.0, "reinforce_pp": 0.99980}[name], abs=1e-4)


def test_advantages_names_of_the_config_are_those_of_the_registry() -> None:
    assert set(BUILT_IN_ADVANTAGES) == {"grpo", *ADVANTAGES}


def squared(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return combine_rewards(rewards, weights) ** 2


def flat(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return combine_rewards(rewards, weights).flatten()


def test_advantages_function_of_the_user() -> None:
    values, zero_std = compute(f"{__name__}:squared", groups([2.0, 1.0], [0.0, NAN]))
    assert values.tolist() == [[4.0, 1.0], [0.0, 0.0]] and zero_std[:, 0].tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"flat must return a tensor of shape .* \(2, 1\); got \(2,\)"):
        compute(f"{__name__}:flat", groups([2.0], [1.0]))
    with pytest.raises(ConfigError, match=r"grpo.advantages: .* has no 'square'; did you mean squared"):
        compute(f"{__name__}:square", groups([2.0]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.advantages=rlo"], r"grpo.advantages=rlo must be one of grpo, rloo, .* did you mean rloo"),
        (["grpo.advantages=rloo", "grpo.scale_rewards=none"], "grpo.scale_rewards"),
        (["grpo.advantages=reinforce_pp", "grpo.dynamic_sampling=1"], "may depend on all groups"),
        (["grpo.advantages=my.own:function", "grpo.dynamic_sampling=1"], "may depend on all groups"),
    ],
)
def test_advantages_config_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)
    load_config(None, ["grpo.advantages=rloo", "grpo.dynamic_sampling=1"])
