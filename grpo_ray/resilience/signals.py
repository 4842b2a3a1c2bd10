"""Graceful stop: after Ctrl-C, SIGTERM or `ray job stop`, the run finishes its step, saves a checkpoint, and ends.

The driver receives the signal and sets a flag in the run coordinator. Rank 0 polls the flag after each step and
broadcasts it, so that all workers stop after the same step.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist

if TYPE_CHECKING:
    from ray import ObjectRef

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that request a stop."""

Handler = Callable[[int, FrameType | None], Any]


class StopSignals:
    """Signal handlers of the driver: the first signal requests a graceful stop.

    The previous handlers run instead at the second signal, and while the workers take no steps, because then there is
    nothing to save.
    """

    def __init__(self, coordinator: Any, notify: Callable[[str], None], is_training: Callable[[], bool]):
        """
        Args:
            coordinator: handle of the `RunCoordinator` actor.
            notify: shows a line to the user.
            is_training: returns True while the workers take steps, and thus check for a request.
        """
        self.coordinator = coordinator
        self.notify = notify
        self.is_training = is_training
        self.received: str | None = None
        """Name of the signal that requested the stop."""
        self.reason: str | None = None
        """Warning (`run.stop_on`) or other reason that requested the stop."""
        self.error: Exception | None = None
        """Error that `abort` ends the run with."""
        self._stops_workers = True
        self._previous: dict[int, Any] = {}

    @property
    def requested_by(self) -> str | None:
        """Warning or signal that requested a graceful stop; None without such a request."""
        return self.reason or self.received

    def request_stop(self, reason: str, cause: str | None = None) -> None:
        """Request a graceful stop from any thread; only the first request counts.

        Args:
            reason: warning of `run.stop_on`, or another reason that is no signal.
            cause: begin of the line for the user; None: the warning.
        """
        if self.reason is None:
            self.reason = reason
            self.coordinator.request_stop.remote()
            cause = cause or f"run.stop_on={reason}"
            self.notify(f"{cause}: the run stops once the current step is finished and saved")

    def abort(self, error: Exception, *, stops_workers: bool) -> None:
        """End the run with an error, from another thread: interrupts the main thread, which waits for Ray.

        The interrupted call may raise KeyboardInterrupt in place of `error`; the caller raises `self.error` then.

        Args:
            stops_workers: False if the cluster is lost: then there are no workers to stop, and Ray does not respond.
        """
        self.error, self._stops_workers = error, stops_workers
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def install(self) -> None:
        """Install the handlers. Outside the main thread, where Python cannot handle signals, do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def remove(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous: Handler | int | None = self._previous.get(number)
        if self.error is not None:
            self.remove()
            if self._stops_workers and callable(previous):
                with suppress(SystemExit, KeyboardInterrupt):  # Ray Train's handler ends the process afterwards
                    previous(number, frame)
            raise self.error
        if self.received is None and self.is_training():
            self.received = signal.Signals(number).name
            self.coordinator.request_stop.remote()
            self.notify(
                f"{self.received}: the run stops once the current step is finished and saved; "
                "send the signal again to stop immediately"
            )
            return
        self.remove()
        if callable(previous):
            previous(number, frame)
        else:
            signal.raise_signal(number)


class StopRequest:
    """Check, on the workers, for a requested stop. Collective: every rank must call it once after each step."""

    def __init__(self, coordinator: Any):
        """
        Args:
            coordinator: handle of the `RunCoordinator` actor.
        """
        self.coordinator = coordinator
        self.requested = False
        self._pending: ObjectRef[bool] | None = None

    def __call__(self) -> bool:
        """Return True once a stop was requested; the same on all ranks."""
        if not self.requested:
            distributed = dist.is_initialized() and dist.get_world_size() > 1
            flag = [self._poll() if not distributed or dist.get_rank() == 0 else False]
            if distributed:
                dist.broadcast_object_list(flag)
            self.requested = flag[0]
        return self.requested

    def _poll(self) -> bool:
        """Return the coordinator's latest response and send the next request, without waiting for it."""
        requested = False
        if self._pending is not None and ray.wait([self._pending], timeout=0)[0]:
            requested, self._pending = ray.get(self._pending), None
        if self._pending is None:
            self._pending = self.coordinator.stop_requested.remote()
        return requested
