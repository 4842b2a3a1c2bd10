"""Reward functions of the user in processes of their own (`rewards.isolate`).

A function that hangs, exits, needs too much memory or raises an error neither ends nor blocks the run: its completions
get no reward (None), and the metric `reward/failed_share` counts them. Each reward has one process on each worker; the
process is started again after it has ended.

A failed call is repeated for each problem separately, so that a completion on which the function fails affects only the
completions of the same problem. All of these lose their reward: otherwise a policy could escape a penalty by writing a
completion on which the function fails.
"""

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.reward_names import MAX_ENDED_PROCESSES, reward_name
from grpo_ray.errors import RewardError
from grpo_ray.processes.request_client import RequestClient
from grpo_ray.rewards.completions import select_rows
from grpo_ray.rewards.metrics import FAILED_SHARE

logger = logging.getLogger(__name__)

MODULE = "grpo_ray.rewards.isolated_process"
LOAD_SECONDS = 600.0
"""Time limit for the import of the user's modules, which may load models."""
MAX_ANSWER_BYTES = 1 << 26
GRACE_SECONDS = 30.0
"""Time after the limit of a call for which the client waits for the process to end itself, before it kills it."""
STATE_FIELDS = ("global_step", "max_steps", "epoch", "num_train_epochs", "logging_steps", "save_steps", "eval_steps")
"""Fields of transformers' `TrainerState` that are passed to the function."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a process."""

    seconds: float
    """Time of one call."""
    memory_gib: float | None
    """Address space; None: not limited."""


class IsolatedReward:
    """Reward function in a process of its own, called as TRL calls it: all arguments by keyword.

    Thread-safe. The process starts with the first call, and ends with this object.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], limits: Limits) -> None:
        """
        Args:
            name: `package.module:function` or `package.module:class`.
            settings: its keyword arguments, of JSON types.
        """
        self.__name__ = reward_name(name)
        self._path, self._settings, self._limits = name, dict(settings), limits
        self._client = RequestClient(MODULE, lambda variable: True)
        self._lock = threading.Lock()
        self._is_loaded = self._was_loaded = False
        self._state: Any = None
        """Latest state of a reward that has one."""
        self._is_dirty = False
        """True if a call failed that may have left the state half changed."""
        self._ends = 0
        """Processes that have ended since the current call was divided by problems."""
        self.failed_places: Sequence[int] = ()
        """Completions of the last call whose reward failed."""
        weakref.finalize(self, self._client.stop)

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        prompts: Sequence[Any],
        log_metric: Callable[[str, float], None],
        **others: Any,
    ) -> list[float | None]:
        """Return the reward of each completion, (B,): None where the function returns None, or fails.

        Raises:
            RewardError: the function cannot be loaded, or logs a metric under a name that the run itself uses.
        """
        arguments = {"completions": completions, "prompts": prompts, "log_metric": log_metric, **others}
        with self._lock:
            rewards, self.failed_places = self._compute(arguments)
        log_metric(FAILED_SHARE, len(self.failed_places) / len(completions))
        return rewards

    def try_once(self, **arguments: Any) -> list[float | None]:
        """Return the rewards of one call. Raises RewardError if it fails, with the reason."""
        with self._lock:
            try:
                return self._request(arguments, self._limits.seconds)
            except _Failure as failure:
                raise RewardError(f"reward {self._path!r} failed: {failure}") from None

    def close(self) -> None:
        """End the process. The next call starts another one."""
        with self._lock:
            self._stop()

    def _compute(self, arguments: Arguments) -> tuple[list[float | None], list[int]]:
        """Return the reward of each completion, (B,), and the places of those whose reward failed."""
        rewards: list[float | None] = [None] * len(arguments["completions"])
        try:
            return self._request(arguments, self._limits.seconds), []
        except _Failure as failure:
            logger.warning("reward %s failed for %d completions: %s", self.__name__, len(rewards), failure)
        problems = _places_by_problem(arguments)
        failed: list[int] = []
        if len(problems) == 1:
            return rewards, problems[0]
        self._ends = 0
        # A call that fails without ending its process may take as long as one that hangs, and the run's watchdog waits
        # for all of them: `limits_are_of_isolated_rewards` relies on this limit.
        most = left = MAX_ENDED_PROCESSES * self._limits.seconds
        for places in problems:
            try:
                if self._ends >= MAX_ENDED_PROCESSES:
                    raise _Failure(f"not called, since {MAX_ENDED_PROCESSES} processes have ended in this step")
                if left <= 0:
                    raise _Failure(f"not called, since the calls for single problems have taken {most:g} s")
                self._load()
                started = time.monotonic()
                try:
                    own = self._request(select_rows(arguments, places), min(left, self._limits.seconds))
                finally:
                    left -= time.monotonic() - started
                for place, reward in zip(places, own, strict=True):
                    rewards[place] = reward
            except _Failure as failure:
                failed += places
                logger.warning("reward %s failed for a problem: %s", self.__name__, failure)
        return rewards, failed

    def _request(self, arguments: Arguments, seconds: float) -> list[float | None]:
        """Call the function once, for at most `seconds`.

        Raises _Failure if it fails, and RewardError as `__call__` does.
        """
        self._load()
        state = arguments.get("trainer_state")
        answer = self._ask(
            {
                "arguments": {key: value for key, value in arguments.items() if key not in _NOT_SENT},
                "trainer_state": {key: getattr(state, key) for key in STATE_FIELDS if hasattr(state, key)},
                "restored": self._state if self._is_dirty else None,
            },
            seconds,
        )
        self._is_dirty = "error" in answer
        if "error" in answer:
            raise _Failure(answer["error"])
        for name, value in answer["logged"]:
            arguments["log_metric"](name, value)
        for column in answer["extra"]:
            arguments["log_extra"](column, [])
        self._state = answer.get("state")
        rewards: list[float | None] = answer["rewards"]
        return rewards

    def _load(self) -> None:
        """Start the process and load the reward, unless it is loaded.

        Raises:
            RewardError: it cannot be loaded.
            _Failure: it cannot be loaded again, after it was.
        """
        if self._is_loaded and not self._client.has_ended:
            return
        self._stop()
        memory = self._limits.memory_gib
        request = {
            "name": self._path,
            "settings": self._settings,
            "state": self._state,
            "folder": os.getcwd(),
            "memory_bytes": None if memory is None else int(memory * 2**30),
        }
        try:
            answer = self._ask(request, LOAD_SECONDS)
            if "error" in answer:
                raise _Failure(answer["error"])
        except _Failure as failure:
            if self._was_loaded:
                raise
            raise RewardError(f"reward {self._path!r} cannot be loaded in a process of its own: {failure}") from None
        self._is_loaded, self._was_loaded, self._state = True, True, answer.get("state")

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the process. Raises _Failure if it ends."""
        # Values that JSON does not have arrive as text, as those of columns do in training.
        request = json.dumps({**message, "seconds": seconds}, default=str).encode()
        started = time.monotonic()
        answer, code = self._client.ask(request, MAX_ANSWER_BYTES, seconds + GRACE_SECONDS)
        if answer is None:
            self._is_loaded = self._is_dirty = False
            self._ends += 1
            raise _Failure(_reason(code, time.monotonic() - started, seconds))
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def _stop(self) -> None:
        self._client.stop()
        self._is_loaded = self._is_dirty = False


class StatefulIsolatedReward(IsolatedReward):
    """Isolated reward of a class with `state_dict` and `load_state_dict`.

    The state is the one after the last successful call.
    """

    def state_dict(self) -> Any:
        """Return the state, of JSON types; before the first call, the initial one."""
        with self._lock:
            self._load()
            return self._state

    def load_state_dict(self, state: Any) -> None:
        """Continue with a state."""
        with self._lock:
            self._stop()
            self._state = state


class _Failure(Exception):
    """Call that gave no rewards; the message is the reason."""


_NOT_SENT = frozenset({"log_metric", "log_extra", "trainer_state"})


def _reason(code: int | None, seconds: float, limit: float) -> str:
    """Return the reason why a process ended.

    Args:
        code: its exit code; None if it ended while it started.
        seconds: duration of the call.
        limit: time limit of the call, seconds; less than rewards.isolate_seconds if the step's calls had less left.
    """
    if code is None:
        return "its process ended while it started"
    if seconds >= limit:
        return f"it took longer than {round(limit, 2):g} s (rewards.isolate_seconds)"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with status {code}"


def _places_by_problem(arguments: Arguments) -> list[list[int]]:
    """Return the places of the completions of each problem."""
    prompts = arguments["prompts"]
    places: dict[str, list[int]] = {}
    for place, problem in enumerate(zip(prompts, arguments.get("id") or prompts, strict=True)):
        places.setdefault(json.dumps(problem), []).append(place)
    return list(places.values())
