"""Supervisor for tests of its client: sends each frame back, and ends in the ways that frames ask for."""

import os
import socket
import time

from grpo_ray.processes.messages import frame, receive_frames

CRASH, HANG = b"crash", b"hang"
CODE = 7
"""Exit code of a crash."""


def main(descriptor: int, *arguments: float) -> None:
    """Send the arguments and each frame back until the socket closes."""
    with socket.socket(fileno=descriptor) as sock:
        sock.sendall(frame(repr(arguments).encode()))
        for body in receive_frames(sock):
            if body == CRASH:
                os._exit(CODE)
            if body == HANG:  # from now on also beyond the end of the socket
                time.sleep(1e6)
            sock.sendall(frame(body))
