"""Patience with storage: what is repeated while it is out of reach or full, and what is hopeless."""

import errno
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0
"""Seconds that storage may be out of reach, if nothing else is said."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between two tries; each pause is twice the one before."""
UNREACHABLE = frozenset(
    {
        errno.EAGAIN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,  # what a network file system gives when its server is away
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EREMOTEIO,
        errno.ESTALE,
    }
)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
UNREACHABLE_WORDS = re.compile(
    r"NETWORK_CONNECTION|HTTP status (?:408|429|500|502|503|504)|"
    r"SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT|REQUEST_TIME_TOO_SKEWED|"
    r"Status\((?:UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL|ABORTED)|CURL error"
)
"""What pyarrow's errors of S3 and of Google's storage say, all of them plain OSErrors without a number."""
HOPELESS_WORDS = re.compile(r"curlCode: (?:1|3|51|58|60|77|83),")
"""Errors of the network that no waiting mends: malformed addresses and refused certificates."""
FULL_WORDS = re.compile(r"HTTP status 507|StorageFull|QuotaExceeded")

_asked_once: ContextVar[bool] = ContextVar("asked_once", default=False)

log = logging.getLogger(__name__)


def is_transient(error: OSError) -> bool:
    """Whether storage was out of reach or overburdened, so that the same call may succeed later."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError) or error.errno in UNREACHABLE:
        return True
    said = str(error)
    return bool(UNREACHABLE_WORDS.search(said)) and not HOPELESS_WORDS.search(said)


def is_full(error: OSError) -> bool:
    """Whether storage has no room left, or none for this user."""
    return error.errno in FULL or bool(FULL_WORDS.search(str(error)))


def retry_transient(
    action: Callable[[], T], patience: float = DEFAULT_TIMEOUT, on_trouble: Callable[[str], None] | None = None
) -> T:
    """Do something whole, such as copying a file, again and again while storage is out of reach or full.

    action: must be harmless when repeated. Calls to a run folder inside it are not repeated one by one.
    patience: seconds from the first failure to the last try.
    on_trouble: told when trouble begins and when it is over, a sentence each; without it, the log is.

    Raises the last error when patience is over, and every other error at once.
    """
    tell = on_trouble or log.warning
    inside, began, pause = _asked_once.get(), None, FIRST_PAUSE
    while True:
        try:
            with single_attempt():
                result = action()
        except OSError as error:
            if inside or not (is_transient(error) or is_full(error)):
                raise
            now = time.monotonic()
            if began is None:
                began = now
                if patience > 0:
                    tell(f"{describe_error(error)}; trying again for {patience:g} s")
            left = began + patience - now
            if left <= 0:
                raise
        else:
            if began is not None:
                tell(f"storage is back after {time.monotonic() - began:.0f} s")
            return result
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def single_attempt() -> Iterator[None]:
    """Inside, no call to storage is repeated by us: somebody waits who would rather know."""
    token = _asked_once.set(True)
    try:
        yield
    finally:
        _asked_once.reset(token)


def describe_error(error: OSError) -> str:
    said = " ".join((error.strerror or str(error)).split())
    return f"storage cannot be {'written' if is_full(error) else 'reached'} ({said})"
