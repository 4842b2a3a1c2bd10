"""Epoch plans that a loader publishes to the tasks that read: problems carried over, and problems left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from worker_cases import draw_epoch
from worker_group import run_workers

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, uint64_to_ids
from grpo_ray.data.mixture_ledger import MixtureLedger
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import EpochPlan, to_row
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.coordinator import RunCoordinator
from grpo_ray.training.problem_loader import ProblemLoader
from grpo_ray.training.worker import publish_plan

NAME = "coordinator"
IDS = [f"{number:016x}" for number in range(1, 7)]
ROWS = [to_row(Problem(id=each, prompt=[{"role": "user", "content": "?"}], solution="1"), epoch=0) for each in IDS]


@pytest.fixture
def coordinator(cluster: None) -> Iterator[Any]:
    """Coordinator actor of a run."""
    actor = ray.remote(RunCoordinator).options(num_cpus=0, name=NAME, namespace="draw_epoch").remote()
    yield actor
    ray.kill(actor)


def published(coordinator: Any) -> EpochPlan:
    """Return the plan that reading tasks find."""
    return ray.get(ray.get(coordinator.epoch_plan.remote())[0])


def make_loader(folder: Path, ledger: Ledger, coordinator: Any) -> ProblemLoader:
    """Make the loader of the first of two workers, which draws 2 of a step's 4 problems."""
    config = load_config(None, ["grpo.prompts_per_step=4", "cluster.num_workers=2"])
    return ProblemLoader(
        config,
        MixtureLedger.single(ledger),
        RunFolder(str(folder), "run"),
        publish_plan=lambda plan: publish_plan(coordinator, plan),
        rows=lambda: iter(ROWS),
    )


def test_problem_loader_rest_of_epoch_on_every_worker_is_carried_over(coordinator: Any, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    results = run_workers(draw_epoch, 2, str(tmp_path), address, NAME, [ROWS[:3], ROWS[3:]])
    (first, plans), (second, _) = results
    assert (first[:2], second[:2]) == (IDS[:2], IDS[3:5])  # 6 problems are one step of 4
    before, after = plans
    assert (before.epoch, before.carried_over) == (0, ())
    assert after.epoch == 1
    assert [row["id"] for row in after.carried_over] == [IDS[2], IDS[5]]


def test_problem_loader_plan_excludes_used_and_skipped_problems(coordinator: Any, tmp_path: Path) -> None:
    ledger = Ledger(DatasetFingerprint.of(IDS))
    ledger.set_curriculum(0, skipped=[IDS[3]], preferred=[IDS[2]])
    ledger.mark(0, [IDS[0]])
    make_loader(tmp_path, ledger, coordinator).problems()
    plan = published(coordinator)
    assert (plan.epoch, uint64_to_ids(plan.excluded), uint64_to_ids(plan.preferred)) == (0, [IDS[0], IDS[3]], [IDS[2]])
