"""Settings of the web servers on the loopback interface: the live page of a run, and the engine's endpoint."""

from typing import Any

ADDRESS = "127.0.0.1"

UVICORN_OPTIONS: dict[str, Any] = {
    # Implementations that every installation has. h11 also limits the size of a request's headers.
    "loop": "asyncio",
    "http": "h11",
    "ws": "none",
    "lifespan": "off",
    # Log errors of this program only: pages poll every few seconds, and clients may send malformed requests.
    "log_config": None,
    "log_level": "error",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    # Seconds for which an idle connection stays open: longer than the time between two requests of a page.
    "timeout_keep_alive": 30,
}
"""Arguments of `uvicorn.Config`."""
