"""Tests of the lease of a run folder: who may take it, how a dead driver is told from a living one, and its files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from grpo_ray.errors import ConfigError, SupersededError
from grpo_ray.storage import lease as lease_module
from grpo_ray.storage.lease import FOLDER, HOLDER, Driver, RunLease, read_holder
from grpo_ray.storage.run_folder import RunFolder


class FakeClock:
    """Replacement for the module `time`: sleeping advances the monotonic clock, and the wall clock jumps about."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.while_asleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_asleep()

    def time(self) -> float:
        return -1e9 if self.now % 2 else 4e9  # 1938 or 2096

    strftime = staticmethod(lambda form, moment: "2026-11-22 12:00:00 UTC")
    gmtime = staticmethod(lambda seconds: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(lease_module, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def held_by(folder: RunFolder, driver: Driver, beat: str = "7") -> Driver:
    """Write the files of a driver that has the lease."""
    folder.write_text(beat, FOLDER, f"{driver.id}.beat")
    folder.write_json(asdict(driver), FOLDER, HOLDER)
    return driver


def elsewhere() -> Driver:
    """Return a driver on another machine."""
    return replace(Driver.of_this_process(), host="node-7", pid=42, machine="another boot")


def ended_process() -> Driver:
    """Return a driver on this machine whose process has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return replace(Driver.of_this_process(), pid=process.pid)


def acquire(folder: RunFolder, takeover: str | None = None) -> tuple[RunLease, list[str]]:
    shown: list[str] = []
    return RunLease.acquire(folder, takeover, shown.append), shown


def test_acquire_free_run_waits_for_nothing(folder: RunFolder, clock: FakeClock) -> None:
    lease, shown = acquire(folder)
    assert read_holder(folder) == lease.driver and shown == [] and clock.now == 1000.0
    folder.write_text("", "config.yaml")
    lease.release()
    again, shown = acquire(folder)  # the holder has released the run
    again.release()
    assert shown == [] and clock.now == 1000.0


def test_acquire_living_process_of_this_machine_is_refused_at_once(folder: RunFolder, clock: FakeClock) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = lease_module._process_start(process.pid)
        assert start is not None
        held_by(
            folder, replace(Driver.of_this_process(), id="driver-a", host="h", pid=process.pid, process_start=start)
        )
        with pytest.raises(ConfigError) as refused:
            acquire(folder)
        process.communicate(b"\n")
    assert str(refused.value) == (
        f"run.name=run: the run {folder.uri} has a driver already: host h, pid {process.pid}, since "
        "2026-11-22 12:00:00 UTC (its process is alive); set another run.name, end that driver, or set "
        "run.takeover=driver-a to stop it and continue the run here"
    )
    assert clock.now == 1000.0


def test_acquire_ended_process_of_this_machine_is_replaced_at_once(folder: RunFolder, clock: FakeClock) -> None:
    held_by(folder, ended_process())
    lease, (shown,) = acquire(folder)
    lease.release()
    assert "has ended without releasing the run" in shown and clock.now == 1000.0


def test_acquire_process_number_given_to_another_process_is_replaced(folder: RunFolder, clock: FakeClock) -> None:
    held_by(folder, replace(Driver.of_this_process(), pid=os.getppid(), process_start="1"))
    lease, (shown,) = acquire(folder)
    lease.release()
    assert "has ended without releasing the run" in shown


def test_acquire_beating_driver_elsewhere_is_refused_whatever_the_clocks_say(
    folder: RunFolder, clock: FakeClock
) -> None:
    other = held_by(folder, elsewhere())
    clock.while_asleep = lambda: clock.now == 1004.0 and held_by(folder, other, beat="8")
    with pytest.raises(ConfigError, match=r"host node-7, pid 42, .*\(its heartbeat is fresh\)"):
        acquire(folder)
    assert clock.now == 1004.0


def test_acquire_silent_driver_elsewhere_is_replaced_after_watching(folder: RunFolder, clock: FakeClock) -> None:
    held_by(folder, elsewhere())
    lease, shown = acquire(folder)
    lease.release()
    assert clock.now == 1000.0 + lease_module.WATCH_SECONDS
    assert "may be alive: watching its heartbeat for 20 s" in shown[0] and "no heartbeat for 20 s" in shown[1]


def test_acquire_driver_elsewhere_that_ends_meanwhile_is_replaced(folder: RunFolder, clock: FakeClock) -> None:
    other = held_by(folder, elsewhere())
    clock.while_asleep = lambda: folder.delete_file(FOLDER, f"{other.id}.beat")
    lease, _ = acquire(folder)
    lease.release()
    assert clock.now == 1001.0


def test_takeover_by_id_replaces_driver_which_finds_out(folder: RunFolder, clock: FakeClock) -> None:
    first, _ = acquire(folder)
    other = replace(first.driver, machine="another boot")  # as seen from another machine
    folder.write_json(asdict(other), FOLDER, HOLDER)
    second, (shown,) = acquire(folder, takeover=first.driver.id)
    assert "taking the run over from its driver" in shown
    with pytest.raises(SupersededError, match=r"another driver has taken the run over: host .*, pid \d+, since"):
        first.confirm()
    second.confirm()
    first.release()
    second.confirm()  # the first one's end takes nothing from the second
    second.release()


def test_takeover_of_another_id_is_refused(folder: RunFolder, clock: FakeClock) -> None:
    other = held_by(folder, elsewhere())
    clock.while_asleep = lambda: held_by(folder, other, beat="8")
    with pytest.raises(ConfigError, match=f"run.takeover={other.id}"):
        acquire(folder, takeover="driver-00000000")


def test_acquire_same_moment_one_of_two_has_the_run(folder: RunFolder) -> None:
    first, _ = acquire(folder)
    # The second one looked before the first one wrote.
    second = RunLease(folder, Driver.of_this_process(), is_new=False)
    second._take()
    with pytest.raises(SupersededError):
        first.confirm()
    second.confirm()
    for each in (first, second):
        each.release()


def test_lease_thread_reports_lost_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lease, _ = acquire(folder)
    lost: list[SupersededError] = []
    lease.on_lost = lost.append
    held_by(folder, elsewhere())
    lease._thread.join(60)
    assert not lease._thread.is_alive() and lost == [lease.lost]


def test_release_unused_folder_is_deleted_and_used_one_is_kept(folder: RunFolder) -> None:
    lease, _ = acquire(folder)
    lease.release()
    assert not folder.exists()  # the run was refused
    lease, _ = acquire(folder)
    folder.write_text("", "config.yaml")
    lease.release()
    assert folder.exists("config.yaml")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "driver-a"}'])
def test_read_holder_damaged_file_names_nobody(folder: RunFolder, text: str) -> None:
    folder.write_text(text, FOLDER, HOLDER)
    assert read_holder(folder) is None


def test_driver_id_survives_yaml_and_json() -> None:
    driver = Driver.of_this_process()
    assert Driver(**json.loads(json.dumps(asdict(driver)))) == driver
    assert driver.id.startswith("driver-")
