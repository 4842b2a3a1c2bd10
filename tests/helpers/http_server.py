"""HTTP servers of tests: a server's thread, from its start to its end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Server on a free port of this machine."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)


@contextmanager
def serving(server: ThreadingHTTPServer, released: threading.Event | None = None) -> Iterator[None]:
    """Serve in a thread until the block ends.

    Args:
        released: set at the end, so that requests return that are never answered.
    """
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if released is not None:
            released.set()
        server.shutdown()
        server.server_close()
        thread.join()
