"""Order of the micro-batches of a generation batch, and of the rows that several workers have drawn for it."""

import pytest
import torch
from trl import GRPOConfig

from grpo_ray.config.loader import load_config
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.schedule import BatchSchedule, DrawOrder
from grpo_ray.learner.trl_config import trl_arguments


def arguments(accumulation: int, per_generation: int, epochs: int = 1) -> GRPOConfig:
    """Return TRL's arguments with these numbers of micro-batches in a step and in a generation batch."""
    return GRPOConfig(
        output_dir="out", per_device_train_batch_size=8, num_generations=2, gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation, num_iterations=epochs, use_cpu=True, bf16=False, report_to="none",
    )  # fmt: skip


def test_schedule_two_steps_twice_worked_by_hand() -> None:
    schedule = BatchSchedule.of(arguments(accumulation=2, per_generation=4, epochs=2))
    assert (schedule.parts, schedule.reads) == (2, 8)
    counts = range(9)  # all reads of a generation batch, and the first one of the next
    assert [schedule.begins_batch(count) for count in counts] == [True, *[False] * 7, True]
    assert [schedule.begins_part(count) for count in counts] == [True, False] * 4 + [True]
    assert [schedule.is_first_epoch(count) for count in counts] == [True] * 4 + [False] * 4 + [True]
    assert [schedule.part(count) for count in counts] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert [schedule.place(count) for count in counts] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [schedule.place_in_part(count) for count in counts] == [0, 1] * 4 + [0]


def test_schedule_one_step_has_one_part() -> None:
    schedule = BatchSchedule.of(arguments(accumulation=4, per_generation=4))
    assert (schedule.parts, schedule.per_part, schedule.reads) == (1, 4, 4)


def test_schedule_step_of_several_generation_batches_has_whole_batches_as_parts() -> None:
    schedule = BatchSchedule.of(arguments(accumulation=4, per_generation=2))
    assert (schedule.parts, schedule.per_part, schedule.reads) == (1, 2, 2)


@pytest.mark.parametrize("epochs", ["grpo.epochs=3", "grpo.num_iterations=3"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_schedule_of_a_config_has_its_steps_and_epochs(workers: int, epochs: str) -> None:
    settings = ["grpo.steps_per_generation=2", epochs, "grpo.save_steps=6", "grpo.max_steps=12"]
    sizes = ["grpo.prompts_per_step=8", "grpo.num_generations=4", "grpo.micro_batch_size=16"]
    config = load_config(None, [f"cluster.num_workers={workers}", *settings, *sizes])
    args = trl_arguments(config, "out")
    # A step of 32 completions in 2 micro-batches, and a generation batch of 2 steps
    assert args.per_device_train_batch_size * workers * args.gradient_accumulation_steps == 32
    assert args.per_device_train_batch_size * workers * args.steps_per_generation == 64
    assert BatchSchedule.of(args) == BatchSchedule(micro_batches=4, per_part=2, epochs=3)
    assert (config.sizes.completions_per_generation, config.steps_per_batch) == (64, 6)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_draw_order_is_that_of_one_worker(count: int, parts: int) -> None:
    drawn = torch.arange(16).view(8, 2)  # the rows of one worker
    orders = [DrawOrder(Workers(rank=rank, count=count), parts) for rank in range(count)]
    by_rank = [order.own_rows(drawn) for order in orders]
    assert all(torch.equal(order.sort(torch.cat(by_rank)), drawn) for order in orders)
    assert DrawOrder(Workers()).own_rows(drawn).equal(drawn)


def test_draw_order_two_workers_alternate_in_each_step() -> None:
    drawn = torch.arange(8)
    by_rank = [DrawOrder(Workers(rank=rank, count=2), parts=2).own_rows(drawn).tolist() for rank in range(2)]
    assert by_rank == [[0, 1, 4, 5], [2, 3, 6, 7]]
