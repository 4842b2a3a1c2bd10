"""Sources of a step's completions, with scripted operations in place of a trainer."""

import math
from typing import Any

import pytest
import torch
from transformers import TrainerState

from grpo_ray.data.problem import Problem
from grpo_ray.errors import SyncError
from grpo_ray.learner.batch import Batch, CompletionRows
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler, Padding
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.one_step_off_policy import AheadGenerator, AheadOperations, Generation, Rows
from grpo_ray.learner.rollouts.source import OneStepOffPolicySource, OnPolicySource, is_followed_by_checkpoint
from grpo_ray.learner.sync_check import ImportanceSampling
from grpo_ray.storage.rollouts import GroupRecord
from grpo_ray.telemetry.profiler import PhaseProfiler

PROMPT, COMPLETION = [5, 6], [7, 8, 1]


class FakeTrainer:
    """Operations that a source needs, on groups of two completions; every problem whose id is even has signal."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def roll_out(self, inputs: Rows, *, score_logps: bool = True) -> CompletionRows:
        self.calls.append("roll out" if score_logps else "roll out without log-probabilities")
        signal = [int(row["id"], 16) % 2 == 0 for row in inputs]
        rewards = torch.tensor([[float(has and row % 2)] for row, has in enumerate(signal)])
        count = len(inputs)
        output = {
            "prompt_ids": torch.tensor([PROMPT] * count), "prompt_mask": torch.ones(count, 2, dtype=torch.long),
            "completion_ids": torch.tensor([COMPLETION] * count),
            "completion_mask": torch.ones(count, 3, dtype=torch.long),
            "sampling_per_token_logps": torch.full((count, 3), -2.0),
            "advantages": rewards[:, 0] - rewards[:, 0].mean(),
        }  # fmt: skip
        return CompletionRows(inputs, [COMPLETION] * count, rewards, output)

    def record(self, rows: CompletionRows) -> list[GroupRecord]:
        values: dict[str, Any] = {"correct": None, "lengths": (), "truncated": ()}
        return [
            GroupRecord(step=1, epoch=0, problem=row["id"], rewards=tuple(rows.rewards[:, 0].tolist()), **values)
            for row in rows.inputs[::2]
        ]

    def prepare(self, inputs: Rows) -> tuple[list[list[int]], Any]:
        self.calls.append("sync")

        def generate() -> Generation:
            self.calls.append("generate")
            return Generation([COMPLETION] * len(inputs), [[-2.0, None, -2.0]] * len(inputs))

        return [PROMPT] * len(inputs), generate

    def score(self, batch: Batch) -> torch.Tensor:
        self.calls.append("score")
        return torch.full(batch["completion_ids"].shape, -2.0 + math.log(2))

    def check_sync(self, learner: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        self.calls.append("check")
        assert learner.shape == engine.shape == mask.shape and engine[0, 1].isnan()

    def source(self) -> OneStepOffPolicySource:
        def make_generator(next_rows: Any) -> AheadGenerator:
            operations = AheadOperations(next_rows, self.prepare, self.score, self.check_sync)
            return AheadGenerator(operations, pad_token_id=0, device=torch.device("cpu"), profiler=PhaseProfiler())

        importance = ImportanceSampling("token_truncate", high=1.5)
        return OneStepOffPolicySource(self.roll_out, self.record, make_generator, importance, Workers())


def batches(problems: int, prompts: int = 2) -> GroupBatches:
    stream = [Problem(id=f"{n:016x}", prompt=[], solution="", columns={}) for n in range(problems)]
    return GroupBatches([(problem, 0) for problem in stream], prompts, num_generations=2, repeats=1)


def numbers(groups: list[GroupRecord]) -> list[int]:
    return [int(group.problem, 16) for group in groups]


# On-policy


def test_on_policy_source_rolls_out_once() -> None:
    trainer = FakeTrainer()
    source = OnPolicySource(trainer.roll_out, trainer.record)
    attached = iter(source.attach(batches(2)))
    step = source.collect(next(attached))
    source.start_ahead(TrainerState())
    source.finish_ahead()
    assert trainer.calls == ["roll out"] and source.generation_for([PROMPT]) is None
    assert numbers(step.groups) == [0, 1] and all(group.trained for group in step.groups)


def test_on_policy_source_dynamic_sampling_records_all_rounds() -> None:
    trainer = FakeTrainer()
    sampler = DynamicSampler(3, 2, torch.ones(1), Padding(token=0, multiple=None, ratio=None), Workers())
    source = OnPolicySource(trainer.roll_out, trainer.record, sampler)
    step = source.collect(next(iter(source.attach(batches(8)))))
    # Problems 0 and 2 have signal; the second round has drawn 2 and 3.
    assert numbers(step.groups) == [0, 1, 2, 3]
    assert [group.trained for group in step.groups] == [True, False, True, False]
    assert [row["id"] for row in step.rows.inputs[::2]] == [f"{0:016x}", f"{2:016x}"]
    assert step.metrics == {"group/rounds": 2.0, "group/signal_share": 1.0}


# One step off-policy


def test_one_step_off_policy_source_collects_what_was_generated_ahead() -> None:
    trainer = FakeTrainer()
    source = trainer.source()
    attached = iter(source.attach(batches(4)))
    source.collect(next(attached))
    source.start_ahead(TrainerState(global_step=0, save_steps=5, max_steps=9))
    source.finish_ahead()
    assert sorted(trainer.calls[1:3]) == ["generate", "sync"] and trainer.calls[3:] == ["score", "check"]
    assert source.generation_for([PROMPT] * 4) == Generation([COMPLETION] * 4, [[-2.0, None, -2.0]] * 4)
    with pytest.raises(RuntimeError, match="not those that completions were generated for"):
        source.generation_for([[9]] * 4)
    step = source.collect(next(attached))
    assert numbers(step.groups) == [2, 3]  # the batch that was looked at is drawn, and not the one after it
    assert trainer.calls[-1] == "roll out without log-probabilities"
    old = step.rows.output["old_per_token_logps"]
    torch.testing.assert_close(old, torch.full((4, 3), -2.0 + math.log(2)))
    torch.testing.assert_close(step.rows.output["importance_sampling_ratio"], torch.full((4, 3), 1.5))  # 2, truncated
    assert step.metrics["sampling/importance_sampling_ratio/mean"] == 1.5
    assert source.generation_for([PROMPT] * 4) is None


def test_one_step_off_policy_source_before_checkpoint_generates_nothing() -> None:
    trainer = FakeTrainer()
    source = trainer.source()
    attached = iter(source.attach(batches(4)))
    source.collect(next(attached))
    source.start_ahead(TrainerState(global_step=4, save_steps=5, max_steps=9))
    source.finish_ahead()
    source.collect(next(attached))
    assert trainer.calls == ["roll out", "roll out"]


def test_one_step_off_policy_source_filters_checks_logps_before_them() -> None:
    checked: list[list[float]] = []

    class FilteringTrainer(FakeTrainer):
        def prepare(self, inputs: Rows) -> tuple[list[list[int]], Any]:
            prompts, generate = super().prepare(inputs)
            return prompts, lambda: generate()._replace(unprocessed_logps=[[-3.0, -4.0, -5.0]] * len(inputs))

        def check_sync(self, learner: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
            checked.append(engine[0].tolist())

    source = FilteringTrainer().source()
    source.attach(batches(4))
    source.start_ahead(TrainerState(global_step=0, save_steps=5, max_steps=9))
    source.finish_ahead()
    assert checked == [[-3.0, -4.0, -5.0]]
    ready = source.generation_for([PROMPT] * 4)
    assert ready is not None and ready.logps[0] == [-2.0, None, -2.0]  # TRL's ratio takes those after the filters


def test_one_step_off_policy_source_failed_check_raises() -> None:
    class StaleTrainer(FakeTrainer):
        def check_sync(self, *logps: torch.Tensor) -> None:
            raise SyncError("not in sync")

    source = StaleTrainer().source()
    source.attach(batches(4))
    source.start_ahead(TrainerState(global_step=0, save_steps=5, max_steps=9))
    with pytest.raises(SyncError):
        source.finish_ahead()
    assert source.generator.ready is None and source.generator.pending is None


@pytest.mark.parametrize(("step", "expected"), [(0, False), (3, False), (4, True), (5, False), (8, True)])
def test_is_followed_by_checkpoint_saved_or_last_step_true(step: int, expected: bool) -> None:
    state = TrainerState(global_step=step, save_steps=5, max_steps=9)
    assert is_followed_by_checkpoint(state) == expected
