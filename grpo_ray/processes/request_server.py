"""Loop of a process that answers one request at a time (`request_client.py`)."""

import socket
from collections.abc import Callable

from grpo_ray.processes.messages import frame, receive_frames

READY = b"ready"
"""First message of the process, sent once its limits are in effect."""


def serve_requests(sock: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    """Answer requests until the socket closes.

    Args:
        answer: returns the answer to a request; must not raise, which would end the process without an answer.
    """
    sock.sendall(frame(READY))
    for request in receive_frames(sock):
        sock.sendall(frame(answer(request)))
