"""Providers of remote sandboxes: services that run a Python program elsewhere, and return its output.

A provider is a class with the two methods of `SandboxProvider`, named by a row of `PROVIDERS` or by
`rollout.sandbox_provider: package.module:Class`. It makes one attempt; `RemoteSandbox` repeats it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_ray.config.import_path import import_callable
from grpo_ray.errors import ConfigError

PROVIDERS: Mapping[str, str] = {"sandbox_fusion": "grpo_ray.tools.remote.sandbox_fusion:SandboxFusion"}
"""Names in `rollout.sandbox_provider` -> class."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Address of a remote sandbox, with the token and certificates for its use."""

    url: str
    token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer ...`; None: nothing is sent."""
    certificates: str | None = None
    """File of certificate authorities for https; None: those of the system."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Program to run in a fresh interpreter, with nothing of earlier programs."""

    program: str
    """ASCII source of a script for Python 3.10 or newer."""
    stdin: str
    """Standard input of the program."""
    seconds: float
    """Time after which the program is ended."""
    memory_bytes: int
    """Address space of the program."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Result of a program."""

    output: str
    """Standard output."""
    return_code: int
    """Exit code; negative: the signal that ended it."""
    is_timed_out: bool = False
    """True if the program was ended after `Job.seconds`."""


class SandboxError(Exception):
    """Failure of the sandbox to give a result, for a reason other than the program.

    Args:
        reason: one line for people, without secrets.
        is_temporary: True if another attempt may succeed.
        retry_seconds: shortest pause before the next attempt, if the service demands one; else 0.
    """

    def __init__(self, reason: str, is_temporary: bool = False, retry_seconds: float = 0.0):
        super().__init__(reason, is_temporary, retry_seconds)
        self.reason, self.is_temporary, self.retry_seconds = reason, is_temporary, retry_seconds

    def __str__(self) -> str:
        return self.reason


class SandboxProvider(Protocol):
    """Client of one kind of remote sandbox.

    It is created in the process from which the processes of completions are forked. Its constructor may read
    `rollout.variables`, which are set there, but must not open connections or start threads.
    """

    def __init__(self, service: Service) -> None: ...

    def run(self, job: Job, seconds: float) -> Execution:
        """Run a program once.

        Args:
            seconds: longest time to wait for the answer; more than `job.seconds`.

        Raises:
            SandboxError: there is no result, and the program is not the reason.
            CallError: the service refuses this program; the policy reads the message.
        """
        ...


def make_provider(name: str, service: Service) -> SandboxProvider:
    """Return the client of `rollout.sandbox_provider`. Raises ConfigError if there is no such class."""
    if name not in PROVIDERS and ":" not in name:
        raise ConfigError(
            f"rollout.sandbox_provider={name!r} must be one of {', '.join(PROVIDERS)}, or package.module:Class"
        )
    made: Any = import_callable(PROVIDERS.get(name, name), "rollout.sandbox_provider")
    provider: SandboxProvider = made(service)
    return provider
