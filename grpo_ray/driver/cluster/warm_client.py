"""Client of the warm servers (`warm_start.py`): the command that Ray runs in place of the Python interpreter.

A script, never imported. It must start within milliseconds, so it runs with `python -S -E -s` and imports little. On
any error it executes the plain interpreter with the same arguments. Usage:

    python -S -E -s warm_client.py FOLDER SCRIPT.py ARGUMENT ...

FOLDER holds one Unix socket for each server. The client exits with status 0 as soon as a server has forked: Ray
identifies a worker by the process id that the worker itself registers, as it does for workers in containers.
"""

import json
import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress

HEAVY_MARK = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable of the processes that need torch and vLLM (`evaluate.worker_environment`)."""

CONTROLLER_MARK = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Environment variable of Ray Train's controller, which imports torch."""

Waits = tuple[tuple[str, float], ...]
"""Servers that are asked in this order, each with its timeout in seconds, since it may still be importing."""

LIGHT: Waits = (("light", 15.0),)
HEAVY: Waits = (("heavy", 30.0), *LIGHT)
"""The sum of both timeouts is below 60 s, within which Ray expects a worker. The controller of a run waits, too: the
workers that it is to start need the heavy server anyway."""
LIMITS = ("RLIMIT_NOFILE", "RLIMIT_CORE")
"""Resource limits that the child takes over."""


class NotServedError(Exception):
    """Error for a command that the plain interpreter has to run."""


def worker_command(arguments: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str], Waits]:
    """Determine the script with its arguments, and the environment, that `arguments` would finally execute.

    Does the work of Ray's setup_worker.py for a runtime environment that consists of environment variables only.

    Returns:
        Script with arguments; environment; the servers to ask, which depend on whether the runtime environment sets
        `HEAVY_MARK` or `CONTROLLER_MARK`. A mark that is set only in the user's shell is ignored: it would send even
        the first processes to the heavy server, which starts to serve only after the light one's first request.

    Raises:
        NotServedError: any other script or runtime environment.
    """
    script = os.path.basename(arguments[0]) if arguments else ""
    if script == "default_worker.py":
        return arguments, environment, LIGHT
    if script != "setup_worker.py":
        raise NotServedError(script)
    context: dict = {}
    rest = []
    for argument in arguments[1:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            rest.append(argument)
        elif value != "PYTHON":
            raise NotServedError(argument)
    interpreter = context.pop("py_executable", sys.executable)
    variables = context.pop("env_vars", None) or {}
    if os.path.realpath(interpreter) != os.path.realpath(sys.executable) or any(context.values()):
        raise NotServedError("a runtime environment with more than env_vars")
    if not rest or os.path.basename(rest[0]) != "default_worker.py":
        raise NotServedError("no default_worker.py")
    environment = dict(environment)
    for name, value in variables.items():
        if "$" in value:  # Ray expands these against the variables set so far
            value = re.sub(
                r"\$(\w+)|\$\{([^}]*)\}", lambda match: environment.get(match[1] or match[2], match[0]), value
            )
            value = re.sub(r"\$\{[A-Z0-9_]+\}", "", value)
        environment[name] = value
    servers = HEAVY if variables.keys() & {HEAVY_MARK, CONTROLLER_MARK} else LIGHT
    return rest, environment, servers


def encode_request(arguments: list[str], environment: dict[str, str], is_announcement: bool = False) -> bytes:
    """Describe this process, and the process to start, as JSON.

    Args:
        is_announcement: only tell the server the environment of this process; nothing is forked.
    """
    umask = os.umask(0)
    os.umask(umask)
    return json.dumps(
        {
            "is_announcement": is_announcement,
            "arguments": arguments,
            "environment": environment,
            "base_environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": umask,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "blocked_signals": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        }
    ).encode()


def send(connection: socket.socket, path: str, message: bytes) -> None:
    """Send a request, with the standard streams of this process, to the server at a socket. Raises OSError."""
    connection.connect(path)
    socket.send_fds(connection, [len(message).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(message)


def fork_worker(path: str, message: bytes, seconds: float) -> None:
    """Have the server at a socket fork a worker. Raises OSError or NotServedError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        send(connection, path, message)
        # The server forks only for a client that still waits.
        if connection.recv(1) != b"?":
            raise NotServedError("refused")
        connection.sendall(b"!")
        # From here on the worker may be running, so a second one may be started only if the fork failed.
        connection.settimeout(None)
        if connection.recv(1) != b"k":
            raise NotServedError("not forked")


def main() -> None:
    """Hand this process over to a server, or execute the plain interpreter."""
    folder, arguments = sys.argv[1], sys.argv[2:]
    try:
        command, environment, servers = worker_command(arguments, dict(os.environ))
        message = encode_request(command, environment)
        # The heavy server learns the environment from the light one, which may have had no request so far. The
        # connection stays open until this process ends: the server identifies the process by it.
        announcement = socket.socket(socket.AF_UNIX)
        if servers is HEAVY:
            with suppress(OSError):  # the servers serve no longer
                send(announcement, os.path.join(folder, "light"), encode_request(command, environment, True))
        for name, seconds in servers:
            try:
                fork_worker(os.path.join(folder, name), message, seconds)
            except (OSError, NotServedError):
                continue
            os._exit(0)
    except Exception:  # a faster start must not make a run fail; the plain interpreter reports the error
        pass
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
