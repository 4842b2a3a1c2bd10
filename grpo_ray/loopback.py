"""Settings of the web servers on the loopback interface: the live page of a run, and the engine's endpoint."""

from typing import Any

ADDRESS = "127.0.0.1"

UVICORN_OPTIONS: dict[str, Any] = {
    # The implementations that every installation has; h11 also bounds the size of a request's head.
    "loop": "asyncio",
    "http": "h11",
    "ws": "none",
    "lifespan": "off",
    # Errors of this program only: pages ask every few seconds, and clients may send anything.
    "log_config": None,
    "log_level": "error",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    # Seconds after a response until its connection is closed: longer than the time between two requests of a page.
    "timeout_keep_alive": 30,
}
"""Arguments of `uvicorn.Config`."""
