"""What ends an attempt, and what ends the run: a worker that hangs, and errors that another attempt would not mend."""

import re
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from grpo_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LedgerError,
    NonFiniteError,
    RepeatedWorkerError,
    SupersededError,
)

FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
VARYING = re.compile(r"0x[0-9a-fA-F]+|\S*/\S*|\d+")
"""Numbers, addresses and paths: temporary folders have random names."""
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|lost|timed out)|closed by peer|broken pipe"
    r"|socket closed|no route to host|network is unreachable"
    r"|nccl\w* (communicator|comm|operation)\w* (was |were )?abort|ncclRemoteError|remote process exit"
    r"|failed to (recv|send), got \d+ bytes|timed out waiting \d+ ?ms",
    re.IGNORECASE,
)
"""What collectives say when another worker is gone."""


def annotate_step(error: BaseException, step: int) -> None:
    """Write on an error, before it leaves the worker, at which step it came and its traceback.

    Ray Train hands the controller the bare error: of its own the traceback does not survive pickling.
    """
    bare = _bare(error)
    if _raised(bare) is None:
        bare.add_note(f"grpo_ray step {step}")
        bare.__dict__["_grpo_ray"] = (uuid.uuid4().hex, "".join(traceback.format_exception(error)))


class error_context:
    """Marks every error that leaves the block with the step it came at: who decides on another try must know."""

    def __init__(self, step: Callable[[], int]):
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            annotate_step(error, self.step())


def step_of(error: BaseException) -> int | None:
    """The step that `annotate_step` wrote on an error, or None."""
    notes = "\n".join(getattr(_bare(error), "__notes__", []))
    found = re.search(r"^grpo_ray step (\d+)$", notes or str(error), re.MULTILINE)
    return int(found[1]) if found else None


def traceback_of(error: BaseException) -> str | None:
    """The traceback of an error as text, from wherever it can still be had; None if it is lost."""
    if raised := _raised(_bare(error)):
        return raised[1]
    if text := getattr(error, "_traceback_str", None):
        return text
    return "".join(traceback.format_exception(error)) if error.__traceback__ else None


def error_signature(error: BaseException) -> str | None:
    """What makes two errors the same: type, message without what varies, and the frames of the traceback.

    None for a death: what Ray says of a worker, node or actor that is gone has no traceback of the code that ran.
    """
    bare = _bare(error)
    text = traceback_of(error)
    if text is None or _died(error):
        return None
    message = VARYING.sub("#", (str(bare).strip().splitlines() or [""])[0])
    frames = [":".join(frame) for frame in FRAME.findall(text)]
    return "\n".join([f"{type(bare).__module__}.{type(bare).__qualname__}: {message}", *frames])


FATAL_ERRORS = (NonFiniteError, CheckpointError, ConfigError, DataError, LedgerError, SupersededError)
"""Errors that every attempt would end with."""


def raise_if_fatal(error: BaseException) -> None:
    """Raise an error that another attempt would not mend, in the controller, which does not retry what it raises."""
    if isinstance(bare := _bare(error), FATAL_ERRORS):
        raise bare


def root_cause(worker_exceptions: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The worker whose error explains the others', and that error.

    An error of the code comes before a death, and both before what only says that another worker is gone.
    """

    def order(item: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = item
        if _lost_peer(_bare(error)):
            return 2, rank
        return int(_died(error)), rank

    return min(worker_exceptions.items(), key=order)


def describe_worker_error(error: BaseException) -> str:
    """What an error of a worker says, in a line."""
    if getattr(_bare(error), "preempted", False):
        return "its machine, or another of the group, is taken away"
    if _died(error):
        return "it died (killed, out of memory, or its machine is gone)"
    error = _bare(error)
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


class RepeatedErrorDetector:
    """Ends the run at the second sight of the same error at the same step; lives in Ray Train's controller.

    An attempt in which a worker died is no evidence: the errors of the others may come of that. Nor is an error that
    only says that another worker is gone, even where Ray has not heard yet of which.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], set[str]] = {}
        """Step and signature -> the raises that they were seen in."""

    def after_exception(self, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Look at the errors of an attempt, by rank. Raises SameBugError, which Ray Train does not retry."""
        present: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
        text = {}
        for error in worker_exceptions.values():
            step, name, raised = step_of(error), error_signature(error), _raised(_bare(error))
            if name is None:
                return
            if step is not None and raised is not None and not _lost_peer(_bare(error)):
                present[step, name].add(raised[0])
                text[step, name] = raised[1]
        for key, raises in present.items():
            # Ray may show an attempt twice, the second time with more of its workers' errors.
            if self._seen.get(key, raises).isdisjoint(raises):
                raise RepeatedWorkerError(
                    f"the same error at step {key[0]} as in an attempt before, so the workers are not started again:\n"
                    f"{text[key]}"
                )
        for key, raises in present.items():
            self._seen.setdefault(key, set()).update(raises)


def _bare(error: BaseException) -> BaseException:
    """What user code raised: without Ray Train's wrapper, and without the one of an error from a Ray task."""
    bare: Any = getattr(error, "_base_exc", error)
    while any(kind.__name__ == "RayTaskError" for kind in type(bare).__mro__):
        bare = bare.cause
    return bare


def _died(error: BaseException) -> bool:
    """Whether it is what Ray says of a worker, node or actor that is gone."""
    return any(kind.__module__.partition(".")[0] == "ray" for kind in type(_bare(error)).__mro__)


def _raised(bare: BaseException) -> tuple[str, str] | None:
    """Which raise it was (an id) and its traceback, as `annotate_step` wrote them."""
    return bare.__dict__.get("_grpo_ray")


def _lost_peer(bare: BaseException) -> bool:
    return isinstance(bare, ConnectionError) or LOST_PEER.search(str(bare)) is not None
