"""What the driver does about signals, and how the workers hear of it."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_ray.stop import StopAsked, StopSignals


class Told:
    """A board that runs in this process."""

    def __init__(self) -> None:
        self.asked = 0
        self.stop = self

    def remote(self) -> None:
        self.asked += 1


@pytest.fixture
def earlier() -> Iterator[list[int]]:
    """Signals that came to the handler from before; the process's own handlers are put back at the end."""
    heard: list[int] = []
    before = {number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_workers_and_the_second_does_what_it_always_did(
    earlier: list[int], number: signal.Signals
) -> None:
    board, said = Told(), []
    stop = StopSignals(board, said.append, is_training=lambda: True)
    stop.install()
    os.kill(os.getpid(), number)
    assert (board.asked, earlier, stop.heard) == (1, [], number.name)
    assert len(said) == 1 and said[0].startswith(f"{number.name}: the step is finished and saved")
    os.kill(os.getpid(), number)
    assert (board.asked, earlier) == (1, [number])


def test_while_nothing_trains_a_signal_does_what_it_always_did(earlier: list[int]) -> None:
    board = Told()
    stop = StopSignals(board, lambda text: None, is_training=lambda: False)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (board.asked, earlier, stop.heard) == (0, [signal.SIGTERM], None)


def test_signals_are_given_back(earlier: list[int]) -> None:
    stop = StopSignals(Told(), lambda text: None, is_training=lambda: True)
    stop.install()
    stop.remove()
    os.kill(os.getpid(), signal.SIGINT)
    assert earlier == [signal.SIGINT]


def test_the_workers_hear_of_it_without_waiting_for_the_board(cluster: None) -> None:
    import ray
    from failing_storage import wait_for

    from grpo_ray.board import Board

    board: Any = ray.remote(num_cpus=0)(Board).remote()
    asked = StopAsked(board)
    assert asked() is False
    ray.get(board.stop.remote())
    wait_for(asked, "the board's answer")
    assert asked() is True
