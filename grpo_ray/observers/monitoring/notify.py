"""Messages about a run to a web address (`run.notify`): warnings, failures and the end, as JSON.

A dedicated thread delivers them, so that neither training nor the other observers wait for the network. The address is
a secret, since anyone who has it can post to the chat: messages quote neither it nor the error texts of libraries.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.observers.feed import RunObserver
from grpo_ray.storage.numbers import json_values
from grpo_ray.telemetry.events import event_text
from grpo_ray.telemetry.measures import format_heldout, heldout_part
from grpo_ray.text.display import safe_text
from grpo_ray.text.redaction import redact_row

MAX_TEXT_CHARS = 1500
"""Longest text of a message."""
MENTIONS = str.maketrans({"<": "\u2039", ">": "\u203a", "@": "\uff20"})
"""Harmless replacements for characters that a chat interprets as mentions or links: errors may quote completions, which
are untrusted."""


@dataclass(frozen=True, kw_only=True)
class DeliveryLimits:
    """Limits of the delivery of messages."""

    request_seconds: float = 5.0
    """Timeout of each blocking socket operation of a request."""
    attempts: int = 4
    """Most requests for one message."""
    backoff_seconds: float = 1.0
    """Pause before the second request; each further one is twice as long."""
    close_seconds: float = 10.0
    """Longest wait for the last message at the end of a run."""
    waiting: int = 32
    """Most messages that wait; beyond this the oldest one is dropped."""


class DeliveryError(Exception):
    """A request failed."""

    def __init__(self, reason: str, is_permanent: bool = False):
        super().__init__(reason)
        self.is_permanent = is_permanent


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects: following one would turn the POST into a GET, perhaps to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def post(address: str, body: bytes, timeout: float) -> None:
    """Post a JSON body once.

    Raises:
        DeliveryError: the server cannot be reached, or refuses the message; the text does not contain the address.
    """
    request = urllib.request.Request(
        address, body, {"Content-Type": "application/json; charset=utf-8", "User-Agent": "grpo_ray"}, method="POST"
    )
    try:
        with urllib.request.build_opener(NoRedirects).open(request, timeout=timeout):
            return
    except urllib.error.HTTPError as error:
        error.close()
        # 408 and 429 allow another attempt, and 5xx is a failure of the server.
        is_permanent = error.code < 500 and error.code not in (408, 429)
        raise DeliveryError(f"the server responded {error.code}", is_permanent) from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        raise DeliveryError(f"the server cannot be reached ({text})") from None
    except (http.client.HTTPException, ValueError) as error:
        raise DeliveryError(f"the response is not valid HTTP ({type(error).__name__})") from None


class Outbox:
    """Thread that delivers messages in order, with retries.

    Args:
        notice: shows the user a line.
    """

    def __init__(self, address: str, notice: Callable[[str], None], limits: DeliveryLimits):
        self._address, self._notice, self._limits = address, notice, limits
        self._waiting: deque[bytes] = deque(maxlen=limits.waiting)
        self._changed = threading.Condition()
        self._is_started = self._is_closing = self._has_failed = False
        self._thread = threading.Thread(target=self._deliver_all, daemon=True, name="notify")

    def put(self, body: bytes) -> None:
        """Queue a message for delivery; return at once."""
        with self._changed:
            self._waiting.append(body)
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the last message, at most for `close_seconds`; earlier ones that still wait are dropped."""
        with self._changed:
            self._is_closing = True
            while len(self._waiting) > 1:
                self._waiting.popleft()
            self._changed.notify_all()
        if self._is_started:
            self._thread.join(self._limits.close_seconds)
            if self._thread.is_alive():
                self._notice(
                    f"run.notify: the last message was not delivered within {self._limits.close_seconds:g} seconds"
                )

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closing:
                        return
                    self._changed.wait()
                body = self._waiting.popleft()
            self._deliver(body)

    def _deliver(self, body: bytes) -> None:
        pause = self._limits.backoff_seconds
        for attempt in range(1, self._limits.attempts + 1):
            try:
                return post(self._address, body, self._limits.request_seconds)
            except DeliveryError as error:
                if error.is_permanent or attempt == self._limits.attempts or not self._pause(pause):
                    self._report(error)
                    return
                pause *= 2

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; return False at once if the run's last message is waiting."""
        end = time.monotonic() + seconds
        with self._changed:
            while (left := end - time.monotonic()) > 0:
                if self._is_closing and self._waiting:
                    return False
                self._changed.wait(left)
        return True

    def _report(self, error: DeliveryError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._notice(f"run.notify: a message was not delivered: {error}; further failures are not shown")


class Notifier(RunObserver):
    """Sender of a message for each warning, each failure, and the end of a launch.

    Args:
        folder: URI of the run folder.
        notice: shows the user a line.
    """

    def __init__(
        self,
        config: Config,
        folder: str,
        notice: Callable[[str], None],
        limits: DeliveryLimits = DeliveryLimits(),
    ):
        assert config.run.notify is not None
        self._run, self._folder, self._max_steps = config.run.name, folder, config.grpo.max_steps
        self._outbox = Outbox(config.run.notify, notice, limits)
        self._step = 0
        self._reward: Any = None
        self._heldout: dict[str, Any] = {}

    def resumed(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._step = step

    def step(self, row: Mapping[str, Any], at: float) -> None:
        self._step, self._reward = row["step"], row.get("reward/mean", self._reward)
        self._keep_heldout(row)

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._keep_heldout(metrics)

    def _keep_heldout(self, metrics: Mapping[str, Any]) -> None:
        self._heldout = heldout_part(metrics) or self._heldout

    def event(self, entry: Mapping[str, Any]) -> None:
        """Send a message for a warning or the failure of a worker."""
        if entry["event"] == "warning":
            self._send("warning", event_text(entry), at=entry["at"], warning=entry["name"])
        elif entry["event"] == "failed":
            self._send("worker_failed", event_text(entry), at=entry["at"])

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Send the summary."""
        self._step = summary["steps"]
        stopped = summary["stopped"]
        best = summary["best_checkpoint"]
        what = f"stopped by {stopped}" if stopped else f"best checkpoint: {best}" if best else ""
        self._send("stopped" if stopped else "finished", what, summary=summary)

    def aborted(self, error: BaseException) -> None:
        """Send the error."""
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        self._send("failed", "interrupted" if interrupted else f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._outbox.close()

    def _send(
        self,
        event: str,
        what: str,
        *,
        at: float | None = None,
        warning: str | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        what = safe_text(what, MAX_TEXT_CHARS)
        parts = [f"{self._run}: {event.replace('_', ' ')} at step {self._step} of {self._max_steps}"]
        parts += [f"reward {self._reward:.3f}"] if isinstance(self._reward, float) else []
        parts += [heldout] if (heldout := format_heldout(self._heldout)) else []
        payload = {
            "text": ("; ".join(parts) + (f"\n{what}" if what else "")).translate(MENTIONS),
            "event": event,
            "run": self._run,
            "folder": self._folder,
            "at": time.time() if at is None else at,
            "step": self._step,
            "max_steps": self._max_steps,
            "reward": self._reward,
            "heldout": self._heldout,
            "warning": warning,
            "what": what,
            "summary": summary,
        }
        self._outbox.put(json.dumps(json_values(redact_row(payload)), allow_nan=False).encode())
