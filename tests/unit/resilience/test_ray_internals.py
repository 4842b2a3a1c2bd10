"""Tests that the private APIs of Ray that we use still exist, with the signature and the behaviour we rely on."""

import hashlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
from ray._private import services
from ray._private.node import Node
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from grpo_ray.resilience.ray_internals import longer_start

TRAIN = "ray.train.v2._internal.execution"
POLICY = f"{TRAIN}.scaling_policy:ElasticScalingPolicy"
CONTROLLER = f"{TRAIN}.controller:TrainController"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer"
AUTOSCALING = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:_AutoscalingCoordinatorActor"

SIGNATURES = {
    "ray._private.state:available_resources_per_node": "()",
    "ray._common.utils:get_ray_address_file": "(temp_dir)",
    "ray._private.services:find_gcs_addresses": "()",
    "ray._private.services:get_node": "(gcs_address, node_id)",
    f"{TRAIN}.preemption:_get_draining_nodes": "()",
    f"{TRAIN}.controller.state:ReschedulingState": "(training_failed_error)",
    f"{TRAIN}.scaling_policy:NoopDecision": "()",
    f"{TRAIN}.scaling_policy:ResizeDecision": "(num_workers, resources_per_worker)",
    f"{TRAIN}.scaling_policy:ScalingDecision": "()",
    POLICY: "(scaling_config)",
    f"{POLICY}.make_decision_for_running_worker_group": "(self, worker_group_state, worker_group_status)",
    f"{POLICY}.make_decision_for_non_running_worker_group": "(self)",
    f"{POLICY}.after_controller_state_update": "(self, previous_state, current_state)",
    f"{POLICY}.on_controller_start_worker_group": "(self, *, scaling_config, num_workers)",
    f"{POLICY}._count_possible_workers": "(self, reserved_resources)",
    f"{POLICY}._get_reserved_resources": "(self)",
    f"{POLICY}._get_resize_decision": "(self, num_workers)",
    f"{POLICY}._maybe_send_resource_request": "(self)",
    f"{AUTOSCALING}.get_reserved_resources": "(self, requester_id, recompute)",
    f"{TRAIN}.worker_group:WorkerStatus": "(running, error, training_report, return_value, preemption_info)",
    f"{TRAIN}.worker_group:WorkerGroupPollStatus": "(worker_statuses, worker_rank_to_replica_group_rank)",
    f"{TRAIN}.worker_group:WorkerGroupState": "(start_time, placement_group_handle, workers, sync_actor)",
    f"{TRAINER}._initialize_and_run_controller": "(self, **controller_init_kwargs)",
    f"{TRAINER}._register_sigint_handler": "(self, controller)",
    "ray.train.v2._internal.exceptions:UserExceptionWithTraceback": "(exc, traceback_str)",
    "ray.exceptions:RayActorError": "(actor_id, error_msg, actor_init_failed, preempted)",
}
"""Private class or function that we call or override -> its parameters."""

ATTRIBUTES = {
    "ray._raylet:RAY_NODE_ID_KEY": str,
    "ray._raylet:GcsClient": type,
    "ray._private.services:ConsolePopen": type,
    "ray._private.services:find_gcs_addresses.cache_clear": object,
    "ray._private.services:RAYLET_EXECUTABLE": str,
    "ray._private.node:Node.dead_processes": object,
    "ray._private.worker:_global_node": object,
    "ray._private.state:state._connect_and_get_accessor": object,
    "ray._raylet:GlobalStateAccessor.get_placement_group_table": object,
    "ray.core.generated.gcs_pb2:PlacementGroupTableData.CREATOR_ACTOR_DEAD_FIELD_NUMBER": int,
    "ray.core.generated.gcs_pb2:PlacementGroupTableData.CREATOR_JOB_ID_FIELD_NUMBER": int,
    "ray._raylet:InnerGcsClient.get_cluster_status": object,
    f"{POLICY}._autoscaling_coordinator": property,
    "ray.train:ScalingConfig._resources_per_worker_not_none": property,
    f"{TRAIN}.worker_group:WorkerGroupState.num_workers": property,
}
"""Other private name that we use -> its type."""

SOURCES = {
    f"{TRAINER}.fit": "5d2b8d40bfcb",
    f"{TRAINER}._initialize_and_run_controller": "ea57ec449832",
    f"{TRAINER}._register_sigint_handler": "58291d0ee444",
    f"{POLICY}.__init__": "60565211a497",
    f"{POLICY}.make_decision_for_running_worker_group": "9bc8c63cc4ad",
    f"{POLICY}.make_decision_for_non_running_worker_group": "e0a0292656e3",
    f"{POLICY}._get_reserved_resources": "5bcd17e7fc85",
    f"{POLICY}._count_possible_workers": "9ea722d0fec7",
    f"{TRAIN}.callback:ControllerCallback.after_controller_state_update": "f79b30492c77",
    f"{TRAIN}.callback:ControllerCallback.on_controller_start_worker_group": "afd3468b5795",
    f"{CONTROLLER}._start_worker_group": "4cd5f350d092",
    f"{CONTROLLER}._get_retry_state": "5c64fa936088",
    f"{CONTROLLER}._handle_preempting_state": "885cb421dad2",
    f"{TRAIN}.checkpoint.report_handler:ReportCallbackHandler.after_worker_group_poll_status": "202003c712d1",
    f"{AUTOSCALING}.get_reserved_resources": "1cf6f63ce800",
    f"{TRAIN}.failure_handling.default:_is_preemption_failure": "c0f83ce15a8d",
    f"{TRAIN}.worker_group.poll:_is_preempted_actor": "75282b8c7e88",
    f"{TRAIN}.preemption:_get_draining_nodes": "9e752cf8f8a6",
}
"""Function whose behaviour we rely on -> hash of its source."""


def resolve(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"Ray moved or removed {path} ({error}); update grpo_ray/resilience/ray_internals.py")


def parameters(function: Callable[..., Any]) -> str:
    """Format the parameters of a function without annotations and defaults."""
    empty = inspect.Parameter.empty
    signature = inspect.signature(function)
    bare = [each.replace(annotation=empty, default=empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def name_of(path: str) -> str:
    return path.rpartition(":")[2]


@pytest.mark.parametrize("path", SIGNATURES, ids=name_of)
def test_ray_private_function_has_known_signature(path: str) -> None:
    found = parameters(resolve(path))
    assert found == SIGNATURES[path], (
        f"Ray changed the parameters of {path} from {SIGNATURES[path]} to {found}: read the change, adapt "
        "grpo_ray/resilience/ray_internals.py and elastic.py, then write the new signature here"
    )


@pytest.mark.parametrize("path", ATTRIBUTES, ids=name_of)
def test_ray_private_attribute_exists(path: str) -> None:
    assert isinstance(resolve(path), ATTRIBUTES[path])


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_ray_function_we_rely_on_is_unchanged(path: str) -> None:
    found = hashlib.sha256(inspect.getsource(resolve(path)).encode()).hexdigest()[:12]
    assert found == SOURCES[path], (
        f"Ray changed the source of {path}: read the change, check that ray_internals.py and elastic.py still hold, "
        f"then write the new hash {found} here"
    )


def test_ray_policy_sets_attributes_that_we_use() -> None:
    policy = resolve(POLICY)(ScalingConfig(num_workers=(1, 2)))
    assert policy._latest_monitor_time == float("-inf")
    assert policy._requester_id is None


def test_ray_cluster_status_has_autoscaling_state() -> None:
    assert "autoscaling_state" in GetClusterStatusReply.DESCRIPTOR.fields_by_name


def test_longer_start_finds_a_node_that_registers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RuntimeError("no node"), RuntimeError("no node"), {"node_manager_port": 1}])

    def get_node(gcs_address: str, node_id: str) -> Any:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with longer_start(60):
        assert services.get_node("127.0.0.1:1", "node") == {"node_manager_port": 1}
    assert services.get_node is get_node


def test_longer_start_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_node(gcs_address: str, node_id: str) -> Any:
        raise RuntimeError("no node")

    monkeypatch.setattr(services, "get_node", get_node)
    with longer_start(0), pytest.raises(RuntimeError, match="no node"):
        services.get_node("127.0.0.1:1", "node")


def test_ray_start_waits_by_the_function_that_longer_start_replaces() -> None:
    assert "ray._private.services.get_node(" in inspect.getsource(Node.__init__)


def test_ray_wrapped_user_error_keeps_error_and_traceback() -> None:
    error = KeyError("a bug")
    wrapped = resolve("ray.train.v2._internal.exceptions:UserExceptionWithTraceback")(error, "Traceback ...")
    assert wrapped._base_exc is error and wrapped._traceback_str == "Traceback ..."


def test_ray_torch_trainer_is_data_parallel_trainer() -> None:
    assert issubclass(TorchTrainer, resolve(TRAINER))


def test_only_ray_internals_imports_private_modules_of_ray() -> None:
    from grpo_ray.resilience import elastic, nodes, signals

    for module in (elastic, nodes, signals):
        source = inspect.getsource(module)
        assert "._internal" not in source and "ray._" not in source, module.__name__
