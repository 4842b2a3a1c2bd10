"""Sampled groups of a step: their choice on any number of workers, and their tokens in the loss."""

import math
from array import array

import numpy as np
import pytest
import torch

from grpo_ray.learner.batch import SAMPLED_ROWS, Batch, concatenate, select_rows
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.recorded_samples import SampleChooser, SampleReader, marked_rows, round_logps
from grpo_ray.learner.schedule import DrawOrder

WEIGHTS = torch.tensor([1.0])


def mark(rewards: list[list[float]], rounds: int = 1, workers: int = 1, parts: int = 1) -> list[int]:
    """Return the marks of all workers' rows of the last of several equal rounds, for groups of two rewards, by rank.

    parts: optimizer steps of the generation batch.
    """
    table = torch.tensor(rewards).view(-1, 1)
    marks: list[int] = []
    for rank in range(workers):
        chooser = SampleChooser(2, WEIGHTS, DrawOrder(Workers(rank=rank, count=workers), parts))
        chooser.start_step()
        for _ in range(rounds):
            batch: Batch = {"advantages": torch.zeros(len(table) // workers)}
            chooser.mark(batch, table)
        marks += batch[SAMPLED_ROWS].tolist()
    return marks


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_chooser_marks_the_same_groups_for_any_worker_count(workers: int) -> None:
    rewards = [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert mark(rewards, workers=workers) == [0, 1, -1, -1, 2, 3, -1, -1]


def test_chooser_several_steps_marks_the_first_groups_in_order_of_drawing() -> None:
    # With two workers, the first of them has drawn the first and the third group.
    rewards = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    assert mark(rewards, workers=2, parts=2) == [0, 1, -1, -1, 2, 3, -1, -1]


def test_chooser_first_group_with_signal_is_one_sample() -> None:
    assert mark([[0.0, 1.0], [1.0, 0.0]]) == [0, 1, -1, -1]


def test_chooser_group_without_known_rewards_has_no_signal() -> None:
    assert mark([[math.nan, math.nan], [1.0, math.nan], [math.nan, 1.0]]) == [0, 1, -1, -1, -1, -1]


def test_chooser_later_rounds_add_only_what_is_missing() -> None:
    assert mark([[0.0, 1.0], [1.0, 0.0]], rounds=2) == [-1] * 4
    chooser = SampleChooser(2, WEIGHTS, DrawOrder(Workers()))
    chooser.start_step()
    for rewards, marks in (([0.0, 0.0], [0, 1]), ([1.0, 1.0], [-1, -1]), ([1.0, 0.0], [2, 3]), ([1.0, 0.0], [-1, -1])):
        batch: Batch = {"advantages": torch.zeros(2)}
        chooser.mark(batch, torch.tensor(rewards).view(-1, 1))
        assert batch[SAMPLED_ROWS].tolist() == marks


def micro_batch(marks: list[int], *lengths: int) -> Batch:
    """Make a micro-batch of rows with these marks and lengths."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"advantages": torch.ones(len(marks)), "completion_mask": mask.long(), SAMPLED_ROWS: torch.tensor(marks)}


def test_marked_rows_survive_selection_and_joining() -> None:
    batch = concatenate([micro_batch([-1, 3], 2, 2), micro_batch([0, -1], 3, 1)])
    assert marked_rows(batch) == [(1, 3), (2, 0)]
    assert marked_rows(select_rows(batch, [2, 0, 1])) == [(0, 0), (2, 3)]
    assert marked_rows({"advantages": torch.ones(2)}) == []


def test_reader_loss_pass_has_logps_and_tokens_without_gradient() -> None:
    reader, batch = SampleReader(2), micro_batch([-1, 3, 0], 3, 2, 3)
    reader.start_step(7)
    reader.locate([micro_batch([-1], 1), batch])
    logps = torch.tensor([[-1.0, -2.0, -3.0]] * 3, requires_grad=True)
    reader.observe_pass(1, batch, logps)
    weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.5, 0.0, -1.0]])  # 0: masked, or padding
    (logps * weights).sum().backward()
    signal, first = reader.collect()
    assert (signal.step, signal.sample, signal.index) == (7, "signal", 1)
    assert (signal.logps, signal.masked) == (array("f", [-1.0, -2.0]), b"\0\0")
    assert (first.sample, first.index, first.masked) == ("first", 0, b"\0\1\0")
    assert reader.collect() == []


def test_reader_leaves_the_gradient_as_it_is() -> None:
    gradients = []
    for observed in (False, True):
        weights = torch.tensor([0.5, -1.5], requires_grad=True)
        logps = torch.log_softmax(weights * torch.ones(2, 2), dim=-1)
        if observed:
            reader, batch = SampleReader(2), micro_batch([0, 1], 2, 2)
            reader.locate([batch])
            reader.observe_pass(0, batch, logps)
        (logps * torch.tensor([[1.0, 0.0], [0.3, 2.0]])).sum().backward()
        gradients.append(weights.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_reader_scored_batch_has_no_mask() -> None:
    reader = SampleReader(2)
    reader.start_step(1)
    reader.observe_scored(micro_batch([0, 1], 2, 0), torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))
    (row,) = reader.collect()  # the second completion is masked as a whole, and was not read
    assert (row.index, row.logps, row.masked) == (0, array("f", [-1.0, -2.0]), None)


def test_reader_pass_without_samples_keeps_nothing() -> None:
    reader, batch = SampleReader(2), micro_batch([-1, -1], 2, 2)
    reader.start_step(1)
    reader.locate([batch])
    reader.observe_pass(0, batch, torch.zeros(2, 2))
    assert reader.collect() == []


def test_round_logps_four_digits_without_negative_zeros() -> None:
    assert round_logps(torch.tensor([[-0.123, -2.0]], dtype=torch.bfloat16))[0, 1] == -2.0
    rounded = round_logps(torch.tensor([-0.123449, -0.00001, math.nan]))
    assert rounded[0] == np.float32(-0.1234) and math.copysign(1, rounded[1]) == 1 and np.isnan(rounded[2])
