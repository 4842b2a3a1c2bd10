"""Loop of a process that answers one request at a time (`request_client.py`)."""

import socket
from collections.abc import Callable

from grpo_ray.processes.messages import frame, receive_frames

READY = b"ready"
"""First message of the process. Its limits hold from then on."""


def serve_requests(sock: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    """Answer requests until the socket closes.

    Args:
        answer: must not raise: the process would end without an answer.
    """
    sock.sendall(frame(READY))
    for request in receive_frames(sock):
        sock.sendall(frame(answer(request)))
