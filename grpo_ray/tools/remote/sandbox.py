"""Use of a remote sandbox in a run: its settings, the program that it runs, and repeated attempts within the limits.

Time: the code has `CODE_SHARE` of `rollout.time_limit`, and the answer must arrive within `ANSWER_SHARE` of it. The
rest is for the network, the service's own work, and this process, so that code that runs too long can be distinguished
from a service that does not answer. Slow code is the policy's fault: a result with the status `timeout`. A missing
answer is not: status `unreachable`, after which the completion is unscorable.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import HIDDEN, remember_secrets
from grpo_ray.tools.python_tool import CHILD, BoundedOutput, shown_output
from grpo_ray.tools.remote.provider import PROVIDERS, Job, SandboxError, SandboxProvider, Service, make_provider
from grpo_ray.tools.sandbox.protocol import CallError

CODE_SHARE = 0.5
"""Share of `rollout.time_limit` that the code has."""
NETWORK_SHARE = 0.2
"""Share of it kept for the network and the service's own work; failed attempts may reduce the code's time instead."""
ANSWER_SHARE = 0.9
"""Share of it within which the answer must arrive."""
LEAST_SHARE = 0.1
"""Share of it that the code must have; with less time left, no further attempt is made."""
ATTEMPTS = 4
"""Attempts of one call, if the service is unreachable or busy."""
BACKOFF_SECONDS = 0.25
"""Mean pause before the second attempt; each further one is twice as long."""
HEADER = """\
import os, sys
os.dup2(1, 2)
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.stdout.reconfigure(encoding="utf-8"); sys.stderr.reconfigure(encoding="utf-8")
sys.argv = ["", "{seed}"]
"""
"""Lines before the script of the local tool: stderr goes to stdout, in order, and numeric libraries use one thread."""


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings of the remote sandbox, as they are sent to the processes of tools."""

    provider: str
    url: str
    token: str | None = field(default=None, repr=False)
    certificates: str | None = None
    time_limit: float = 10.0
    memory_bytes: int = 1 << 30

    @staticmethod
    def of(config: RolloutConfig) -> "RemoteSettings | None":
        """Return the settings with the token, which is remembered as a secret; None without a remote sandbox.

        Raises:
            ConfigError: the environment variable of the token is not set here, or is not a token.
        """
        if config.sandbox_url is None:
            return None
        token, variable = None, config.sandbox_token_variable
        if variable is not None:
            token = os.environ.get(variable, "")
            remember_secrets({"token": token})
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise ConfigError(
                    f"rollout.sandbox_token_variable={variable}: this environment variable "
                    f"{'is not a token of printable characters' if token else 'is not set'} on this machine; set it on "
                    "every machine where workers run, or leave the field out"
                )
        return RemoteSettings(
            provider=config.sandbox_provider,
            url=config.sandbox_url,
            token=token,
            certificates=os.environ.get("SSL_CERT_FILE") or None,
            time_limit=config.time_limit,
            memory_bytes=int(config.memory_gib * 2**30),
        )

    @property
    def has_own_provider(self) -> bool:
        """True if the provider is a class of the user."""
        return self.provider not in PROVIDERS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RemoteSandbox:
    """Runner of code in a remote sandbox.

    Args:
        sleep, clock: replaced in tests of limits.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.settings, self._sleep, self._clock = settings, sleep, clock

    @cached_property
    def provider(self) -> SandboxProvider:
        """Client of the service.

        Raises:
            ConfigError: there is no such class.
            CallError: `unreachable`: its constructor raised an exception, for example for unreadable certificates.
        """
        settings = self.settings
        service = Service(url=settings.url, token=settings.token, certificates=settings.certificates)
        try:
            return make_provider(settings.provider, service)
        except ConfigError:
            raise
        except Exception as error:  # a user's class may raise anything; not the policy's fault
            reason = f"its provider cannot be made: {type(error).__name__}: {error}"
            raise self._unreachable(reason) from None

    @property
    def code_seconds(self) -> float:
        """Time that the code of a call has."""
        return CODE_SHARE * self.settings.time_limit

    def run(self, code: str, seed: int) -> str:
        """Run code and return its output as the local tool does.

        Raises:
            CallError: `timeout`: the code has exceeded its time; `error`: the service refuses this code;
                `unreachable`: there is no result, for a reason that is not the code.
        """
        program = HEADER.format(seed=seed) + Path(CHILD).read_text(encoding="ascii")
        stdin = code.encode("utf-8", "replace").decode()
        limit, begun = self.settings.time_limit, self._clock()
        try:
            provider = self.provider
        except ConfigError as missing:
            raise self._unreachable(str(missing)) from None
        lost = 0.0  # seconds of failed attempts and the pauses after them
        for attempt in range(ATTEMPTS):
            seconds = self._seconds_left(lost)
            job = Job(program=program, stdin=stdin, seconds=seconds, memory_bytes=self.settings.memory_bytes)
            try:
                execution = provider.run(job, ANSWER_SHARE * limit - lost)
            except SandboxError as failed:
                error = failed
                # Not from the completion's own random numbers: results must not depend on the number of attempts.
                jitter = random.SystemRandom().uniform(0.5, 1.5)
                pause = max(BACKOFF_SECONDS * 2**attempt * jitter, failed.retry_seconds)
                lost = self._clock() - begun + pause
                is_last = attempt == ATTEMPTS - 1 or self._seconds_left(lost) < LEAST_SHARE * limit
                if is_last or not failed.is_temporary:
                    break
                self._sleep(pause)
                continue
            if not execution.is_timed_out:
                output = BoundedOutput()
                output.append(execution.output.encode("utf-8", "replace"))
                return self._without_token(shown_output(output.value(), execution.return_code))
            if seconds == self.code_seconds:
                raise CallError("timeout", f"no result within {seconds:g} s")
            # Failed attempts have reduced the code's time, so it is not known to be too slow.
            error = SandboxError(f"it was busy, and left the code {seconds:.3g} s of {self.code_seconds:g}")
            break
        raise self._unreachable(str(error))

    def _unreachable(self, reason: str) -> CallError:
        return CallError("unreachable", self._without_token(f"the remote sandbox gave no result: {reason}"))

    def _seconds_left(self, lost: float) -> float:
        """Return the time that code has after failed attempts."""
        return min(self.code_seconds, (ANSWER_SHARE - NETWORK_SHARE) * self.settings.time_limit - lost)

    def _without_token(self, text: str) -> str:
        """Hide the token, which a service may send back."""
        return text.replace(self.settings.token, HIDDEN) if self.settings.token else text


def sandbox_issue(config: RolloutConfig) -> str | None:
    """Run a trivial program in the run's remote sandbox. Returns the reason why it cannot be used here, or None.

    Raises:
        ConfigError: the token or the provider's class is missing.
    """
    settings = RemoteSettings.of(config)
    if settings is None:
        return None
    sandbox = RemoteSandbox(settings)
    try:
        sandbox.provider  # noqa: B018  a missing class is an error of the config
        output = sandbox.run("6 * 7", seed=0)
    except CallError as error:
        return str(error)
    return None if output == "42\n" else f"the remote sandbox returned {output[:80]!a} for 6 * 7"
