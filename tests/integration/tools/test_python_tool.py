"""The Python tool in real sandbox processes."""

import ast
import ctypes
import json
import platform
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import escape_attempts
import pytest
from escape_attempts import ATTEMPTS
from other_user import as_another_user, needs_own_root

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.processes.landlock import landlock_version
from grpo_ray.processes.seccomp import system_calls
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import Episode, EpisodePool, SandboxLimits

pytestmark = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")

ATTEMPTS_FILE = Path(escape_attempts.__file__)
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
    status, text = run(episode, "import socket\nsocket.socket()")
    assert status == "ok" and text is not None and "Operation not permitted" in text


def test_code_sees_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    config = RolloutConfig(tools=("grpo_ray.tools.python_tool:python",), time_limit=60.0)
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as opened:
        status, text = run(opened.open(None, seed=0, columns={}, call_seed=0), "import os\nsorted(os.environ)")
    names = ast.literal_eval(str(text))
    assert status == "ok" and "PATH" in names and not {"HF_TOKEN", "WANDB_API_KEY"} & set(names)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Folder of the user with files that code tries to reach."""
    for name in ("neighbour", "home"):
        (tmp_path / name).mkdir()
    for name in ("secret", "movable", "removable"):
        (tmp_path / "neighbour" / name).write_text("answer")
    for name in ("token", "truncated", "mode", "time"):
        (tmp_path / "home" / name).write_text("content")
    (tmp_path / "home" / "program").write_text("#!/bin/sh\n")
    (tmp_path / "home" / "program").chmod(0o755)
    return tmp_path


def attempts(folder: Path) -> str:
    """Return code that makes all attempts. Its victim is the process that starts the interpreters of the episode."""
    facts = {
        "address": 0, "folder": str(folder), "group": 1, "victim": 1, "socket": 3, "port": 9, "abstract": "none",
    }  # fmt: skip
    return (
        f"import os\nos.environ['ESCAPE_FACTS'] = {json.dumps(json.dumps(facts))}\n"
        f"exec(compile({ATTEMPTS_FILE.read_text()!r}, 'attempts', 'exec'))"
    )


def worked(status: str, text: str | None) -> set[str]:
    """Return the attempts that worked, by the result of `attempts`."""
    assert status == "ok" and text is not None and text.startswith("{"), text
    results: dict[str, str] = json.loads(text)
    assert results.keys() == ATTEMPTS.keys()
    return {name for name, result in results.items() if result == "worked"}


def test_code_escapes_by_no_attempt(pool: EpisodePool, episode: Episode, beside: Path) -> None:
    assert worked(*run(episode, attempts(beside))) == set()
    assert pool.isolation is not None and "is confined (Landlock" in pool.isolation


def test_code_reaches_no_folder_of_another_completion(pool: EpisodePool, episode: Episode) -> None:
    other = pool.open(None, seed=0, columns={}, call_seed=0)
    assert run(other, "open('answer.txt', 'w').write('42')") == ("ok", "2\n")
    _, text = run(other, "import os\nos.getcwd()")
    folder = ast.literal_eval(str(text))
    for code in (f"open('{folder}/answer.txt').read()", f"open('{folder}/note', 'w')", "import os\nos.listdir('..')"):
        _, text = run(episode, code)
        # With private mounts the folder is not there, or is read-only if the interpreter is in /tmp as well.
        refusals = ("PermissionError", "FileNotFoundError", "Read-only file system")
        assert text is not None and any(each in text for each in refusals)
    assert run(other, "import os\nos.listdir()") == ("ok", "['answer.txt']\n")
    other.close()


def test_code_is_not_confined_without_isolation(beside: Path) -> None:
    config = RolloutConfig(tools=("grpo_ray.tools.python_tool:python",), time_limit=60.0, isolation="none")
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as opened:
        reached = worked(*run(opened.open(None, seed=0, columns={}, call_seed=0), attempts(beside)))
    assert {"file of the user", "file of a neighbour", "note in /tmp"} <= reached and len(reached) >= 40


IN_A_CONTAINER = """
import json, sys
from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ToolError
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits

config = RolloutConfig(tools=("grpo_ray.tools.python_tool:python",), time_limit=60.0, isolation=sys.argv[1])
with EpisodePool(load_definition(config), SandboxLimits.of(config)) as pool:
    try:
        result = pool.open(None, seed=0, columns={}, call_seed=0).call("python", {"code": sys.stdin.read()}).result(240)
        print(json.dumps([result.status, result.text, pool.isolation]))
    except ToolError as error:
        print(json.dumps([type(error).__name__, str(error), pool.isolation]))
"""


def refuse_calls(*numbers: int) -> None:
    """Have system calls fail in this process and all that it starts, as a container's filter does."""
    instructions = [(0x20, 0, 0, 0)]
    for number in numbers:
        instructions += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    program = b"".join(struct.pack("HBBI", *each) for each in [*instructions, (0x06, 0, 0, 0x7FFF0000)])
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header, 0, 0) == 0


def in_a_container(isolation: str, *refused: int, code: str = "6 * 7") -> list[str]:
    """Run code from a process whose system calls are refused; return status, text and level."""
    process = subprocess.run(
        [sys.executable, "-c", IN_A_CONTAINER, isolation],
        preexec_fn=lambda: refuse_calls(*refused),
        input=code,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert process.returncode == 0, process.stderr
    result: list[str] = json.loads(process.stdout)
    return result


CALLS = {call.name: call.number for call in system_calls(platform.machine())}
LANDLOCK = 444


def test_code_is_confined_where_namespaces_are_forbidden() -> None:
    status, text, level = in_a_container("required", CALLS["unshare"], CALLS["setns"])
    assert (status, text) == ("ok", "42\n") and "is confined (Landlock" in level and "private mounts" not in level


def test_code_escapes_by_no_attempt_where_namespaces_are_forbidden(beside: Path) -> None:
    status, text, _ = in_a_container("required", CALLS["unshare"], CALLS["setns"], code=attempts(beside))
    assert worked(status, text) == set()


@needs_own_root
def test_code_of_another_user_escapes_by_no_attempt() -> None:
    test = f"{Path(__file__)}::test_code_escapes_by_no_attempt"
    result = as_another_user([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test])
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr


def test_code_does_not_run_where_it_cannot_be_confined() -> None:
    status, text, level = in_a_container("required", LANDLOCK)
    assert status == "ToolError" and level is None
    assert "cannot be confined here" in text and "set rollout.isolation=best" in text


def test_code_runs_with_a_notice_where_it_cannot_be_confined_if_allowed() -> None:
    status, text, level = in_a_container("best", LANDLOCK)
    assert (status, text) == ("ok", "42\n") and "is not confined here" in level


REACHING = tuple(f"reaching_tools:{name}" for name in ("read_file", "open_socket", "work"))


def results_of_reaching(confine: bool, path: Path) -> dict[str, tuple[str, str | None]]:
    """Return status and text of each reaching tool, and of the Python tool beside them."""
    tools = (*REACHING, "grpo_ray.tools.python_tool:python")
    config = RolloutConfig(tools=tools, time_limit=60.0, confine=confine)
    calls = {
        "read_file": {"path": str(path)}, "open_socket": {}, "work": {},
        "python": {"code": "import socket\nprint(6 * 7)\nsocket.socket()"},
    }  # fmt: skip
    with EpisodePool(load_definition(config), SandboxLimits.of(config)) as opened:
        episode = opened.open(None, seed=0, columns={}, call_seed=0)
        results = {name: episode.call(name, arguments).result(WAIT) for name, arguments in calls.items()}
    return {name: (result.status, result.text) for name, result in results.items()}


def test_own_tools_are_confined_if_the_user_wishes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    results = results_of_reaching(True, tmp_path / "token")
    assert results["work"] == ("ok", "kept 1/2")
    for name in ("read_file", "open_socket"):
        status, text = results[name]
        assert status == "error" and text is not None and text.startswith("PermissionError")
    status, text = results["python"]
    assert status == "ok" and text is not None and text.startswith("42\n") and "Operation not permitted" in text


def test_own_tools_are_trusted_otherwise(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    results = results_of_reaching(False, tmp_path / "token")
    assert results["read_file"] == ("ok", "secret") and results["open_socket"] == ("ok", "opened")
    assert results["work"] == ("ok", "kept 1/2")
    assert "Operation not permitted" in str(results["python"][1])
