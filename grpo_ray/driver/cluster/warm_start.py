"""Warm start: servers that have the libraries imported and fork a Ray worker in milliseconds.

Why: a run on one machine starts about 16 Python processes. Each imports Ray and pandas (2 CPU seconds), and each train
worker torch, transformers, TRL and vLLM (12 CPU seconds). A restart after a killed worker repeats these imports.

How: while the driver starts a Ray cluster on its own machine, `sys.executable` is a small script, and Ray starts its
workers with it. The script (`warm_client.py`) sends its arguments, environment and standard streams to a server of this
module, which forks; the child becomes the worker. The light server has imported the libraries of every Ray worker. The
heavy server, forked from it, has also imported those of train workers and evaluations, and has their environment
variables (`HEAVY_MARK`). It also serves Ray Train's controller, which needs torch (`CONTROLLER_MARK`).

Each server imports in two stages. Ray's C++ library reads its settings from environment variables when it is loaded,
among them the ids of the job and the raylet. Ray, and every library that imports it, is therefore imported at the first
request, with the environment of that request. The driver makes that request as soon as the cluster runs
(`connection._start_cluster`), and each client of the heavy server announces the environment to the light one.

Risks and countermeasures:
- A fork copies the calling thread only, so a lock that another thread holds stays locked. The servers therefore refuse
  to fork unless they have a single thread; the variables in `SINGLE_THREAD` keep libraries from starting threads.
- Libraries read environment variables when they are imported. A request is refused if its environment differs from the
  server's in any variable. Differences in the heavy server's own variables are allowed in requests to the light server,
  whose libraries do not read them, and in those of Ray Train's controller, which computes nothing.
- Random generators are copied, too. Python's and numpy's are reseeded in the child, but Ray's C++ generator of ids
  cannot be: two workers would give the same id to different objects. It must not have been used before the fork
  (`without_drawing_ids`), and each server tests that before it serves (`children_draw_different_ids`).
- Workers forked from one server share memory layout and hash seed, which weakens protection against hostile code in
  one of them.
- A forked worker runs with this user's rights, even if the requesting process has fewer. Therefore only this user can
  access the folder of the sockets, and a server forks only for a child of the driver's raylet, identified by the kernel
  (`raylet_of`). Processes that a worker starts, and so all model-written code, are not served. Where a cluster is
  started for a run with tools, the driver deletes the sockets once its workers have started (`WarmStartEnd`), or
  before it measures a policy itself (`PreparedRun`).
- After a refused request, without a server, or on any error the client runs the plain interpreter, as Ray would.

Switched off by GRPO_RAY_WARM_START=0; not used with GPUs (CUDA does not survive a fork) or with an existing cluster.
Linux only. The servers run this module as a script, so it imports nothing of the package.
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
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Preload(NamedTuple):
    """Modules that a server imports, in this order; of `module:function` it also calls the function."""

    early: Sequence[str]
    """Imported when the server starts; none of them may import Ray."""
    late: Sequence[str]
    """Imported with the environment of the first request."""


SWITCH = "GRPO_RAY_WARM_START"
"""Environment variable; "0": off."""

LIGHT = Preload(
    ("numpy", "pyarrow", "pandas", "pydantic", "google.protobuf.message"),
    ("ray", "ray.data", "ray.train", "ray.train.v2.api.data_parallel_trainer", "ray._private.workers.default_worker"),
)
HEAVY = Preload(
    ("torch", "transformers", "accelerate", "peft", "datasets"),
    (
        "ray.train.torch",
        "ray.tune",
        "trl",
        "vllm",
        # An engine imports these when it starts.
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.layers.utils",
        "vllm.model_executor.layers.quantization.online.base",
        "grpo_ray.inference.vllm_internals:register_kernels_before_forks",
        "grpo_ray.training.worker",
        "grpo_ray.learner.learner",
        "grpo_ray.resilience.elastic",
        "grpo_ray.evaluation.evaluate",
    ),
)

SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment variables of the servers while they import: keep numpy and pyarrow from starting threads."""

FIRST_JOB = "01000000"
"""`RAY_JOB_ID` of the driver that has started the cluster. Workers with another id run in the plain interpreter: those
that Ray starts before there is a job, and those of drivers that join the cluster later."""

OOM_SCORE = "RAY_worker_oom_score_adjustment"
"""Environment variable with the OOM score of Ray workers."""

CONTROLLER_MARK = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Environment variable that Ray Train sets for its controller, and that no library reads at import."""

OWNER = 0
"""File descriptor in the servers that becomes readable when the driver has ended."""

SOCKETS = ("light", "heavy")
"""Name of each server, and of its socket."""

LOG = "server.log"
"""Output of the servers: refused requests and modules that could not be imported."""


_folders: list[Path] = []
"""Folders of the servers that this process has started, until their sockets are deleted."""


def is_enabled(use_gpu: bool) -> bool:
    """Return True if the workers of a cluster that this process is about to start are forked from warm servers."""
    has_plain_flags = not (sys.flags.no_site or sys.flags.no_user_site)
    return sys.platform == "linux" and has_plain_flags and not use_gpu and os.environ.get(SWITCH) != "0"


@contextmanager
def warm_executable(
    heavy_environment: Mapping[str, str], raylet: str, light: Preload = LIGHT, heavy: Preload = HEAVY
) -> Iterator[str]:
    """Start the servers; inside the block, `sys.executable` is the client.

    The servers end with this process, or with the process whose children they replace (the raylet).

    Args:
        heavy_environment: environment variables that children of the heavy server have in addition to the driver's.
        raylet: path of the raylet's program. Only children of a raylet that this process has started are served.

    Yields:
        Path of the client.
    """
    folder = Path(tempfile.mkdtemp(prefix="grpo_ray-warm-"))
    plain = sys.executable
    client = folder / "python"
    command = [plain, "-S", "-E", "-s", str(Path(__file__).with_name("warm_client.py")), str(folder)]
    client.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    client.chmod(0o700)
    if not os.access(client, os.X_OK):  # a file system mounted with noexec
        shutil.rmtree(folder)
        yield plain
        return
    settings = {
        "folder": str(folder),
        "package_root": str(Path(__file__).parents[3]),
        "heavy_environment": dict(heavy_environment),
        "raylet": raylet,
        "light": light,
        "heavy": heavy,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    with open(folder / LOG, "wb") as log:
        server = subprocess.Popen(
            [plain, __file__, str(folder)],
            stdin=subprocess.PIPE,  # never written; closed when this process ends, which the server notices
            stdout=log,
            stderr=log,
            env=os.environ | SINGLE_THREAD,
            start_new_session=True,  # a signal to the driver's process group must not reach the workers forked here
        )
    threading.Thread(target=server.wait, name="reaps the warm server", daemon=True).start()
    _folders.append(folder)
    sys.executable = str(client)
    try:
        yield str(client)
    finally:
        sys.executable = plain


def end_warm_start() -> None:
    """Delete the sockets of the servers that this process has started: Ray starts all later workers in plain Python.

    The servers go on: the forked workers are their children.
    """
    for folder in _folders:
        for name in SOCKETS:
            (folder / name).unlink(missing_ok=True)
    _folders.clear()


class Server:
    """Server at a Unix socket that forks a child for each request.

    Args:
        listener: socket, bound before the imports started so that early clients wait and are not refused.
        starts_workers: given the peer's process id and user id, returns the id of the raylet that started the peer
            (`raylet_of`); raises OSError for a peer that is not served.
        heavy_variables: names of the environment variables that only the heavy server has.
        is_heavy: whether this server is the heavy one; its workers must have these variables, with the same values.
    """

    def __init__(
        self,
        listener: socket.socket,
        starts_workers: Callable[[int, int], int],
        heavy_variables: Collection[str],
        is_heavy: bool = False,
    ):
        self.listener, self.starts_workers = listener, starts_workers
        self.heavy_variables, self.is_heavy = heavy_variables, is_heavy
        self.environment: Mapping[str, str] | None = None
        """Environment of the workers; None until the first request."""
        self.adopt: Callable[[dict[str, str]], None]
        """Function that does the late imports, called with the environment of the first request."""
        self.raylet: int | None = None
        """File descriptor (pidfd) of the process that starts the workers."""

    def serve(self) -> dict[str, Any] | None:
        """Serve until the driver or the raylet has ended, then return None. In a forked child, return the request."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombies
        while True:
            ends = [OWNER, *([] if self.raylet is None else [self.raylet])]
            ready, _, _ = select.select([self.listener.fileno(), *ends], [], [])
            if any(each in ready for each in ends):
                return None
            connection, _ = self.listener.accept()
            with connection:
                connection.settimeout(5)
                try:
                    if (request := self._handle(connection)) is not None:
                        return request
                except (OSError, ValueError) as error:  # the client has ended, or is not served
                    print(f"a request was dropped: {error!r}", file=sys.stderr, flush=True)

    def _handle(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a client. Return the request in the child, None in the server."""
        # Checked before anything is read: the peer may be any process of this user.
        raylet = self.starts_workers(*peer_of(connection))
        header, streams, _, _ = socket.recv_fds(connection, 4, 3)
        try:
            with connection.makefile("rb") as stream:
                request = json.loads(stream.read(int.from_bytes(header, "big")))
            reason = self._settle_environment(request["base_environment"], raylet) or self._refusal_reason(request)
            if request["is_announcement"]:
                return None
            if reason:
                print(f"refused: {reason}", file=sys.stderr, flush=True)
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
                os.dup2(stream_fd, number)  # also replaces OWNER
            self.listener.close()
            if self.raylet is not None:
                os.close(self.raylet)
            return request
        finally:
            for number in streams:
                os.close(number)

    def _settle_environment(self, base: dict[str, str], raylet: int) -> str:
        """Do the late imports in the environment of the first request, that of a process which the raylet starts.

        Returns:
            The reason why the plain interpreter must serve requests of this environment; empty for the driver's job.
        """
        if base.get("RAY_JOB_ID", FIRST_JOB) != FIRST_JOB:
            return "a worker without a job, or of another driver's"
        if self.environment is None:
            with suppress(OSError):  # the servers must end with the cluster, which the driver may outlive
                self.raylet = os.pidfd_open(raylet)
            self.environment = base
            self.adopt(base)
        return ""

    def _refusal_reason(self, request: dict[str, Any]) -> str:
        """Return the reason why the plain interpreter must serve a request; empty if this server can."""
        assert self.environment is not None
        environment = request["environment"]
        names = environment.keys() | self.environment.keys()
        changed = {name for name in names if environment.get(name) != self.environment.get(name)}
        if not self.is_heavy or CONTROLLER_MARK in environment:
            changed -= {*self.heavy_variables, CONTROLLER_MARK}
        if changed:
            return f"other environment variables: {sorted(changed)}"
        threads = len(os.listdir("/proc/self/task"))
        return f"{threads} threads" if threads > 1 else ""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id with which the other end of a Unix socket connected."""
    process, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def raylet_of(process: int, user: int, *, driver: int, raylet: str) -> int:
    """Return the parent of a process, if that is the raylet of this driver.

    Args:
        process: id of the process, in this PID namespace; 0 if it is in a namespace that is not visible from here.
        user: id of its user.
        driver: id of the process that has to be the raylet's parent.
        raylet: path of the raylet's program.

    Raises:
        PermissionError: the raylet has not started the process, or it belongs to another user.
        OSError: the process has ended.
    """
    parent = parent_of(process)
    is_child = user == os.geteuid() and parent_of(parent) == driver
    if not is_child or not os.path.samefile(f"/proc/{parent}/exe", raylet):
        raise PermissionError(f"process {process} of user {user} was not started by the raylet")
    return parent


def parent_of(process: int) -> int:
    """Return the id of a process's parent. Raises OSError if the process has ended."""
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])


def become(request: dict[str, Any]) -> None:
    """Turn this forked child into the requested process, and run its script until it ends."""
    # A group of its own, as Ray gives its workers: when one ends, the raylet signals the whole group.
    os.setpgid(0, 0)
    set_environment(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, max(request["nice"], os.getpriority(os.PRIO_PROCESS, 0)))
    for name, limits in request["limits"].items():
        with suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), limits)
    with suppress(OSError):  # the raylet has set it for the process that it started, which is the client
        Path("/proc/self/oom_score_adj").write_text(os.environ.get(OOM_SCORE, "1000"))
    for each in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    if "numpy" in sys.modules:  # `random` is reseeded by Python after a fork
        sys.modules["numpy"].random.seed()
    sys.argv = request["arguments"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_servers(folder: Path) -> dict[str, Any] | None:
    """Import, fork the heavy server, serve. Return the request in a forked child, None at the end of a server."""
    settings = json.loads((folder / "settings.json").read_text())
    sys.path[0] = settings["package_root"]
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the driver; this process ends when the driver does
        signal.signal(each, signal.SIG_IGN)
    light = Preload(*settings["light"])
    listeners = {name: listen(folder / name) for name in SOCKETS}
    starts_workers = partial(raylet_of, driver=os.getppid(), raylet=settings["raylet"])
    preload(light.early)
    announced, announce = os.pipe()  # carries the environment of the first request to the heavy server
    light_server = os.getpid()
    if os.fork() == 0:
        os.close(announce)
        listeners["light"].close()
        end_with_parent(light_server)
        heavy = Preload(*settings["heavy"])
        return run_heavy(listeners["heavy"], starts_workers, heavy, announced, settings["heavy_environment"])
    os.close(announced)
    listeners["heavy"].close()
    server = Server(listeners["light"], starts_workers, settings["heavy_environment"])

    def adopt(environment: dict[str, str]) -> None:
        with open(announce, "w") as pipe:
            json.dump(environment, pipe)
        set_environment(environment | SINGLE_THREAD)
        import_late(light.late)

    server.adopt = adopt
    request = server.serve()
    if request is None:
        shutil.rmtree(folder, ignore_errors=True)
    return request


def run_heavy(
    listener: socket.socket,
    starts_workers: Callable[[int, int], int],
    modules: Preload,
    announced: int,
    own_environment: dict[str, str],
) -> dict[str, Any] | None:
    """Import the libraries of train workers, and serve them once the light server has announced their environment.

    Args:
        listener, starts_workers: as of `Server`.
        announced: file descriptor from which the environment of the first request is read, as JSON.
        own_environment: environment variables of the train workers.
    """
    set_environment(os.environ | own_environment)
    preload(modules.early)
    with open(announced) as pipe:
        text = pipe.read()
    if not text or "ray" in sys.modules:
        return None
    environment = json.loads(text) | own_environment
    set_environment(environment | SINGLE_THREAD)
    import_late(modules.late)
    server = Server(listener, starts_workers, own_environment, is_heavy=True)
    server.environment = environment
    return server.serve()


def import_late(modules: Sequence[str]) -> None:
    """Do the late imports, and prepare the process for forking. Exits if its children would draw the same ids."""
    with without_drawing_ids(modules):
        preload(modules)
    if not children_draw_different_ids():
        sys.exit("children would draw the same ids")
    gc.collect()
    gc.freeze()  # otherwise the first collection in a child copies the pages of all objects


@contextmanager
def without_drawing_ids(modules: Sequence[str]) -> Iterator[None]:
    """Have Ray draw the ids of actor classes, assigned at import, from the kernel instead of its generator."""
    if not any(module.partition(".")[0] == "ray" for module in modules):
        yield
        return
    actor: Any = importlib.import_module("ray.actor")
    original = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: original(os.urandom(original.size())))
    try:
        yield
    finally:
        actor.ActorClassID = original


def children_draw_different_ids() -> bool:
    """Return True if two children draw different ids from Ray's generator, or if Ray is not imported."""
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
        with suppress(ChildProcessError):  # already reaped if SIGCHLD is ignored
            os.waitpid(child, 0)
    return all(drawn) and drawn[0] != drawn[1]


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)


def listen(path: Path) -> socket.socket:
    """Open a Unix socket. Its file appears only once it accepts connections."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def preload(modules: Sequence[str]) -> None:
    """Import modules, except those that raise an error; the workers import these themselves."""
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time
    for module in modules:
        if select.select([OWNER], [], [], 0)[0]:  # the driver has ended
            sys.exit()
        try:
            name, _, function = module.partition(":")
            imported = importlib.import_module(name)
            if function:
                getattr(imported, function)()
        except Exception as error:  # a library may raise any error; the worker that needs the library reports it
            print(f"{module}: {error!r}", file=sys.stderr, flush=True)
    gc.enable()


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    child_request = run_servers(Path(sys.argv[1]))
    if child_request is not None:
        become(child_request)
