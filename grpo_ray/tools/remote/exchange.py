"""HTTP request with JSON, bounded in time and size.

`http.client` follows no redirect, which would send code and token to another address, and takes no proxy from the
environment. With https, certificate and host name are verified.
"""

import functools
import http.client
import json
import math
import queue
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grpo_ray.tools.remote.provider import SandboxError, Service

MAX_RESPONSE_BYTES = 16 << 20
"""Bytes of a response that are read. SandboxFusion returns up to 1 MiB of output, six times as much in JSON."""
TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""


@dataclass(frozen=True)
class Response:
    """Response of a service with the status 200, or 413, which refuses a body as too large."""

    status: int
    body: bytes
    is_cut: bool = False
    """True if the body is longer than `MAX_RESPONSE_BYTES`."""


def post_json(service: Service, path: str, payload: Mapping[str, Any], seconds: float) -> Response:
    """Post an object to a path of the service.

    Args:
        seconds: longest time, from the look-up of the host's name to the last byte of the response.

    Raises:
        SandboxError: there is no response, or one with another status.
    """
    outcomes: queue.SimpleQueue[Response | SandboxError] = queue.SimpleQueue()
    connection = _connect(service, 2 * seconds)  # this timeout only ends the thread; the limit is below

    def exchange() -> None:
        try:
            outcomes.put(_exchange(connection, service, path, payload))
        except SandboxError as error:
            outcomes.put(error)
        except (OSError, http.client.HTTPException, ValueError) as error:  # the response is untrusted
            outcomes.put(_error_of(error))
        finally:
            connection.close()

    # In a thread, since `http.client` limits neither the look-up of a name nor the total time of a slow response.
    threading.Thread(target=exchange, name="remote-sandbox", daemon=True).start()
    try:
        outcome = outcomes.get(timeout=seconds)
    except queue.Empty:
        if (sock := connection.sock) is not None:
            with suppress(OSError):  # it has just closed
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        raise SandboxError(f"no response within {seconds:.3g} s") from None
    if isinstance(outcome, SandboxError):
        raise outcome
    return outcome


def prepare(service: Service) -> None:
    """Load the accepted certificates for this process and its forks, if the service uses https."""
    if urlsplit(service.url).scheme == "https":
        _tls_context(service.certificates)


@functools.cache
def _tls_context(certificates: str | None) -> ssl.SSLContext:
    """Return the context that verifies certificates. It is cached: reading those of the system takes 22 ms.

    Args:
        certificates: file with the accepted ones; None: those of the system.
    """
    return ssl.create_default_context(cafile=certificates)


def _connect(service: Service, seconds: float) -> http.client.HTTPConnection:
    parts = urlsplit(service.url)
    assert parts.hostname is not None  # the config was checked
    if parts.scheme == "https":
        context = _tls_context(service.certificates)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)


def _exchange(
    connection: http.client.HTTPConnection, service: Service, path: str, payload: Mapping[str, Any]
) -> Response:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "grpo_ray"}
    if service.token is not None:
        headers["Authorization"] = f"Bearer {service.token}"
    connection.request("POST", urlsplit(service.url).path.rstrip("/") + path, json.dumps(payload), headers)
    response = connection.getresponse()
    if response.status not in (200, 413):
        raise SandboxError(
            f"it responded {response.status}{' with a redirect' if 300 <= response.status < 400 else ''}",
            response.status in TEMPORARY_STATUSES,
            _retry_seconds(response.headers.get("Retry-After", "")),
        )
    body = response.read(MAX_RESPONSE_BYTES + 1)
    if len(body) <= MAX_RESPONSE_BYTES and response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return Response(response.status, body, is_cut=len(body) > MAX_RESPONSE_BYTES)


def _retry_seconds(header: str) -> float:
    """Return the pause in a header Retry-After; 0 for a date or anything else."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _error_of(error: Exception) -> SandboxError:
    """Convert an exception to a SandboxError.

    Messages of libraries may quote headers, so only those of the system and of certificate checks are kept.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return SandboxError(f"its certificate is not accepted ({error.verify_message})")
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return SandboxError(f"no connection ({error.strerror or type(error).__name__})", is_temporary=True)
    return SandboxError(f"the response is no HTTP ({type(error).__name__})", is_temporary=True)
