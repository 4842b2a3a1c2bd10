"""HTTP server of tests that speaks SandboxFusion's API on this machine, and misbehaves as told.

It runs the programs for real, in a process each, without any confinement.
"""

import json
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from http_server import Server, serving

Answer = Callable[[Mapping[str, Any]], Any] | bytes | int | str
"""Answer to a request: a function of the request's JSON that returns that of the response; a body; a status; or one of
"redirect", "hang" (never), "drip" (bytes for ever), "close" (without a response) and "cut" (half a response)."""


def run_program(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the program of a request in the form of `POST /run_code`."""
    assert request["language"] == "python"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(request["code"])
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                input=request["stdin"].encode(),
                capture_output=True,
                cwd=folder,
                timeout=request["run_timeout"],
            )
        except subprocess.TimeoutExpired as expired:
            return answer("Failed", "TimeLimitExceeded", stdout=(expired.stdout or b"").decode())
    status = "Failed" if done.returncode else "Success"
    return answer(status, "Finished", done.returncode, done.stdout.decode(), done.stderr.decode())


def answer(
    status: str, run_status: str, return_code: int | None = None, stdout: str = "", stderr: str = "", message: str = ""
) -> dict[str, Any]:
    """Return the JSON of a response."""
    result = {
        "status": run_status, "execution_time": 0.1, "return_code": return_code, "stdout": stdout, "stderr": stderr,
    }  # fmt: skip
    return {
        "status": status, "message": message, "compile_result": None, "run_result": result,
        "executor_pod_name": None, "files": {},
    }  # fmt: skip


@dataclass
class SandboxServer:
    """Server on a free port.

    Args:
        answers: answers to requests in turn; the last one repeats.
    """

    answers: Sequence[Answer]
    retry_after: str | None = None
    """Header of responses with a status."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """JSON of the requests to `/run_code`, in their order."""
    authorizations: list[str | None] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Method and path of all other requests."""
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end, so that requests without an answer return."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def sandbox_server(
    *answers: Answer, certificate: tuple[Path, Path] | None = None, retry_after: str | None = None, path: str = ""
) -> Iterator[SandboxServer]:
    """Run a server; without answers it runs programs.

    Args:
        certificate: files of certificate and key, for https.
        path: path under which the API is served.
    """
    state = SandboxServer(answers or (run_program,), retry_after)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != f"{path}/run_code":
                self.note()
                return
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            with state.lock:
                given = state.answers[min(len(state.requests), len(state.answers) - 1)]
                state.requests.append(request)
                state.authorizations.append(self.headers.get("Authorization"))
            if callable(given):
                given = json.dumps(given(request)).encode()
            if isinstance(given, bytes):
                self.send_response(200)
                self.send_header("Content-Length", str(len(given)))
                self.end_headers()
                self.wfile.write(given)
            elif isinstance(given, int):
                self.send_response(given)
                if state.retry_after is not None:
                    self.send_header("Retry-After", state.retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.misbehave(given)

        def misbehave(self, how: str) -> None:
            self.close_connection = True
            if how == "hang":
                state.released.wait()
            elif how == "redirect":
                self.send_response(307)
                self.send_header("Location", f"{state.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif how == "cut":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"status": "Success"')
            elif how == "drip":
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drip: ")
                while not state.released.wait(0.05):
                    self.wfile.write(b"x")
                    self.wfile.flush()
            else:
                assert how == "close"

        def note(self) -> None:
            with state.lock:
                state.others.append(f"{self.command} {self.path}")
            self.send_response(404)
            self.end_headers()

        do_GET = note

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    class QuietServer(Server):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing of clients that have gone, and of handshakes that failed."""

    server = QuietServer(Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}{path}"
    with serving(server, state.released):
        yield state


def make_certificate(folder: Path, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """Write a certificate for an address of this machine, signed by itself, and its key. Needs the program openssl."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=sandbox", "-addext", f"subjectAltName=IP:{host}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key
