"""How many workers an elastic run has: the rules with fakes, then a real cluster whose machines come and go."""

import hashlib
import inspect
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train import CheckpointUploadMode
from ray.train.backend import BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2._internal.execution import preemption
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import default as failure_handling
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
)
from ray.train.v2._internal.execution.worker_group import poll
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from several_nodes import several_nodes

from grpo_ray import elastic
from grpo_ray.elastic import Commits, Drained, Draining, EvenScaling, Trainer, explain, places, scaling
from grpo_ray.settings import load

# What we override, and what we call or stand between. When one fails: read Ray's change, see whether ours still holds,
# then write the new digest here.
BENEATH = {
    DataParallelTrainer.fit: "5d2b8d40bfcb",
    DataParallelTrainer._initialize_and_run_controller: "ea57ec449832",
    DataParallelTrainer._register_sigint_handler: "58291d0ee444",
    ElasticScalingPolicy.__init__: "60565211a497",
    ElasticScalingPolicy.make_decision_for_running_worker_group: "9bc8c63cc4ad",
    ElasticScalingPolicy.make_decision_for_non_running_worker_group: "e0a0292656e3",
    ElasticScalingPolicy._get_reserved_resources: "5bcd17e7fc85",
    ElasticScalingPolicy._count_possible_workers: "9ea722d0fec7",
    ControllerCallback.after_controller_state_update: "f79b30492c77",
    ControllerCallback.on_controller_start_worker_group: "afd3468b5795",
    TrainController._start_worker_group: "4cd5f350d092",
    TrainController._get_retry_state: "5c64fa936088",
    TrainController._handle_preempting_state: "885cb421dad2",
    ReportCallbackHandler.after_worker_group_poll_status: "202003c712d1",
    _AutoscalingCoordinatorActor.get_reserved_resources: "1cf6f63ce800",
    failure_handling._is_preemption_failure: "c0f83ce15a8d",
    poll._is_preempted_actor: "75282b8c7e88",
    preemption._get_draining_nodes: "9e752cf8f8a6",
}


def digest(function: Callable[..., Any]) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


@pytest.mark.parametrize("function", BENEATH, ids=lambda function: function.__qualname__)
def test_ray_has_not_changed_beneath_what_is_extended(function: Callable[..., Any]) -> None:
    assert digest(function) == BENEATH[function]


@pytest.mark.parametrize(
    ("ours", "rays", "overridden"),
    [
        (
            Trainer,
            DataParallelTrainer,
            {"__init__", "_initialize_and_run_controller", "_register_sigint_handler"},
        ),
        (
            EvenScaling,
            ElasticScalingPolicy,
            {
                "__init__",
                "make_decision_for_running_worker_group",
                "make_decision_for_non_running_worker_group",
                "after_controller_state_update",
                "on_controller_start_worker_group",
                "_get_reserved_resources",
                "_count_possible_workers",
            },
        ),
    ],
)
def test_only_the_named_methods_of_ray_are_overridden(ours: type, rays: type, overridden: set[str]) -> None:
    own = {name for name in vars(ours) if callable(getattr(ours, name)) and hasattr(rays, name)}
    assert own == overridden


@dataclass
class Node:
    """A machine as the policy sees it."""

    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)
    usable: bool = True


class FakeScaling(EvenScaling):
    """The policy over machines that the test names, with a coordinator that offers all of them."""

    def __init__(self, counts: list[int], nodes: dict[str, Node], *, gpu: bool = False, settle: float = 0.0):
        per_worker = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
        super().__init__(
            ray.train.ScalingConfig(
                num_workers=(min(counts), max(counts)),
                use_gpu=gpu,
                resources_per_worker=per_worker,
                elastic_resize_monitor_interval_s=settle,
            ),
            counts,
        )
        self.nodes = nodes

    def _maybe_send_resource_request(self) -> None:
        pass

    def _get_reserved_resources(self) -> dict[str, dict[str, float]]:
        return {name: node.total for name, node in self.nodes.items()}

    def _usable_nodes(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.usable}

    def _free(self, usable: set[str]) -> dict[str, dict[str, float]]:
        return {name: self.nodes[name].free for name in usable}


@dataclass
class Report:
    checkpoint: object | None = None


@dataclass
class Status:
    """What a look at one worker finds."""

    training_report: Report | None = None


@dataclass
class Statuses:
    worker_statuses: dict[int, Status]


@dataclass
class Group:
    num_workers: int
    start_time: float = 0.0


NOTHING, PLAIN, SAVED = Status(), Status(Report()), Status(Report(checkpoint="checkpoint-10"))


def look(*ranks: Status) -> Statuses:
    return Statuses(dict(enumerate(ranks)))


def cpus(*counts: int) -> dict[str, Node]:
    return {f"node-{number}": Node({"CPU": count}, {"CPU": count}) for number, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("machines", "workers"), [((2, 2), 4), ((2, 1), 2), ((1, 1, 1, 1, 1), 4), ((1,), 0), ((), 0), ((9,), 4)]
)
def test_as_many_workers_are_taken_as_share_the_step_evenly(machines: tuple[int, ...], workers: int) -> None:
    policy = FakeScaling([2, 4], cpus(*machines))  # a step of 16 problems: 3 workers could not share it
    assert policy._count_possible_workers(policy._get_reserved_resources()) == workers


def test_a_group_that_lost_a_machine_starts_again_with_what_is_left() -> None:
    policy = FakeScaling([2, 4], cpus(2, 1))
    assert policy.make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_a_machine_that_does_not_answer_or_is_leaving_does_not_count() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].usable = False
    assert FakeScaling([2, 4], nodes).make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_with_too_few_machines_the_policy_waits_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(elastic.time, "sleep", slept.append)
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert slept == [elastic.WAIT_SECONDS]


def test_after_a_start_that_did_not_come_about_only_what_is_free_counts() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].free = {"CPU": 0}  # somebody else's
    policy = FakeScaling([2, 4], nodes)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4
    policy.after_controller_state_update(None, elastic.ReschedulingState(training_failed_error=None))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.after_controller_state_update(None, None)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4


def test_growth_is_held_back_until_a_checkpoint_is_committed() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2)), Group(2)
    assert isinstance(decide(policy, group, look(NOTHING, NOTHING)), NoopDecision)
    assert isinstance(decide(policy, group, look(PLAIN, PLAIN)), NoopDecision)
    assert isinstance(decide(policy, group, look(SAVED, NOTHING)), NoopDecision)  # rank 1 has not reported it yet
    assert decide(policy, group, look(NOTHING, SAVED)) == ResizeDecision(4, {"CPU": 1})
    assert isinstance(decide(policy, group, look(PLAIN, PLAIN)), NoopDecision)  # a step too late


def test_the_chance_of_a_commit_is_taken_however_lately_ray_looked() -> None:
    policy, group = FakeScaling([2, 4], cpus(2), settle=60.0), Group(2, start_time=time.monotonic() - 61)
    assert isinstance(decide(policy, group, look(SAVED, SAVED)), NoopDecision)  # nothing to grow onto
    policy.nodes = cpus(2, 2)
    assert decide(policy, group, look(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1})


def test_a_group_is_not_resized_soon_after_its_start() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2), settle=60.0), Group(2, start_time=time.monotonic() - 59)
    assert isinstance(decide(policy, group, look(SAVED, SAVED)), NoopDecision)


def test_a_running_group_shrinks_at_a_commit_too() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 1)), Group(4)
    assert isinstance(decide(policy, group, look(PLAIN, PLAIN, PLAIN, PLAIN)), NoopDecision)
    assert decide(policy, group, look(SAVED, PLAIN, PLAIN, PLAIN)) == ResizeDecision(2, {"CPU": 1})


def test_a_running_group_is_left_alone_when_too_few_machines_would_be_left() -> None:
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(decide(policy, Group(4), look(SAVED, PLAIN, PLAIN, PLAIN)), NoopDecision)


def test_reports_of_a_group_that_is_gone_are_forgotten() -> None:
    policy = FakeScaling([2, 4], cpus(2, 2))
    decide(policy, Group(2, start_time=1.0), look(SAVED, NOTHING))
    assert isinstance(decide(policy, Group(2, start_time=2.0), look(NOTHING, PLAIN)), NoopDecision)


def test_a_group_is_not_torn_down_for_gpus_that_somebody_else_holds() -> None:
    nodes = {
        "ours": Node({"CPU": 8, "GPU": 2}, {"CPU": 6, "GPU": 0}),
        "new": Node({"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}),
    }
    policy, group = FakeScaling([2, 4], nodes, gpu=True), Group(2)
    assert isinstance(decide(policy, group, look(SAVED, SAVED)), NoopDecision)
    nodes["new"].free = {"CPU": 0, "GPU": 2}  # the data stream's tasks on its CPUs end with the group
    assert decide(policy, group, look(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1, "GPU": 1})


def decide(policy: EvenScaling, group: Group, status: Statuses) -> Any:
    return policy.make_decision_for_running_worker_group(group, status)


def test_a_checkpoint_is_committed_when_the_last_rank_made_that_very_report() -> None:
    commits = Commits()
    ranks = [(PLAIN, NOTHING), (SAVED, NOTHING), (PLAIN, PLAIN), (NOTHING, SAVED), (NOTHING, PLAIN)]
    # rank 0 reports 1, 2 (saved), 3; rank 1 reports 1, 2 (saved), 3: the second is whole in the fourth look
    assert [commits.look(look(*pair).worker_statuses) for pair in ranks] == [False, False, False, True, False]


def test_one_rank_with_the_checkpoint_is_enough() -> None:
    assert Commits().look(look(SAVED, PLAIN).worker_statuses)


def test_a_worker_needs_all_its_resources_on_one_machine() -> None:
    nodes = {"a": {"CPU": 7, "GPU": 2}, "b": {"CPU": 1, "GPU": 8}, "c": {"CPU": 64}}
    assert places(nodes, {"CPU": 2, "GPU": 1, "memory": 0}) == 2  # two on a; b has too few CPUs, c no GPU


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.num_workers=2"], None),
        (["cluster.num_workers=[1, 2]"], "cluster.num_workers=[1, 2]: the run takes 1 or 2 workers"),
        (
            ["cluster.num_workers=[2, 4]"],
            "cluster.num_workers=[2, 4]: the run takes 2 or 4 workers; 3 does not divide grpo.prompts_per_step=16",
        ),
        (
            ["cluster.num_workers=[3, 6]"],
            "cluster.num_workers=[3, 6]: the run takes 4 workers; 3, 5 or 6 do not divide grpo.prompts_per_step=16",
        ),
        (
            ["cluster.num_workers=[2, 4]", "grpo.micro_batch_size=2"],
            "cluster.num_workers=[2, 4]: the run takes 2 workers; "
            "3 or 4 do not divide grpo.prompts_per_step=16 and grpo.micro_batch_size=2",
        ),
    ],
)
def test_an_elastic_run_says_how_many_workers_it_takes(overrides: list[str], said: str | None) -> None:
    assert explain(load(None, ["grpo.prompts_per_step=16", *overrides])) == said


def test_ray_is_asked_for_no_more_workers_than_share_the_step() -> None:
    asked = scaling(load(None, ["grpo.prompts_per_step=16", "cluster.num_workers=[2, 6]", "cluster.use_gpu=true"]))
    assert (asked.num_workers, asked.resources_per_worker) == ((2, 4), {"CPU": 1, "GPU": 1})
    assert asked.elasticity_enabled
    assert not scaling(load(None, ["cluster.num_workers=2"])).elasticity_enabled


def test_a_fixed_number_of_workers_keeps_the_policy_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[Any] = []
    monkeypatch.setattr(
        DataParallelTrainer,
        "_initialize_and_run_controller",
        lambda self, **parts: took.append(parts["scaling_policy"]),
    )
    for workers in (2, (2, 4)):
        asked = ray.train.ScalingConfig(num_workers=workers)
        trainer = Trainer(print, worker_counts=[2, 4], scaling_config=asked)
        trainer._initialize_and_run_controller(scaling_policy="rays")
    assert took[0] == "rays"
    assert isinstance(took[1], EvenScaling)


def test_the_error_that_ends_an_attempt_is_a_lost_machine_to_ray() -> None:
    error = pickle.loads(pickle.dumps(Drained()))
    assert poll._is_preempted_actor(error)
    assert "about to be taken away" in str(error)


def test_the_announcement_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    announcements = iter([None, preemption.PreemptionInfo(None, {"node": [1]})])
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: next(announcements))
    draining = Draining()
    assert [draining(), draining(), draining()] == [False, True, False]


class NoProcessGroup(BackendConfig):
    """Workers that need no torch.distributed are soon started."""

    backend = "gloo"


def count_up(settings: dict[str, Any]) -> None:
    """A train function without a model: counts steps, saves each n-th, and writes down what happens."""
    context = ray.train.get_context()
    workers, rank, step = context.get_world_size(), context.get_world_rank(), 0
    events = Path(settings["folder"]) / "events.jsonl"

    def happened(what: str) -> None:
        if rank == 0:
            with events.open("a") as file:
                file.write(json.dumps({"what": what, "step": step, "workers": workers}) + "\n")

    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as local:
            step = int(Path(local, "step").read_text())
    happened("began")
    draining = Draining()
    # Rank 0 decides for all: a worker that saw the end a step too soon would leave the others at the next barrier.
    while not broadcast_from_rank_zero((events.parent / "stop").exists()):
        time.sleep(0.1)
        step += 1
        leaving = draining()
        saves = leaving or step % settings["save_steps"] == 0
        if saves:
            local = tempfile.mkdtemp()
            Path(local, "step").write_text(str(step))
            ray.train.report(
                {"step": step},
                ray.train.Checkpoint.from_directory(local),
                checkpoint_dir_name=f"{step}-{workers}",
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=True,
            )
        else:
            ray.train.report({"step": step}, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        happened("announced" if leaving else "saved" if saves else "step")
        if leaving:
            draining.leave()


def drive(folder: str, save_steps: int) -> None:
    """The driver of the real runs below, in a process of its own."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}
    ray.init()
    Trainer(
        count_up,
        worker_counts=[2, 4],
        train_loop_config={"folder": folder, "save_steps": save_steps},
        torch_config=NoProcessGroup(),
        scaling_config=ray.train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1),  # a drained machine must not use it up
        ),
    ).fit()


class Events:
    """What the run in a folder wrote down."""

    def __init__(self, folder: Path):
        self.file = folder / "events.jsonl"
        self.file.touch()

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def wait(self, what: str, workers: int, after: int = 0, seconds: float = 60.0) -> int:
        """Position behind the first such event that comes after so many; fails when there is none in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for position, event in enumerate(self.all()[after:], start=after):
                if (event["what"], event["workers"]) == (what, workers):
                    return position + 1
            time.sleep(0.05)
        raise AssertionError(f"no {what!r} with {workers} workers in {seconds} s after {self.all()[:after][-3:]}")


def attempts(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each worker group."""
    parts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["what"] == "began":
            parts.append([])
        parts[-1].append(event)
    return parts


@pytest.mark.slow
def test_a_run_outlives_a_machine_and_grows_onto_a_new_one_at_a_checkpoint(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with several_nodes(2, 2) as nodes:
        driver = nodes.drive(drive, folder=str(tmp_path), save_steps=5)
        seen = events.wait("saved", workers=4)
        nodes.kill_node(nodes.workers[1])
        # Ray still believes in the machine for 15 s, and would wait 60 s for workers on it.
        seen = events.wait("began", workers=2, after=seen, seconds=40)
        nodes.add_node(2)
        seen = events.wait("began", workers=4, after=seen)
        events.wait("saved", workers=4, after=seen)
        (tmp_path / "stop").touch()
        assert driver.wait(30) == 0
    first, fewer, again = attempts(events.all())
    saved = [event["step"] for event in first if event["what"] == "saved"]
    assert fewer[0]["step"] in (saved[-1], saved[-1] + 5)  # the last save, or one that was not written down any more
    # Growing cost no step but those that were on their way when the checkpoint was committed.
    saved = [event["step"] for event in fewer if event["what"] == "saved"]
    assert again[0]["step"] in (saved[-1], saved[-1] + 5)
    assert fewer[-1]["step"] - again[0]["step"] <= 3


@pytest.mark.slow
def test_a_machine_that_is_announced_to_go_costs_no_step(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with several_nodes(2, 2) as nodes:
        driver = nodes.drive(drive, folder=str(tmp_path), save_steps=100)
        seen = events.wait("step", workers=4)
        nodes.drain_node(nodes.workers[1], deadline_s=60)
        seen = events.wait("announced", workers=4, after=seen, seconds=20)
        began = time.monotonic()
        seen = events.wait("began", workers=2, after=seen)
        assert time.monotonic() - began < 40  # long before the deadline
        events.wait("step", workers=2, after=seen)
        (tmp_path / "stop").touch()
        assert driver.wait(30) == 0
    first, fewer = attempts(events.all())
    assert first[-1]["what"] == "announced"
    assert fewer[0]["step"] == first[-1]["step"]
