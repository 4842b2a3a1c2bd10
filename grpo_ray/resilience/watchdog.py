"""Hang watchdog: ends a worker process whose current phase takes far longer than usual."""

import faulthandler
import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HANG_EXIT_CODE = 86
"""Exit code of a worker that its own watchdog ended."""


class HangTimeout:
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
        end: Callable[[], object] = lambda: os._exit(HANG_EXIT_CODE),
    ):
        """
        stacks: file that the stacks are appended to; on a disk of this machine, since storage may be what hangs.
        factor: a phase hangs when it takes so many times the usual time of its kind,
        floor: but not before so many seconds; they alone count for a kind whose usual time is not known yet.
        on_hang: told what hangs and where the stacks are; may fail or hang itself.
        """
        self.stacks = stacks
        self.pace = HangTimeout(factor, floor)
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
