"""Tool that runs Python code in a remote sandbox, each call in a new interpreter there.

    rollout:
      tools: ["grpo_ray.tools.remote_python:python"]
      sandbox_url: https://sandbox.example.org
      sandbox_token_variable: SANDBOX_TOKEN

Its name, description and form of results are those of the local tool (`python_tool.py`), so the policy cannot
distinguish the two. Only the code of a completion's calls is sent. Neither variables nor files are kept between calls.
Python's random numbers follow the seed of the completion; otherwise, reproducibility depends on the service.
"""

import contextlib
import random
from collections.abc import Mapping
from typing import Any

from grpo_ray.errors import ConfigError
from grpo_ray.tools import python_tool
from grpo_ray.tools.remote.sandbox import RemoteSandbox, RemoteSettings
from grpo_ray.tools.sandbox.protocol import CallError

_sandboxes: list[RemoteSandbox] = []
"""Sandbox of this process, set before the processes of completions are forked."""


def configure(settings: Mapping[str, Any]) -> None:
    """Set the sandbox of this process, and of those that it forks.

    The provider is created here, because a user's class may read environment variables that the forked processes do not
    have. If that fails, each call fails with the status `unreachable`.

    Args:
        settings: `RemoteSettings.to_json`.
    """
    _sandboxes[:] = [RemoteSandbox(RemoteSettings(**settings))]
    with contextlib.suppress(CallError, ConfigError):
        _sandboxes[0].provider  # noqa: B018  it is cached


def python(code: str) -> str:
    if not _sandboxes:
        raise RuntimeError("no remote sandbox is configured; set rollout.sandbox_url")
    return _sandboxes[0].run(code, random.getrandbits(32))


python.__doc__ = python_tool.python.__doc__
