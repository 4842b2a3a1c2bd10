"""Tools that hang, crash, multiply or eat memory, in real processes: every other call goes on, and nothing is left."""

import contextlib
import errno
import inspect
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import hostile_tools
import psutil
import pytest
from other_user import as_another_user, needs_own_root
from process_watch import in_a_fork

from grpo_ray.config.import_path import import_callable
from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ToolError
from grpo_ray.processes import supervisor_client
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox import supervisor
from grpo_ray.tools.sandbox.episode import ProcessLimits, run_episode
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits
from grpo_ray.tools.sandbox.protocol import MAX_BYTES, CallResult, pack, receive
from grpo_ray.tools.sandbox.supervisor import OPEN_FILES, REMOVED_AT_ONCE, Supervisor

HELPERS = Path(hostile_tools.__file__).parent
WAIT = 120.0
"""Seconds after which a test gives up; far more than any of them takes."""
TOOLS = tuple(
    f"hostile_tools:{name}"
    for name, function in inspect.getmembers(hostile_tools, inspect.isfunction)
    if not name.startswith("_")
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which pools of this process and of its children make theirs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def open_pool(monkeypatch: pytest.MonkeyPatch, folders: Path) -> Iterator[Callable[..., EpisodePool]]:
    """Return a function that opens a pool with all hostile tools; closed pools must leave no process and no folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    pools: list[EpisodePool] = []

    def opener(**fields: object) -> EpisodePool:
        settings: dict[str, Any] = {"tools": TOOLS, "time_limit": 2.0, **fields}
        config = RolloutConfig(**settings)
        pools.append(EpisodePool(load_definition(config), SandboxLimits.of(config)))
        return pools[-1]

    yield opener
    supervisors = [pool.pid for pool in pools if pool.pid is not None]
    for pool in pools:
        pool.close()
    assert not any(map(psutil.pid_exists, supervisors))
    wait_until(
        lambda: not any(folders.iterdir())
    )  # a supervisor that was killed leaves its folder to the pool's reader


def processes_of(pool: EpisodePool) -> list[psutil.Process]:
    """Return all processes below a pool's supervisor."""
    assert pool.pid is not None
    return psutil.Process(pool.pid).children(recursive=True)


def names_of(processes: list[psutil.Process]) -> list[str]:
    """Return the names of those processes that still exist."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        time.sleep(0.02)


def call(pool: EpisodePool, name: str, **arguments: object) -> "Future[CallResult]":
    return pool.open(None, seed=0, columns={}, call_seed=0).call(name, arguments)


def test_results_and_errors(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    results = {
        name: call(pool, name, **arguments)
        for name, arguments in {
            "add": {"a": 1, "b": 2}, "add_later": {"a": 3, "b": 4}, "nothing": {}, "fail": {}, "exit_politely": {},
            "megabyte": {}, "fill_disk": {}, "shout": {},
        }.items()
    }  # fmt: skip
    found = {name: (result.result(WAIT).status, result.result().text) for name, result in results.items()}
    status, text = found.pop("megabyte")
    assert status == "ok" and text is not None and len(text) < 70_000 and "characters omitted" in text
    assert found.pop("fill_disk")[0] == "error"
    assert found.pop("shout")[0] in ("ok", "crash", "error")  # junk in its own socket ends its own process at most
    assert found == {
        "add": ("ok", "3"), "add_later": ("ok", "7"), "nothing": ("ok", None),
        "fail": ("error", "ValueError: no such number"), "exit_politely": ("error", "SystemExit: 3"),
    }  # fmt: skip


def test_arguments_that_do_not_fit_are_errors_of_the_policy(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    few, wrong = call(pool, "add", a=1).result(WAIT), call(pool, "add", a=1, b=None).result(WAIT)
    assert few.status == wrong.status == "error"
    assert few.text is not None and few.text.startswith("TypeError") and "'b'" in few.text


HOSTILE = {
    "hang": "timeout", "spin": "timeout", "endless": "timeout", "bomb": "processes", "scattered_bomb": "processes",
    "segfault": "crash", "leave": "crash", "eat_memory": "memory", "remove_folder": "ok", "daemonize": "ok",
    "megabyte": "ok",
}  # fmt: skip
"""Tool -> status of its call."""


def test_hostile_tools_at_once_end_alone_and_leave_no_process(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    harmless = [pool.open(None, 0, {}, call_seed=number) for number in range(4)]
    before = [each.call("remember", {"number": number}) for number, each in enumerate(harmless)]
    hostile = {name: pool.open(None, 0, {}, 0) for name in HOSTILE}
    results = {name: episode.call(name, {}) for name, episode in hostile.items()}
    beside = [each.call("nap", {"seconds": 0.2}) for each in harmless]
    assert {name: result.result(WAIT).status for name, result in results.items()} == HOSTILE
    assert [each.result(WAIT).text for each in before] == [f"[{number}]" for number in range(4)]
    assert {each.result(WAIT).status for each in beside} == {"ok"}
    after = [each.call("remember", {"number": 9}) for each in harmless]  # the same processes as before
    assert [each.result(WAIT).text for each in after] == [f"[{number}, 9]" for number in range(4)]
    for episode in (*hostile.values(), *harmless):
        episode.close()
    wait_until(lambda: not processes_of(pool))


def test_processes_that_a_call_has_left_are_limited(open_pool: Callable[..., EpisodePool]) -> None:
    """The limit holds between calls too, and for children of threads."""
    pool = open_pool(max_processes=4)
    few, many = (pool.open(None, 0, {}, 0) for _ in range(2))
    assert few.call("leave_processes", {"count": 3}).result(WAIT).status == "ok"
    during = many.call("leave_processes", {"count": 8}).result(WAIT)
    wait_until(lambda: names_of(processes_of(pool)).count("sleep") == 3)
    assert few.call("nothing", {}).result(WAIT).status == "ok"
    # The policy is told by the call's own result, or by that of the next one.
    after = [many.call("nothing", {}).result(WAIT) for _ in range(2)]
    failed = during if during.status != "ok" else after.pop(0)
    assert (failed.status, failed.text) == ("processes", "more than 4 processes")
    assert {each.status for each in after} == {"ok"}


def test_environment_that_multiplies_between_calls_is_lost_for_a_reason_that_is_told(
    open_pool: Callable[..., EpisodePool],
) -> None:
    pool = open_pool(environment="hostile_tools:Counter", max_processes=4)
    episode = pool.open(None, 0, {}, 0)
    assert episode.reset().result(WAIT).status == "ok"
    during = episode.call("leave_processes", {"count": 8}).result(WAIT)
    wait_until(lambda: not processes_of(pool))
    after = [episode.call("increase", {"by": 1}).result(WAIT) for _ in range(2)]
    failed = during if during.status != "ok" else after.pop(0)
    assert (failed.status, failed.text) == ("processes", "more than 4 processes")
    assert {(each.status, each.text) for each in after} == {("crash", "the environment's process has ended")}


def test_children_of_a_thread_whose_process_looks_ended_count(open_pool: Callable[..., EpisodePool]) -> None:
    """The main thread of a process may end before others, and the process is then shown as a zombie."""
    episode = open_pool(max_processes=4).open(None, 0, {}, 0)
    results = [episode.call("headless", {"count": 8}).result(WAIT), episode.call("nothing", {}).result(WAIT)]
    assert "processes" in {each.status for each in results}


def test_many_large_requests_at_once_are_all_served(open_pool: Callable[..., EpisodePool]) -> None:
    """More than the sockets' buffers hold, in both directions."""
    pool = open_pool(tools=(), environment="hostile_tools:Counter", time_limit=60.0)
    episodes = [pool.open(None, 0, {"text": "x" * 30_000}, 0) for _ in range(256)]
    resets = [each.reset() for each in episodes]
    assert {len(each.result(WAIT).text or "") > 30_000 for each in resets} == {True}


def test_calls_are_not_late_because_others_start(
    open_pool: Callable[..., EpisodePool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forks take twice the limit of time; results that wait meanwhile are no timeouts."""
    Path(tmp_path, "slow_start.py").write_text(SLOW_START)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    pool = open_pool(tools=("slow_start:nothing_slowly",), time_limit=1.0)
    calls = [call(pool, "nothing_slowly") for _ in range(100)]
    assert [each.result(WAIT).status for each in calls] == ["ok"] * 100


def test_supervisor_that_is_killed_leaves_no_helper_and_no_call_behind(
    open_pool: Callable[..., EpisodePool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that was forked during the import has the supervisor's descriptors."""
    Path(tmp_path, "with_fork.py").write_text(WITH_FORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    pool = open_pool(tools=("with_fork:helper", "hostile_tools:hang"), time_limit=600.0)
    own_helper = sys.modules["with_fork"].HELPER  # the pool's owner has imported the module as well
    os.kill(own_helper, signal.SIGKILL)
    os.waitpid(own_helper, 0)
    helper = psutil.Process(int(call(pool, "helper").result(WAIT).text or ""))
    hung = call(pool, "hang")
    wait_until(lambda: len(processes_of(pool)) > 2)
    assert pool.pid is not None
    os.kill(pool.pid, signal.SIGKILL)
    assert hung.result(WAIT).status == "crash"
    wait_until(lambda: not helper.is_running())


def test_ended_processes_do_not_count(open_pool: Callable[..., EpisodePool]) -> None:
    episode = open_pool(max_processes=8, time_limit=60.0).open(None, 0, {}, 0)
    assert [episode.call("orphans", {"count": 10}).result(WAIT).status for _ in range(2)] == ["ok", "ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root lists the open files of a supervisor")
def test_process_that_cannot_be_started_is_a_crash_of_that_call_alone(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    first = pool.open(None, 0, {}, 0)
    assert first.call("remember", {"number": 1}).result(WAIT).text == "[1]"
    assert pool.pid is not None
    used = {int(each.name) for each in Path(f"/proc/{pool.pid}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pool.pid, resource.RLIMIT_NOFILE, (free, 1024))  # no descriptor is left for another process
    failed = call(pool, "nothing").result(WAIT)
    assert failed.status == "crash" and "no process could be started" in (failed.text or "")
    resource.prlimit(pool.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    assert first.call("remember", {"number": 2}).result(WAIT).text == "[1, 2]"


def test_helpers_of_a_module_live_as_long_as_the_pool(
    open_pool: Callable[..., EpisodePool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may start a server when it is imported."""
    Path(tmp_path, "with_helper.py").write_text(WITH_HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    own = __import__("with_helper").HELPER
    pool = open_pool(tools=("with_helper:is_alive",))
    for _ in range(2):
        assert call(pool, "is_alive").result(WAIT).text == "True"
        time.sleep(0.2)  # several checks of limits
    (helper,) = [each for each in processes_of(pool) if each.name() == "sleep"]
    pool.close()
    wait_until(lambda: not helper.is_running())
    own.kill()
    own.wait()


def test_limits_of_time(open_pool: Callable[..., EpisodePool]) -> None:
    """A sleeping tool ends at its limit; one that computes may be starved on a busy machine, and gets four times it."""
    pool = open_pool(time_limit=1.0)
    hung, spun = call(pool, "hang"), call(pool, "spin")
    assert 1.0 <= hung.result(WAIT).seconds < 3.0 and hung.result().text == "no result within 1 s"
    assert 1.0 <= spun.result(WAIT).seconds < 6.0


def test_tool_is_called_again_after_its_process_was_ended(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    episode = pool.open(None, 0, {}, 0)
    assert episode.call("remember", {"number": 1}).result(WAIT).text == "[1]"
    assert episode.call("segfault", {}).result(WAIT).status == "crash"
    assert episode.call("remember", {"number": 2}).result(WAIT).text == "[2]"


def test_requests_of_an_episode_are_served_in_order(open_pool: Callable[..., EpisodePool]) -> None:
    episode = open_pool().open(None, 0, {}, 0)
    results = [episode.call("remember", {"number": number}) for number in range(5)]
    assert [each.result(WAIT).text for each in results] == [str(list(range(number + 1))) for number in range(5)]


def test_calls_after_one_that_was_ended_are_not_made(open_pool: Callable[..., EpisodePool]) -> None:
    """A turn with many calls that hang takes the time of one of them."""
    episode = open_pool().open(None, 0, {}, 0)
    names = ["nothing", "hang", "hang", "nothing"]
    results = [result.result(WAIT) for result in [episode.call(name, {}) for name in names]]
    assert [each.status for each in results] == ["ok", "timeout", "skipped", "skipped"]
    assert episode.call("nothing", {}).result(WAIT).status == "ok"  # in the next turn


def test_completions_share_no_state_and_no_folder(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    assert [call(pool, "remember", number=number).result(WAIT).text for number in (1, 2)] == ["[1]", "[2]"]
    folders = [call(pool, "working_folder").result(WAIT).text for _ in range(2)]
    assert folders[0] != folders[1] and None not in folders


def test_folders_are_removed(open_pool: Callable[..., EpisodePool]) -> None:
    episode = open_pool().open(None, 0, {}, 0)
    folder = episode.call("working_folder", {}).result(WAIT).text
    assert folder is not None and Path(folder).is_dir()
    episode.close()
    wait_until(lambda: not Path(folder).exists())


@pytest.fixture
def bare_supervisor(folders: Path) -> Iterator[Supervisor]:
    """Supervisor in this process, which is not run."""
    own, theirs = socket.socketpair()
    with own, theirs:
        yield Supervisor(theirs, str(folders), SandboxLimits())


def test_episode_closed_in_a_fork_runs_on_in_its_parent(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    episode = pool.open(None, 0, {}, 0)
    assert episode.call("remember", {"number": 1}).result(WAIT).text == "[1]"

    def close_all() -> int | None:
        episode.close()
        pool.close()
        return pool.pid

    before = pool.pid
    assert in_a_fork(close_all) == "None"
    assert episode.call("remember", {"number": 2}).result(WAIT).text == "[1, 2]" and pool.pid == before


@pytest.mark.parametrize(("module", "name"), [(tempfile, "mkdtemp"), (supervisor_client, "start_child")])
def test_pool_without_space_or_process_left_raises_and_works_again(
    module: object, name: str, open_pool: Callable[..., EpisodePool], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    episode = open_pool().open(None, 0, {}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(ToolError, match=r"no process for tools can be started.*temporarily unavailable"):
            episode.call("remember", {"number": 1})
    assert list(folders.iterdir()) == []
    assert episode.call("remember", {"number": 1}).result(WAIT).text == "[1]"


@pytest.mark.parametrize(("module", "name"), [(tempfile, "mkdtemp"), (os, "fork")])
def test_large_folder_is_removed_where_no_space_or_process_is_left(
    module: object, name: str, bare_supervisor: Supervisor, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    (folders / "own").mkdir()
    for number in range(2 * REMOVED_AT_ONCE):
        (folders / "own" / str(number)).touch()
    monkeypatch.setattr(module, name, refuse)
    bare_supervisor._remove(str(folders / "own"))
    assert list(folders.iterdir()) == [] and not bare_supervisor.removers


@pytest.mark.parametrize(("episodes", "pause"), [(1, 0.25), (100, 20.0)])  # 100 * 0.01 s are 5 % of 20 s
def test_files_of_many_episodes_are_measured_in_a_small_share_of_time(
    episodes: int, pause: float, bare_supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [7.0]

    def measure(*_: object) -> None:
        seconds[0] += 0.01

    monkeypatch.setattr(supervisor, "disk_excess", measure)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    bare_supervisor.episodes = {number: supervisor._Episode({}) for number in range(episodes)}
    bare_supervisor._disk_excess(bare_supervisor.episodes[0], [], [])
    assert bare_supervisor.episodes[0].next_disk_check == pytest.approx(7.0 + pause)


def test_random_numbers_come_from_the_seed(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    thrown = [pool.open(None, 0, {}, call_seed=seed).call("dice", {}).result(WAIT).text for seed in (1, 1, 2)]
    assert thrown[0] == thrown[1] != thrown[2]


def test_tools_see_no_secrets_and_no_descriptors(
    open_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    pool = open_pool()
    names = (call(pool, "variables").result(WAIT).text or "").split()
    assert "PATH" in names and not {"HF_TOKEN", "WANDB_API_KEY"} & set(names)
    opened = (call(pool, "descriptors").result(WAIT).text or "").split()
    assert sorted(each.split(":")[0] for each in opened if not each.startswith("/proc")) == ["/dev/null"] * 3 + [
        "socket"
    ]


def test_environment(open_pool: Callable[..., EpisodePool]) -> None:
    path = "hostile_tools:Counter"
    pool = open_pool(tools=(), environment=path, settings={path: {"start": 4}})
    episode = pool.open(None, seed=7, columns={"level": "easy"}, call_seed=1)
    assert episode.reset().result(WAIT).text == "seed 7, [('level', 'easy')]"
    first, second = episode.call("increase", {"by": 2}).result(WAIT), episode.call("increase", {"by": 4}).result(WAIT)
    assert (first.text, first.done, second.text, second.done) == ("6", False, "10", True)
    assert [episode.step(text).result(WAIT).text for text in ("hello", "")] == ["you said hello", None]
    assert episode.reward().result(WAIT).value == 10.0


def test_reset_takes_what_its_signature_names(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=(), environment="hostile_tools:Narrow")
    episode = pool.open(None, seed=7, columns={"level": "easy", "other": 1}, call_seed=1)
    assert episode.reset().result(WAIT).text is None
    assert episode.call("show", {}).result(WAIT).text == "easy"


def test_column_seed_takes_the_place_of_the_run_s_seed(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=(), environment="hostile_tools:Counter")
    assert pool.open(None, seed=7, columns={"seed": 3}, call_seed=1).reset().result(WAIT).text == "seed 3, []"


def test_columns_may_be_larger_than_any_result(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=("hostile_tools:add",), environment="hostile_tools:Narrow")
    large, small = (pool.open(None, 0, {"level": "x" * size}, 0) for size in (MAX_BYTES + 1, 1))
    assert [each.reset().result(WAIT).status for each in (large, small)] == ["ok", "ok"]
    shown = large.call("show", {}).result(WAIT).text
    assert shown is not None and shown.startswith("xxx")


def test_supervisor_may_open_more_files_than_the_usual_limit(
    open_pool: Callable[..., EpisodePool], request: pytest.FixtureRequest
) -> None:
    """Open a socket for each process; the soft limit that the pool inherits is 1,024 on most systems."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 1024), limits[1]))
    pool = open_pool()
    assert call(pool, "nothing").result(WAIT).status == "ok"
    assert pool.pid is not None
    assert resource.prlimit(pool.pid, resource.RLIMIT_NOFILE) == (min(OPEN_FILES, limits[1]), limits[1])


def test_environment_whose_process_has_ended_is_lost(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=(), environment="hostile_tools:Counter")
    episode = pool.open(None, 0, {}, 0)
    results = [episode.reset(), episode.call("crash", {}), episode.call("increase", {"by": 1}), episode.reward()]
    assert [each.result(WAIT).status for each in results] == ["ok", "crash", "crash", "crash"]
    assert results[3].result().value is None


def test_reward_that_raises_is_no_number(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=(), environment="hostile_tools:Counter")
    episode = pool.open(None, 0, {}, 0)
    episode.reset()
    episode.call("increase", {"by": -1})
    result = episode.reward().result(WAIT)
    assert (result.status, result.value) == ("error", None)


def test_supervisor_that_is_killed_is_replaced(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(time_limit=60.0)
    episode = pool.open(None, 0, {}, 0)
    assert episode.call("add", {"a": 1, "b": 1}).result(WAIT).text == "2"
    assert pool.pid is not None
    pending = episode.call("nap", {"seconds": 1e6})
    wait_until(lambda: len(processes_of(pool)) > 0)
    below = processes_of(pool)
    os.kill(pool.pid, signal.SIGKILL)
    assert pending.result(WAIT).status == "crash"
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
    assert episode.call("remember", {"number": 1}).result(WAIT).text == "[1]"


def test_supervisor_that_cannot_start_is_an_error(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    pool.definition = replace(pool.definition, tools=("hostile_tools:no_longer_there",))
    with pytest.raises(ToolError, match="3 times in a row"):
        for _ in range(10):
            assert call(pool, "nothing").result(WAIT).status == "crash"


def test_closed_pool_settles_what_is_pending(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    pending = call(pool, "hang")
    pool.close()
    with pytest.raises(ToolError, match="closed"):
        pending.result(WAIT)
    with pytest.raises(ToolError, match="closed"):
        call(pool, "nothing")


def test_call_that_returns_from_two_processes_has_one_result(open_pool: Callable[..., EpisodePool]) -> None:
    """The second result must not be taken for that of a later call."""
    episode = open_pool().open(None, 0, {}, 0)
    calls = [
        episode.call(name, arguments)
        for name, arguments in (("return_twice", {}), ("nap", {"seconds": 1.0}), ("remember", {"number": 1}))
    ]
    assert [each.result(WAIT).text for each in calls] == ["parent", "rested", "[1]"]


def test_message_that_answers_no_request_ends_the_process(open_pool: Callable[..., EpisodePool]) -> None:
    episode = open_pool().open(None, 0, {}, 0)
    assert episode.call("forge", {"id": -1}).result(WAIT).status == "crash"
    assert episode.call("nothing", {}).result(WAIT).status == "ok"  # from a new process


def test_closed_episode_settles_its_calls_and_no_others(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(time_limit=600.0)
    other, closed = (pool.open(None, 0, {}, 0) for _ in range(2))
    nap = other.call("nap", {"seconds": 1.0})
    pending = [closed.call("hang", {}) for _ in range(2)]
    closed.close()
    pending.append(closed.call("nothing", {}))
    told = {(each.result(WAIT).status, each.result(WAIT).text) for each in pending}
    assert told == {("skipped", "the episode was closed")}
    assert nap.result(WAIT).text == "rested"


def test_tools_learn_how_their_processes_end_where_the_trainer_ignores_them(
    open_pool: Callable[..., EpisodePool],
) -> None:
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pool = open_pool()
        assert call(pool, "exit_status").result(WAIT).text == "1"
        pool.close()
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the rights of root")
def test_kill_all_leaves_a_process_of_another_user_without_waiting() -> None:
    script = """
import encodings.ascii, os, signal
from grpo_ray.processes.process_tree import kill_all
foreign = os.fork()
if not foreign:
    signal.pause()
os.setresuid(65534, 65534, 65534)
kill_all(foreign)
"""
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        assert process.wait(WAIT) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the process that was left


def test_process_of_another_user_begins_a_namespace_of_its_own(tmp_path: Path) -> None:
    """The supervisor of another user than root cannot make the namespace; a process in between makes it."""
    own, theirs = socket.socketpair()
    spec: dict[str, Any] = {"tools": ["hostile_tools:process_id"], "environment": None, "settings": {}}
    spec |= {"columns": {}, "call_seed": 0}
    pid = os.fork()
    if pid == 0:
        own.close()
        try:
            limits = ProcessLimits(folder=str(tmp_path), memory=1 << 30, file_bytes=1 << 30)
            run_episode(theirs, spec, partial(import_callable, where="rollout"), limits, is_first=False)
        finally:
            os._exit(0)
    theirs.close()
    own.settimeout(WAIT)
    own.sendall(pack({"op": "call", "name": "process_id", "arguments": {}, "id": 7}))
    answer = next(receive(own))
    own.close()
    os.waitpid(pid, 0)
    assert (answer["status"], answer["text"], answer["id"]) == ("ok", "1", 7)


@needs_own_root
def test_memory_of_imported_modules_is_no_memory_of_another_users_calls() -> None:
    """Processes of another user than root cannot read how much of their memory they share with the supervisor."""
    result = as_another_user([sys.executable, "-c", LARGE])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["wait", "ok", "python", "ok", "grow", "memory"]


LARGE = """
import sys, tempfile
from pathlib import Path
from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits

MODULE = '''
import os, time

TABLE = bytearray(os.urandom(1) * (600 << 20))

def wait() -> str:
    "Wait until memory was measured several times."
    time.sleep(0.5)
    return "done"

def grow() -> str:
    "Use 1.5 times the memory that is allowed, in two processes."
    os.fork()
    own = bytearray(os.urandom(1) * (192 << 20))
    time.sleep(1000)
    return "grown"
'''
CODE = {"code": "import time; time.sleep(0.5)"}

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "large_module.py").write_text(MODULE)
    sys.path.insert(0, folder)
    tools = ("large_module:wait", "large_module:grow", "grpo_ray.tools.python_tool:python")
    config = RolloutConfig(tools=tools, time_limit=100.0, memory_gib=0.25)
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as pool:
        for name, arguments in (("wait", {}), ("python", CODE), ("grow", {})):
            print(name, pool.open(None, 0, {}, 0).call(name, arguments).result(120).status)
"""


WITH_HELPER = """
import os, subprocess

HELPER = subprocess.Popen(["sleep", "1000000"])

def is_alive() -> str:
    \"\"\"Tell whether the helper lives.\"\"\"
    return str(os.path.exists(f"/proc/{HELPER.pid}"))
"""


WITH_FORK = """
import os, signal

HELPER = os.fork()
if not HELPER:
    signal.pause()

def helper() -> str:
    \"\"\"Return the id of a process that was forked while this module was imported.\"\"\"
    return str(HELPER)
"""


SLOW_START = """
import os, time

os.register_at_fork(before=lambda: time.sleep(0.02))

def nothing_slowly() -> str:
    \"\"\"Return at once, from a process whose start takes time, as with a large table in memory.\"\"\"
    return "done"
"""


OWNER = """
import sys, time
from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits

config = RolloutConfig(tools=("hostile_tools:daemonize", "hostile_tools:hang"), time_limit=600.0)
pool = EpisodePool(load_definition(config), SandboxLimits.of(config))
episodes = [pool.open(None, 0, {}, 0) for _ in range(3)]
for episode in episodes:
    episode.call("daemonize", {}).result()
    episode.call("hang", {})
print(pool.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_trainer_is_killed(
    number: int, monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    supervisor = psutil.Process(int(owner.stdout.readline()))
    wait_until(lambda: len(supervisor.children(recursive=True)) >= 6)
    below = supervisor.children(recursive=True)
    owner.send_signal(number)
    owner.wait(WAIT)
    owner.stdout.close()
    wait_until(
        lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in (supervisor, *below))
    )
    assert not any(folders.iterdir())
