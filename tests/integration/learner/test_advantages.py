"""The gradient under other advantages than TRL's default, compared with TRL's own in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from stock_trl import EQUAL, GROUP, NEAR, PARTLY, SIGNAL, Record, ScriptedLearner, largest_difference, train_steps
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


SOURCE_REWARDS = {"a": SIGNAL, "b": PARTLY, "c": EQUAL}
"""Source of a mixture -> rewards of its groups."""


def of_a_and_b(pays: list[Sequence[float]], **columns: Any) -> list[float | None]:
    return _pay("ab", pays, columns)


def of_b_and_c(pays: list[Sequence[float]], **columns: Any) -> list[float | None]:
    return _pay("bc", pays, columns, scale=-0.7)


def _pay(sources: str, pays: list[Sequence[float]], columns: dict[str, Any], scale: float = 1.0) -> list[float | None]:
    """Return the rewards of the rows of some sources, None for the others; TRL passes the row's item as it is."""
    named = columns.get("source") or columns["grpo_ray_source"]
    return [scale * pays[n][n % GROUP] if source in sources else None for n, source in enumerate(named)]


class MixtureLearner(ScriptedLearner):
    overrides: Sequence[str] = (
        "data.train={a: {path: arithmetic, rewards: ['m:of_a_and_b']}, b: {path: arithmetic}, "
        "c: {path: arithmetic, rewards: ['m:of_b_and_c']}}",
        "rewards.functions=['m:of_a_and_b', 'm:of_b_and_c']",
        "heldout.score=reward",
    )


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_mixture_whose_rewards_apply_to_some_sources_has_the_gradient_of_trl(tmp_path: Path, aggregation: str) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "7 + 5 " * (1 + n % 5)}], "pays": SOURCE_REWARDS["abc"[n % 3]],
            "grpo_ray_source": "abc"[n % 3], "id": f"{n:016x}", "epoch": 0, "index": 0,
        }
        for n in range(32)
    ]  # fmt: skip
    settings: dict[str, Any] = {"dataset": Dataset.from_list(rows), "multi_objective_aggregation": aggregation}
    theirs, _ = train_steps(GRPOTrainer, tmp_path / "trl", reward=[of_a_and_b, of_b_and_c], **settings)  # type: ignore[arg-type]
    ours, _ = train_steps(MixtureLearner, tmp_path / "ours", reward=[of_a_and_b, of_b_and_c], **settings)  # type: ignore[arg-type]
    assert any(each.any() for each in theirs.gradients[0].values())
    assert largest_difference(ours, theirs) < NEAR
