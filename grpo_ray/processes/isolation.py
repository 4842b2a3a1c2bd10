"""Confinement of code that the policy writes: readable files, the layers of protection that work here, and a trial.

The supervisor of tools calls `prepare` once. The processes of episodes are its forks; they confine the interpreters
that they start, or themselves, with `confine`. If `prepare` was not called, `confine` requires a confinement and raises
an error without one. Where namespaces can be made, `hide_system` first gives the process that starts the interpreters
private mounts.
"""

import os
import resource
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_ray.errors import ConfinementError
from grpo_ray.processes import mounts, namespaces
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
"""Files and folders that programs read; the rest of /etc and /proc, with secrets and other processes, is excluded."""
PROGRAM = """\
import ctypes, math, zlib
for name in ("bz2", "curses", "decimal", "hashlib", "lzma", "readline", "sqlite3", "ssl", "uuid"):
    try:
        __import__(name)
    except ImportError:  # this interpreter was built without it
        pass
"""
"""Program that loads the shared libraries of the standard library."""
LIST = """\
with open("/proc/self/maps") as maps:
    print(*{line.split(None, 5)[-1].strip() for line in maps if ".so" in line}, sep=chr(10))
"""
"""Program that prints the loaded shared libraries, one per line."""
ADVICE = "set rollout.isolation=best to run the code without confinement where there is none"


@dataclass
class _Isolation:
    """State of the confinement in this process and in its forks."""

    is_required: bool = True
    confinement: Confinement | None = None
    confinement_in_namespace: Confinement | None = None
    """Confinement of interpreters in a PID namespace, where signals reach their own descendants only."""
    is_prepared: bool = False
    has_mounts: bool = False
    """True if the first process of a PID namespace can have private mounts."""
    is_applied: bool = False
    """True in a process that is confined, as are all that it starts."""


_isolation = _Isolation()


def readable_places(files: Iterable[str] = ()) -> list[str]:
    """Return the files and folders that an interpreter of this environment reads, and `files`."""
    interpreter = os.path.dirname(os.path.realpath(sys.executable))
    libraries = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    own = [sys.prefix, sys.base_prefix, interpreter, *sysconfig.get_paths().values(), *libraries, *files]
    return [*SYSTEM, *dict.fromkeys(own)]


def package_places() -> list[str]:
    """Return the folders of the packages that this process has imported, and the files of its single modules.

    A package may import further modules of its own later, and may lie outside of the interpreter's folders: in the
    user's site, in a folder of PYTHONPATH, as Ray's `py_modules` do, or in an editable checkout. The folders of
    `sys.path` themselves are left out, as are those that contain the user's home, since they hold other files too.
    """
    places: dict[str, None] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__":
            continue
        file = getattr(module, "__file__", None)
        found = getattr(module, "__path__", None) or ([file] if file else ())
        places |= dict.fromkeys(os.path.abspath(each) for each in found if isinstance(each, str))
    home = Path(os.path.expanduser("~")).resolve()
    return [place for place in places if not home.is_relative_to(os.path.realpath(place))]


def prepare(wanted: str, folder: str, files: Iterable[str] = ()) -> str:
    """Prepare the confinement, and test it with a trial that tries to escape.

    Args:
        wanted: `rollout.isolation`.
        folder: folder in which the trial makes a file that confined code must not reach.
        files: further files that interpreters read.

    Returns:
        A line for the user about the confinement in effect.

    Raises:
        ConfinementError: confinement is required, and the system has none, or the trial escaped.
    """
    global _isolation
    _isolation = _Isolation(is_required=wanted == "required", is_prepared=True)
    if wanted == "none":
        return "code that the policy writes is not confined (rollout.isolation=none)"
    places = readable_places(files)
    try:
        places += interpreter_libraries(places, folder)
        confinement = Confinement(places)
        if escaped := try_to_escape(confinement, folder):
            raise ConfinementError(f"confined code could reach {', '.join(escaped)}")
        _run_interpreter(PROGRAM, folder, confinement)
    except ConfinementError as error:
        if _isolation.is_required:
            raise ConfinementError(f"code that the policy writes cannot be confined here: {error}; {ADVICE}") from None
        return f"code that the policy writes is not confined here: {error}"
    _isolation.confinement = confinement
    _isolation.confinement_in_namespace = Confinement(places, has_pid_namespace=True)
    _isolation.has_mounts = mounts_work(folder, places)
    further = ", private mounts" if _isolation.has_mounts else ""
    return f"code that the policy writes is confined (Landlock {confinement.version}, filtered system calls{further})"


def interpreter_libraries(places: Iterable[str], folder: str) -> list[str]:
    """Return the shared libraries that an interpreter of this environment loads from elsewhere than `places`.

    The interpreter finds them by its own search path (RPATH), as with packages of Nix and Spack. Only the files become
    readable, not their folders.

    Args:
        folder: folder in which the interpreter gets a temporary working folder.

    Raises:
        ConfinementError: it cannot run.
    """
    known = [Path(place).resolve() for place in places]
    loaded = sorted(line for line in _run_interpreter(PROGRAM + LIST, folder).splitlines() if line.startswith("/"))
    return [each for each in loaded if not any(Path(each).is_relative_to(place) for place in known)]


def _run_interpreter(program: str, folder: str, confinement: Confinement | None = None) -> str:
    """Run a program in an interpreter with few variables, and return its output.

    Raises ConfinementError if it cannot run.
    """
    variables = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            run = subprocess.run(
                [sys.executable, "-s", "-P", "-c", program],
                cwd=own,
                env={**variables, "HOME": own, "TMPDIR": own, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                preexec_fn=None if confinement is None else partial(confinement.apply, [own], {}),
            )
        except (OSError, subprocess.SubprocessError) as error:  # it cannot be executed
            raise ConfinementError(f"{sys.executable}: {error}") from None
    if run.returncode != 0:
        how = "" if confinement is None else "confined "
        reason = (run.stderr.strip().splitlines() or ["no error was printed"])[-1]
        raise ConfinementError(f"the {how}interpreter {sys.executable} ended with {run.returncode}: {reason}")
    return run.stdout


def hide_system(folder: str) -> None:
    """Set up private mounts in this process, the first one of a PID namespace, if they work here.

    Args:
        folder: its folder, which stays writable.
    """
    if _isolation.has_mounts and _isolation.confinement is not None:
        mounts.make_private(folder, _isolation.confinement.read)


def mounts_work(folder: str, places: Iterable[str]) -> bool:
    """Return True if private mounts work here; tried in a child process."""
    with tempfile.TemporaryDirectory(dir=folder) as trial:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                if namespaces.enter_pid_namespace():
                    if (first := os.fork()) == 0:
                        mounts.make_private(trial, places)
                        Path(trial, "file").write_text("x")
                        # In a /proc of another namespace, this process has another number.
                        status = 0 if os.readlink("/proc/self") == str(os.getpid()) == "1" else 1
                    else:
                        status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
            except (OSError, ConfinementError):  # the layer is left out
                status = 1
            finally:
                os._exit(status)
        return os.waitpid(pid, 0)[1] == 0


def hard_limits() -> dict[int, int]:
    """Return this process's soft limits of memory, file size and open files, to be made hard for untrusted code."""
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
    soft = {kind: resource.getrlimit(kind)[0] for kind in kinds}
    return {kind: limit for kind, limit in soft.items() if limit != resource.RLIM_INFINITY}


def confine(own: str, limits: Mapping[int, int], files: Iterable[str] = ()) -> None:
    """Confine this process, which is about to run code, to its folder. Its forks are confined too.

    Args:
        own: folder of the process, in which it can write at all depths.
        limits: resource (`RLIMIT_...`) -> hard limit.
        files: further files that it reads, if nothing was prepared.

    Raises:
        ConfinementError: confinement is required, and this process cannot be confined.
    """
    if _isolation.is_applied:
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, limit))
        return
    confinement = _isolation.confinement_in_namespace if 1 in (os.getpid(), os.getppid()) else _isolation.confinement
    if confinement is None and not _isolation.is_prepared:
        confinement = Confinement(readable_places(files))
    if confinement is not None:
        confinement.apply([own], limits)
        _isolation.is_applied = True
    elif _isolation.is_required:
        raise ConfinementError("the confinement was not prepared")


def isolation_issue() -> str | None:
    """Return the reason why this machine cannot confine code, in one line; None if it can.

    The trial runs in a separate process: this one may have threads, and must not be confined.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    trial = subprocess.run(
        [sys.executable, "-m", "grpo_ray.processes.isolation"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if trial.returncode == 0:
        return None
    lines = [line.strip() for line in (trial.stdout + trial.stderr).splitlines() if line.strip()]
    return (
        f"rollout.isolation=required: {lines[-1] if lines else 'the trial of the confinement ended without a result'}"
    )


def try_to_escape(confinement: Confinement, folder: str) -> list[str]:
    """Return the names of attempts that must fail in a confined process, but succeeded."""
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


def main() -> int:
    """Try to confine code here; if that is impossible, print the reason and return 1."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepare("required", folder)
        except ConfinementError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
