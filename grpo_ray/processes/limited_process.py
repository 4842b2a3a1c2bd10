"""Process that reads untrusted texts, one at a time, under limits of CPU time and memory; and its client.

Some texts make a parser's time grow with a power of their length, and a thread cannot be stopped inside of it. CPU time
limits each text: unlike wall time, it does not depend on the load of the machine.
"""

import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_ray.errors import ConfinementError
from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.isolation import package_places, readable_places
from grpo_ray.processes.limits import set_soft_limit
from grpo_ray.processes.request_client import RequestClient
from grpo_ray.processes.request_server import serve_requests
from grpo_ray.processes.supervisors import is_needed


class StartError(RuntimeError):
    """Error of a process that ended while it started."""


class LimitedProcess:
    """Client of one process at a time. Its methods may be called from any thread."""

    def __init__(self, module: str, needs: str) -> None:
        """
        Args:
            module: full name of the module whose `main` calls `serve`.
            needs: package that the process imports, for messages.
        """
        self._module, self._needs = module, needs
        self._lock = threading.Lock()
        self._client = RequestClient(module, is_needed)

    @property
    def pid(self) -> int | None:
        """Process id, None if no process was started."""
        return self._client.pid

    def start(self) -> None:
        """Start the process, unless it runs; do not wait until it is ready."""
        with self._lock:
            self._client.start()

    def ask(self, request: bytes) -> bytes | None:
        """Return the answer to a request; None if it exceeds the limits of the process.

        If the process ends in another way, for example killed by the kernel because memory ran out, the request is
        repeated once.

        Raises:
            StartError: the process cannot run.
        """
        with self._lock:
            answer, code = self._ask(request)
            # Unless it exceeded its CPU time (SIGPROF), the process may have ended for a reason other than this text.
            if answer is None and code != -signal.SIGPROF:
                answer, _ = self._ask(request)
        return answer

    def close(self) -> None:
        """End the process. The next request starts another one."""
        with self._lock:
            self._client.stop()

    def _ask(self, request: bytes) -> tuple[bytes | None, int | None]:
        if not self._client.wait_until_ready():
            raise StartError(
                f"the process of {self._module} ended while it started; see its error on stderr, and check that "
                f"{self._needs} is installed for {sys.executable}"
            )
        return self._client.ask(request)


def serve(descriptor: int, answer: Callable[[bytes], bytes], memory_bytes: int) -> None:
    """Answer requests until the connection closes, confined where the system can.

    Args:
        descriptor: this process's end of the connection.
        answer: returns the answer to a request; must not raise.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    with socket.socket(fileno=descriptor) as sock:
        limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_NPROC: 0}
        try:
            Confinement([*readable_places(), *package_places()]).apply([], limits)
        except ConfinementError:  # no code of the policy runs here; the process exists for the limits below
            for kind, amount in limits.items():
                set_soft_limit(kind, amount)
        serve_requests(sock, answer)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End this process with SIGPROF if the block takes more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
