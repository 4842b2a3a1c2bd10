"""Thread that reads the run folder and renders the report while a page is open."""

import threading
import time
import traceback
from dataclasses import dataclass, field, replace

from grpo_ray.errors import DamagedFileError
from grpo_ray.pages.report.page import render_contents
from grpo_ray.pages.watch.live_run import LiveRun, Snapshot
from grpo_ray.text.display import safe_text

LOCAL_SECONDS, REMOTE_SECONDS = 2.0, 15.0
"""Shortest time between two readings of a local folder, and of one in an object store, in seconds."""
MAX_SHARE = 0.05
"""Largest share of one core for reading and rendering; to keep to it, a long run is refreshed less often."""
MAX_PROBLEM_CHARS = 600


@dataclass(frozen=True)
class View:
    """State of the page at one time."""

    snapshot: Snapshot | None = None
    """None until the folder has been read."""
    contents: bytes = b""
    """Report as HTML, for this snapshot."""
    read_at: float = 0.0
    """Time of the last successful reading, seconds since 1970."""
    problem: str = ""
    """Reason why the folder cannot be read now; "" if it can."""


@dataclass
class Refresher:
    """Reader of the run folder that works only while a page requests updates."""

    run: LiveRun
    view: View = field(default_factory=View)
    """Replaced as a whole, so other threads read it without a lock."""
    _wanted: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._interval = REMOTE_SECONDS if self.run.folder.local is None else LOCAL_SECONDS
        self._thread = threading.Thread(target=self._work, name="watch-refresher", daemon=True)

    def start(self) -> None:
        """Start the thread and the first reading."""
        self._wanted.set()
        self._thread.start()

    def want(self) -> View:
        """Request a reading, and return the present state without waiting."""
        self._wanted.set()
        return self.view

    def stop(self) -> None:
        """Make the thread end after its current reading; do not wait for it, since storage may hang."""
        self._stopped.set()
        self._wanted.set()

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopped.is_set():
                return
            self._wanted.clear()
            began = time.thread_time()
            self.refresh()
            spent = time.thread_time() - began
            self._stopped.wait(max(self._interval, spent / MAX_SHARE - spent))

    def refresh(self) -> None:
        """Read the files that have changed, and render the report."""
        try:
            snapshot = self.run.refresh()
            contents = self.view.contents
            if snapshot is not None:
                contents = render_contents(snapshot.run, time.time()).encode()
        except (OSError, DamagedFileError) as error:  # storage errors and damaged files
            self.view = replace(self.view, problem=safe_text(str(error), MAX_PROBLEM_CHARS))
        except Exception as error:  # a bug; without this, the page would stop updating and show no reason
            traceback.print_exc()
            text = f"an error of grpo-ray watch, see its terminal: {type(error).__name__}: {error}"
            self.view = replace(self.view, problem=safe_text(text, MAX_PROBLEM_CHARS))
        else:
            self.view = View(snapshot or self.view.snapshot, contents, time.time())
