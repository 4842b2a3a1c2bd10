"""Tests of output to lost terminals and pipes; `integration/observers/terminal/test_terminal.py` has real ones."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from grpo_ray.resilience.hangup import UnbufferedOutput, survives_hangup


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, int]]:
    """The writing end of a pipe as a stream, and the reading end as a file descriptor."""
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        yield stream, reader


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """The signal's default handler, however the tests were started: `nohup` has it ignored."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_unbuffered_output_keeps_the_order_of_the_stream(pipe: tuple[TextIO, int]) -> None:
    stream, reader = pipe
    output = UnbufferedOutput(stream)
    stream.write("first, ")
    assert output.write("second") == 6
    assert os.read(reader, 100) == b"first, second"
    os.close(reader)


def test_unbuffered_output_without_reader_is_discarded(pipe: tuple[TextIO, int]) -> None:
    stream, reader = pipe
    os.close(reader)
    output = UnbufferedOutput(stream)
    output.write("lost")
    output.write("lost too")
    stream.write("what other code prints")
    stream.flush()  # raises nothing: the file descriptor leads to /dev/null
    assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_unbuffered_output_character_outside_the_encoding_is_replaced() -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="ascii") as stream:
        UnbufferedOutput(stream).write("━ 1")
    assert os.read(reader, 100) == b"? 1"
    os.close(reader)


@pytest.mark.usefixtures("default_hangup")
def test_survives_hangup_handles_the_signal_inside_only() -> None:
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with survives_hangup():
        assert callable(signal.getsignal(signal.SIGHUP))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_survives_hangup_keeps_other_handlers() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with survives_hangup():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("default_hangup")
def test_survives_hangup_outside_main_thread_does_nothing() -> None:
    entered = []

    def enter() -> None:
        with survives_hangup():
            entered.append(signal.getsignal(signal.SIGHUP))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.SIG_DFL]
