"""The gradient under other advantages than TRL's default, compared with TRL's own in float64."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from stock_trl import EQUAL, GROUP, PARTLY, SIGNAL, Record, ScriptedLearner, largest_difference, train_steps
from trl import GRPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

REWARDS = (SIGNAL, EQUAL, PARTLY, EQUAL)


class DrGrpoLearner(ScriptedLearner):
    overrides: Sequence[str] = ("grpo.advantages=dr_grpo",)


class RlooLearner(ScriptedLearner):
    overrides: Sequence[str] = ("grpo.advantages=rloo",)


class GlobalLearner(ScriptedLearner):
    overrides: Sequence[str] = ("grpo.advantages=reinforce_pp",)


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """One step of TRL on rewards that are centred in their group, and not divided."""
    folder = tmp_path_factory.mktemp("trl")
    return train_steps(GRPOTrainer, folder, rewards=REWARDS, max_steps=1, scale_rewards="none")[0]


def test_dr_grpo_same_gradient_as_trl_without_scaling(tmp_path: Path, unscaled: Record) -> None:
    ours, trainer = train_steps(DrGrpoLearner, tmp_path, rewards=REWARDS, max_steps=1)
    assert trainer.savings.rows  # groups of equal rewards are not read
    assert largest_difference(ours, unscaled) < 1e-12


def test_rloo_gradient_is_that_of_centred_rewards_times_g_over_g_minus_1(tmp_path: Path, unscaled: Record) -> None:
    ours, _ = train_steps(RlooLearner, tmp_path, rewards=REWARDS, max_steps=1)
    factor = GROUP / (GROUP - 1)
    expected = Record([{name: factor * each for name, each in unscaled.gradients[0].items()}])
    assert largest_difference(ours, expected) < 1e-6  # advantages are in float32


def test_baseline_of_the_step_gives_groups_of_equal_rewards_a_gradient(tmp_path: Path) -> None:
    ours, trainer = train_steps(GlobalLearner, tmp_path, rewards=[EQUAL, (0.0,) * GROUP], max_steps=1)
    assert any(each.any() for each in ours.gradients[0].values())
    assert ours.logs[0]["frac_reward_zero_std"] == 0.0
    assert trainer.rollout.batch["advantages"].bool().all()
