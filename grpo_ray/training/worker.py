"""Entry point of a worker: the train function of Ray Train, up to the point at which heavy libraries are loaded."""

from collections import deque
from functools import partial
from typing import Any

import ray
import ray.train

from grpo_ray.data.mixture import MixturePlan
from grpo_ray.data.stream import EpochPlan, from_row
from grpo_ray.device import select_device
from grpo_ray.resilience.error_triage import error_context
from grpo_ray.storage.jsonl import HISTORY_ROWS, load_metrics_history
from grpo_ray.training.attempt import WorkerSpec, announce_start, start_attempt, take_fence
from grpo_ray.training.problem_loader import ProblemLoader
from grpo_ray.training.start_point import choose_start, load_ledger, open_checkpoint


def train_worker(settings: dict[str, WorkerSpec]) -> None:
    """Train until the last step, or `run.pause_at`, from the run's last state; Ray Train's `train_loop_per_worker`."""
    attempt = start_attempt(settings["spec"])
    select_device(attempt.config.cluster.use_gpu)
    attempt.set_status("looking for a checkpoint, and verifying it")
    # First of all, so that an earlier attempt can no longer commit a checkpoint.
    fence = take_fence(attempt.folder)
    report_damage = partial(attempt.notify, event="damaged_checkpoint")
    spec = attempt.spec
    start = choose_start(attempt.config, attempt.folder, spec.last_serial, report_damage, spec.initial_checkpoint)
    heldout = {
        key: [from_row(row) for row in ray.train.get_dataset_shard(key).iter_rows()]
        for key in attempt.spec.heldout_conditions
    }
    if start.checkpoint is not None:
        attempt.set_status(f"fetching {start.checkpoint.name}")
    with open_checkpoint(start, attempt.scratch) as checkpoint, error_context(lambda: start.step):
        loader = ProblemLoader(
            attempt.config,
            # The ids are in Ray's shared memory, not copied.
            load_ledger(
                checkpoint,
                {name: source.share for name, source in attempt.config.training_sources.items()},
                ray.get(attempt.spec.training_ids),
                attempt.spec.training_fingerprints,
                is_of_other_run=start.is_of_other_run,
            ),
            attempt.folder,
            publish_plan=lambda plan: publish_plan(attempt.spec.coordinator, plan),
            rows=lambda: iter(ray.train.get_dataset_shard("train").iter_rows()),
            start_step=start.step,
        )
        history = load_metrics_history(checkpoint) if checkpoint and start.step else deque(maxlen=HISTORY_ROWS)
        announce_start(attempt, start, history)
        if start.checkpoint is not None and start.step >= attempt.config.last_step:
            # A worker died after the last checkpoint was written, but before Ray Train had its report. The trainer
            # would take one more step.
            return
        problems = loader.problems()  # the first ones are fetched while libraries, policy and engine are loaded
        attempt.set_status("loading libraries")
        from grpo_ray.training.training_loop import TrainingInputs, run_training

        run_training(
            TrainingInputs(
                attempt=attempt,
                start=start,
                checkpoint=checkpoint,
                loader=loader,
                problems=problems,
                heldout=heldout,
                history=history,
                fence=fence,
            )
        )


def publish_plan(coordinator: Any, plan: EpochPlan | MixturePlan) -> None:
    """Pass a plan to the tasks that read problems (`training_stream`, `mixture_stream`).

    Args:
        coordinator: handle of the run's `RunCoordinator` actor.
    """
    # A reference, in a list so that Ray does not replace it by its value: a plan has 8 bytes for each used problem, and
    # thousands of tasks read it.
    ray.get(coordinator.set_epoch_plan.remote([ray.put(plan)]))
