"""Process in which one reward function of the user runs; `isolated.py` is its client.

It loads the reward with the first request and calls it with each further one. Requests and answers are JSON.
"""

import asyncio
import faulthandler
import hashlib
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

from grpo_ray.errors import GrpoRayError
from grpo_ray.processes.limits import set_soft_limit
from grpo_ray.processes.request_server import serve_requests
from grpo_ray.rewards.outside_training import read_rewards
from grpo_ray.rewards.registry import load_reward
from grpo_ray.text.redaction import redact

MAX_ERROR = 500
"""Largest number of characters of an error's message."""
PARENT_SECONDS = 2.0
"""Time between two checks that the parent lives. `die_with_parent` is not used: its signal is sent at the end of the
thread that started this process, which may end before the parent does."""


class Server:
    """The loaded reward, and the event loop that its calls share."""

    def __init__(self) -> None:
        self._name = ""
        self._reward: Any = None
        self._runner = asyncio.Runner()
        """Event loop of an `async def` reward, kept between calls so that the reward's network clients stay usable."""

    def answer(self, request: bytes) -> bytes:
        """Load the reward, or call it, within the request's time limit; at the limit the process ends."""
        message = json.loads(request)
        # A thread of C code: it also ends a function that never releases the interpreter lock, and it prints the
        # function's stack to stderr. Timers with signals stay free for the function's own use.
        faulthandler.dump_traceback_later(message["seconds"], exit=True)
        try:
            if "name" in message:
                return _encode(self._load(message))
            # Random numbers depend on the arguments only, so that a step that is taken again has the same rewards.
            called_with = json.dumps([message["arguments"], message["trainer_state"]])
            _seed(hashlib.sha256(called_with.encode()).digest())
            if message["restored"] is not None:
                self._reward.load_state_dict(message["restored"])
            return _encode(self._call(message["arguments"], message["trainer_state"]))
        except BaseException as error:  # any error, `SystemExit` too, of any code
            return _encode({"error": describe(error)})
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _load(self, message: dict[str, Any]) -> dict[str, Any]:
        os.chdir(message["folder"])
        if message["memory_bytes"] is not None:
            set_soft_limit(resource.RLIMIT_AS, message["memory_bytes"])
        self._name, self._reward = message["name"], load_reward(message["name"], **message["settings"])
        if message["state"] is not None:
            self._reward.load_state_dict(message["state"])
        return self._with_state({})

    def _call(self, arguments: dict[str, Any], trainer_state: dict[str, Any]) -> dict[str, Any]:
        logged: list[tuple[str, float]] = []
        extra: list[str] = []
        returned = self._reward(
            **arguments,
            trainer_state=SimpleNamespace(**trainer_state),
            log_metric=lambda name, value: logged.append((name, float(value))),
            log_extra=lambda column, values: extra.append(column),
        )
        if inspect.iscoroutine(returned):
            returned = self._runner.run(returned)
        rewards = read_rewards(self._name, returned, len(arguments["completions"]))
        return self._with_state({"rewards": rewards, "logged": logged, "extra": extra})

    def _with_state(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer | ({"state": self._reward.state_dict()} if hasattr(self._reward, "state_dict") else {})


def describe(error: BaseException) -> str:
    """Return an error as one line: its type and message, and the place where it was raised; secrets are hidden.

    An error of grpo_ray about an error of the function's module or class is described by the latter.
    """
    while isinstance(error, GrpoRayError) and error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return redact(message) + place


def _encode(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()


def _seed(digest: bytes) -> None:
    """Seed the generators of random numbers that are imported."""
    random.seed(digest)
    number = int.from_bytes(digest[:4], "little")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def _end_with(parent: int) -> None:
    """End this process and those of its group once its parent has ended, even during a call."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int) -> None:
    """Serve until the client closes its end of the socket.

    Args:
        descriptor: of this end.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.dup2(2, 1)  # the function's output goes to stderr, and so into the worker's log
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as sock:
        sock.set_inheritable(False)  # else a process of the function would keep the connection open
        serve_requests(sock, Server().answer)
