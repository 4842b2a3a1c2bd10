"""Tests of the lease of a run folder on a real S3 server, with replies that are lost, and on a disk that is full."""

from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest
from failing_storage import LossyProxy, S3Server, fill, small_disk, wait_for

from grpo_ray.errors import ConfigError, SupersededError
from grpo_ray.storage import lease as lease_module
from grpo_ray.storage.lease import FOLDER, HOLDER, RunLease
from grpo_ray.storage.run_folder import RunFolder

run_number = count(1)


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every 50 ms, watched for 2 s."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "WATCH_SECONDS", 2.0)


def move_elsewhere(lease: RunLease) -> None:
    """Have the lease appear as that of a driver on another machine, whose process cannot be looked up."""
    lease.folder.write_json(asdict(replace(lease.driver, machine="another boot")), FOLDER, HOLDER)


def test_s3_driver_elsewhere_is_refused_then_taken_over_then_replaced(s3_server: S3Server, fast_beats: None) -> None:
    folder = RunFolder(s3_server.storage_path, f"lease-{next(run_number)}")
    shown: list[str] = []
    first = RunLease.acquire(folder, None, shown.append)
    folder.write_text("", "config.yaml")
    move_elsewhere(first)
    with pytest.raises(ConfigError, match=r"has a driver already: host .* \(its heartbeat is fresh\)"):
        RunLease.acquire(folder, None, shown.append)
    second = RunLease.acquire(folder, first.driver.id, shown.append)
    first._thread.join(60)
    assert isinstance(first.lost, SupersededError)
    move_elsewhere(second)
    second._stop.set()  # killed: no heartbeat any more, and no release
    second._thread.join(60)
    third = RunLease.acquire(folder, None, shown.append)
    third.confirm()
    third.release()
    assert "no heartbeat for 2 s" in shown[-1]
    assert not RunFolder(s3_server.storage_path, folder.name).exists(FOLDER, f"{third.driver.id}.beat")


def test_s3_lost_replies_do_not_lose_the_lease(s3_server: S3Server, fast_beats: None) -> None:
    name = f"lease-{next(run_number)}"
    puts = count()

    def loses(method: str, path: str) -> bool:
        return method == "PUT" and path.partition("?")[0].endswith(".beat") and next(puts) % 3 != 0

    with LossyProxy(s3_server.port, loses) as proxy:
        lease = RunLease.acquire(RunFolder(proxy.storage_path, name), None, print)
        wait_for(lambda: lease._beats > 3 and len(proxy.lost) > 3, "several heartbeats")
        lease.confirm()
        lease.release()
    assert lease.lost is None


def test_full_disk_driver_is_refused_with_the_storage_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        with pytest.raises(ConfigError, match=r"run\.storage_path=.*cannot be written: .*No space left on device"):
            RunLease.acquire(RunFolder(str(disk), "run"), None, print)
