"""Steps with dynamic sampling against unmodified TRL on the same groups, in float64, for any number of workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from problem_stream import CHOSEN, DynamicSamplingLearner, StreamTrainer, flat, train_on_stream, whole_stream
from stock_trl import EQUAL, NEAR, UNSCORABLE, Record, largest_difference
from worker_cases import train_dynamic_sampling
from worker_group import run_workers

from grpo_ray.errors import DataError
from grpo_ray.storage.records.groups import GroupRecord, add_loss_tokens
from grpo_ray.storage.records.tokens import LossTokens

pytestmark = pytest.mark.usefixtures("one_thread")


def samples(groups: list[GroupRecord], tokens: list[LossTokens]) -> list[Any]:
    """Return what is recorded of the samples, in order; log-probabilities rounded, as their sums differ in order.

    Completions without advantage are read only where they prove a worker's weight sync: one or none on each.
    """
    found = []
    for group in add_loss_tokens(groups, tokens):
        for index, each in enumerate(group.tokens or ()):
            read = [round(value, 3) for value in each.learner_logps or ()] if group.advantages[index] else None  # type: ignore[index]
            found.append(
                (group.step, group.sample, index, group.problem, group.completions, each.texts, read, each.masked)
            )
    return sorted(found, key=lambda sample: sample[:3])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 1, "steps_per_generation": 1,
         "per_device_train_batch_size": 16},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"vllm_importance_sampling_mode": "sequence_truncate", "num_iterations": 2, "max_steps": 6},
        {"vllm_importance_sampling_mode": "token_mask", "num_iterations": 2, "max_steps": 6},
        {"vllm_importance_sampling_correction": False},
        {"pad_to_multiple_of": 8},
        {"mask_truncated_completions": True},
        {"beta": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_dynamic_sampling_same_gradient_as_trl_on_chosen_groups(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, whole_stream(), **settings)
    stock, _ = train_on_stream(StreamTrainer, tmp_path, flat(CHOSEN), **settings)
    assert trainer.trained_on == [list(step) for step in CHOSEN]
    assert largest_difference(ours, stock) < NEAR
    # The token count in the denominator is that of the chosen groups, not of those first drawn.
    wrong, _ = train_on_stream(StreamTrainer, tmp_path, whole_stream(), **settings)
    assert largest_difference(ours, wrong) > 1e-2


def test_dynamic_sampling_two_steps_of_a_batch_same_gradient_as_trl(tmp_path: Path) -> None:
    # Steps of two groups. In the second batch each gets one of the two groups with signal, and one of the fillers.
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2}
    ours, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, whole_stream(), **settings, max_steps=12)
    divided = (CHOSEN[0], (8, 13, 9, 16), CHOSEN[2])
    assert trainer.trained_on == [list(batch) for batch in divided]
    stock, _ = train_on_stream(StreamTrainer, tmp_path, flat(divided), **settings, max_steps=12)
    assert largest_difference(ours, stock) < NEAR


def test_dynamic_sampling_draws_only_the_rounds_it_needs(tmp_path: Path) -> None:
    record, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, whole_stream())
    assert [len(rounds) for rounds in trainer.drawn] == [2, 3, 1]
    assert [log["group/rounds"] for log in record.logs] == [2, 3, 1]
    assert [log["group/signal_share"] for log in record.logs] == [1.0, 0.5, 1.0]
    assert flat(flat(trainer.drawn)) == list(whole_stream())  # each was drawn once
    assert [[sum(each) for each in rounds] for rounds in trainer.trained] == [[1, 3], [2, 1, 1], [4]]


def test_dynamic_sampling_all_groups_have_signal_keeps_step(tmp_path: Path) -> None:
    _, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, range(20, 24), max_steps=1)
    assert trainer.rollout.batch is trainer.last_round.batch


def test_dynamic_sampling_no_group_has_signal_ends_with_zero_gradient(tmp_path: Path) -> None:
    pays = (EQUAL, UNSCORABLE, (0.0,) * 4, (0.7,) * 4) * 3
    record, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, range(12), pays=pays, max_steps=1)
    assert trainer.drawn == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    assert trainer.trained_on == [[0, 1, 2, 3]]
    assert all(not gradient.any() for gradient in record.gradients[0].values())
    assert record.logs[0]["group/signal_share"] == 0.0 and math.isfinite(record.logs[0]["loss"])


def test_dynamic_sampling_stream_ends_inside_step_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 of a step's 4 problems"):
        train_on_stream(DynamicSamplingLearner, tmp_path, range(4), max_steps=1)


@pytest.mark.parametrize(("workers", "accumulation"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_dynamic_sampling_same_step_for_any_number_of_workers(tmp_path: Path, workers: int, accumulation: int) -> None:
    alone, trainer = train_on_stream(DynamicSamplingLearner, tmp_path, whole_stream())
    results = run_workers(train_dynamic_sampling, workers, str(tmp_path), accumulation)
    for result in results:
        gradients = [{name: torch.from_numpy(each) for name, each in step.items()} for step in result["gradients"]]
        assert largest_difference(Record(gradients), alone) < NEAR
        for mine, theirs in zip(result["logs"], alone.logs, strict=True):
            for name in ("group/rounds", "group/signal_share", "frac_reward_zero_std", "reward"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name
    for step, chosen in enumerate(CHOSEN):
        trained_on = [result["trained_on"][step] for result in results]
        assert sorted(flat(trained_on)) == sorted(chosen)
        assert all(len(each) == 4 // workers for each in trained_on)
        # The groups that the workers drew, and whether each was kept, are in the order of the stream.
        for number in range(len(trainer.drawn[step])):
            assert flat([result["drawn"][step][number] for result in results]) == trainer.drawn[step][number]
            assert flat([result["trained"][step][number] for result in results]) == trainer.trained[step][number]
    # The samples are the same groups, whichever worker drew them and whichever read each row.
    groups, tokens = (flat([result[name] for result in results]) for name in ("groups", "tokens"))
    assert samples(groups, tokens) == samples(trainer.groups, trainer.tokens)
