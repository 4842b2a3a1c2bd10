"""Warm interpreters: processes that have the libraries imported and fork a Ray worker in milliseconds.

Why: a run on one machine starts about 16 Python processes. Each imports Ray and pandas (2 CPU seconds), and each train
worker torch, transformers, TRL and vLLM (12 CPU seconds); a restart after a killed worker pays for them again.

How: while the driver starts a Ray cluster on its own machine, `sys.executable` is a small script, and Ray starts its
workers with it. The script (`warm_client.py`) sends its arguments, environment and standard streams to a server here,
which forks; the child becomes the worker. The light server has what every Ray worker imports. The heavy one, forked
from it, has what train workers and evaluations import too, with their environment variables (`HEAVY_MARK`).

Each server imports in two stages. Ray's C++ library reads its settings from environment variables when it is loaded,
among them the job's and the raylet's ids, so Ray itself and whatever imports it wait for the first request, and are
imported with the environment of that request.

Risks, and how they are met:
- A fork copies the calling thread only, so a lock that another thread holds stays locked. The servers therefore refuse
  to fork unless they have a single thread; variables in `SINGLE_THREAD` keep libraries from starting threads.
- Libraries read environment variables when they are imported. A request is refused if its environment differs from the
  server's in any variable (but for those of the heavy server, which nothing in the light one reads).
- Random generators are copied, too. Python's reseed themselves and numpy's is reseeded, but Ray's C++ generator of ids
  cannot be: two workers would give the same id to different objects. So it must not have been used before the fork
  (`without_drawing`), which each server proves before it serves (`draws_differ`).
- The fork server shares memory layout and hash seed among workers, which matters where one of them runs hostile code.
- A refused request, a missing server or any error: the client runs the plain interpreter, as Ray would have done.

Off with GRPO_RAY_WARM_START=0; not used with GPUs (CUDA does not survive a fork) or with a cluster that others started.
Linux only. This module is run as a script in the servers, so it imports nothing of the package.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Preload(NamedTuple):
    """Modules that a server imports, in this order."""

    early: Sequence[str]
    """At once; none of them may import Ray."""
    late: Sequence[str]
    """With the environment of the first request."""


SWITCH = "GRPO_RAY_WARM_START"
"""Environment variable; "0" switches warm starts off."""

LIGHT = Preload(
    ("numpy", "pyarrow", "pandas", "pydantic", "google.protobuf.message"),
    ("ray", "ray.data", "ray.train", "ray.train.v2.api.data_parallel_trainer", "ray._private.workers.default_worker"),
)
HEAVY = Preload(
    ("torch", "transformers", "accelerate", "peft", "datasets"),
    (
        "ray.train.torch",
        "trl",
        "vllm",
        "grpo_ray.training.worker",
        "grpo_ray.training.one_step_off_policy",
        "grpo_ray.resilience.elastic",
        "grpo_ray.evaluation.evaluate",
    ),
)

SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment of the servers while they import: keeps numpy and pyarrow from starting threads."""

NO_JOB = "ffffffff"
"""`RAY_JOB_ID` of workers that Ray starts before there is a job; these are left to the plain interpreter."""

OOM_SCORE = "RAY_worker_oom_score_adjustment"

READ_WHEN_USED = ("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",)
"""Environment variables that Ray Train gives to its actors, and that no library reads when it is imported."""

OWNER = 0
"""File descriptor in the servers that becomes readable when the driver is gone."""

LOG = "server.log"
"""Output of the servers: refused requests and modules that could not be imported."""


def is_wanted(use_gpu: bool) -> bool:
    """Return whether workers can be started by a fork here, for a cluster that this process is about to start."""
    plain = not (sys.flags.no_site or sys.flags.no_user_site)
    return sys.platform == "linux" and plain and not use_gpu and os.environ.get(SWITCH) != "0"


@contextmanager
def warm_executable(
    heavy_environment: Mapping[str, str], light: Preload = LIGHT, heavy: Preload = HEAVY
) -> Iterator[str]:
    """Start the servers, and have `sys.executable` name the client inside the block.

    The servers end with this process, or with the process whose children they replace (the raylet).

    Args:
        heavy_environment: variables that processes of the heavy server have on top of the driver's.
    """
    folder = Path(tempfile.mkdtemp(prefix="grpo_ray-warm-"))
    plain = sys.executable
    client = folder / "python"
    words = [plain, "-S", "-E", "-s", str(Path(__file__).with_name("warm_client.py")), str(folder)]
    client.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    client.chmod(0o700)
    if not os.access(client, os.X_OK):  # a file system mounted with noexec
        shutil.rmtree(folder)
        yield plain
        return
    settings = {
        "folder": str(folder),
        "package_root": str(Path(__file__).parents[2]),
        "heavy_environment": dict(heavy_environment),
        "light": light,
        "heavy": heavy,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    with open(folder / LOG, "wb") as log:
        server = subprocess.Popen(
            [plain, __file__, str(folder)],
            stdin=subprocess.PIPE,  # never written: its end tells the server that this process is gone
            stdout=log,
            stderr=log,
            env=os.environ | SINGLE_THREAD,
        )
    threading.Thread(target=server.wait, name="reaps the warm server", daemon=True).start()
    sys.executable = str(client)
    try:
        yield str(client)
    finally:
        sys.executable = plain


class Server:
    """Accepts requests at a Unix socket and forks a child for each.

    Args:
        listener: bound before the imports began, so that early clients wait and are not refused.
        free: names of the variables in which a request may differ from the first one.
    """

    def __init__(self, listener: socket.socket, free: Collection[str] = ()):
        self.listener, self.free = listener, free
        self.environment: Mapping[str, str] | None = None
        """Of the workers; None until the first request."""
        self.adopt: Callable[[dict[str, str]], None]
        """Called with the environment of the first request; does the late imports."""
        self.raylet: int | None = None
        """File descriptor of the process that starts the workers."""

    def serve(self) -> dict[str, Any] | None:
        """Serve until the driver or the raylet is gone; returns None then. Returns the request in a forked child."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
        while True:
            ends = [OWNER, *([] if self.raylet is None else [self.raylet])]
            ready, _, _ = select.select([self.listener.fileno(), *ends], [], [])
            if any(each in ready for each in ends):
                return None
            connection, _ = self.listener.accept()
            with connection:
                connection.settimeout(5)
                try:
                    if (asked := self._answer(connection)) is not None:
                        return asked
                except (OSError, ValueError) as error:  # the client gave up
                    print(f"a request was dropped: {error!r}", file=sys.stderr, flush=True)

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a client. Returns the request in the child, None in the server."""
        header, streams, _, _ = socket.recv_fds(connection, 4, 3)
        try:
            with connection.makefile("rb") as stream:
                asked = json.loads(stream.read(int.from_bytes(header, "big")))
            if refused := self._unfit(asked):
                print(f"refused: {refused}", file=sys.stderr, flush=True)
                connection.sendall(b"n")
                return None
            connection.sendall(b"?")
            if connection.recv(1) != b"!":
                return None
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fork():
                connection.sendall(b"k")
                return None
            for number, stream_fd in enumerate(streams):
                os.dup2(stream_fd, number)  # in place of OWNER, too
            self.listener.close()
            if self.raylet is not None:
                os.close(self.raylet)
            return asked
        finally:
            for number in streams:
                os.close(number)

    def _unfit(self, asked: dict[str, Any]) -> str:
        """Return why a request must be left to the plain interpreter; empty if it can be served."""
        base, environment = asked["base_environment"], asked["environment"]
        if base.get("RAY_JOB_ID") == NO_JOB:
            return "a worker without a job"
        if self.environment is None:
            with suppress(OSError):  # a driver may outlive its cluster, and the servers must not
                self.raylet = os.pidfd_open(asked["parent"])
            self.environment = base
            self.adopt(base)
        names = environment.keys() | self.environment.keys()
        changed = {name for name in names if environment.get(name) != self.environment.get(name)}
        changed -= {*self.free, *READ_WHEN_USED}
        if changed:
            return f"other environment variables: {sorted(changed)}"
        threads = len(os.listdir("/proc/self/task"))
        return f"{threads} threads" if threads > 1 else ""


def become(asked: dict[str, Any]) -> None:
    """Turn this forked child into the process that was asked for, and run its script until it ends."""
    set_environment(asked["environment"])
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, max(asked["nice"], os.getpriority(os.PRIO_PROCESS, 0)))
    for name, limits in asked["limits"].items():
        with suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), limits)
    with suppress(OSError):  # the raylet sets it for the process that it has started, which was the client
        Path("/proc/self/oom_score_adj").write_text(os.environ.get(OOM_SCORE, "1000"))
    for each in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked_signals"])
    if "numpy" in sys.modules:  # Python reseeds `random` after a fork by itself
        sys.modules["numpy"].random.seed()
    sys.argv = asked["arguments"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_servers(folder: Path) -> dict[str, Any] | None:
    """Import, fork the heavy server, serve. Returns a request in a forked child, None at the end of a server."""
    settings = json.loads((folder / "settings.json").read_text())
    sys.path[0] = settings["package_root"]
    for each in (signal.SIGINT, signal.SIGTERM):  # for the driver, whose end ends this process
        signal.signal(each, signal.SIG_IGN)
    light = Preload(*settings["light"])
    listeners = {name: listen(folder / name) for name in ("light", "heavy")}
    preload(light.early)
    announced, announce = os.pipe()
    begun = os.getpid()
    if os.fork() == 0:
        os.close(announce)
        listeners["light"].close()
        end_with_parent(begun)
        return run_heavy(listeners["heavy"], Preload(*settings["heavy"]), announced, settings["heavy_environment"])
    os.close(announced)
    listeners["heavy"].close()
    server = Server(listeners["light"], free=settings["heavy_environment"])

    def adopt(environment: dict[str, str]) -> None:
        with open(announce, "w") as pipe:
            json.dump(environment, pipe)
        set_environment(environment | SINGLE_THREAD)
        import_ray_and(light.late)

    server.adopt = adopt
    asked = server.serve()
    if asked is None:
        shutil.rmtree(folder, ignore_errors=True)
    return asked


def run_heavy(
    listener: socket.socket, modules: Preload, announced: int, own_environment: dict[str, str]
) -> dict[str, Any] | None:
    """Import for train workers and serve them, once the light server has announced the environment of the workers."""
    set_environment(os.environ | own_environment)
    preload(modules.early)
    with open(announced) as pipe:
        text = pipe.read()
    if not text or "ray" in sys.modules:
        return None
    environment = json.loads(text) | own_environment
    set_environment(environment | SINGLE_THREAD)
    import_ray_and(modules.late)
    server = Server(listener)
    server.environment = environment
    return server.serve()


def import_ray_and(modules: Sequence[str]) -> None:
    """Do the late imports, and make the process fit for being forked. Exits where it is not."""
    with without_drawing(modules):
        preload(modules)
    if not draws_differ():
        sys.exit("children would draw the same ids")
    gc.collect()
    gc.freeze()  # or the first collection of a child would copy the pages of all objects


@contextmanager
def without_drawing(modules: Sequence[str]) -> Iterator[None]:
    """Have Ray take the id that it gives to each actor class, at import, from the kernel and not from its generator."""
    if not any(module.partition(".")[0] == "ray" for module in modules):
        yield
        return
    actor: Any = importlib.import_module("ray.actor")
    drawn = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: drawn(os.urandom(drawn.size())))
    try:
        yield
    finally:
        actor.ActorClassID = drawn


def draws_differ() -> bool:
    """Return whether two children draw different ids from Ray's generator; True without Ray."""
    if "ray" not in sys.modules:
        return True
    drawn = []
    for _ in range(2):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, sys.modules["ray"].ObjectID.from_random().binary())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            drawn.append(pipe.read())
        with suppress(ChildProcessError):  # reaped already where SIGCHLD is ignored
            os.waitpid(child, 0)
    return all(drawn) and drawn[0] != drawn[1]


def set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def listen(path: Path) -> socket.socket:
    """Open a Unix socket that nobody sees before it accepts connections."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def preload(modules: Sequence[str]) -> None:
    """Import modules; one that cannot be imported is left to the workers."""
    for module in modules:
        if select.select([OWNER], [], [], 0)[0]:  # the owner is gone
            sys.exit()
        try:
            importlib.import_module(module)
        except Exception as error:  # a library may raise anything; the worker that needs it will report it
            print(f"{module}: {error!r}", file=sys.stderr, flush=True)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    request = run_servers(Path(sys.argv[1]))
    if request is not None:
        become(request)
