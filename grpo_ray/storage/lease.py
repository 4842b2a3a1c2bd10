"""Lease of a run folder: one driver at a time, with a heartbeat.

The fencing token protects the files of a run from an attempt that was replaced. The lease protects the user: a second
driver with the same run name is refused, with an error that names the holder.

The folder `driver/` of a run folder contains two kinds of files, neither of which needs a lock or an atomic rename:

- `holder.json`: the driver that took the run last. Only a driver that takes the run writes it.
- `<id>.beat`: a number, written by this driver only. The driver increases it every HEARTBEAT_SECONDS, and deletes the
  file when it ends.

A driver without a `.beat` file has released the run. Otherwise:

- On the same machine (and in the same container) its process is looked up: alive or gone.
- Elsewhere its heartbeat is watched for WATCH_SECONDS of this machine's monotonic clock. No times of two machines are
  compared, so their clocks may differ or jump.

Two drivers that take a free run at the same moment both write `holder.json`. The later write takes the run; the other
driver detects this at its next heartbeat, or when it calls `confirm` before it writes to the run folder.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from grpo_ray.errors import SupersededError, TakenRunError
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder

FOLDER = "driver"
HOLDER = "holder.json"
HEARTBEAT_SECONDS = 5.0
"""Time between two heartbeats, seconds."""
WATCH_SECONDS = 20.0
"""Time without a change after which a heartbeat counts as stopped, seconds: four beats."""
POLL_SECONDS = 1.0
"""Time between two reads of another driver's heartbeat, seconds."""


@dataclass(frozen=True)
class Driver:
    """A process that has, or had, the lease of a run."""

    id: str
    """Unique; begins with a letter, so that YAML reads it as text."""
    host: str
    pid: int
    machine: str
    """Id of the machine's boot and of the container's process numbers; "" where the system does not have them."""
    process_start: str
    """Start of the process in ticks of its machine: the pid of an ended process may be reused."""
    since: float
    """Seconds since 1970, by the clock of the driver's machine; shown, never compared."""

    @classmethod
    def of_this_process(cls) -> "Driver":
        pid = os.getpid()
        return cls(
            id=f"driver-{secrets.token_hex(4)}",
            host=socket.gethostname(),
            pid=pid,
            machine=_machine(),
            process_start=_process_start(pid) or "",
            since=time.time(),
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"host {self.host}, pid {self.pid}, since {since}"

    @property
    def is_on_this_machine(self) -> bool:
        """True if this process can look up whether the driver's process is alive."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_alive_here(self) -> bool:
        """True if the driver's process is alive; only if it is on this machine."""
        return _process_start(self.pid) == self.process_start

    @property
    def is_this_process(self) -> bool:
        return self.is_on_this_machine and self.pid == os.getpid() and self.is_alive_here


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _process_start(pid: int) -> str | None:
    """Return the start of a living process of this machine, in ticks; None if there is none, or on other systems."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended


class RunLease:
    """Lease of a run folder, kept by a thread until `release`: `with RunLease.acquire(...)`."""

    def __init__(self, folder: RunFolder, driver: Driver, is_new: bool):
        """Create the lease without taking it; `acquire` does both.

        Args:
            is_new: the run folder did not exist before. It is deleted at the end if it has no files but the lease's.
        """
        self.folder, self.driver, self.is_new = folder, driver, is_new
        self.on_lost: Callable[[SupersededError], None] = lambda error: None
        """Called once, in the lease's thread, when another driver has taken the run."""
        self.lost: SupersededError | None = None
        self._beats = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease of the run folder", daemon=True)

    @classmethod
    def acquire(cls, folder: RunFolder, takeover: str | None, notify: Callable[[str], None]) -> Self:
        """Take the run for this process.

        Args:
            takeover: id of a running driver to take the run from; None: a run that has a driver is refused.
            notify: shows the user a line: the reason for a wait, or the driver whose run is taken over.

        Raises:
            TakenRunError: another driver has the run.
            ConfigError: the folder cannot be written.
        """
        is_new = not folder.exists()
        folder.check_writable()
        holder = read_holder(folder)
        if holder is not None and not holder.is_this_process:
            _require_free(folder, holder, takeover, notify)
        lease = cls(folder, Driver.of_this_process(), is_new)
        lease._take()
        lease._thread.start()
        return lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _take(self) -> None:
        self._write_beat()  # first: a holder without a heartbeat would count as one that has released the run
        self.folder.write_json(asdict(self.driver), FOLDER, HOLDER)

    def _write_beat(self) -> None:
        self._beats += 1
        self.folder.write_text(str(self._beats), FOLDER, _beat_file(self.driver))

    def _keep(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                with single_attempt():
                    self.beat()
            except SupersededError as error:
                self.on_lost(error)
                return
            except OSError:
                continue  # the storage cannot be reached; the next call that needs it reports that

    def beat(self) -> None:
        """Write a heartbeat. Raises SupersededError if another driver has taken the run."""
        with self._lock:
            holder = read_holder(self.folder)
            if holder is not None and holder.id != self.driver.id:
                self.lost = SupersededError(
                    f"{self.folder.uri}: another driver has taken the run over: {holder}; this one writes no more to it"
                )
                raise self.lost
            if not self._stop.is_set():
                self._write_beat()

    def confirm(self) -> None:
        """Check that the run is still this driver's. Raises SupersededError."""
        self.beat()

    def set_aside_folder(self) -> str:
        """Rename the run folder, and continue the lease in a new folder of the run's name.

        Returns:
            The new path of the old folder.
        """
        with self._lock:
            path = self.folder.set_aside()
            self._take()
        RunFolder(self.folder.storage_path, Path(path).name).delete_folder(FOLDER)
        return path

    def release(self) -> None:
        """Release the run. Raises nothing: if the storage fails, the next driver detects that this one has ended."""
        self._stop.set()
        try:
            with self._lock, single_attempt():
                self.folder.delete_file(FOLDER, _beat_file(self.driver))
                if self.is_new and self.lost is None:  # a run that was refused leaves no folder
                    self.folder.delete_if_only([f"{FOLDER}/{HOLDER}"])
        except OSError:
            pass  # as in the docstring


def read_holder(folder: RunFolder) -> Driver | None:
    """Return the driver that took the run last; None if there is none."""
    try:
        return Driver(**json.loads(folder.read_text(FOLDER, HOLDER)))
    except (FileNotFoundError, ValueError, TypeError):  # a damaged file counts as none
        return None


def _beat_file(driver: Driver) -> str:
    return f"{driver.id}.beat"


def _read_beat(folder: RunFolder, driver: Driver) -> str | None:
    """Return a driver's heartbeat; None if it has released the run."""
    try:
        return folder.read_text(FOLDER, _beat_file(driver))
    except FileNotFoundError:
        return None


def _require_free(folder: RunFolder, holder: Driver, takeover: str | None, notify: Callable[[str], None]) -> None:
    """Check that the run's last driver has ended, or is the one to take over from. Raises TakenRunError if not."""
    beat = _read_beat(folder, holder)
    if beat is None:
        return
    if takeover == holder.id:
        notify(f"taking the run over from its driver ({holder}), which stops at its next heartbeat")
    elif holder.is_on_this_machine:
        if holder.is_alive_here:
            raise _refusal(folder, holder, "its process is alive")
        notify(f"the run's last driver ({holder}) has ended without releasing the run; going on from its checkpoints")
    else:
        notify(f"the run's last driver ({holder}) may be alive: watching its heartbeat for {WATCH_SECONDS:g} s")
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = _read_beat(folder, holder)
            if now is None:
                return
            if now != beat:
                raise _refusal(folder, holder, "its heartbeat is fresh")
        notify(f"no heartbeat for {WATCH_SECONDS:g} s: that driver has ended; going on from its checkpoints")
    folder.delete_file(FOLDER, _beat_file(holder))


def _refusal(folder: RunFolder, holder: Driver, evidence: str) -> TakenRunError:
    return TakenRunError(
        f"run.name={folder.name}: the run {folder.uri} has a driver already: {holder} ({evidence}); set another "
        f"run.name, end that driver, or set run.takeover={holder.id} to stop it and continue the run here"
    )
