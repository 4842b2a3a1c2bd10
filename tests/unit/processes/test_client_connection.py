"""Tests of a supervisor's end of the socket to its client: it never waits, and notices the end."""

import select
import socket
from collections.abc import Iterator

import pytest

from grpo_ray.processes.client_connection import ClientConnection

LARGE = b"x" * (8 << 20)
"""More than the socket's buffers hold."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, ClientConnection]]:
    """Return the client's end and the supervisor's."""
    client, supervisor = socket.socketpair()
    with client, supervisor:
        yield client, ClientConnection(supervisor)


def test_exchange_without_data_does_not_wait(ends: tuple[socket.socket, ClientConnection]) -> None:
    _, connection = ends
    assert connection.exchange()
    assert connection.incoming == b"" and connection.events == select.POLLIN


def test_exchange_appends_what_has_come(ends: tuple[socket.socket, ClientConnection]) -> None:
    client, connection = ends
    for part in (b"ab", b"c"):
        client.sendall(part)
        assert connection.exchange()
    assert connection.incoming == b"abc"


def test_added_message_is_sent_with_the_next_exchange(ends: tuple[socket.socket, ClientConnection]) -> None:
    client, connection = ends
    client.setblocking(False)
    connection.add(b"abc")
    with pytest.raises(BlockingIOError):
        client.recv(8)
    assert connection.events == select.POLLIN | select.POLLOUT
    assert connection.exchange()
    assert client.recv(8) == b"abc" and connection.events == select.POLLIN


def test_message_larger_than_the_buffers_is_sent_in_parts(ends: tuple[socket.socket, ClientConnection]) -> None:
    client, connection = ends
    connection.send(LARGE)
    assert connection.events == select.POLLIN | select.POLLOUT
    received = 0
    while received < len(LARGE):
        received += len(client.recv(1 << 20))
        assert connection.exchange()
    assert connection.events == select.POLLIN


def test_requests_are_read_while_the_client_takes_no_result(ends: tuple[socket.socket, ClientConnection]) -> None:
    client, connection = ends
    connection.send(LARGE)
    client.sendall(b"request")
    assert connection.exchange()
    assert connection.incoming == b"request"


def test_exchange_after_the_client_has_closed_gives_its_last_data_then_false(
    ends: tuple[socket.socket, ClientConnection],
) -> None:
    client, connection = ends
    client.sendall(b"last")
    client.close()
    connection.add(b"nobody reads this")
    assert connection.exchange()
    assert connection.incoming == b"last" and not connection.exchange()
