"""Tests of the engine pool in a real Ray cluster, whose engines are actors without vLLM (`fake_engines.py`)."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from failing_storage import wait_for
from fake_engines import POISON, SLOW, Client, FakePool, Notes
from ray.util import placement_group_table

from grpo_ray.config.loader import load_config
from grpo_ray.errors import EngineError, SupersededError, SyncError
from grpo_ray.inference.pool.engine_process import EngineSpec
from grpo_ray.inference.pool.messages import EngineRequest
from grpo_ray.inference.pool.pool import Round, divide

LIMIT = 300.0
"""Seconds that a test waits for an engine on a busy machine."""


@pytest.fixture(scope="module")
def notes(cluster: None) -> Any:
    return ray.remote(num_cpus=0)(Notes).remote()


@contextmanager
def running_pool(
    notes: Any, folder: Path, replicas: str, tensor_parallel_size: int = 1, hang_seconds: float = 900
) -> Iterator[Any]:
    """Keep a pool running. Its engines react to files in the folder."""
    config = load_config(
        None,
        [
            "engine.placement=dedicated",
            f"engine.replicas={replicas}",
            f"engine.tensor_parallel_size={tensor_parallel_size}",
            "cluster.cpus_per_worker=1",
            f"run.hang_seconds={hang_seconds}",
        ],
    )
    spec = EngineSpec(
        config=config, model_path=str(folder), max_num_seqs=8, versions={}, environment={}, coordinator=notes
    )
    pool = ray.remote(num_cpus=0, max_concurrency=100)(FakePool).remote(spec)
    try:
        ray.get(pool.reserve.remote(), timeout=LIMIT)
        yield pool
    finally:
        ray.get(pool.stop.remote(), timeout=LIMIT)
        ray.kill(pool)


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two_engines(notes: Any, folder_of_two: Path) -> Iterator[Any]:
    with running_pool(notes, folder_of_two, "2") as pool:
        Client(pool, "first")
        wait_for_engines(pool, 2)
        yield pool


@pytest.fixture
def folder(folder_of_two: Path) -> Path:
    """The empty folder of the two engines."""
    for file in folder_of_two.iterdir():
        file.unlink()
    return folder_of_two


def engines(pool: Any) -> list[dict[str, Any]]:
    return ray.get(pool.engines.remote(), timeout=LIMIT)


def wait_for_engines(pool: Any, count: int) -> None:
    def started() -> bool:
        return sum(engine["node"] is not None for engine in engines(pool)) == count

    wait_for(started, f"{count} engines", LIMIT)


def test_pool_answers_each_worker_in_its_order(two_engines: Any) -> None:
    client = Client(two_engines, "order", workers=2)
    client.sync(7)
    first, second = client.sample([[1], [1], [2, 2]], [[3], [3]])
    assert first == [[0, 7, 1], [1, 7, 1], [2, 7, 2]]
    assert second == [[10, 7, 1], [11, 7, 1]]
    assert client.sample([], [[3]]) == [[], [[10, 7, 1]]]  # a worker without requests takes part


def test_pool_uses_each_engine_and_new_weights(two_engines: Any, folder: Path) -> None:
    client = Client(two_engines, "both")
    assert client.sync(1) == 2
    number = client.submit([[SLOW], [SLOW, SLOW]])
    wait_for(lambda: len(list(folder.glob("waiting-*"))) == 2, "both engines at work", LIMIT)
    (folder / "go").touch()
    assert client.collect(number, 0, 2) == [[0, 1, 1], [1, 1, 2]]
    client.sync(2)
    assert client.sample([[5]]) == [[[0, 2, 1]]]


def test_pool_uses_no_weights_before_they_are_proven(two_engines: Any) -> None:
    client = Client(two_engines, "unproven")
    client.sync(1)
    client.load(2)
    number = client.submit([[1], [2]])
    assert client.call("results", number, 0) == ([], True)  # after POLL_SECONDS
    assert not any(engine["busy"] for engine in engines(two_engines))
    client.prove(2)
    assert client.collect(number, 0, 2) == [[0, 2, 1], [1, 2, 1]]


def test_pool_tells_every_worker_whether_any_is_active(two_engines: Any) -> None:
    Client(two_engines, "asks", workers=2)

    def ask(number: int, *answers: bool) -> list[bool]:
        asked = [two_engines.is_any_active.remote("asks", number, rank, each) for rank, each in enumerate(answers)]
        return ray.get(asked, timeout=LIMIT)

    assert ask(1, True, False) == [True, True]
    assert ask(2, False, True) == [True, True]
    assert ask(3, False, False) == [False, False]
    waiting = two_engines.is_any_active.remote("asks", 4, 0, True)
    Client(two_engines, "later")
    with pytest.raises(ray.exceptions.RayTaskError, match="another attempt"):
        ray.get(waiting, timeout=LIMIT)


def test_pool_tells_waiting_for_a_worker_from_generating(two_engines: Any) -> None:
    client = Client(two_engines, "one late", workers=2)
    client.sync(1)
    client.call("submit", 1, 1, 0, [EngineRequest([5], {"seed": 0})])
    assert client.call("results", 1, 0) == ([], False)
    client.call("submit", 1, 1, 1, [])
    finished, is_generating = client.call("results", 1, 0)
    assert len(finished) <= 1 and is_generating


def test_pool_ends_the_work_for_an_earlier_attempt(two_engines: Any, folder: Path) -> None:
    client = Client(two_engines, "earlier")
    client.sync(1)
    number = client.submit([[SLOW], [SLOW, SLOW]])
    wait_for(lambda: len(list(folder.glob("waiting-*"))) == 2, "both engines at work", LIMIT)
    again = Client(two_engines, "later")
    again.sync(2)
    assert again.sample([[1]]) == [[[0, 2, 1]]]  # although the file that the first round waits for is not there
    with pytest.raises(SupersededError):
        client.collect(number, 0, 1)
    with pytest.raises(SupersededError):
        client.load(1)


def test_pool_repeats_the_shard_of_a_killed_engine(two_engines: Any, folder: Path, notes: Any) -> None:
    client = Client(two_engines, "killed")
    client.sync(4)
    number = client.submit([[1], [2], [SLOW]])  # the first and the last one are of one shard
    wait_for(lambda: bool(list(folder.glob("waiting-*"))), "an engine at work", LIMIT)
    (waiting,) = folder.glob("waiting-*")
    (engine,) = [each for each in engines(two_engines) if waiting.name == f"waiting-{each['number']}"]
    os.kill(engine["pids"][0], signal.SIGKILL)
    (folder / "go").touch()
    # The first completion was delivered by the killed engine; the client would notice a second delivery.
    assert client.collect(number, 0, 3) == [[0, 4, 1], [1, 4, 1], [2, 4, 1]]
    lost = f"engine {engine['number']} was lost and is started again"
    # The pool does not wait until its note has arrived.
    wait_for(lambda: any(lost in note for note in ray.get(notes.read.remote())), "the note of the loss", LIMIT)
    wait_for_engines(two_engines, 2)
    assert client.prove(4) == 2  # the new engine has received the weights


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, although its parent may not have asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_pool_replaces_an_engine_that_is_frozen(notes: Any, tmp_path: Path) -> None:
    with running_pool(notes, tmp_path, "1", hang_seconds=20) as pool:
        client = Client(pool, "frozen")
        client.sync(4)
        number = client.submit([[1], [SLOW]])
        wait_for((tmp_path / "waiting-0").exists, "the engine at work", LIMIT)
        (engine,) = engines(pool)
        (pid,) = engine["pids"]
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert client.collect(number, 0, 2) == [[0, 4, 1], [1, 4, 1]]
        lost = "engine 0 was lost and is started again: TimeoutError: its process has not answered for 20 s"
        wait_for(lambda: any(lost in note for note in ray.get(notes.read.remote())), "the note of the loss", LIMIT)
        wait_for(lambda: has_ended(pid), "the end of the frozen process", LIMIT)


def test_pool_passes_on_that_an_engine_holds_other_weights(two_engines: Any, folder: Path) -> None:
    client = Client(two_engines, "stale")
    wait_for_engines(two_engines, 2)
    client.load(3)
    (folder / "stale-1").touch()
    with pytest.raises(SyncError, match="does not hold the learner's weights"):
        client.prove(3)
    (folder / "stale-1").unlink()
    again = Client(two_engines, "mended")  # the next attempt starts the engine anew
    again.sync(3)
    assert again.sample([[1]]) == [[[0, 3, 1]]]


def test_pool_ends_the_run_if_a_shard_kills_two_engines(notes: Any, tmp_path: Path) -> None:
    with running_pool(notes, tmp_path, "1") as pool:
        client = Client(pool, "a")
        client.sync(0)
        number = client.submit([[POISON]])
        with pytest.raises(EngineError, match="2 engines have died on the same 1 completions"):
            client.collect(number, 0, 1)
        with pytest.raises(EngineError):  # a new attempt would send the same requests
            Client(pool, "b")


def test_pool_ends_the_run_if_no_engine_can_be_started(notes: Any, tmp_path: Path) -> None:
    (tmp_path / "cannot-start").touch()
    with (
        running_pool(notes, tmp_path, "1") as pool,
        pytest.raises(EngineError, match="engine 0 cannot be started: RuntimeError: no memory for the weights"),
    ):
        Client(pool, "a")


@pytest.mark.slow
def test_pool_goes_on_without_an_engine_that_cannot_be_started(notes: Any, tmp_path: Path) -> None:
    (tmp_path / "cannot-start-1").touch()

    def failures() -> int:
        return sum("engine 1 was lost" in note for note in ray.get(notes.read.remote()))

    before = failures()
    with running_pool(notes, tmp_path, "[1, 2]") as pool:
        client = Client(pool, "a")
        client.sync(2)
        number = client.submit([[1], [2]])
        wait_for(lambda: failures() >= before + 3, "three failed starts", LIMIT)
        assert client.collect(number, 0, 2) == [[0, 2, 1], [1, 2, 1]]
        assert client.prove(2) == 1


def test_pool_grows_to_the_most_engines_of_several_processes(notes: Any, tmp_path: Path) -> None:
    with running_pool(notes, tmp_path, "[1, 2]", tensor_parallel_size=2) as pool:
        client = Client(pool, "a")
        client.sync(9)
        assert len(engines(pool)) == 1  # until the workers sample, and have their resources
        number = client.submit([[1]])
        wait_for_engines(pool, 2)
        client.collect(number, 0, 1)
        assert client.prove(9) == 2
        assert len({pid for engine in engines(pool) for pid in engine["pids"]}) == 4
        assert client.sample([[1], [2]]) == [[[0, 9, 1], [1, 9, 1]]]


def requests(*prompts: int) -> list[EngineRequest]:
    return [EngineRequest([prompt], {}) for prompt in prompts]


def test_pool_asks_for_no_place_while_no_worker_samples(notes: Any, tmp_path: Path) -> None:
    """A request that waits would take the resources of workers that are restarted."""

    def pending() -> int:
        return sum(each["state"] == "PENDING" for each in placement_group_table().values())

    assert ray.cluster_resources()["CPU"] < 16
    with running_pool(notes, tmp_path, "[1, 16]") as pool:
        client = Client(pool, "a")
        client.sync(1)
        number = client.submit([[SLOW]])
        wait_for(lambda: pending() > 0, "a request for a place", LIMIT)
        (tmp_path / "go").touch()
        assert client.collect(number, 0, 1) == [[0, 1, 1]]
        wait_for(lambda: pending() == 0, "no request for a place", LIMIT)


def test_divide_gives_whole_groups_to_shards_in_turn() -> None:
    each = Round("a", 0, {1: requests(3, 3, 4, 4), 0: requests(1, 1, 2, 2)})
    shards = divide(each, 2)
    assert [shard.rows for shard in shards] == [
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(0, 2), (0, 3), (1, 2), (1, 3)],
    ]
    assert [shard.number for shard in divide(Round("a", 0, {0: requests(1)}), 3)] == [0]
    assert divide(Round("a", 0, {0: []}), 3) == []
