"""Process for tests of `RequestClient`: answers in upper case, and ends in the ways that requests ask for."""

import os
import signal
import socket

from grpo_ray.processes.request_server import serve_requests

KILL, LONG = b"kill", b"long"
LONG_BYTES = 1 << 20


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as sock:
        serve_requests(sock, answer)


def answer(request: bytes) -> bytes:
    if request == KILL:
        os.kill(os.getpid(), signal.SIGTERM)
    return b"x" * LONG_BYTES if request == LONG else request.upper()
