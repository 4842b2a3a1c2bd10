"""HTTP server of the live page: loopback only, read-only, and without external resources.

Starlette routes the requests, and uvicorn serves them.
"""

import contextlib
import json
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Host, Route, Router

from grpo_ray.errors import ConfigError
from grpo_ray.loopback import ADDRESS, UVICORN_OPTIONS
from grpo_ray.pages.report.page import read_stylesheet, render_more_curves, warm_up
from grpo_ray.pages.report.read import open_run
from grpo_ray.pages.watch.api import answer
from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.pages.watch.refresher import Refresher

HOST_NAMES = ("127.0.0.1", "localhost")
"""Host names of the page. A request with another one comes from a page that has bound its own name to this machine's
address (DNS rebinding). The port is not compared: a tunnel may have another one."""
RETRY_SECONDS = 10.0
"""Seconds to retry while the storage cannot be reached, before the page shows the error."""
STOP_SECONDS = 1.0
"""Longest wait for responses in progress when the server stops, in seconds."""
SIGNAL_SECONDS = 0.5
"""Longest time for which the main thread waits without looking for signals, in seconds."""
MAX_CONNECTIONS = 64
"""Number of open connections at which further requests get status 503."""
MAX_PARAMETERS = 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only this server's files are loaded, no inline script or style, and no script can turn text into elements."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""


def build_app(refresher: Refresher, url: str) -> Starlette:
    """Build the application that answers the page's requests, which are GET and HEAD only.

    Args:
        refresher: Reader of the run folder.
        url: URL of the page, quoted when a request under another host name is refused.
    """

    async def show_contents(request: Request) -> Response:
        return HTMLResponse(refresher.want().contents)

    # Starlette runs these two, which compute and read files, in a thread of its pool.
    def show_more_curves(request: Request) -> Response:
        snapshot = refresher.want().snapshot
        return HTMLResponse(render_more_curves(snapshot.run) if snapshot else "")

    def answer_question(request: Request) -> Response:
        if len(request.query_params.multi_items()) > MAX_PARAMETERS:
            raise HTTPException(400, "too many parameters")
        return _json(answer(request.path_params["name"], refresher.want(), request.query_params))

    async def refuse(request: Request) -> Response:
        raise HTTPException(403, f"open {url}: this page has no other name")

    stylesheet = read_stylesheet() + _read_static("watch.css")  # the report's, then the viewer's
    page = Router(
        [
            # Kept in memory: a thread for each file would compete with the first reading of the folder.
            Route("/", Response(_read_static("index.html"), media_type="text/html"), methods=["GET"]),
            Route("/watch.css", Response(stylesheet, media_type="text/css"), methods=["GET"]),
            Route("/watch.js", Response(_read_static("watch.js"), media_type="text/javascript"), methods=["GET"]),
            Route("/contents", show_contents),
            Route("/more-curves", show_more_curves),
            Route("/api/{name}", answer_question),
        ],
        redirect_slashes=False,
    )
    return Starlette(
        routes=[*(Host(name, page) for name in HOST_NAMES), Route("/{path:path}", refuse)],
        exception_handlers={HTTPException: _show_error, Exception: _show_bug},
    )


class WatchServer:
    """Server of one run's page, in a dedicated thread.

    This thread and the threads that it starts for requests are daemons, so one that waits for hanging storage does not
    keep the process from ending.
    """

    def __init__(self, refresher: Refresher, port: int = 0):
        """Bind the port; 0: a free one. Raises OSError if it is taken."""
        self.socket = socket.create_server((ADDRESS, port))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://{ADDRESS}:{self.port}/"
        self._refresher = refresher
        self._is_interrupted = False
        config = uvicorn.Config(
            build_app(refresher, self.url),
            headers=list(HEADERS.items()),
            limit_concurrency=MAX_CONNECTIONS,
            **UVICORN_OPTIONS,
        )
        config.load()  # imports, which would otherwise delay the first request
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self.socket],), name="watch-server", daemon=True
        )

    def wait(self) -> None:
        """Wait until the server has stopped, or `interrupt` was called."""
        # Not one `join()`: Python's signal handlers run in the main thread only, and a signal does not end the wait of
        # that thread if it arrives just before the wait, or in another thread.
        while self._thread.is_alive() and not self._is_interrupted:
            self._thread.join(SIGNAL_SECONDS)

    def interrupt(self) -> None:
        """End `wait`; a signal handler may call it."""
        self._is_interrupted = True

    def __enter__(self) -> "WatchServer":
        self._thread.start()
        self._refresher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._refresher.stop()
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)


def watch(path: str, port: int, open_browser: bool, on_start: Callable[[str], None]) -> None:
    """Serve the live page of a run until the process is interrupted.

    Args:
        path: Run folder, local path or URI.
        port: Port on the loopback interface; 0: a free one.
        open_browser: Open the page in the user's browser.
        on_start: Called with the page's URL once it can be opened.

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
    with server, _handling_interrupts(server.interrupt):
        on_start(server.url)
        if open_browser:
            webbrowser.open(server.url)
        server.wait()


@contextlib.contextmanager
def _handling_interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` at SIGINT in place of raising KeyboardInterrupt, which Python drops if a destructor is running."""
    previous = signal.signal(signal.SIGINT, lambda number, frame: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_static(name: str) -> str:
    return files("grpo_ray.pages.watch").joinpath("static", name).read_text(encoding="utf-8")


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code, error.headers)


async def _show_bug(request: Request, error: Exception) -> Response:
    """Respond to a bug in this program, whose traceback uvicorn then writes to the terminal."""
    return _json({"error": f"an error of grpo-ray watch, see its terminal: {type(error).__name__}"}, 500)


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII only: Starlette's JSONResponse encodes as UTF-8, which fails on a lone surrogate.
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, status, headers, media_type="application/json")
