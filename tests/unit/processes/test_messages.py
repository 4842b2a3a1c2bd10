"""Tests of frames: messages cut anywhere, sizes that are refused, sockets that close."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.processes.messages import LENGTH, frame, receive_frame, receive_frames, unpack_frames


@given(bodies=st.lists(st.binary(max_size=20), max_size=4), size=st.integers(1, 9))
def test_frames_in_pieces_are_unpacked_once(bodies: list[bytes], size: int) -> None:
    data = b"".join(map(frame, bodies))
    buffer = bytearray()
    unpacked: list[bytes] = []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        unpacked += unpack_frames(buffer)
    assert unpacked == bodies and not buffer


def test_frame_above_the_limit_is_refused_by_its_header() -> None:
    assert list(unpack_frames(bytearray(LENGTH.pack(10)), 10)) == []
    with pytest.raises(ValueError, match="a message of 11 bytes; at most 10 are allowed"):
        list(unpack_frames(bytearray(LENGTH.pack(11)), 10))
    near, far = socket.socketpair()
    with near, far:
        near.sendall(LENGTH.pack(11))
        with pytest.raises(ValueError, match="a message of 11 bytes; at most 10 are allowed"):
            receive_frame(far, 10)


def test_received_frame_leaves_those_after_it() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(frame(b"x" * 100_000) + frame(b"") + frame(b"third"))
        near.shutdown(socket.SHUT_WR)
        assert receive_frame(far) == b"x" * 100_000
        assert list(receive_frames(far)) == [b"", b"third"]


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(5)[:2], LENGTH.pack(5), frame(b"abcde")[:-1]])
def test_received_frame_of_a_closed_socket_raises(sent: bytes) -> None:
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(sent)
        with pytest.raises(ConnectionError):
            receive_frame(far)


def test_received_frames_end_with_the_socket() -> None:
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(frame(b"whole") + frame(b"part")[:-1])
        assert list(receive_frames(far)) == [b"whole"]
