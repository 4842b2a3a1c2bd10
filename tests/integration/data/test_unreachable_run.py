"""A run whose training problems come from a server that fails now and then."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from small_runs import count_uses, groups_of

ROWS = [{"prompt": f"What is {n} + 1?", "solution": f"${n + 1}$", "level": level} for n in range(4) for level in (1, 2)]
CONTENT = "".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]).encode()


class OverloadedServer(ThreadingHTTPServer):
    """Server of one file, which answers every third request with status 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.requests = 0
        self.refused = 0

    def is_overloaded(self) -> bool:
        self.requests += 1
        if self.requests % 3:
            return False
        self.refused += 1
        return True


class FileHandler(BaseHTTPRequestHandler):
    server: OverloadedServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self._answer():
            self.wfile.write(CONTENT)

    def _answer(self) -> bool:
        if self.server.is_overloaded():
            self.send_error(503)
            return False
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@pytest.fixture
def server() -> Iterator[OverloadedServer]:
    with OverloadedServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_overloaded_server_of_the_data_ends_no_run(
    small_run: Callable[..., Any], server: OverloadedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every epoch reads the file again, so a run of four epochs meets the failure in each of its parts."""
    address = f"http://127.0.0.1:{server.server_port}/problems.jsonl"
    summary, folder = small_run("overloaded", f"data.train={address}", "data.heldout=arithmetic", "grpo.max_steps=8")
    assert summary.steps == 8 and summary.price.failures == 0 and server.refused >= 5
    # Rows that differ in one column are problems of their own; the last row equals the first one.
    uses = count_uses(groups_of(folder))
    assert [sorted(counter.values()) for counter in uses.values()] == [[1] * len(ROWS)] * 4
    assert "1 row left out, equal to an earlier row in all columns" in capsys.readouterr().out
