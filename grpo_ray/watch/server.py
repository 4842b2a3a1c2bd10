"""HTTP server of the live page: loopback only, read-only, and without anything from outside."""

import json
import threading
import webbrowser
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from grpo_ray.errors import ConfigError
from grpo_ray.report.page import read_stylesheet, render_more_curves, warm_up
from grpo_ray.report.read import open_run
from grpo_ray.watch.api import RequestError, answer
from grpo_ray.watch.live_run import LiveRun
from grpo_ray.watch.refresher import Refresher

ADDRESS = "127.0.0.1"
HOST_NAMES = frozenset({"127.0.0.1", "localhost"})
"""Host names of the page. A request with another one comes from a page that has bound its own name to this machine's
address (DNS rebinding). The port is not compared: a tunnel may have another one."""
RETRY_SECONDS = 10.0
"""Seconds to retry while the storage cannot be reached, before the page shows that."""
REQUEST_SECONDS = 30.0
"""Seconds after which an idle connection is closed."""
MAX_CONNECTIONS = 64
"""Connections at a time, each with a thread; a further one is closed at once."""
MAX_PARAMETERS = 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing is loaded from elsewhere or from within the page's text, and no script can turn text into elements."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
"""Path -> file in `static/`, and its type."""


class WatchServer(ThreadingHTTPServer):
    """Server of one run's page. Each request is answered by a thread of its own from the refresher's state."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, refresher: Refresher, port: int = 0):
        """Bind the port; 0: a free one. Raises OSError if it is taken."""
        self.refresher = refresher
        self._free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((ADDRESS, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless too many are open."""
        if not self._free_connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._free_connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it closes."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def __enter__(self) -> "WatchServer":
        self.refresher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.refresher.stop()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection; only GET and HEAD exist."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "grpo-ray", ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        try:
            status, kind, body = self._respond()
        except RequestError as error:
            status, kind, body = error.status, "application/json", _to_json({"error": str(error)})
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except ConnectionError:  # the page was closed in the meantime
                self.close_connection = True

    do_HEAD = do_GET

    def _respond(self) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        host = self.headers.get("Host", "").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else "".join(host)
        if name.lower() not in HOST_NAMES:
            raise RequestError(HTTPStatus.FORBIDDEN, f"open {self.server.url}: this page has no other name")
        parts = urlsplit(self.path)
        if parts.path in STATIC:
            file, kind = STATIC[parts.path]
            return HTTPStatus.OK, kind, _read_static(file)
        view = self.server.refresher.want()
        if parts.path == "/contents":
            return HTTPStatus.OK, "text/html; charset=utf-8", view.contents
        if parts.path == "/more-curves":
            html = render_more_curves(view.snapshot.run) if view.snapshot else ""
            return HTTPStatus.OK, "text/html; charset=utf-8", html.encode()
        try:
            values = dict(parse_qsl(parts.query, max_num_fields=MAX_PARAMETERS))
        except ValueError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "too many parameters") from None
        return HTTPStatus.OK, "application/json", _to_json(answer(parts.path, view, values))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks every few seconds."""


def watch(path: str, port: int, open_browser: bool, on_start: Callable[[str], None]) -> None:
    """Serve the live page of a run until the process is interrupted.

    Args:
        path: Run folder, local path or URI.
        port: Port on the loopback interface; 0: a free one.
        open_browser: Open the page in the user's browser.
        on_start: Receives the page's URL once it can be opened.

    Raises:
        ConfigError: The path is not a run folder, or the port is taken.
    """
    refresher = Refresher(LiveRun(open_run(path, RETRY_SECONDS)))
    warm_up()
    try:
        server = WatchServer(refresher, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--port {port}: cannot be used: {reason}; leave it out to use a free port") from None
    with server:
        on_start(server.url)
        if open_browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


@cache
def _read_static(name: str) -> bytes:
    if name == "watch.css":  # the report's stylesheet, then the viewer's
        return read_stylesheet().encode() + _read_file(name)
    return _read_file(name)


def _read_file(name: str) -> bytes:
    return files("grpo_ray.watch").joinpath("static", name).read_bytes()


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
