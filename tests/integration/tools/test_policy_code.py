"""Code of the policy beside an environment: the processes of both, and the limits on the sum of all calls."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_tools
import psutil
import pytest
from bombs import BOMBS, EIGHT, SMALL, STAY

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.processes.landlock import landlock_version
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import Episode, EpisodePool, SandboxLimits
from grpo_ray.tools.sandbox.protocol import CallResult

pytestmark = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")

HELPERS = Path(hostile_tools.__file__).parent
PYTHON = "grpo_ray.tools.python_tool:python"
WAIT = 240.0
"""Seconds after which a test gives up; far more than any of them takes."""
ENVIRONMENT = "hostile_tools:Counter"


@pytest.fixture
def open_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., EpisodePool]]:
    """Return a function that opens a pool with the Python tool; closed pools must leave no process and no folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    pools: list[EpisodePool] = []

    def opener(**fields: Any) -> EpisodePool:
        variables = fields.get("variables", ())
        config = RolloutConfig(**{"tools": (PYTHON,), "time_limit": 60.0, **fields})
        pools.append(EpisodePool(load_definition(config), SandboxLimits.of(config), str(tmp_path), variables))
        return pools[-1]

    yield opener
    supervisors = [pool.pid for pool in pools if pool.pid is not None]
    for pool in pools:
        pool.close()
    assert not any(map(psutil.pid_exists, supervisors))
    wait_until(lambda: not any(tmp_path.iterdir()))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        time.sleep(0.02)


def opened(pool: EpisodePool) -> Episode:
    return pool.open(None, seed=0, columns={}, call_seed=0)


def run(episode: Episode, code: str) -> CallResult:
    return episode.call("python", {"code": code}).result(WAIT)


# --- where the score is computed


def test_environment_is_no_ancestor_of_code(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(environment=ENVIRONMENT)
    episode = opened(pool)
    assert episode.reset().result(WAIT).status == "ok"
    assert pool.pid is not None
    supervisor = psutil.Process(pool.pid)
    environment = {each.pid for each in supervisor.children(recursive=True)}
    call = episode.call("python", {"code": "import time\ntime.sleep(1000)"})
    wait_until(lambda: any("python_child.py" in "".join(cmdline(each)) for each in supervisor.children(recursive=True)))
    (code,) = [each for each in supervisor.children(recursive=True) if "python_child.py" in "".join(cmdline(each))]
    ancestors = {each.pid for each in code.parents()}
    assert supervisor.pid in ancestors and not environment & ancestors
    episode.close()
    assert call.result(WAIT).status == "skipped"


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


FORGE = """
import os, socket, struct, json, ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
own = libc.syscall(438, libc.syscall(434, os.getppid(), 0), {descriptor}, 0)
assert own >= 0
def send(number):
    message = json.dumps(dict(id=number, status="ok", text="forged", value=1.0, done=True)).encode()
    os.write(own, struct.pack("<I", len(message)) + message)
send({number})
if {also_next}:
    send({number} + 1)
"""
"""Code that takes its parent's socket to the supervisor, and answers its own call, and perhaps the next request."""


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel may let only root take descriptors of the parent")
@pytest.mark.parametrize("also_next", [False, True])
def test_code_that_has_taken_over_its_process_forges_no_reward(
    open_pool: Callable[..., EpisodePool], also_next: bool
) -> None:
    """Unconfined code can use everything that the process which starts it has, and that process has no reward."""
    pool = open_pool(environment=ENVIRONMENT, isolation="none")
    episode = opened(pool)
    assert episode.reset().result(WAIT).status == "ok"
    assert run(episode, "1").text == "1\n"
    number = next(pool._numbers) + 1  # of the next request
    for descriptor in range(3, 12):
        result = run(episode, FORGE.format(descriptor=descriptor, number=number, also_next=also_next))
        number += 1
        if result.text == "forged" or result.status == "crash":
            break
    assert result.text == "forged" or also_next
    assert result.value is None and result.done is False
    scored = episode.reward().result(WAIT)
    assert (scored.status, scored.value) == ("ok", 0.0)


def test_code_that_is_ended_leaves_the_environment_and_its_score(open_pool: Callable[..., EpisodePool]) -> None:
    """Code cannot end its completion without a score."""
    pool = open_pool(environment=ENVIRONMENT, time_limit=2.0)
    episode = opened(pool)
    assert episode.reset().result(WAIT).status == "ok"
    assert episode.call("increase", {"by": 3}).result(WAIT).text == "3"
    turn = [
        episode.call("python", {"code": "import time\ntime.sleep(1000)"}),
        episode.call("increase", {"by": 3}),
        episode.reward(),
    ]
    assert [each.result(WAIT).status for each in turn] == ["timeout", "skipped", "ok"]
    assert turn[-1].result().value == 3.0
    assert run(episode, "2").text == "2\n"


@pytest.mark.parametrize("name", ["memory without an address", "shared memory that is not resident"])
def test_memory_of_code_without_a_name_ends_the_code_and_not_the_environment(
    open_pool: Callable[..., EpisodePool], name: str
) -> None:
    pool = open_pool(environment=ENVIRONMENT, **SMALL)
    episode = opened(pool)
    assert episode.reset().result(WAIT).status == "ok"
    assert episode.call("increase", {"by": 3}).result(WAIT).text == "3"
    assert run(episode, BOMBS[name].code).status == "disk"
    scored = episode.reward().result(WAIT)
    assert (scored.status, scored.value) == ("ok", 3.0)


def test_call_of_code_says_whether_the_environment_is_done(open_pool: Callable[..., EpisodePool]) -> None:
    episode = opened(open_pool(environment=ENVIRONMENT))
    assert episode.reset().result(WAIT).status == "ok"
    assert not run(episode, "1").done
    assert episode.call("increase", {"by": 10}).result(WAIT).done
    assert run(episode, "1").done


def test_environment_reads_files_of_code_and_code_none_of_it(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(environment="judging_environment:Judge")
    episode = opened(pool)
    assert episode.reset().result(WAIT).text == "secret is kept"
    assert episode.reward().result(WAIT).value == 0.0
    reached = run(episode, "import os\nopen('answer.txt', 'w').write('42')\nos.listdir('../own')").text
    assert reached is not None and ("PermissionError" in reached or "FileNotFoundError" in reached)
    assert episode.reward().result(WAIT).value == 1.0


# --- supervisors


def test_supervisor_has_no_secrets(open_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"}
    for name in (*secrets, "OTHER", "SEARCH_API_KEY"):
        monkeypatch.setenv(name, "value-of-the-variable")
    only_code = open_pool()
    with_own = open_pool(environment=ENVIRONMENT, variables=("SEARCH_API_KEY",))
    for pool in (only_code, with_own):
        assert run(opened(pool), "1").status == "ok"
    first, second = (variables_of(pool) for pool in (only_code, with_own))
    assert "PATH" in first and not {"OTHER", "SEARCH_API_KEY", *secrets} & first
    assert {"OTHER", "SEARCH_API_KEY"} <= second and not secrets & second
    assert only_code.withheld == [] and secrets <= set(with_own.withheld) and "OTHER" not in with_own.withheld


def variables_of(pool: EpisodePool) -> set[str]:
    """Return the names of variables that the supervisor was started with, by its Python process."""
    if os.geteuid() != 0:
        pytest.skip("only root reads the supervisor's variables")
    content = Path(f"/proc/{pool.pid}/environ").read_text()
    return {each.partition("=")[0] for each in content.split("\0")}


def test_memory_of_supervisor_and_environment_is_hidden(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(tools=(PYTHON, "hostile_tools:is_dumpable"))
    assert opened(pool).call("is_dumpable", {}).result(WAIT).text == "0"  # inherited from the supervisor
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1  # of this process


# --- memory and disk in sum


def test_bombs_are_ended_and_leave_nothing(open_pool: Callable[..., EpisodePool], tmp_path: Path) -> None:
    pool = open_pool(**SMALL, time_limit=WAIT)
    bombs = {name: each for name, each in BOMBS.items() if each.status != "timeout"}
    harmless = opened(pool)
    assert run(harmless, "open('kept', 'w').write('x')").text == "1\n"
    hostile = {name: opened(pool) for name in bombs}
    calls = {name: hostile[name].call("python", {"code": each.code}) for name, each in bombs.items()}
    ended = {name: call.result(WAIT).status for name, call in calls.items()}
    assert ended == {name: each.status for name, each in bombs.items()}
    assert calls["memory of several processes"].result().text == "more than 0.3 GiB of memory in all processes"
    assert calls["many files"].result().text == "more than 500 files"
    for episode in hostile.values():
        assert run(episode, "import os\nos.listdir()").text == "[]\n"  # in a new process with an empty folder
        episode.close()
    assert run(harmless, "import os\nos.listdir()").text == "['kept']\n"
    wait_until(lambda: len([each for each in tmp_path.glob("*/*") if (each / "code").is_dir()]) == 1)


def test_bombs_end_at_the_time_limit(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool(time_limit=1.0)
    calls = [opened(pool).call("python", {"code": each.code}) for each in BOMBS.values() if each.status == "timeout"]
    assert {each.result(WAIT).status for each in calls} == {"timeout"}


@pytest.mark.slow
def test_bombs_are_harmless_under_larger_limits(open_pool: Callable[..., EpisodePool]) -> None:
    """The limits in sum alone end the bombs in the tests above."""
    pool = open_pool(max_processes=100, memory_gib=2.0, disk_gib=1.0, time_limit=WAIT)
    left_out = {"path longer than the system takes"}  # which ends under any limit
    bombs = {name: each for name, each in BOMBS.items() if each.status != "timeout" and name not in left_out}
    calls = {
        name: opened(pool).call("python", {"code": each.code.replace(STAY, "import time\ntime.sleep(1)")})
        for name, each in bombs.items()
    }
    assert {name: call.result(WAIT).status for name, call in calls.items()} == dict.fromkeys(bombs, "ok")


def test_memory_that_processes_share_counts_once(open_pool: Callable[..., EpisodePool]) -> None:
    code = f"import os\nkept = bytearray(os.urandom(1 << 20)) * 150\n{EIGHT}time.sleep(1.5)"
    result = run(opened(open_pool(memory_gib=0.4)), code)
    assert result.status == "ok"


def test_folders_nested_deeper_than_any_path_are_removed(open_pool: Callable[..., EpisodePool], tmp_path: Path) -> None:
    pool = open_pool()
    episode = opened(pool)
    code = "import os\nfor _ in range(3000):\n    os.mkdir('x' * 10)\n    os.chdir('x' * 10)\nopen('file', 'w').close()"
    assert run(episode, code).status in ("ok", "disk")
    supervisor = pool.pid
    episode.close()
    wait_until(lambda: not any(each.is_dir() for each in tmp_path.glob("*/*")))
    assert run(opened(pool), "1").text == "1\n" and pool.pid == supervisor


def test_folder_without_rights_is_removed(open_pool: Callable[..., EpisodePool], tmp_path: Path) -> None:
    episode = opened(open_pool())
    code = "import os\nos.mkdir('a', 0o300)\nopen('a/file', 'w').close()\nos.mkdir('a/b', 0)\nos.mkdir('c', 0)"
    assert run(episode, code).status in ("ok", "disk")
    episode.close()
    wait_until(lambda: not any(tmp_path.glob("*/*")))


def test_code_has_no_descriptor_but_the_standard_streams(open_pool: Callable[..., EpisodePool]) -> None:
    code = "import os\nfound = []\nfor number in range(256):\n    try: os.fstat(number)\n    except OSError: continue\n"
    assert run(opened(open_pool()), f"{code}    found.append(number)\nfound").text == "[0, 1, 2]\n"


# --- private mounts


def test_code_sees_no_other_process_and_no_shared_folder(open_pool: Callable[..., EpisodePool]) -> None:
    pool = open_pool()
    (outside := Path("/dev/shm", f"grpo_ray-test-{os.getpid()}")).write_text("x")
    try:
        code = f"import os\n[os.path.exists(each) for each in ('/proc/{os.getpid()}', '{outside}', os.getcwd())]"
        found = run(opened(pool), code).text
    finally:
        with contextlib.suppress(FileNotFoundError):
            outside.unlink()
    assert pool.isolation is not None
    has_mounts = "private mounts" in pool.isolation
    assert found == f"{[not has_mounts, not has_mounts, True]}\n"
    assert has_mounts or os.geteuid() != 0


def test_folders_of_many_files_keep_no_other_call_waiting(
    open_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    """A process of its own removes the folders, while the episode has a new folder already."""
    pool = open_pool(max_files=10**6)
    episode = opened(pool)
    code = (
        "import os\nfor _ in range(40):\n    os.mkdir('d')\n    os.chdir('d')\n    for n in range(50): os.mkdir(str(n))"
    )
    assert run(episode, code).status == "ok"
    assert pool.pid is not None
    supervisor = psutil.Process(pool.pid)
    before = {each.pid for each in supervisor.children()}
    episode.close()
    removers: set[int] = set()

    def is_removed() -> bool:
        removers.update(each.pid for each in supervisor.children() if each.pid not in before)
        return not any(tmp_path.glob("*/*"))

    wait_until(is_removed)
    assert run(opened(pool), "1").text == "1\n"
    wait_until(lambda: not removers & {each.pid for each in supervisor.children()})
    assert removers
