"""A run that is asked to stop, by Ctrl-C, SIGTERM or `ray job stop`, finishes its step, saves it, and ends.

The driver hears the signal and writes it on the board; the workers look there after each step, and all of them hear
of it at the same one.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any]


class StopSignals:
    """What the driver does about a signal that ends programs: the first one asks the workers to stop.

    While nothing trains there is nothing to save, and the signal does what it did before; so does a second one.
    """

    def __init__(self, board: Any, say: Callable[[str], None], is_training: Callable[[], bool]):
        """
        is_training: whether the workers are taking steps, so that they will hear of it.
        """
        self.board = board
        self.say = say
        self.is_training = is_training
        self.heard: str | None = None
        """Name of the signal that the workers were told of."""
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over. Signals reach the main thread alone; in another one this does nothing."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}

    def remove(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None and self.is_training():
            self.heard = signal.Signals(number).name
            self.board.stop.remote()
            self.say(f"{self.heard}: the step is finished and saved, then the run stops; once more stops it at once")
            return
        before = self._before.get(number)
        self.remove()
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)


class StopRequest:
    """Whether the run was asked to stop; on the workers. A barrier: every worker calls it after each step."""

    def __init__(self, board: Any):
        self.board = board
        self.asked = False
        self._answer: Any = None

    def __call__(self) -> bool:
        if not self.asked:
            several = dist.is_initialized() and dist.get_world_size() > 1
            heard = [self._look() if not several or dist.get_rank() == 0 else False]
            if several:
                dist.broadcast_object_list(heard)
            self.asked = heard[0]
        return self.asked

    def _look(self) -> bool:
        """What the board last said; training never waits for its answer."""
        asked = False
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            asked, self._answer = ray.get(self._answer), None
        if self._answer is None:
            self._answer = self.board.stopping.remote()
        return asked
