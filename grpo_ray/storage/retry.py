"""Retries for storage: which errors are transient, and the retry loop with exponential backoff."""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

from grpo_ray.text.redaction import redact

T = TypeVar("T")

DEFAULT_RETRY_SECONDS = 600.0
"""Time for which calls to storage are retried by default, in seconds."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Shortest and longest pause between two attempts, in seconds; each pause is twice the one before."""
TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,  # a network file system returns it when its server cannot be reached
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EREMOTEIO,
        errno.ESTALE,
    }
)
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
TRANSIENT_MESSAGE = re.compile(
    r"NETWORK_CONNECTION|HTTP status (?:408|429|500|502|503|504)|"
    r"SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT|REQUEST_TIME_TOO_SKEWED|"
    r"Status\((?:UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL|ABORTED)|CURL error"
)
"""Transient errors of S3 and Google Cloud Storage: pyarrow raises them as plain OSErrors without an errno."""
TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP status codes of a server that is overloaded or restarts."""
CLIENT_ERRORS = frozenset(
    {
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "botocore.ConnectionError",
        "botocore.HTTPClientError",
        "httpx.TransportError",
        "requests.ConnectionError",
        "requests.Timeout",
    }
)
"""Package and class of the errors with which fsspec's filesystems report a lost or refused connection. Most are not
OSErrors."""
PERMANENT_MESSAGE = re.compile(r"curlCode: (?:1|3|51|58|60|77|83),")
"""Network errors that no retry can fix: malformed addresses and refused certificates."""
FULL_MESSAGE = re.compile(r"HTTP status 507|StorageFull|QuotaExceeded")

_in_single_attempt: ContextVar[bool] = ContextVar("in_single_attempt", default=False)

log = logging.getLogger(__name__)


def is_transient(error: Exception) -> bool:
    """Return True if storage was unreachable or overloaded, so that the same call may succeed later."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in TRANSIENT_ERRNOS:
        return True
    if any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in CLIENT_ERRORS for kind in type(error).__mro__):
        return True
    if _http_status(error) in TRANSIENT_STATUS:
        return True
    message = str(error)
    return bool(TRANSIENT_MESSAGE.search(message)) and not PERMANENT_MESSAGE.search(message)


def _http_status(error: Exception) -> int | None:
    """Return the status code of a server's answer: in `status` (aiohttp), `code` (gcsfs), or `response` (httpx)."""
    response = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((each for each in found if isinstance(each, int)), None)


def is_full(error: OSError) -> bool:
    """Return True if the storage, or the user's quota on it, is full."""
    return error.errno in FULL_ERRNOS or bool(FULL_MESSAGE.search(str(error)))


def retry_transient(
    action: Callable[[], T],
    retry_seconds: float = DEFAULT_RETRY_SECONDS,
    on_progress: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Run an action, and repeat it while storage is unreachable or full.

    Nested calls are not retried on their own: the outermost `retry_transient` repeats its whole action.

    Args:
        action: a complete operation, such as copying a file, that is safe to repeat.
        retry_seconds: time from the first failure to the last attempt; 0: a single attempt.
        on_progress: receives one message when retrying starts and one when storage works again; None: they are
            logged as warnings.
        sleep: waits between two attempts, in seconds; None: `time.sleep`.

    Returns:
        The result of the action.

    Raises:
        OSError: the error of the last attempt, or at once an error that a retry cannot fix.
    """
    attempts = _StorageAttempts(retry_seconds, on_progress or log.warning)
    retrying = Retrying(
        retry=retry_if_exception(attempts.should_retry),
        wait=attempts.pause,
        stop=attempts.are_over,
        sleep=sleep or (lambda seconds: time.sleep(seconds)),
        reraise=True,
    )
    result = retrying(_with_nested_retries_off(action))
    attempts.report_success()
    return result


def _with_nested_retries_off(action: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        with single_attempt():
            return action()

    return run


class _StorageAttempts:
    """Attempts of one action. The time limit counts from the first failure: the action itself may take long.

    Args:
        retry_seconds: time from the first failure to the last attempt.
        notify: receives one message when retrying starts and one when storage works again.
    """

    def __init__(self, retry_seconds: float, notify: Callable[[str], None]):
        self.retry_seconds = retry_seconds
        self.notify = notify
        self._is_nested = _in_single_attempt.get()
        self._first_failure: float | None = None
        self._exponential = wait_exponential(multiplier=FIRST_PAUSE, max=LONGEST_PAUSE)

    @property
    def _elapsed(self) -> float:
        return 0.0 if self._first_failure is None else time.monotonic() - self._first_failure

    def should_retry(self, error: BaseException) -> bool:
        """Return True for an error that may be transient, unless an enclosing call retries."""
        if self._is_nested or not isinstance(error, OSError) or not (is_transient(error) or is_full(error)):
            return False
        if self._first_failure is None:
            self._first_failure = time.monotonic()
            if self.retry_seconds > 0:
                self.notify(f"{describe_error(error)}; trying again for {self.retry_seconds:g} s")
        return True

    def are_over(self, state: RetryCallState) -> bool:
        """Return True if the time limit is reached."""
        return self._elapsed >= self.retry_seconds

    def pause(self, state: RetryCallState) -> float:
        """Return the seconds until the next attempt; the last attempt is made at the time limit."""
        return max(0.0, min(self._exponential(state), self.retry_seconds - self._elapsed))

    def report_success(self) -> None:
        """Notify that storage works again, if it had failed."""
        if self._first_failure is not None:
            self.notify(f"storage is back after {self._elapsed:.0f} s")


@contextmanager
def single_attempt() -> Iterator[None]:
    """Disable retries inside the block, for a caller that prefers an error at once to a late success."""
    token = _in_single_attempt.set(True)
    try:
        yield
    finally:
        _in_single_attempt.reset(token)


def describe_error(error: OSError) -> str:
    """Return a message that states whether storage is unreachable or full, with the error's own text.

    For a full local disk it is the operating system's text alone: pyarrow adds a position in its source code.
    """
    if error.errno in FULL_ERRNOS:
        return f"storage cannot be written ({os.strerror(error.errno)})"
    text = redact(" ".join((error.strerror or str(error)).split()))
    return f"storage cannot be {'written' if is_full(error) else 'reached'} ({text})"
