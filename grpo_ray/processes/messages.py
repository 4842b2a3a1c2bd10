"""Messages over a socket between two processes: bytes prefixed with their length, 32 bits in little-endian order.

Some senders are not trusted: their messages may have any content, and the length is checked before the rest is read.
"""

import math
import socket
import struct
from collections.abc import Iterator

LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16


def frame(body: bytes) -> bytes:
    """Return a message prefixed with its length. Raises `struct.error` from 4 GiB on."""
    return LENGTH.pack(len(body)) + body


def unpack_frames(buffer: bytearray, max_bytes: float = math.inf) -> Iterator[bytes]:
    """Remove the complete messages from the start of a buffer and yield them.

    Args:
        max_bytes: largest message of a sender that is not trusted.

    Raises:
        ValueError: a message is larger.
    """
    while len(buffer) >= LENGTH.size:
        size = _size(buffer, max_bytes)
        if len(buffer) < LENGTH.size + size:
            return
        body = bytes(buffer[LENGTH.size : LENGTH.size + size])
        del buffer[: LENGTH.size + size]
        yield body


def receive_frame(sock: socket.socket, max_bytes: float = math.inf) -> bytes:
    """Receive the next message of a blocking socket; later ones stay in the socket.

    Raises:
        ConnectionError: the socket closes before the message is complete.
        ValueError: the message is larger than `max_bytes`.
    """
    return _receive_exactly(sock, _size(_receive_exactly(sock, LENGTH.size), max_bytes))


def receive_frames(sock: socket.socket) -> Iterator[bytes]:
    """Yield the messages of a blocking socket until it closes."""
    buffer = bytearray()
    while data := sock.recv(_CHUNK_BYTES):
        buffer += data
        yield from unpack_frames(buffer)


def _size(header: bytes | bytearray, max_bytes: float) -> int:
    (size,) = LENGTH.unpack_from(header)
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes; at most {max_bytes} are allowed")
    return int(size)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(min(size - len(data), _CHUNK_BYTES))
        if not more:
            raise ConnectionError("the socket closed before the message was complete")
        data += more
    return bytes(data)
