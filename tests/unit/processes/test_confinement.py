"""Tests of confined processes: what they try to reach, and what still works in them."""

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import confinement
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.landlock import landlock_version

ATTEMPTS = Path(__file__).parents[2] / "helpers" / "escape_attempts.py"
VERSION = landlock_version()
needs_landlock = pytest.mark.skipif(not VERSION, reason="this kernel, or this container, has no Landlock")
READ = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/passwd", sys.prefix, sys.base_prefix,
    sysconfig.get_paths()["stdlib"], str(ATTEMPTS),
)  # fmt: skip
LIMITS = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: 1 << 20, resource.RLIMIT_AS: 1 << 30}
SECRET = ctypes.create_string_buffer(b"secret 8")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder with the process's own folder `own`, and beside it what it must not reach."""
    for name in ("own", "neighbour", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "neighbour" / "secret").write_text("answer")
    for name in ("token", "truncated", "mode", "time"):
        (tmp_path / "home" / name).write_text("content")
    with ExitStack() as stack:
        for name, kind in (("stream", socket.SOCK_STREAM), ("datagrams", socket.SOCK_DGRAM)):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            here = os.getcwd()
            os.chdir(tmp_path)  # the path of a socket must be short
            try:
                sock.bind(name)
            finally:
                os.chdir(here)
            if kind == socket.SOCK_STREAM:
                sock.listen(1)
        yield tmp_path


def run(folder: Path, *arguments: str, confine: Confinement | None) -> "subprocess.CompletedProcess[str]":
    """Run a program in the process's own folder."""
    facts = {"victim": os.getpid(), "address": ctypes.addressof(SECRET), "folder": str(folder), "group": os.getpgid(0)}
    own = folder / "own"
    variables = {"PATH": os.environ["PATH"], "HOME": str(own), "TMPDIR": str(own), "ESCAPE_FACTS": json.dumps(facts)}

    def restrict() -> None:
        if confine is not None:
            confine.apply([str(own)], LIMITS)

    return subprocess.run(
        [sys.executable, "-s", "-P", *arguments],
        env=variables,
        cwd=own,
        capture_output=True,
        text=True,
        preexec_fn=restrict,
        start_new_session=True,
        timeout=300,
    )


def attempts(folder: Path, confine: Confinement | None) -> dict[str, str]:
    result = run(folder, str(ATTEMPTS), confine=confine)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout)
    return found


@needs_landlock
def test_no_attempt_to_escape_works(folder: Path) -> None:
    confined = attempts(folder, Confinement(READ))
    assert {name: result for name, result in confined.items() if result == "worked"} == {}
    assert len(confined) >= 55
    assert (folder / "home" / "truncated").read_text() == "content"
    assert [each.name for each in (folder / "neighbour").iterdir()] == ["secret"]


@needs_landlock
def test_attempts_to_escape_work_without_confinement(folder: Path) -> None:
    """A refusal above means something only if the attempt itself is right."""
    unconfined = attempts(folder, None)
    worked = {name for name, result in unconfined.items() if result == "worked"}
    expected = {
        "socket of AF_INET", "connection to a socket of the user", "datagram to a socket of the user",
        "signal to the victim", "file of a neighbour", "note for a neighbour", "file of the user", "home of the user",
        "file of a neighbour by a symbolic link", "file moved to a neighbour", "note in /tmp", "list of the neighbours",
        "mode of a file of the user", "time of a file of the user", "truncated file of the user", "shared memory",
        "process group of its own", "limits of the victim", "priority of the victim", "pipe with a name",
        "handle of the victim", "watch of files", "ownership of a pipe by the victim",
    }  # fmt: skip
    assert expected <= worked, {name: unconfined.get(name) for name in expected - worked}


@needs_landlock
@pytest.mark.parametrize("version", [version for version in range(1, 8) if version <= VERSION])
def test_older_landlock_restricts_files_and_signals_too(folder: Path, version: int) -> None:
    confined = attempts(folder, Confinement(READ, version=version))
    assert {name: result for name, result in confined.items() if result == "worked"} == {}


WORKING = {
    "subprocess": "import subprocess as s; assert s.check_output('echo hi | tr h j', shell=True) == b'ji\\n'",
    "time limit of a subprocess": (
        "import subprocess\ntry: subprocess.run(['sleep', '60'], timeout=0.1)\n"
        "except subprocess.TimeoutExpired: print('over')"
    ),
    "new session": "import subprocess, sys; subprocess.check_call([sys.executable, '-c', ''], start_new_session=True)",
    "process with a pipe": (
        "import multiprocessing as m\na, b = m.get_context('fork').Pipe()\n"
        "p = m.get_context('fork').Process(target=b.send, args=(7,)); p.start(); assert a.recv() == 7; p.join()"
    ),
    "threads": "from concurrent.futures import ThreadPoolExecutor as E\nwith E(4) as e: list(e.map(abs, [-1, -2]))",
    "temporary files": (
        "import os, tempfile, shutil\nd = tempfile.mkdtemp(); assert d.startswith(os.getcwd())\n"
        "open(d + '/x', 'w').write('y'); shutil.copy2(d + '/x', 'z'); shutil.rmtree(d)"
    ),
    "events": (
        "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', '1')\n"
        "    return await p.wait()\nasyncio.run(f())"
    ),
    "database": "import sqlite3; c = sqlite3.connect('d.db'); c.execute('create table t(a)'); c.commit()",
    "archive": (
        "import tarfile\nopen('q', 'w').write('1')\nwith tarfile.open('t.tar', 'w') as t: t.add('q')\n"
        "tarfile.open('t.tar').extractall('e')"
    ),
    "NumPy": "import numpy as np; a = np.random.rand(50, 50); np.save('a.npy', a); print(np.linalg.svd(a)[1][0])",
    "SymPy": "import sympy as s; x = s.Symbol('x'); print(s.integrate(s.sin(x) ** 2, x))",
    "end of an own process": (
        "import os, time\np = os.fork()\nif p == 0: time.sleep(60)\nos.kill(p, 9); os.waitpid(p, 0)"
    ),
}


@needs_landlock
@pytest.mark.parametrize("what", WORKING)
def test_ordinary_code_works(folder: Path, what: str) -> None:
    if VERSION < 6 and what in ("time limit of a subprocess", "end of an own process"):
        pytest.skip("without a PID namespace, Landlock before version 6 leaves no signals")
    result = run(folder, "-c", WORKING[what], confine=Confinement(READ))
    assert result.returncode == 0, result.stderr


@needs_landlock
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("bytearray(2 << 30)", "MemoryError"),
        ("open('large', 'wb').write(bytes(2 << 20)) and open('large', 'ab').write(b'x')", "File too large"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))", "not allowed to raise"),
    ],
)
def test_limits_are_hard(folder: Path, code: str, error: str) -> None:
    result = run(folder, "-c", code, confine=Confinement(READ))
    assert result.returncode != 0
    assert error in result.stderr or result.returncode == -25  # SIGXFSZ


@needs_landlock
def test_own_folder_that_does_not_exist_ends_the_process(folder: Path) -> None:
    confine = Confinement(READ)
    shutil.rmtree(folder / "own")

    def start() -> None:
        subprocess.run([sys.executable, "-c", "pass"], preexec_fn=lambda: confine.apply([str(folder / "own")], {}))

    with pytest.raises(subprocess.SubprocessError):
        start()


def test_system_without_landlock_is_refused() -> None:
    with pytest.raises(ConfinementError, match=r"no Landlock"):
        Confinement(READ, version=0)


def test_machine_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfinementError, match=r"on x86_64 and aarch64 only, not on riscv64"):
        Confinement(READ, version=7)
