"""Tests of confined processes: attempts that must fail in them, and operations that still work."""

import ctypes
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import escape_attempts
import pytest
from escape_attempts import ATTEMPTS, Layer
from escape_table import PAGE
from escape_table import main as escape_table_main
from other_user import as_another_user, is_in_chroot, needs_own_root

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import confinement, landlock
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.landlock import SIGNALS_SINCE, landlock_version, restrict_files

ATTEMPTS_FILE = Path(escape_attempts.__file__)
VERSION = landlock_version()
needs_landlock = pytest.mark.skipif(not VERSION, reason="this kernel, or this container, has no Landlock")
READ = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/passwd", sys.prefix, sys.base_prefix,
    sysconfig.get_paths()["stdlib"], str(ATTEMPTS_FILE),
)  # fmt: skip
LIMITS = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: 1 << 20, resource.RLIMIT_AS: 1 << 30}
SECRET = ctypes.create_string_buffer(b"secret 8")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder with the process's own folder `own`, and beside it what it must not reach."""
    for name in ("own", "neighbour", "home"):
        (tmp_path / name).mkdir()
    for name in ("secret", "movable", "removable"):
        (tmp_path / "neighbour" / name).write_text("answer")
    for name in ("token", "truncated", "mode", "time"):
        (tmp_path / "home" / name).write_text("content")
    (tmp_path / "home" / "program").write_text("#!/bin/sh\n")
    (tmp_path / "home" / "program").chmod(0o755)
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
    own = folder / "own"
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
        abstract.bind(f"\0{folder}")
        abstract.listen(1)
        facts = {
            "victim": os.getpid(), "address": ctypes.addressof(SECRET), "folder": str(folder),
            "group": os.getpgid(0), "socket": server.fileno(), "port": server.getsockname()[1],
            "abstract": str(folder),
        }  # fmt: skip
        variables = {
            "PATH": os.environ["PATH"], "HOME": str(own), "TMPDIR": str(own), "ESCAPE_FACTS": json.dumps(facts),
        }  # fmt: skip

        def restrict() -> None:
            if confine is not None:
                confine.apply([str(own)], LIMITS)
            else:  # limits that are only soft, as code had them before it was confined
                for kind, limit in {resource.RLIMIT_CORE: 0, **LIMITS}.items():
                    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))

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
    result = run(folder, str(ATTEMPTS_FILE), confine=confine)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout)
    return found


@needs_landlock
def test_no_attempt_to_escape_works(folder: Path) -> None:
    confined = attempts(folder, Confinement(READ))
    assert {name: result for name, result in confined.items() if result == "worked"} == {}
    assert confined.keys() == ATTEMPTS.keys() and len(confined) >= 110
    assert (folder / "home" / "truncated").read_text() == "content"
    assert {each.name for each in (folder / "neighbour").iterdir()} == {"secret", "movable", "removable"}


def has_all_rights() -> bool:
    """Return True for root with the right to administrate the system, which root in a container lacks."""
    sets = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), sets)
    return os.geteuid() == 0 and bool(struct.unpack("6I", sets.raw)[0] >> 21 & 1)


MISSING = ("ENOSYS", "EAFNOSUPPORT", "ENODEV", "ENOENT", "EOPNOTSUPP", "ESOCKTNOSUPPORT", "EPROTONOSUPPORT", "EINVAL")
"""Errors of a kernel that lacks a part."""


@needs_landlock
def test_attempts_to_escape_work_without_confinement(folder: Path) -> None:
    """A refusal above means something only if the attempt itself is right."""
    unconfined = attempts(folder, None)
    users = ("anyone", "the same user", "root") if has_all_rights() else ("anyone",)
    expected = {name: each for name, each in ATTEMPTS.items() if each.works_for in users}
    failed = {name: unconfined[name] for name in expected if unconfined[name] != "worked"}
    assert {name: result for name, result in failed.items() if not (expected[name].needs and is_missing(result))} == {}
    assert len(expected) - len(failed) >= 40


def is_missing(result: str) -> bool:
    if result == "EPERM" and is_in_chroot():  # no user namespaces
        return True
    return result in MISSING or result.startswith("ended by signal") or not has_all_rights()


class OneLayer(Confinement):
    """Confinement by one of its layers only."""

    def __init__(self, layer: str):
        super().__init__(READ)
        self.layer = layer

    def apply(self, own: Iterable[str], limits: Mapping[int, int]) -> None:
        for kind, limit in {resource.RLIMIT_CORE: 0, **limits}.items():
            resource.setrlimit(kind, (limit, limit if self.layer == "limits" else resource.getrlimit(kind)[1]))
        assert confinement._prctl(confinement._NO_NEW_PRIVILEGES, 1) == 0
        if self.layer == "Landlock":
            restrict_files(self.read, own, self.version)
        elif self.layer == "capabilities":
            confinement._drop_capabilities()
        elif self.layer == "seccomp":
            address = ctypes.addressof(self._header)
            assert confinement._prctl(confinement._SET_SECCOMP, confinement._SECCOMP_FILTER, address) == 0


@pytest.mark.skipif(VERSION < SIGNALS_SINCE, reason="Landlock stops signals since version 6")
@pytest.mark.parametrize("layer", get_args(Layer))
def test_layer_stops_its_attempts_alone(folder: Path, layer: str) -> None:
    """The other layers are off, so each of them is needed."""
    results = attempts(folder, OneLayer(layer))
    own = {name for name, each in ATTEMPTS.items() if each.layer == layer}
    assert own and {name: results[name] for name in own if results[name] == "worked"} == {}
    assert "worked" in results.values()  # which another layer stops


@needs_landlock
@needs_own_root
def test_no_attempt_of_another_user_works() -> None:
    """Tests that run as root try it again as the user nobody."""
    test = f"{Path(__file__)}::test_no_attempt_to_escape_works"
    result = as_another_user([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test])
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr


@needs_landlock
@pytest.mark.parametrize("version", [version for version in range(1, 8) if version <= VERSION])
def test_older_landlock_restricts_files_and_signals_too(folder: Path, version: int) -> None:
    confined = attempts(folder, Confinement(READ, version=version))
    assert {name: result for name, result in confined.items() if result == "worked"} == {}


@needs_landlock
@pytest.mark.parametrize("code", ["os.stat(sys.argv[1])", "os.stat('/proc/1')"])
def test_names_and_sizes_of_files_are_visible(folder: Path, code: str) -> None:
    """Landlock does not restrict `stat`, as the documentation says; private mounts hide /proc and /tmp."""
    program = f"import os, sys\n{code}"
    result = run(folder, "-c", program, str(folder / "home" / "token"), confine=Confinement(READ))
    assert result.returncode == 0, result.stderr


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


@pytest.mark.parametrize(
    ("system", "machine", "reason"), [("darwin", "x86_64", "has no Landlock"), ("darwin", "arm64", "not on arm64")]
)
def test_other_system_is_refused_without_a_system_call(
    system: str, machine: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of Landlock's system call is that of another one there."""
    monkeypatch.setattr(landlock, "_libc", None)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(confinement.platform, "machine", lambda: machine)
    with pytest.raises(ConfinementError, match=reason):
        Confinement([])


def test_machine_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfinementError, match=r"on x86_64 and aarch64 only, not on riscv64"):
        Confinement(READ, version=7)


def test_page_has_the_attempts_of_the_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n" + PAGE.read_text().replace("| Landlock |", "| nothing |"))
    escape_table_main(page)
    assert page.read_text() == "above\n" + PAGE.read_text()
