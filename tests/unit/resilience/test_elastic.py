"""Tests of the rules by which an elastic run is resized, with fake machines, and of the Ray code they extend."""

import hashlib
import inspect
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import ray.train
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train.v2._internal.execution import preemption
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import default as failure_handling
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.worker_group import poll
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from grpo_ray.config.loader import load_config
from grpo_ray.resilience import elastic
from grpo_ray.resilience.elastic import (
    Commits,
    DivisibleScalingPolicy,
    PreemptedError,
    PreemptibleTrainer,
    PreemptionNotice,
    explain_scaling,
    scaling_config,
    worker_slots,
)

# Functions of Ray that grpo_ray.elastic overrides, calls or relies on. When a digest differs: read the change in Ray,
# check that our code still holds, then write the new digest here.
EXTENDED = {
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


@pytest.mark.parametrize("function", EXTENDED, ids=lambda function: function.__qualname__)
def test_ray_extended_function_is_unchanged(function: Callable[..., Any]) -> None:
    assert digest(function) == EXTENDED[function]


@pytest.mark.parametrize(
    ("ours", "rays", "overridden"),
    [
        (
            PreemptibleTrainer,
            DataParallelTrainer,
            {"__init__", "_initialize_and_run_controller", "_register_sigint_handler"},
        ),
        (
            DivisibleScalingPolicy,
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
def test_ray_only_listed_methods_are_overridden(ours: type, rays: type, overridden: set[str]) -> None:
    own = {name for name in vars(ours) if callable(getattr(ours, name)) and hasattr(rays, name)}
    assert own == overridden


@dataclass
class Node:
    """Machine as the policy sees it."""

    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)
    usable: bool = True


class FakeScaling(DivisibleScalingPolicy):
    """Policy over a fixed set of machines, all of them offered by the coordinator."""

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
    """Poll result of one worker."""

    training_report: Report | None = None


@dataclass
class Statuses:
    worker_statuses: dict[int, Status]


@dataclass
class Group:
    num_workers: int
    start_time: float = 0.0


NOTHING, PLAIN, SAVED = Status(), Status(Report()), Status(Report(checkpoint="checkpoint-10"))


def statuses(*ranks: Status) -> Statuses:
    return Statuses(dict(enumerate(ranks)))


def cpus(*counts: int) -> dict[str, Node]:
    return {f"node-{number}": Node({"CPU": count}, {"CPU": count}) for number, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("machines", "workers"), [((2, 2), 4), ((2, 1), 2), ((1, 1, 1, 1, 1), 4), ((1,), 0), ((), 0), ((9,), 4)]
)
def test_scaling_takes_most_workers_that_divide_step(machines: tuple[int, ...], workers: int) -> None:
    policy = FakeScaling([2, 4], cpus(*machines))  # 3 workers cannot share a step of 16 problems
    assert policy._count_possible_workers(policy._get_reserved_resources()) == workers


def test_scaling_lost_machine_restarts_with_fewer() -> None:
    policy = FakeScaling([2, 4], cpus(2, 1))
    assert policy.make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_scaling_unusable_machine_is_ignored() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].usable = False
    assert FakeScaling([2, 4], nodes).make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_scaling_too_few_machines_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(elastic.time, "sleep", pauses.append)
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert pauses == [elastic.WAIT_SECONDS]


def test_scaling_after_failed_start_counts_free_only() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].free = {"CPU": 0}  # taken by another job
    policy = FakeScaling([2, 4], nodes)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4
    policy.after_controller_state_update(None, elastic.ReschedulingState(training_failed_error=None))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.after_controller_state_update(None, None)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4


def test_scaling_growth_waits_for_checkpoint() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2)), Group(2)
    assert isinstance(decide(policy, group, statuses(NOTHING, NOTHING)), NoopDecision)
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN)), NoopDecision)
    assert isinstance(decide(policy, group, statuses(SAVED, NOTHING)), NoopDecision)  # rank 1 has not reported it yet
    assert decide(policy, group, statuses(NOTHING, SAVED)) == ResizeDecision(4, {"CPU": 1})
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN)), NoopDecision)  # one step too late


def test_scaling_each_checkpoint_allows_growth() -> None:
    policy, group = FakeScaling([2, 4], cpus(2), settle=60.0), Group(2, start_time=time.monotonic() - 61)
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)  # no machine to grow to
    policy.nodes = cpus(2, 2)
    assert decide(policy, group, statuses(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1})


def test_scaling_new_group_is_not_resized() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2), settle=3600.0), Group(2, start_time=time.monotonic())
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)


def test_scaling_shrinking_waits_for_checkpoint() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 1)), Group(4)
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN, PLAIN, PLAIN)), NoopDecision)
    assert decide(policy, group, statuses(SAVED, PLAIN, PLAIN, PLAIN)) == ResizeDecision(2, {"CPU": 1})


def test_scaling_below_minimum_keeps_group() -> None:
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(decide(policy, Group(4), statuses(SAVED, PLAIN, PLAIN, PLAIN)), NoopDecision)


def test_scaling_reports_of_old_group_are_dropped() -> None:
    policy = FakeScaling([2, 4], cpus(2, 2))
    decide(policy, Group(2, start_time=1.0), statuses(SAVED, NOTHING))
    assert isinstance(decide(policy, Group(2, start_time=2.0), statuses(NOTHING, PLAIN)), NoopDecision)


def test_scaling_gpus_in_use_do_not_count() -> None:
    nodes = {
        "ours": Node({"CPU": 8, "GPU": 2}, {"CPU": 6, "GPU": 0}),
        "new": Node({"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}),
    }
    policy, group = FakeScaling([2, 4], nodes, gpu=True), Group(2)
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)
    nodes["new"].free = {"CPU": 0, "GPU": 2}  # tasks of the data stream on its CPUs end with the group
    assert decide(policy, group, statuses(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1, "GPU": 1})


def decide(policy: DivisibleScalingPolicy, group: Group, status: Statuses) -> Any:
    return policy.make_decision_for_running_worker_group(group, status)


def test_commits_need_report_of_every_rank() -> None:
    commits = Commits()
    ranks = [(PLAIN, NOTHING), (SAVED, NOTHING), (PLAIN, PLAIN), (NOTHING, SAVED), (NOTHING, PLAIN)]
    # Both ranks report 1, 2 (saved) and 3; the fourth poll sees the second report of rank 1.
    assert [commits.look(statuses(*pair).worker_statuses) for pair in ranks] == [False, False, False, True, False]


def test_commits_one_rank_with_checkpoint_is_enough() -> None:
    assert Commits().look(statuses(SAVED, PLAIN).worker_statuses)


def test_places_need_all_resources_on_one_machine() -> None:
    nodes = {"a": {"CPU": 7, "GPU": 2}, "b": {"CPU": 1, "GPU": 8}, "c": {"CPU": 64}}
    assert worker_slots(nodes, {"CPU": 2, "GPU": 1, "memory": 0}) == 2  # two on a; b has too few CPUs, c no GPU


@pytest.mark.parametrize(
    ("overrides", "message"),
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
def test_explain_lists_possible_worker_counts(overrides: list[str], message: str | None) -> None:
    assert explain_scaling(load_config(None, ["grpo.prompts_per_step=16", *overrides])) == message


def test_scaling_config_is_limited_to_divisors() -> None:
    config = scaling_config(
        load_config(None, ["grpo.prompts_per_step=16", "cluster.num_workers=[2, 6]", "cluster.use_gpu=true"])
    )
    assert (config.num_workers, config.resources_per_worker) == ((2, 4), {"CPU": 1, "GPU": 1})
    assert config.elasticity_enabled
    assert not scaling_config(load_config(None, ["cluster.num_workers=2"])).elasticity_enabled


def test_trainer_fixed_workers_keep_policy_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[Any] = []
    monkeypatch.setattr(
        DataParallelTrainer,
        "_initialize_and_run_controller",
        lambda self, **parts: policies.append(parts["scaling_policy"]),
    )
    for workers in (2, (2, 4)):
        config = ray.train.ScalingConfig(num_workers=workers)
        trainer = PreemptibleTrainer(print, worker_counts=[2, 4], scaling_config=config)
        trainer._initialize_and_run_controller(scaling_policy="rays")
    assert policies[0] == "rays"
    assert isinstance(policies[1], DivisibleScalingPolicy)


def test_drained_error_counts_as_preemption() -> None:
    error = pickle.loads(pickle.dumps(PreemptedError()))
    assert poll._is_preempted_actor(error)
    assert "about to be taken away" in str(error)


def test_draining_announcement_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    announcements = iter([None, preemption.PreemptionInfo(None, {"node": [1]})])
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: next(announcements))
    draining = PreemptionNotice()
    assert [draining(), draining(), draining()] == [False, True, False]
