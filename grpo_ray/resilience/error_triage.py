"""Classification of worker errors: retryable, or fatal because the next attempt would fail in the same way.

Ray Train restarts the worker group after any error, up to `run.max_failures` times, and counts a bug like a dead
machine. The functions here run in its controller and end the run early after an error that cannot go away.
"""

import re
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LedgerError,
    NonFiniteError,
    RefusedRewardError,
    RepeatedWorkerError,
    RolloutError,
    SupersededError,
)

FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
"""Frame of a Python traceback: file, line, function."""
VARYING = re.compile(r"0x[0-9a-fA-F]+|\S*/\S*|\d+")
"""Parts of a message that differ between equal errors: addresses, numbers, and paths (temporary folders)."""
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|lost|timed out)|closed by peer|broken pipe"
    r"|socket closed|no route to host|network is unreachable"
    r"|nccl\w* (communicator|comm|operation)\w* (was |were )?abort|ncclRemoteError|remote process exit"
    r"|failed to (recv|send), got \d+ bytes|timed out waiting \d+ ?ms",
    re.IGNORECASE,
)
"""Messages of gloo and NCCL after another worker of the group has ended."""

MEMORY_KILL = re.compile(r"killed due to (?:the node running low on memory|memory pressure)")
"""Messages of Ray's memory monitor, which kills processes before a node is out of memory."""
MEMORY_ADVICE = (
    "Ray's memory monitor killed it because its node was low on memory; use fewer workers on the node "
    "(cluster.num_workers), a smaller grpo.micro_batch_size or engine.cpu_cache_gib, or a node with more memory"
)

GPU_MEMORY_ADVICE = (
    "lower grpo.tokens_per_micro_batch or, with colocated engines, engine.gpu_memory_utilization; grpo_ray's "
    "documentation lists the other settings (GPU memory)"
)

FATAL_ERRORS = (
    NonFiniteError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LedgerError,
    RefusedRewardError,
    RolloutError,
    SupersededError,
)
"""Errors that would recur in every further attempt."""


class _Origin(NamedTuple):
    """Origin of an error, which `annotate_step` attaches to it."""

    id: str
    """Random id of this raise; it survives pickling, so two copies of one error can be recognized."""
    traceback: str


def annotate_step(error: BaseException, step: int) -> None:
    """Attach the step, a random id and the traceback to an error, before it leaves the worker.

    Ray Train sends the bare error to the controller, and pickling drops its traceback. An error that is annotated
    already is left unchanged.
    """
    user_error = _unwrap(error)
    if _origin(user_error) is None:
        user_error.add_note(f"grpo_ray step {step}")
        # A plain tuple, so that a process can unpickle the error without importing this package.
        user_error.__dict__["_grpo_ray"] = (uuid.uuid4().hex, "".join(traceback.format_exception(error)))


@contextmanager
def error_context(step: Callable[[], int]) -> Iterator[None]:
    """Annotate every Exception that leaves the block with the current step, to detect repeated errors.

    Args:
        step: returns the current step.
    """
    try:
        yield
    except Exception as error:  # annotated and raised again
        annotate_step(error, step())
        raise


def error_step(error: BaseException) -> int | None:
    """Return the step that `annotate_step` attached to an error, or None."""
    notes = "\n".join(getattr(_unwrap(error), "__notes__", []))
    match = re.search(r"^grpo_ray step (\d+)$", notes or str(error), re.MULTILINE)
    return int(match[1]) if match else None


def error_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error as text: attached by `annotate_step`, else Ray's, else its own, else None."""
    if origin := _origin(_unwrap(error)):
        return origin.traceback
    text: str | None = getattr(error, "_traceback_str", None)  # set by Ray Train's wrapper of user errors
    if text:
        return text
    return "".join(traceback.format_exception(error)) if error.__traceback__ else None


def error_signature(error: BaseException) -> str | None:
    """Return a text that is equal for two occurrences of the same error.

    It consists of the type, the message without its varying parts, and the frames of the traceback. None for the death
    of a worker, node or actor, because Ray's error has no traceback of the code that ran.
    """
    user_error = _unwrap(error)
    text = error_traceback(error)
    if text is None or _is_death(error):
        return None
    message = VARYING.sub("#", (str(user_error).strip().splitlines() or [""])[0])
    frames = [":".join(frame) for frame in FRAME.findall(text)]
    return "\n".join([f"{type(user_error).__module__}.{type(user_error).__qualname__}: {message}", *frames])


def raise_if_fatal(error: BaseException) -> None:
    """Raise an error again if it is one of `FATAL_ERRORS`: Ray Train does not retry errors raised in its controller."""
    if isinstance(user_error := _unwrap(error), FATAL_ERRORS):
        raise user_error


def root_cause(worker_exceptions: Mapping[int, Exception]) -> tuple[int, Exception]:
    """Return the rank and the error of the worker that explains the errors of the others.

    Errors of the code come first, then deaths, then errors that only report a lost connection to another worker; equal
    ones are ordered by rank.
    """

    def priority(item: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = item
        if _is_lost_peer(_unwrap(error)):
            return 2, rank
        return int(_is_death(error)), rank

    return min(worker_exceptions.items(), key=priority)


def describe_worker_error(error: BaseException) -> str:
    """Describe a worker's error in one line."""
    if getattr(_unwrap(error), "preempted", False):
        return "its node, or another node of the worker group, is being preempted"
    if is_memory_kill(error):
        return MEMORY_ADVICE
    if _is_death(error):
        return "it died (killed, out of memory, or its node is gone)"
    error = _unwrap(error)
    lines = str(error).strip().splitlines() or ["no message"]
    advice = f"; {GPU_MEMORY_ADVICE}" if lines[0].startswith("CUDA out of memory") else ""
    return f"{type(error).__name__}: {lines[0]}{advice}"


def is_memory_kill(error: BaseException) -> bool:
    """Return True if Ray's memory monitor killed the worker or task that the error is about."""
    return MEMORY_KILL.search(str(error)) is not None


class RepeatedErrorDetector:
    """Detector of bugs: the same error at the same step in two attempts. Used in Ray Train's controller.

    Two kinds of errors are not evidence of a bug: all errors of an attempt in which a worker died, because its death
    may have caused them, and errors that report a lost connection to another worker, because that worker may have died
    and Ray may not have noticed it yet.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], set[str]] = {}
        """(step, signature) -> ids of the raises."""

    def check(self, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Record the errors of an attempt and compare them with those of earlier attempts.

        Args:
            worker_exceptions: rank -> error.

        Raises:
            RepeatedWorkerError: the same error occurred at the same step before. Ray Train does not retry it.
        """
        current: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
        tracebacks: dict[tuple[int, str], str] = {}
        for error in worker_exceptions.values():
            step, signature, origin = error_step(error), error_signature(error), _origin(_unwrap(error))
            if signature is None:
                return
            if step is not None and origin is not None and not _is_lost_peer(_unwrap(error)):
                current[step, signature].add(origin.id)
                tracebacks[step, signature] = origin.traceback
        for key, ids in current.items():
            # Ray may report an attempt twice, the second time with the errors of more workers.
            if self._seen.get(key, ids).isdisjoint(ids):
                raise RepeatedWorkerError(
                    f"the same error at step {key[0]} as in an earlier attempt, so the workers are not restarted:\n"
                    f"{tracebacks[key]}"
                )
        for key, ids in current.items():
            self._seen.setdefault(key, set()).update(ids)


def _unwrap(error: BaseException) -> BaseException:
    """Return the error that user code raised, without the wrappers of Ray Train and of Ray tasks."""
    unwrapped: Any = getattr(error, "_base_exc", error)
    while any(kind.__name__ == "RayTaskError" for kind in type(unwrapped).__mro__):
        unwrapped = unwrapped.cause
    return unwrapped


def _is_death(error: BaseException) -> bool:
    """Return True for Ray's own errors, which report the death of a worker, node or actor."""
    return any(kind.__module__.partition(".")[0] == "ray" for kind in type(_unwrap(error)).__mro__)


def _origin(user_error: BaseException) -> _Origin | None:
    """Return the origin that `annotate_step` attached; None if there is none."""
    attached = user_error.__dict__.get("_grpo_ray")
    return None if attached is None else _Origin(*attached)


def _is_lost_peer(user_error: BaseException) -> bool:
    return isinstance(user_error, ConnectionError) or LOST_PEER.search(str(user_error)) is not None
