"""Fake judge: an OpenAI-compatible server on this machine whose answers the test decides."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_server import Server, serving

Reply = str | bytes | int | None
"""Text of an answer, the whole body of one, an HTTP status, or None for a request that is never answered."""


@dataclass
class JudgeServer:
    """Requests that the server has received, and its address."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def users(self) -> list[str]:
        """User messages of the requests."""
        return [each["messages"][1]["content"] for each in self.requests]


def completions_in(user: str) -> list[str]:
    """Return the completions in a user message."""
    return re.findall(r"<completion(?:-\d+)?-[0-9a-f]{12}>\n(.*?)\n</completion", user, re.DOTALL)


@contextmanager
def judge_server(reply: Callable[[str, int], Reply]) -> Iterator[JudgeServer]:
    """Run a server that answers with `reply(user message, number of earlier requests)`."""
    state = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.requests)
                state.requests.append(body)
                state.keys.append(self.headers.get("Authorization"))
                answer = reply(body["messages"][1]["content"], number)
            if answer is None:
                state.released.wait()
                return
            content = {
                "id": "a", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
                ],
                "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
            }  # fmt: skip
            data = json.dumps({"error": {"message": "no"}} if isinstance(answer, int) else content).encode()
            data = answer if isinstance(answer, bytes) else data
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = Server(Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    with serving(server, state.released):
        yield state
