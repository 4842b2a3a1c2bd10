"""Tests of the engine pool in a real Ray cluster, whose engines are actors without vLLM (`fake_engines.py`)."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from failing_storage import wait_for
from fake_engines import POISON, SLOW, Client, FakePool, Notes

from grpo_ray.config.loader import load_config
from grpo_ray.errors import EngineError, SupersededError, SyncError
from grpo_ray.inference.pool.engine_process import EngineSpec
from grpo_ray.inference.pool.pool import EngineRequest, Round, divide

LIMIT = 300.0
"""Seconds that a test waits for an engine on a busy machine."""

Start = Callable[..., Any]


@pytest.fixture
def notes(cluster: None) -> Any:
    return ray.remote(num_cpus=0)(Notes).remote()


@pytest.fixture
def start_pool(notes: Any, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a pool; `tmp_path` has the files that engines react to."""
    pools = []

    def start(replicas: str = "2", tensor_parallel_size: int = 1) -> Any:
        config = load_config(
            None,
            [
                "engine.placement=dedicated",
                f"engine.replicas={replicas}",
                f"engine.tensor_parallel_size={tensor_parallel_size}",
                "cluster.cpus_per_worker=1",
            ],
        )
        spec = EngineSpec(
            config=config, model_path=str(tmp_path), max_num_seqs=8, versions={}, environment={}, coordinator=notes
        )
        pool = ray.remote(num_cpus=0, max_concurrency=100)(FakePool).remote(spec)
        pools.append(pool)
        ray.get(pool.reserve.remote(), timeout=LIMIT)
        return pool

    yield start
    for pool in pools:
        ray.get(pool.stop.remote(), timeout=LIMIT)
        ray.kill(pool)


def engines(pool: Any) -> list[dict[str, Any]]:
    return ray.get(pool.engines.remote(), timeout=LIMIT)


def wait_for_engines(pool: Any, count: int) -> None:
    def started() -> bool:
        return sum(engine["node"] is not None for engine in engines(pool)) == count

    wait_for(started, f"{count} engines", LIMIT)


def test_pool_answers_each_worker_in_its_order(start_pool: Start) -> None:
    client = Client(start_pool("2"), "a", workers=2)
    client.sync(7)
    first, second = client.sample([[1], [1], [2, 2]], [[3], [3]])
    assert first == [[0, 7, 1], [1, 7, 1], [2, 7, 2]]
    assert second == [[10, 7, 1], [11, 7, 1]]
    assert client.sample([], [[3]]) == [[], [[10, 7, 1]]]  # a worker without requests takes part


def test_pool_uses_each_engine_and_new_weights(start_pool: Start, tmp_path: Path) -> None:
    pool = start_pool("2")
    client = Client(pool, "a")
    wait_for_engines(pool, 2)
    assert client.sync(1) == 2
    number = client.submit([[SLOW], [SLOW, SLOW]])
    wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, "both engines at work", LIMIT)
    (tmp_path / "go").touch()
    assert client.collect(number, 0, 2) == [[0, 1, 1], [1, 1, 2]]
    client.sync(2)
    assert client.sample([[5]]) == [[[0, 2, 1]]]


def test_pool_repeats_the_shard_of_a_killed_engine(start_pool: Start, tmp_path: Path, notes: Any) -> None:
    pool = start_pool("1")
    client = Client(pool, "a")
    client.sync(4)
    number = client.submit([[1], [SLOW]])
    wait_for((tmp_path / "waiting-0").exists, "the engine at work", LIMIT)
    (engine,) = engines(pool)
    os.kill(engine["pids"][0], signal.SIGKILL)
    (tmp_path / "go").touch()
    # The first completion was delivered by the killed engine; the client would notice a second delivery.
    assert client.collect(number, 0, 2) == [[0, 4, 1], [1, 4, 1]]
    assert any("engine 0 was lost and is started again" in note for note in ray.get(notes.read.remote()))
    assert client.prove(4) == 1


def test_pool_ends_the_run_if_a_shard_kills_two_engines(start_pool: Start) -> None:
    client = Client(start_pool("1"), "a")
    client.sync(0)
    number = client.submit([[POISON]])
    with pytest.raises(EngineError, match="2 engines have died on the same 1 completions"):
        client.collect(number, 0, 1)
    with pytest.raises(EngineError):  # a new attempt would send the same requests
        Client(client.pool, "b")


def test_pool_ends_the_run_if_no_engine_can_be_started(start_pool: Start, tmp_path: Path) -> None:
    (tmp_path / "cannot-start").touch()
    with pytest.raises(EngineError, match="engine 0 cannot be started: RuntimeError: no memory for the weights"):
        Client(start_pool("1"), "a")


def test_pool_passes_on_that_an_engine_holds_other_weights(start_pool: Start, tmp_path: Path) -> None:
    pool = start_pool("2")
    client = Client(pool, "a")
    wait_for_engines(pool, 2)
    client.load(3)
    (tmp_path / "stale-1").touch()
    with pytest.raises(SyncError, match="does not hold the learner's weights"):
        client.prove(3)
    (tmp_path / "stale-1").unlink()
    again = Client(pool, "b")  # the next attempt starts the engine anew
    again.sync(3)
    assert again.sample([[1]]) == [[[0, 3, 1]]]


def test_pool_ends_the_work_for_an_earlier_attempt(start_pool: Start, tmp_path: Path) -> None:
    pool = start_pool("1")
    client = Client(pool, "a")
    client.sync(1)
    number = client.submit([[SLOW]])
    wait_for((tmp_path / "waiting-0").exists, "the engine at work", LIMIT)
    again = Client(pool, "b")
    again.sync(2)
    assert again.sample([[1]]) == [[[0, 2, 1]]]  # although the file that the first round waits for is not there
    with pytest.raises(SupersededError):
        client.collect(number, 0, 1)
    with pytest.raises(SupersededError):
        client.load(1)


def test_pool_of_shared_engines_starts_all_processes_on_one_node(start_pool: Start) -> None:
    pool = start_pool("1", tensor_parallel_size=2)
    client = Client(pool, "a")
    client.sync(5)
    (engine,) = engines(pool)
    assert len(set(engine["pids"])) == 2
    assert client.sample([[1], [2]]) == [[[0, 5, 1], [1, 5, 1]]]


def test_pool_grows_to_the_most_engines_once_workers_have_begun(start_pool: Start) -> None:
    pool = start_pool("[1, 2]")
    wait_for_engines(pool, 1)
    client = Client(pool, "a")
    client.sync(9)
    wait_for_engines(pool, 2)
    wait_for(lambda: all(engine["version"] for engine in engines(pool)), "the weights in the second engine", LIMIT)
    assert client.prove(9) == 2


def requests(*prompts: int) -> list[EngineRequest]:
    return [EngineRequest([prompt], {}) for prompt in prompts]


def test_divide_gives_whole_groups_to_shards_in_turn() -> None:
    each = Round("a", 0, {1: requests(3, 3, 4, 4), 0: requests(1, 1, 2, 2)})
    shards = divide(each, 2)
    assert [shard.rows for shard in shards] == [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(0, 2), (0, 3), (1, 2), (1, 3)],
    ]
    assert [shard.number for shard in divide(Round("a", 0, {0: requests(1)}), 3)] == [0]
    assert divide(Round("a", 0, {0: []}), 3) == []
