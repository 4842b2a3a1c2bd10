"""Confinement of the interpreters of the Python tool: what they may read, how far it goes here, and a trial of it.

The supervisor calls `prepare` once; the processes of episodes are its forks, and confine the interpreters that they
start with `confine`. Without `prepare` an interpreter is confined, or not started.
"""

import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_ray.errors import ConfinementError
from grpo_ray.processes.confinement import Confinement

SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone")),
    *(f"/etc/{name}" for name in ("passwd", "group", "nsswitch.conf", "mime.types")),
    *("/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
)
"""Files and folders that programs read: no others of /etc and /proc, where secrets and other processes are."""
ADVICE = "set rollout.isolation=best to run the code without confinement where there is none"


@dataclass
class _Isolation:
    """How interpreters are confined in this process and in its forks."""

    is_required: bool = True
    confinement: Confinement | None = None
    confinement_in_namespace: Confinement | None = None
    """The same for interpreters in a PID namespace, where signals reach their own descendants only."""
    is_prepared: bool = False


_isolation = _Isolation()


def readable_places(files: Iterable[str] = ()) -> list[str]:
    """Return what an interpreter of this environment reads, and `files`."""
    interpreter = os.path.dirname(os.path.realpath(sys.executable))
    libraries = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    own = [sys.prefix, sys.base_prefix, interpreter, *sysconfig.get_paths().values(), *libraries, *files]
    return [*SYSTEM, *dict.fromkeys(own)]


def prepare(wanted: str, folder: str, files: Iterable[str] = ()) -> str:
    """Prepare the confinement, and try to get out of it.

    Args:
        wanted: `rollout.isolation`.
        folder: in which the trial makes a file that it must not reach.
        files: further files that interpreters read.

    Returns:
        A description of what was reached, for people.

    Raises:
        ConfinementError: confinement is required, and the system has none, or the trial got out.
    """
    global _isolation
    _isolation = _Isolation(is_required=wanted == "required", is_prepared=True)
    if wanted == "none":
        return "the code of the Python tool is not confined (rollout.isolation=none)"
    places = readable_places(files)
    try:
        confinement = Confinement(places)
        if escaped := try_to_escape(confinement, folder):
            raise ConfinementError(f"confined code could reach {', '.join(escaped)}")
    except ConfinementError as error:
        if _isolation.is_required:
            raise ConfinementError(f"the code of the Python tool cannot be confined here: {error}; {ADVICE}") from None
        return f"the code of the Python tool is not confined here: {error}"
    _isolation.confinement = confinement
    _isolation.confinement_in_namespace = Confinement(places, has_pid_namespace=True)
    return f"the code of the Python tool is confined (Landlock {confinement.version}, filtered system calls)"


def confine(own: str, limits: Mapping[int, int], files: Iterable[str] = ()) -> None:
    """Confine this process, which is about to become an interpreter, to its folder.

    Args:
        own: its folder.
        limits: resource (`RLIMIT_...`) -> hard limit.
        files: further files that it reads, if nothing was prepared.

    Raises:
        ConfinementError: it must be confined and cannot be.
    """
    confinement = _isolation.confinement_in_namespace if os.getppid() == 1 else _isolation.confinement
    if confinement is None and not _isolation.is_prepared:
        confinement = Confinement(readable_places(files))
    if confinement is not None:
        confinement.apply([own], limits)
    elif _isolation.is_required:
        raise ConfinementError("the confinement was not prepared")


def try_to_escape(confinement: Confinement, folder: str) -> list[str]:
    """Return what a confined process could reach and must not."""
    with tempfile.TemporaryDirectory(dir=folder) as trial:
        own, neighbour = Path(trial, "own"), Path(trial, "neighbour")
        own.mkdir()
        neighbour.write_text("answer")
        readable, writable = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                confinement.apply([str(own)], {})
                (own / "file").write_text("x")  # which must work
                for name, attempt in _attempts(neighbour).items():
                    if _works(attempt):
                        os.write(writable, f"{name}\n".encode())
                os.write(writable, b"end\n")
            finally:
                os._exit(0)
        os.close(writable)
        with open(readable, encoding="utf-8") as found:
            *escaped, end = found.read().splitlines() or [""]
        os.waitpid(pid, 0)
    if end != "end":
        raise ConfinementError("a confined process cannot run")
    return escaped


def _attempts(neighbour: Path) -> dict[str, Callable[[], object]]:
    return {
        "the network": partial(socket.socket, socket.AF_INET),
        "sockets of the system": partial(socket.socket, socket.AF_UNIX),
        "files of others": neighbour.read_text,
        "folders of others": partial(os.listdir, neighbour.parent),
        "temporary files": partial(tempfile.TemporaryFile, dir="/tmp"),
        "other processes": partial(os.kill, os.getppid(), 0),
        "variables of other processes": Path("/proc/1/environ").read_bytes,
        "memory of other processes": partial(open, f"/proc/{os.getppid()}/mem", "rb"),
    }


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
