"""Tests of the rules by which an elastic run is resized, with fake nodes."""

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import ray.train
from ray.train.v2._internal.execution import preemption
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.worker_group import poll
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from grpo_ray.config.loader import load_config
from grpo_ray.resilience import elastic
from grpo_ray.resilience.elastic import (
    CommitTracker,
    DivisibleScalingPolicy,
    PreemptedError,
    PreemptibleTrainer,
    PreemptionNotice,
    Resources,
    explain_scaling,
    scaling_config,
    worker_slots,
)
from grpo_ray.resilience.ray_train_internals import ControlledTrainer, ElasticPolicy, ReschedulingState


@pytest.mark.parametrize(
    ("ours", "rays", "overridden"),
    [
        (
            [PreemptibleTrainer, ControlledTrainer],
            DataParallelTrainer,
            {"__init__", "_initialize_and_run_controller", "_register_sigint_handler"},
        ),
        (
            [DivisibleScalingPolicy, ElasticPolicy],
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
def test_subclasses_override_only_listed_methods(ours: list[type], rays: type, overridden: set[str]) -> None:
    own = {name for cls in ours for name in vars(cls) if callable(getattr(cls, name)) and hasattr(rays, name)}
    assert own == overridden


@dataclass
class Node:
    """Node as the policy sees it."""

    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)
    usable: bool = True


class FakeScaling(DivisibleScalingPolicy):
    """Policy over a fixed set of nodes, all of them offered by the autoscaling coordinator."""

    def __init__(
        self,
        counts: list[int],
        nodes: dict[str, Node],
        *,
        gpu: bool = False,
        resize_seconds: float = 0.0,
        spare_workers: int = 0,
    ):
        per_worker = {"CPU": 1, "GPU": 1} if gpu else {"CPU": 1}
        super().__init__(
            ray.train.ScalingConfig(
                num_workers=(min(counts), max(counts)),
                use_gpu=gpu,
                resources_per_worker=per_worker,
                elastic_resize_monitor_interval_s=resize_seconds,
            ),
            counts,
            spare_workers,
        )
        self.nodes = nodes

    def _maybe_send_resource_request(self) -> None:
        pass

    def _get_reserved_resources(self) -> dict[str, dict[str, float]]:
        return {name: node.total for name, node in self.nodes.items()}

    def _usable_nodes(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.usable}

    def _total_resources(self, usable: set[str]) -> dict[str, Resources]:
        return {name: self.nodes[name].total for name in usable}

    def _free_resources(self, usable: set[str]) -> dict[str, Resources]:
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


NO_REPORT, PLAIN, SAVED = Status(), Status(Report()), Status(Report(checkpoint="checkpoint-10"))


def statuses(*ranks: Status) -> Statuses:
    return Statuses(dict(enumerate(ranks)))


def cpus(*counts: int) -> dict[str, Node]:
    return {f"node-{number}": Node({"CPU": count}, {"CPU": count}) for number, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("cpus_per_node", "workers"), [((2, 2), 4), ((2, 1), 2), ((1, 1, 1, 1, 1), 4), ((1,), 0), ((), 0), ((9,), 4)]
)
def test_scaling_uses_most_workers_that_divide_step(cpus_per_node: tuple[int, ...], workers: int) -> None:
    policy = FakeScaling([2, 4], cpus(*cpus_per_node))  # 3 workers cannot share a step of 16 problems
    assert policy._count_possible_workers(policy._get_reserved_resources()) == workers


@pytest.mark.parametrize(
    ("gpus_per_node", "workers"),
    [((4,), 2), ((4, 1), 4), ((2, 2, 2), 4), ((2,), 0)],  # one GPU is left for measuring; 3 do not divide the step
)
def test_scaling_leaves_spare_resources_free(gpus_per_node: tuple[int, ...], workers: int) -> None:
    nodes = {f"node-{n}": Node({"CPU": 16, "GPU": count}) for n, count in enumerate(gpus_per_node)}
    policy = FakeScaling([2, 4], nodes, gpu=True, spare_workers=1)
    assert policy._count_possible_workers(policy._get_reserved_resources()) == workers


def test_scaling_counts_spare_resources_beyond_the_reservation() -> None:
    nodes = {"a": Node({"CPU": 16, "GPU": 2}), "b": Node({"CPU": 16, "GPU": 1})}
    policy = FakeScaling([1, 2], nodes, gpu=True, spare_workers=1)
    assert policy._count_possible_workers({"a": {"CPU": 2, "GPU": 2}}) == 2  # node b is for measuring


def test_scaling_lost_node_restarts_with_fewer() -> None:
    policy = FakeScaling([2, 4], cpus(2, 1))
    assert policy.make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_scaling_unusable_node_is_ignored() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].usable = False
    assert FakeScaling([2, 4], nodes).make_decision_for_non_running_worker_group() == ResizeDecision(2, {"CPU": 1})


def test_scaling_too_few_nodes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(elastic.time, "sleep", pauses.append)
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert pauses == [elastic.RETRY_SECONDS]


def test_scaling_after_failed_start_counts_free_only() -> None:
    nodes = cpus(2, 2)
    nodes["node-1"].free = {"CPU": 0}  # used by another job
    policy = FakeScaling([2, 4], nodes)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4
    policy.after_controller_state_update(None, ReschedulingState(training_failed_error=None))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.after_controller_state_update(None, None)
    assert policy.make_decision_for_non_running_worker_group().num_workers == 4


def test_scaling_growth_waits_for_checkpoint() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2)), Group(2)
    assert isinstance(decide(policy, group, statuses(NO_REPORT, NO_REPORT)), NoopDecision)
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN)), NoopDecision)
    assert isinstance(decide(policy, group, statuses(SAVED, NO_REPORT)), NoopDecision)  # rank 1 has not reported it yet
    assert decide(policy, group, statuses(NO_REPORT, SAVED)) == ResizeDecision(4, {"CPU": 1})
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN)), NoopDecision)  # one step too late


def test_scaling_each_checkpoint_allows_growth() -> None:
    policy, group = FakeScaling([2, 4], cpus(2), resize_seconds=60.0), Group(2, start_time=time.monotonic() - 61)
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)  # no node to grow onto
    policy.nodes = cpus(2, 2)
    assert decide(policy, group, statuses(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1})


def test_scaling_new_group_is_not_resized() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 2), resize_seconds=3600.0), Group(2, start_time=time.monotonic())
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)


def test_scaling_shrinking_waits_for_checkpoint() -> None:
    policy, group = FakeScaling([2, 4], cpus(2, 1)), Group(4)
    assert isinstance(decide(policy, group, statuses(PLAIN, PLAIN, PLAIN, PLAIN)), NoopDecision)
    assert decide(policy, group, statuses(SAVED, PLAIN, PLAIN, PLAIN)) == ResizeDecision(2, {"CPU": 1})


def test_scaling_below_minimum_keeps_group() -> None:
    policy = FakeScaling([2, 4], cpus(1))
    assert isinstance(decide(policy, Group(4), statuses(SAVED, PLAIN, PLAIN, PLAIN)), NoopDecision)


def test_scaling_reports_of_old_group_are_ignored() -> None:
    policy = FakeScaling([2, 4], cpus(2, 2))
    decide(policy, Group(2, start_time=1.0), statuses(SAVED, NO_REPORT))
    assert isinstance(decide(policy, Group(2, start_time=2.0), statuses(NO_REPORT, PLAIN)), NoopDecision)


def test_scaling_gpus_in_use_do_not_count() -> None:
    nodes = {
        "ours": Node({"CPU": 8, "GPU": 2}, {"CPU": 6, "GPU": 0}),
        "new": Node({"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}),
    }
    policy, group = FakeScaling([2, 4], nodes, gpu=True), Group(2)
    assert isinstance(decide(policy, group, statuses(SAVED, SAVED)), NoopDecision)
    nodes["new"].free = {"CPU": 0, "GPU": 2}  # its CPUs run tasks of the data stream, which end with the group
    assert decide(policy, group, statuses(SAVED, SAVED)) == ResizeDecision(4, {"CPU": 1, "GPU": 1})


def decide(policy: DivisibleScalingPolicy, group: Group, status: Statuses) -> Any:
    return policy.make_decision_for_running_worker_group(group, status)


def test_commit_needs_report_of_every_rank() -> None:
    commits = CommitTracker()
    ranks = [(PLAIN, NO_REPORT), (SAVED, NO_REPORT), (PLAIN, PLAIN), (NO_REPORT, SAVED), (NO_REPORT, PLAIN)]
    # Both ranks report 1, 2 (saved) and 3; the fourth poll sees the second report of rank 1.
    assert [commits.observe(statuses(*pair).worker_statuses) for pair in ranks] == [False, False, False, True, False]


def test_commit_needs_checkpoint_of_one_rank_only() -> None:
    assert CommitTracker().observe(statuses(SAVED, PLAIN).worker_statuses)


def test_worker_slots_need_all_resources_on_one_node() -> None:
    nodes = {"a": {"CPU": 7, "GPU": 2}, "b": {"CPU": 1, "GPU": 8}, "c": {"CPU": 64}}
    assert worker_slots(nodes, {"CPU": 2, "GPU": 1, "memory": 0}) == 2  # two on a; b has too few CPUs, c no GPU


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.num_workers=2"], None),
        (["cluster.num_workers=[1, 2]"], "cluster.num_workers=[1, 2]: the run uses 1 or 2 workers"),
        (
            ["cluster.num_workers=[2, 4]"],
            "cluster.num_workers=[2, 4]: the run uses 2 or 4 workers; 3 does not divide grpo.prompts_per_step=16",
        ),
        (
            ["cluster.num_workers=[3, 6]"],
            "cluster.num_workers=[3, 6]: the run uses 4 workers; 3, 5 or 6 do not divide grpo.prompts_per_step=16",
        ),
        (
            ["cluster.num_workers=[2, 4]", "grpo.micro_batch_size=2"],
            "cluster.num_workers=[2, 4]: the run uses 2 workers; "
            "3 or 4 do not divide grpo.prompts_per_step=16 and grpo.micro_batch_size=2",
        ),
    ],
)
def test_explain_scaling_lists_allowed_worker_counts(overrides: list[str], message: str | None) -> None:
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


def test_preempted_error_counts_as_preemption() -> None:
    error = pickle.loads(pickle.dumps(PreemptedError()))
    assert poll._is_preempted_actor(error)
    assert "is being preempted" in str(error)


def test_preemption_notice_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notices = iter([None, preemption.PreemptionInfo(None, {"node": [1]})])
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: next(notices))
    notice = PreemptionNotice()
    assert [notice(), notice(), notice()] == [False, True, False]
