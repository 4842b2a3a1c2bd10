"""Tests of the driver's signal handlers."""

import os
import signal
from collections.abc import Iterator

import pytest

from grpo_ray.resilience.signals import StopSignals


class FakeCoordinator:
    """Coordinator in this process that counts stop requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.request_stop = self

    def remote(self) -> None:
        self.requests += 1


@pytest.fixture
def previous_handler() -> Iterator[list[int]]:
    """Yield the signals that reach the previously installed handlers; restore the original handlers at the end."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_second_one_calls_previous_handler(previous_handler: list[int], number: signal.Signals) -> None:
    coordinator = FakeCoordinator()
    messages: list[str] = []
    stop = StopSignals(coordinator, messages.append, is_training=lambda: True)
    stop.install()
    os.kill(os.getpid(), number)
    assert (coordinator.requests, previous_handler, stop.received) == (1, [], number.name)
    assert len(messages) == 1 and messages[0].startswith(
        f"{number.name}: the run stops once the current step is finished"
    )
    os.kill(os.getpid(), number)
    assert (coordinator.requests, previous_handler) == (1, [number])


def test_signals_outside_training_call_previous_handler(previous_handler: list[int]) -> None:
    coordinator = FakeCoordinator()
    stop = StopSignals(coordinator, lambda text: None, is_training=lambda: False)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (coordinator.requests, previous_handler, stop.received) == (0, [signal.SIGTERM], None)


def test_signals_remove_restores_previous_handler(previous_handler: list[int]) -> None:
    stop = StopSignals(FakeCoordinator(), lambda text: None, is_training=lambda: True)
    stop.install()
    stop.remove()
    os.kill(os.getpid(), signal.SIGINT)
    assert previous_handler == [signal.SIGINT]


def test_signals_stop_for_a_warning_is_requested_once(previous_handler: list[int]) -> None:
    coordinator, messages = FakeCoordinator(), list[str]()
    stop = StopSignals(coordinator, messages.append, is_training=lambda: True)
    stop.install()
    stop.request_stop("no_signal")
    stop.request_stop("truncation")
    assert (coordinator.requests, stop.requested_by, len(messages)) == (1, "no_signal", 1)
    os.kill(os.getpid(), signal.SIGINT)  # the first signal still lets the step be saved; the warning came first
    assert (stop.requested_by, previous_handler) == ("no_signal", [])
    os.kill(os.getpid(), signal.SIGINT)
    assert previous_handler == [signal.SIGINT]
