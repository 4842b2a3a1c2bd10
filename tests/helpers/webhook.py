"""HTTP server of tests that receives posted JSON and responds as told."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_server import Server, serving


@dataclass
class Webhook:
    """Server on a free port of this machine.

    Args:
        statuses: status of each response in turn; the last one repeats. 0: never respond.
    """

    statuses: Sequence[int] = (200,)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies in the order of their requests, also of those that were refused."""
    paths: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    released: threading.Event = field(default_factory=threading.Event)
    """Set to let the requests return that are never responded to."""
    address: str = ""

    def wait_for(self, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until this number of requests has arrived, and return their bodies."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.bodies) >= count, seconds), self.bodies
            return list(self.bodies)


@contextmanager
def webhook(*statuses: int) -> Iterator[Webhook]:
    """Run a server, with a secret in its path."""
    state = Webhook(statuses or (200,))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json; charset=utf-8"
            with state.changed:
                status = state.statuses[min(len(state.bodies), len(state.statuses) - 1)]
                state.bodies.append(body)
                state.paths.append(self.path)
                state.changed.notify_all()
            if status == 0:
                state.released.wait()
                return
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = Server(Handler)
    state.address = f"http://127.0.0.1:{server.server_port}/services/s3cr3t-of-the-chat"
    with serving(server, state.released):
        yield state
