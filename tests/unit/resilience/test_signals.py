"""Tests of the signal handlers of the driver."""

import os
import signal
from collections.abc import Iterator

import pytest

from grpo_ray.resilience.signals import StopSignals


class FakeBoard:
    """Board in this process that counts stop requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.stop = self

    def remote(self) -> None:
        self.asked += 1


@pytest.fixture
def earlier_handler() -> Iterator[list[int]]:
    """Signals received by the handlers installed before; the original handlers are restored at the end."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_second_one_calls_earlier_handler(earlier_handler: list[int], number: signal.Signals) -> None:
    board, messages = FakeBoard(), []
    stop = StopSignals(board, messages.append, is_training=lambda: True)
    stop.install()
    os.kill(os.getpid(), number)
    assert (board.asked, earlier_handler, stop.heard) == (1, [], number.name)
    assert len(messages) == 1 and messages[0].startswith(f"{number.name}: the step is finished and saved")
    os.kill(os.getpid(), number)
    assert (board.asked, earlier_handler) == (1, [number])


def test_signals_outside_training_call_earlier_handler(earlier_handler: list[int]) -> None:
    board = FakeBoard()
    stop = StopSignals(board, lambda text: None, is_training=lambda: False)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (board.asked, earlier_handler, stop.heard) == (0, [signal.SIGTERM], None)


def test_signals_remove_restores_earlier_handler(earlier_handler: list[int]) -> None:
    stop = StopSignals(FakeBoard(), lambda text: None, is_training=lambda: True)
    stop.install()
    stop.remove()
    os.kill(os.getpid(), signal.SIGINT)
    assert earlier_handler == [signal.SIGINT]
