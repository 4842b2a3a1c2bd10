"""The Python tool in real sandbox processes."""

import multiprocessing
from collections.abc import Iterator

import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.python_tool import leave_network
from grpo_ray.tools.sandbox.pool import Episode, EpisodePool, SandboxLimits

WAIT = 240.0
"""Seconds after which a test gives up; far more than any of them takes."""


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    config = RolloutConfig(tools=("grpo_ray.tools.python_tool:python",), time_limit=20.0, memory_gib=1.0)
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as opened:
        yield opened


@pytest.fixture
def episode(pool: EpisodePool) -> Iterator[Episode]:
    opened = pool.open(None, seed=0, columns={}, call_seed=0)
    yield opened
    opened.close()


def run(episode: Episode, code: str) -> tuple[str, str | None]:
    result = episode.call("python", {"code": code}).result(WAIT)
    return result.status, result.text


def test_code_and_its_errors(episode: Episode) -> None:
    assert run(episode, "x = 20\nprint(x)\nx + 1") == ("ok", "20\n21\n")
    status, text = run(episode, "x")
    assert status == "ok" and text is not None and text.endswith("NameError: name 'x' is not defined\n")


def test_packages_work_within_the_limits(episode: Episode) -> None:
    code = "import numpy as np, sympy\nprint((np.ones((50, 50)) @ np.ones((50, 50)))[0, 0])\nsympy.factorint(1001)"
    assert run(episode, code) == ("ok", "50.0\n{7: 1, 11: 1, 13: 1}\n")


def test_files_are_kept_within_a_completion_only(pool: EpisodePool, episode: Episode) -> None:
    assert run(episode, "open('a.txt', 'w').write('x')") == ("ok", "1\n")
    assert run(episode, "import os\nos.listdir()") == ("ok", "['a.txt']\n")
    other = pool.open(None, seed=0, columns={}, call_seed=0)
    assert run(other, "import os\nos.listdir()") == ("ok", "[]\n")
    other.close()


def test_memory_is_limited(episode: Episode) -> None:
    status, text = run(episode, "kept = bytearray(8 << 30)")
    assert status == "ok" and text is not None and text.endswith("MemoryError\n")


def test_endless_output_ends_at_the_time_limit(pool: EpisodePool) -> None:
    config = RolloutConfig(tools=("grpo_ray.tools.python_tool:python",), time_limit=2.0)
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as short:
        episode = short.open(None, seed=0, columns={}, call_seed=0)
        assert run(episode, "while True:\n    print('x' * 1000)")[0] == "timeout"


def test_processes_are_limited(episode: Episode) -> None:
    code = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(1000)\ntime.sleep(1000)"
    assert run(episode, code)[0] == "processes"


def test_code_has_no_network(episode: Episode) -> None:
    """The code is connected to no port, where namespaces are allowed; a server of this test would be within reach."""
    code = (
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    socket.create_connection(server.getsockname(), 5)"
    )
    if not may_leave_network():
        pytest.skip("the kernel does not allow namespaces here")
    status, text = run(episode, code)
    assert status == "ok" and text is not None and "Network is unreachable" in text


def may_leave_network() -> bool:
    """Return True if a process of this user may enter a network namespace; tried in a child, which it would change."""
    with multiprocessing.get_context("spawn").Pool(1) as one:
        return one.apply(leave_network)
