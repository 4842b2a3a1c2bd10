"""What ends an attempt, and what ends the run: a worker that hangs, and errors that another attempt would not mend."""

import faulthandler
import os
import re
import statistics
import threading
import time
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_ray.errors import (
    BadNumbersError,
    CheckpointError,
    ConfigError,
    DataError,
    LedgerError,
    SameBugError,
    SupersededError,
)

HANGING = 86
"""Exit code of a worker that its own watchdog ended."""


class Pace:
    """How long each kind of phase usually takes: the median of its last 20 times, in seconds."""

    def __init__(self, factor: float, floor: float):
        self.factor = factor
        self.floor = floor
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def add(self, kind: str, seconds: float) -> None:
        """Remember one more time of a kind."""
        self._seconds[kind].append(seconds)

    def usual(self, kind: str) -> float | None:
        """The usual time of a kind, or None where it is not known yet."""
        return statistics.median(self._seconds[kind]) if self._seconds[kind] else None

    def limit(self, kind: str) -> float:
        """Seconds after which a phase of that kind counts as hanging."""
        return max(self.floor, self.factor * (self.usual(kind) or 0.0))


@dataclass(frozen=True)
class _Phase:
    kind: str
    step: int | None
    begun: float
    limit: float


class Watchdog:
    """Ends this process when a phase hangs, so that Ray Train starts the worker group again; says before where.

    A process has one (it uses faulthandler's only timer). A phase that outlasts its limit has the stacks of all
    threads written and `on_hang` called; `grace` seconds after the limit the process ends. The others of the group
    hang in the same step, and write theirs in that time. Where native code holds the interpreter no Python runs any
    more: faulthandler's own thread then writes the stacks and ends the process (with exit code 1), a little later.
    """

    def __init__(
        self,
        stacks: Path,
        factor: float,
        floor: float,
        on_hang: Callable[[str, Path], object],
        grace: float = 10.0,
        end: Callable[[], object] = lambda: os._exit(HANGING),
    ):
        """
        stacks: file that the stacks are appended to; on a disk of this machine, since storage may be what hangs.
        factor: a phase hangs when it takes so many times the usual time of its kind,
        floor: but not before so many seconds; they alone count for a kind whose usual time is not known yet.
        on_hang: told what hangs and where the stacks are; may fail or hang itself.
        """
        self.stacks = stacks
        self.pace = Pace(factor, floor)
        self.on_hang = on_hang
        self.grace = grace
        self.end = end
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(stacks, "a", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until `stop`
        self._phase: _Phase | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def beat(self, kind: str, step: int | None = None) -> None:
        """The phase before is over, and one of this kind begins."""
        with self._changed:
            self._finish()
            self._phase = _Phase(kind, step, time.monotonic(), self.pace.limit(kind))
            backstop = self._phase.limit + 2 * self.grace + 1
            faulthandler.dump_traceback_later(backstop, exit=True, file=self._file)
            self._changed.notify()

    def suspend(self) -> None:
        """The phase before is over; nothing is watched until the next beat."""
        with self._changed:
            self._finish()
            faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Watch nothing any more. A hang that has been found by now still ends the process."""
        with self._changed:
            self._finish()
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self.stacks.exists() and self.stacks.stat().st_size == 0:
            self.stacks.unlink()

    def _finish(self) -> None:
        if self._phase is not None:
            self.pace.add(self._phase.kind, time.monotonic() - self._phase.begun)
        self._phase = None

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                phase = self._phase
                if phase is None:
                    self._changed.wait()
                elif (left := phase.begun + phase.limit - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            else:
                return
        self._hangs(phase)

    def _hangs(self, phase: _Phase) -> None:
        usual = self.pace.usual(phase.kind)
        message = (
            f"{phase.kind}{'' if phase.step is None else f' (step {phase.step})'} hangs: no end after "
            f"{time.monotonic() - phase.begun:.1f} s, usually {'not known' if usual is None else f'{usual:.1f} s'}"
        )
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {message}\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
            self.on_hang(message, self.stacks)
        finally:  # whatever failed, a process that hangs does not live on
            time.sleep(max(0.0, phase.begun + phase.limit + self.grace - time.monotonic()))
            self.end()


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


def with_step(error: BaseException, step: int) -> None:
    """Write on an error, before it leaves the worker, at which step it came and its traceback.

    Ray Train hands the controller the bare error: of its own the traceback does not survive pickling.
    """
    bare = _bare(error)
    if _raised(bare) is None:
        bare.add_note(f"grpo_ray step {step}")
        bare.__dict__["_grpo_ray"] = (uuid.uuid4().hex, "".join(traceback.format_exception(error)))


class Marking:
    """Marks every error that leaves the block with the step it came at: who decides on another try must know."""

    def __init__(self, step: Callable[[], int]):
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with_step(error, self.step())


def step_of(error: BaseException) -> int | None:
    """The step that `with_step` wrote on an error, or None."""
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


def signature(error: BaseException) -> str | None:
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


FINAL = (BadNumbersError, CheckpointError, ConfigError, DataError, LedgerError, SupersededError)
"""Errors that every attempt would end with."""


def stop_for_good(error: BaseException) -> None:
    """Raise an error that another attempt would not mend, in the controller, which does not retry what it raises."""
    if isinstance(bare := _bare(error), FINAL):
        raise bare


def culprit(worker_exceptions: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The worker whose error explains the others', and that error.

    An error of the code comes before a death, and both before what only says that another worker is gone.
    """

    def order(item: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = item
        if _lost_peer(_bare(error)):
            return 2, rank
        return int(_died(error)), rank

    return min(worker_exceptions.items(), key=order)


def one_line(error: BaseException) -> str:
    """What an error of a worker says, in a line."""
    if getattr(_bare(error), "preempted", False):
        return "its machine, or another of the group, is taken away"
    if _died(error):
        return "it died (killed, out of memory, or its machine is gone)"
    error = _bare(error)
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


class SameBug:
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
            step, name, raised = step_of(error), signature(error), _raised(_bare(error))
            if name is None:
                return
            if step is not None and raised is not None and not _lost_peer(_bare(error)):
                present[step, name].add(raised[0])
                text[step, name] = raised[1]
        for key, raises in present.items():
            # Ray may show an attempt twice, the second time with more of its workers' errors.
            if self._seen.get(key, raises).isdisjoint(raises):
                raise SameBugError(
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
    """Which raise it was (an id) and its traceback, as `with_step` wrote them."""
    return bare.__dict__.get("_grpo_ray")


def _lost_peer(bare: BaseException) -> bool:
    return isinstance(bare, ConnectionError) or LOST_PEER.search(str(bare)) is not None
