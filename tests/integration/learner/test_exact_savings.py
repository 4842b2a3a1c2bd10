"""The learner's savings against unmodified TRL: every parameter's gradient is the same, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import pairs_then_all, slow_case
from stock_trl import (
    EQUAL,
    NEAR,
    PARTLY,
    SIGNAL,
    Record,
    ScriptedEngine,
    ScriptedLearner,
    StoppedByProof,
    accumulated,
    largest_difference,
    reference_steps,
    train_steps,
)
from trl import GRPOTrainer
from worker_cases import compare_savings, savings_on_gpu
from worker_group import run_workers

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.errors import SyncError
from grpo_ray.learner import forward_pass
from grpo_ray.learner.exact_savings import SavingsPlan
from grpo_ray.learner.forward_pass import pack_rows
from grpo_ray.learner.passes import PASS_COST

pytestmark = pytest.mark.usefixtures("one_thread")

SAVINGS = {
    "one pass": SavingsPlan(one_pass=True),
    "rows": SavingsPlan(rows=True),
    "shorter prompts": SavingsPlan(trim_prompts=True),
    "shorter completions": SavingsPlan(trim_completions=True),
    "rows regrouped": SavingsPlan(regroup=True),
    "shifted": SavingsPlan(shift=True),
    "packed": SavingsPlan(pack=True),
    "labels only": SavingsPlan(head=True),
}
"""Each saving alone, or with those that it needs."""

OWN_METRICS = {"learner/completions_share", "learner/positions_share", "learner/tokens_saved"}
"""Our metrics of the rows and tokens that the learner processes."""


DIVERSITY = "group/distinct_share"
"""Our metric of the completions of a batch."""

GAP_METRICS = {"engine/logprob_gap_mean", "engine/logprob_gap_max"}
"""Our metrics of the check of the weight sync."""


@pytest.fixture(autouse=True)
def free_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cost of a pass to 0, so that the short rows of these tests are split like rows of hundreds of tokens."""
    monkeypatch.setitem(PASS_COST, "cpu", 0)


def compare(folder: Path, **settings: Any) -> tuple[Record, Record, Any]:
    """Train with the savings and without, compare the gradients, and return both records and our trainer."""
    stock = reference_steps(GRPOTrainer, folder, **settings)
    ours, trainer = train_steps(ScriptedLearner, folder, **settings)
    assert largest_difference(ours, stock) < NEAR
    return ours, stock, trainer


# Gradients


@pytest.mark.parametrize(
    ("loss_type", "scale", "level", "accumulation"),
    pairs_then_all(LOSS_TYPES, ("group", "batch", "none"), ("token", "sequence"), (1, 2, 4)),
)
def test_exact_savings_all_savings_same_gradient(
    tmp_path: Path, loss_type: str, scale: str, level: str, accumulation: int
) -> None:
    ours, _, trainer = compare(
        tmp_path,
        loss_type=loss_type,
        scale_rewards=scale,
        importance_sampling_level=level,
        **accumulated(accumulation),
    )
    regroups = loss_type != "bnpo"
    assert trainer.savings == SavingsPlan(
        one_pass=True,
        rows=True,
        regroup=regroups,
        share=regroups,
        trim_prompts=True,
        trim_completions=True,
        shift=True,
        head=True,
    )
    assert all(log["learner/completions_share"] < 0.8 for log in ours.logs)
    assert all(log["learner/positions_share"] < log["learner/completions_share"] for log in ours.logs)


@pytest.mark.parametrize(
    ("loss_type", "level", "accumulation", "parts", "epochs"),
    pairs_then_all(LOSS_TYPES, ("token", "sequence"), (2, 1), (2, 3), (2, 1)),
)
def test_exact_savings_several_steps_of_a_batch_same_gradient(
    tmp_path: Path, loss_type: str, level: str, accumulation: int, parts: int, epochs: int
) -> None:
    """Two generation batches, each of `parts` x `epochs` optimizer steps."""
    steps = parts * epochs
    ours, stock, trainer = compare(
        tmp_path,
        loss_type=loss_type,
        importance_sampling_level=level,
        num_iterations=epochs,
        max_steps=2 * steps,
        **accumulated(accumulation, parts * accumulation),
    )
    savings = trainer.savings
    assert not savings.one_pass and savings.rows and savings.regroup == (loss_type != "bnpo")
    # The sync is proven once for each batch, before its first step.
    assert [step for step, _, _ in trainer.engine.proven] == [0, steps]
    assert len(trainer.engine.syncs) == 2
    # Each step has a log; rewards are those of the batch and belong to its first step, as in TRL.
    assert len(ours.logs) == 2 * steps
    names = {"loss", "grad_norm", "reward"} | ({"clip_ratio/region_mean"} if accumulation == 1 else set())
    for number, (mine, theirs) in enumerate(zip(ours.logs, stock.logs, strict=True)):
        assert ("reward" in mine) == ("reward" in theirs) == (number % steps == 0)
        assert ("learner/completions_share" in mine) == (number % steps < parts)  # in the first epoch
        for name in theirs.keys() & names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_exact_savings_gpu_savings_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    # The savings that a run takes on a GPU, computed here without one, and a count of their passes.
    monkeypatch.setattr(ScriptedLearner, "savings", property(savings_on_gpu))
    passes = []

    def count(*args: Any) -> Any:
        passes.append(args)
        return pack_rows(*args)

    monkeypatch.setattr(forward_pass, "pack_rows", count)
    compare(tmp_path, loss_type=loss_type, **accumulated(4))
    # A third of the rows has a gradient, so two of four micro-batches remain.
    assert len(passes) == 2 * (4 if loss_type == "bnpo" else 2)


@pytest.mark.parametrize("saving", SAVINGS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_exact_savings_one_saving_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, saving: str
) -> None:
    if SAVINGS[saving].regroup and loss_type == "bnpo":
        pytest.skip("bnpo divides by the tokens of each micro-batch")
    monkeypatch.setattr(ScriptedLearner, "savings", SAVINGS[saving])
    compare(tmp_path, loss_type=loss_type, **accumulated(2))


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
        {"vllm_importance_sampling_mode": "sequence_truncate"},
        {"vllm_importance_sampling_correction": False},
        {"mask_truncated_completions": True},
        {"delta": 1.5, "num_iterations": 2},
        {"off_policy_mask_threshold": 0.1},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
        accumulated(4, 2),
        accumulated(4, 1),
        accumulated(2, 4),
        accumulated(1, 4) | {"num_iterations": 2},
        accumulated(2, 4) | {"vllm_importance_sampling_correction": False, "max_steps": 4},
        accumulated(2, 4) | {"mask_truncated_completions": True, "beta": 0.1, "num_iterations": 2, "max_steps": 6},
        accumulated(2, 4) | {"scale_rewards": "batch", "vllm_importance_sampling_mode": "token_mask", "max_steps": 4},
        {"per_device_train_batch_size": 4},
        {"rewards": [EQUAL]},
        {"rewards": [SIGNAL]},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_type", ["dapo", slow_case("bnpo"), slow_case("vespo")])
def test_exact_savings_other_settings_same_gradient(tmp_path: Path, loss_type: str, settings: dict[str, Any]) -> None:
    if "delta" in settings and loss_type == "vespo":
        pytest.skip("TRL has no two-sided clipping for vespo")
    compare(tmp_path, loss_type=loss_type, **(accumulated(2) | settings))


def test_exact_savings_same_run_twice_bitwise_equal(tmp_path: Path) -> None:
    first, second = (train_steps(ScriptedLearner, tmp_path, **accumulated(4))[0].gradients for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# Metrics


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_exact_savings_metrics_equal_trl(tmp_path: Path, loss_type: str, level: str) -> None:
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon": 0.01, "num_iterations": 2}
    ours, stock, _ = compare(tmp_path, **settings, max_steps=4)
    needs_all_rows = {"entropy", "vespo/phi_seq_mean", "step_time"}
    clipped = [name for name in stock.logs[1] if "clip" in name and "clipped_ratio" not in name]
    assert bool(clipped) == (loss_type not in ("sapo", "vespo"))
    for mine, theirs in zip(ours.logs, stock.logs, strict=True):
        own = mine.keys() - theirs.keys() - {DIVERSITY}
        assert own in (GAP_METRICS, OWN_METRICS | GAP_METRICS, OWN_METRICS, set())
        assert (DIVERSITY in mine) == ("reward" in mine)  # with the step that generates, not with its second iteration
        for name in theirs.keys() - needs_all_rows:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name
    if clipped:  # in the second iteration the policy has moved
        assert any(stock.logs[1][name] for name in clipped)


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_exact_savings_sampling_metrics_equal_trl(tmp_path: Path, mode: str) -> None:
    """Every row has a gradient: metrics of the learner against the engine cover the rows that it processes."""
    ours, stock, _ = compare(
        tmp_path, rewards=[(1.0, 0.0, 0.2, 0.5)], vllm_importance_sampling_mode=mode, **accumulated(4)
    )
    for mine, theirs in zip(ours.logs, stock.logs, strict=True):
        names = [name for name in theirs if name.startswith("sampling/")]
        assert len(names) == 5
        for name in [*names, "loss", "grad_norm"]:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


# Proof of sync


def test_exact_savings_proves_sync_once_a_batch_on_trl_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedLearner, "savings", SavingsPlan(one_pass=True))
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    class RecordingTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            mask = output["completion_mask"].bool()
            expected.append((output["old_per_token_logps"][mask], output["sampling_per_token_logps"][mask]))
            return output

    train_steps(RecordingTrainer, tmp_path, **accumulated(2))
    _, trainer = train_steps(ScriptedLearner, tmp_path, **accumulated(2))
    assert [step for step, _, _ in trainer.engine.proven] == [0, 1]
    for (learner, engine), (_, own_learner, own_engine) in zip(expected, trainer.engine.proven, strict=True):
        # TRL shuffles the rows in between.
        for theirs, mine in ((learner, own_learner), (engine, own_engine)):
            torch.testing.assert_close(mine.nan_to_num().sort()[0], theirs.nan_to_num().sort()[0], rtol=1e-10, atol=0)


def test_exact_savings_failed_proof_raises_before_weights_move(tmp_path: Path) -> None:
    class StaleEngine(ScriptedEngine):
        def prove_sync(self, *args: Any, **kwargs: Any) -> Any:
            raise SyncError("not in sync")

    class StaleLearner(StoppedByProof, ScriptedLearner):
        engine_class = StaleEngine

    assert train_steps(StaleLearner, tmp_path, **accumulated(2))[1].stopped


def test_exact_savings_batch_without_gradient_still_proves_sync(tmp_path: Path) -> None:
    _, trainer = train_steps(ScriptedLearner, tmp_path, rewards=[EQUAL], **accumulated(2))
    assert [step for step, _, _ in trainer.engine.proven] == [0, 1]
    assert all(len(learner) >= 12 for _, learner, _ in trainer.engine.proven)


# Two workers


def test_exact_savings_two_workers_one_without_signal_same_gradient(tmp_path: Path) -> None:
    # The first worker gets the first half of a step's groups.
    rewards = {count: [SIGNAL, EQUAL, *[PARTLY, EQUAL] * (count - 1), *[EQUAL] * 2 * count] for count in (1, 2)}
    cases = [(loss_type, count) for loss_type in ("grpo", "bnpo", "dapo") for count in (1, 2)]
    for worker in run_workers(compare_savings, 2, str(tmp_path), cases, rewards):
        assert list(worker) == cases
        for case, result in worker.items():
            assert result["difference"] < NEAR, case
            # Only the first worker's rows have a gradient; the second keeps one to prove its engine.
            assert all(share <= 0.5 for share in result["completions_share"]), case
            assert result["clipped"] == result["clipped by TRL"], case
