"""Tests of the resources that a run and an evaluation need, over the resources of fake nodes."""

import inspect
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.node import Node

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.driver.cluster.connection import (
    START_TIMEOUT,
    choose_cluster,
    connect,
    cpus_beside_workers,
    evaluation_shortage,
    gpus_beside_workers,
    owns_cluster,
    spare_workers,
    training_shortage,
)
from grpo_ray.errors import ConfigError

BACKGROUND = "run.measure=background"


def gpu_config(*overrides: str) -> Config:
    return load_config(None, ["cluster.use_gpu=true", "cluster.num_workers=2", *overrides])


def gpus(*counts: int) -> list[Mapping[str, float]]:
    return [{"GPU": count, "CPU": 16} for count in counts]


def text(shortage: object) -> str:
    assert shortage is not None
    return f"{shortage.text}; {shortage.remedy}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ([], [2]),
        ([], [1, 1]),
        (["cluster.num_workers=[2, 4]"], [2]),  # the smallest count
        ([BACKGROUND], [3]),
        ([BACKGROUND], [2, 1]),
        ([BACKGROUND, "grpo.vllm_tensor_parallel_size=2"], [2, 2]),
    ],
)
def test_training_shortage_enough_gpus_is_none(overrides: list[str], counts: list[int]) -> None:
    assert training_shortage(gpu_config(*overrides), gpus(*counts)) is None


def test_training_shortage_too_few_gpus_for_workers() -> None:
    assert text(training_shortage(gpu_config(), gpus(1))) == (
        "cluster.num_workers=2 with cluster.use_gpu=true needs 2 GPUs, and the cluster has 1; "
        "use fewer workers, or cluster.use_gpu=false"
    )


def test_training_shortage_no_gpu_left_for_measuring() -> None:
    assert text(training_shortage(gpu_config(BACKGROUND), gpus(2))) == (
        "run.measure=background needs 1 GPU for an engine beside those of cluster.num_workers=2, and the cluster has "
        "2; use fewer workers, or run.measure=inline"
    )
    engine_of_two = gpu_config(BACKGROUND, "grpo.vllm_tensor_parallel_size=2")
    assert "needs 2 GPUs for an engine" in text(training_shortage(engine_of_two, gpus(3)))


def test_training_shortage_too_few_cpus() -> None:
    config = load_config(None, ["cluster.num_workers=2", "cluster.cpus_per_worker=3"])
    assert training_shortage(config, [{"CPU": 7}]) is None
    assert text(training_shortage(config, [{"CPU": 6}])) == (
        "cluster.num_workers=2 x cluster.cpus_per_worker=3 and 1 for Ray Data need 7 CPUs, and the cluster has 6; "
        "set cluster.num_workers=1 or start a node that counts more CPUs than it has (`ray start --num-cpus=7`)"
    )
    assert text(training_shortage(config, [{"CPU": 3}])).endswith(
        "the cluster has 3; start a node that counts more CPUs than it has (`ray start --num-cpus=7`)"
    )


def test_training_shortage_names_a_number_of_workers_that_divides_the_step() -> None:
    config = load_config(None, ["cluster.num_workers=4", "grpo.prompts_per_step=8"])
    assert "set cluster.num_workers=2 or" in text(training_shortage(config, [{"CPU": 4}]))  # 3 do not divide 8 problems


def test_cpus_beside_workers_hold_an_engine_in_the_background() -> None:
    config = load_config(None, ["cluster.num_workers=2", "cluster.cpus_per_worker=3", BACKGROUND])
    assert cpus_beside_workers(config) == 3
    assert "3 for an engine (run.measure=background) need 9 CPUs" in text(training_shortage(config, [{"CPU": 8}]))


DEDICATED = "engine.placement=dedicated"


def dedicated_config(replicas: int | str, size: int = 1, *overrides: str) -> Config:
    settings = [DEDICATED, f"engine.replicas={replicas}", f"engine.tensor_parallel_size={size}"]
    return gpu_config("grpo.prompts_per_step=16", *settings, *overrides)


@pytest.mark.parametrize(
    ("replicas", "size", "overrides", "counts"),
    [
        (2, 1, [], [4]),  # 2 workers and 2 engines
        (2, 1, [], [1, 1, 1, 1]),
        (2, 2, [], [3, 3]),  # an engine and a worker on each node
        ("[1, 4]", 2, [], [4]),  # the fewest engines
        (1, 4, ["cluster.num_workers=[2, 8]"], [4, 2]),
        (1, 2, [BACKGROUND], [4, 2]),  # another engine of 2 measures
    ],
)
def test_training_shortage_enough_gpus_for_engines_is_none(
    replicas: int | str, size: int, overrides: list[str], counts: list[int]
) -> None:
    config = dedicated_config(replicas, size, *overrides)
    assert training_shortage(config, gpus(*counts)) is None


@pytest.mark.parametrize(
    ("replicas", "size", "overrides", "counts", "message"),
    [
        (
            3, 2, ["cluster.num_workers=4"], [8],  # 4 + 3 x 2 = 10
            "engine.replicas=3 x engine.tensor_parallel_size=2 need 6 GPUs beside the 4 of cluster.num_workers=4, and "
            "the cluster has 8; set engine.replicas=2 or set cluster.num_workers=2 or set engine.placement=colocated",
        ),
        (
            "[2, 8]", 1, [], [3],
            "engine.replicas=[2, 8] (at least 2) x engine.tensor_parallel_size=1 need 2 GPUs beside the 2 of "
            "cluster.num_workers=2, and the cluster has 3; set engine.replicas=1 or set cluster.num_workers=1 or set "
            "engine.placement=colocated",
        ),
        (
            1, 1, [], [2],
            "engine.replicas=1 x engine.tensor_parallel_size=1 need 1 GPU beside the 2 of cluster.num_workers=2, and "
            "the cluster has 2; set cluster.num_workers=1 or set engine.placement=colocated",
        ),
        (
            1, 8, [], [7, 7],
            "a dedicated engine with engine.tensor_parallel_size=8 needs 8 GPUs of one node, and the largest node has "
            "7; use larger nodes or set engine.tensor_parallel_size=4",
        ),
        (
            3, 2, [], [3, 3, 2, 1],  # an engine on each of three nodes
            None,
        ),
        (
            3, 2, [], [3, 3, 1, 1],
            "engine.replicas=3 x engine.tensor_parallel_size=2 do not fit on the nodes of the cluster, since an engine "
            "needs 2 GPUs and 2 CPUs of one node: there is space for 2; set engine.replicas=2 or set "
            "engine.placement=colocated",
        ),
        (
            1, 4, ["cluster.cpus_per_worker=5"], [8],
            "a dedicated engine with engine.tensor_parallel_size=4 x cluster.cpus_per_worker=5 needs 20 CPUs of one "
            "node, and the largest node has 16; use larger nodes or set engine.tensor_parallel_size=2 or set "
            "cluster.cpus_per_worker=4",
        ),
        (
            2, 1, [BACKGROUND], [4],
            "run.measure=background needs 1 GPU for an engine beside those of cluster.num_workers=2 and of "
            "engine.replicas=2 x engine.tensor_parallel_size=1, and the cluster has 4; use fewer workers, or "
            "run.measure=inline",
        ),
        (
            2, 1, ["rewards.functions=[a/model]", "rewards.model_gpus=1"], [4],
            "rewards.model_gpus=1 needs a GPU for the reward models beside the 4 of workers and engines, and the "
            "cluster has 4; set rewards.model_gpus=0.25, which shares the GPU of a worker, or use fewer workers",
        ),
    ],
)  # fmt: skip
def test_training_shortage_of_dedicated_engines(
    replicas: int | str, size: int, overrides: list[str], counts: list[int], message: str | None
) -> None:
    shortage = training_shortage(dedicated_config(replicas, size, *overrides), gpus(*counts))
    assert (text(shortage) if shortage else None) == message


def test_training_shortage_too_few_cpus_for_engines() -> None:
    config = load_config(None, ["cluster.num_workers=2", "cluster.cpus_per_worker=2", DEDICATED, "engine.replicas=3"])
    assert training_shortage(config, [{"CPU": 11}]) is None  # 2 x 2, 3 x 2 and 1
    assert text(training_shortage(config, [{"CPU": 10}])) == (
        "cluster.num_workers=2 x cluster.cpus_per_worker=2 and 6 for engine.replicas=3 x engine.tensor_parallel_size=1 "
        "and 1 for Ray Data need 11 CPUs, and the cluster has 10; set cluster.num_workers=1 or set engine.replicas=2 "
        "or start a node that counts more CPUs than it has (`ray start --num-cpus=11`)"
    )
    assert text(training_shortage(config, [{"CPU": 4}])).startswith(
        "engine.replicas=3 x engine.tensor_parallel_size=1 do not fit on the nodes of the cluster, since an engine "
        "needs 2 CPUs of one node: there is space for 2; set engine.placement=colocated"
    )


def test_training_shortage_without_gpus_for_engines() -> None:
    config = dedicated_config(1, 1, "cluster.num_workers=1")
    assert "cluster.num_workers=1 with cluster.use_gpu=true needs 1 GPUs" in text(
        training_shortage(config, [{"CPU": 64}])
    )


def test_evaluation_shortage_names_the_size_of_dedicated_engines() -> None:
    config = dedicated_config(1, 4)
    assert "with engine.tensor_parallel_size=4 needs 4 GPUs of one node, and the largest node has 3; use larger" in (
        text(evaluation_shortage(config, gpus(3, 3)))
    )


def test_spare_workers_are_those_of_the_fewest_engines() -> None:
    assert spare_workers(gpu_config()) == 0
    assert spare_workers(gpu_config(BACKGROUND)) == 1
    config = dedicated_config("[2, 4]", 2, BACKGROUND)
    assert gpus_beside_workers(config) == spare_workers(config) == 6  # 2 engines of 2, and one that measures
    on_cpu = load_config(None, [DEDICATED, "engine.replicas=[2, 4]"])
    assert (gpus_beside_workers(on_cpu), cpus_beside_workers(on_cpu), spare_workers(on_cpu)) == (0, 3, 2)


MODELS = "rewards.functions=[correctness, a/model]"


def test_reward_models_of_their_own_gpu_need_one_more() -> None:
    config = gpu_config(MODELS, "rewards.model_gpus=1", "heldout.score=reward")
    assert training_shortage(config, gpus(2, 1)) is None
    assert text(training_shortage(config, gpus(2))) == (
        "rewards.model_gpus=1 needs a GPU for the reward models beside the 2 of the engines, and the cluster has 2; "
        "set rewards.model_gpus=0.25, which shares the GPU of a worker, or use fewer workers"
    )
    assert evaluation_shortage(config, gpus(1, 1)) is None
    assert "reward models and rewards.model_gpus=1 needs 2 GPUs, and the cluster has 1; set" in text(
        evaluation_shortage(config, gpus(1))
    )


def test_reward_models_that_share_a_gpu_need_no_more() -> None:
    config = gpu_config(MODELS, "heldout.score=reward")
    assert training_shortage(config, gpus(2)) is None and evaluation_shortage(config, gpus(1)) is None
    beside = gpu_config(MODELS, BACKGROUND)  # the engine measures on a GPU of its own
    assert training_shortage(beside, gpus(3)) is None
    assert "needs 1 GPU for an engine beside those of cluster.num_workers=2" in text(training_shortage(beside, gpus(2)))


def test_evaluation_shortage_engine_needs_all_gpus_of_one_node() -> None:
    config = gpu_config("cluster.num_workers=4", "grpo.vllm_tensor_parallel_size=4")
    assert evaluation_shortage(config, gpus(2, 4)) is None
    assert text(evaluation_shortage(config, gpus(2, 3))) == (
        "measuring held-out problems with grpo.vllm_tensor_parallel_size=4 needs 4 GPUs of one node, and the largest "
        "node has 3; use larger nodes, or a smaller grpo.vllm_tensor_parallel_size"
    )


def test_evaluation_shortage_without_gpus() -> None:
    assert evaluation_shortage(gpu_config("cluster.num_workers=8"), gpus(1)) is None  # fewer than training needs
    assert "needs 1 GPU of one node, and the largest node has 0; set cluster.use_gpu=false" in text(
        evaluation_shortage(gpu_config(), [{"CPU": 64}])
    )


def test_evaluation_shortage_too_few_cpus_beside_gpus() -> None:
    config = gpu_config("cluster.cpus_per_worker=20")
    assert text(evaluation_shortage(config, [*gpus(2), {"CPU": 64}])) == (
        "measuring held-out problems with cluster.cpus_per_worker=20 needs 20 CPUs of one node with GPUs, and the "
        "largest has 16; set a smaller cluster.cpus_per_worker"
    )


# Choice of a cluster; tests/integration/driver/cluster/test_connection.py has a real one


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File in which `ray start` records a cluster, not written yet."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def listener() -> Iterator[str]:
    """Address of a server that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_choose_cluster_without_record_starts_one(record: Path) -> None:
    chosen = choose_cluster()
    assert (chosen.address, chosen.notice) == (None, None)


def test_choose_cluster_record_without_node_starts_one(record: Path, listener: str) -> None:
    record.write_text(listener)  # the port of a dead head may belong to another program by now
    chosen = choose_cluster()
    assert chosen.address is None
    assert chosen.notice == (
        f"starting a Ray cluster: the one at {listener}, which {record} names, does not run on this machine any more"
    )


@pytest.mark.parametrize("damaged", ["", "no address", "127.0.0.1:"])
def test_choose_cluster_damaged_record_starts_one(record: Path, damaged: str) -> None:
    record.write_text(damaged)
    assert choose_cluster().address is None


def test_choose_cluster_record_of_node_without_head_starts_one(
    record: Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = "127.0.0.1:1"
    monkeypatch.setattr(services, "_cached_find_gcs_addresses", Addresses(listener, dead))
    record.write_text(dead)
    assert choose_cluster().address is None
    record.write_text(listener)
    assert choose_cluster().address == listener


class Addresses:
    """Ray's list of the clusters that have a node on this machine."""

    def __init__(self, *addresses: str):
        self.addresses = frozenset(addresses)

    def __call__(self) -> frozenset[str]:
        return self.addresses

    def cache_clear(self) -> None:
        """Do nothing: the list does not change."""


def test_choose_cluster_ray_address_wins(record: Path, listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record.write_text(listener)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert choose_cluster().address == "RAY_ADDRESS=10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    chosen = choose_cluster()
    assert (chosen.address, chosen.notice) == (None, None)


def test_connect_to_a_cluster_that_starts_too_slowly_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert START_TIMEOUT in inspect.getsource(Node.__init__)

    def start_slowly(*args: Any, **settings: Any) -> None:
        raise Exception(f"The current node {START_TIMEOUT}.")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("GRPO_RAY_WARM_START", "0")
    monkeypatch.setattr(ray, "init", start_slowly)
    with pytest.raises(ConfigError, match=r"^Ray did not start within 180 s.*run the command again"):
        connect(load_config(None, []))


def test_cluster_that_this_process_started_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run in the same process uses the cluster of the first one, whose servers it may have to end."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("GRPO_RAY_WARM_START", "0")
    running: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda *args, **settings: running.append(True))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(running))
    assert owns_cluster()  # it is going to start one
    connect(load_config(None, []))
    assert running and owns_cluster()
    running.clear()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not owns_cluster()
    connect(load_config(None, []))
    assert running and not owns_cluster()
