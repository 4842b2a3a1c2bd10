"""Tests of storage on a real S3 server, behind a connection that breaks, and on a disk that is full."""

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Literal

import pyarrow.fs
import pytest
from failing_storage import CREDENTIALS, Proxy, S3Server, fill, small_disk, storage_path, wait_for

from grpo_ray.errors import ConfigError
from grpo_ray.storage import filesystem, retry
from grpo_ray.storage.filesystem import fetch_folder
from grpo_ray.storage.jsonl import REMOTE_INTERVALS, EventsFile, MetricsFile, read_metrics
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import split_path


@pytest.fixture(autouse=True)
def fetched(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put fetched folders below pytest's temporary folder, so that they are deleted with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("fetched")))


run_number = count(1)


@pytest.fixture
def s3(s3_server: S3Server) -> RunFolder:
    """Run folder on a real S3 server."""
    return RunFolder(s3_server.storage_path, f"run-{next(run_number)}")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with Proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry after hundredths of a second."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.02)


def names(folder: RunFolder) -> list[str]:
    assert folder.local is not None
    return sorted(path.name for path in folder.local.iterdir())


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_uri_query_stays_at_end(s3: RunFolder, s3_server: S3Server) -> None:
    query = f"?endpoint_override=127.0.0.1:{s3_server.port}&scheme=http&region=us-east-1"
    assert s3.local is None
    assert s3.path("a") == f"bucket/runs/{s3.name}/a"
    assert s3.uri == f"s3://bucket/runs/{s3.name}{query}"
    assert s3.uri_of("policy", "a b.json") == f"s3://bucket/runs/{s3.name}/policy/a%20b.json{query}"
    assert split_path(s3.uri_of("a b.json")) == (s3.uri, "a b.json")
    assert split_path(s3.uri) == (s3_server.storage_path, s3.name)


def test_s3_upload_and_fetch_return_same_bytes(s3: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "policy" / "deep").mkdir(parents=True)
    (tmp_path / "policy" / "deep" / "weights").write_bytes(os.urandom(6 << 20))  # more than one part of an upload
    (tmp_path / "policy" / "config.json").write_text("{}")
    uri = s3.upload(tmp_path / "policy", "my policy")
    for local in (fetch_folder(uri), s3.fetch("my policy")):
        back = {path.name: path.read_bytes() for path in Path(local).rglob("*") if path.is_file()}
        assert back == {
            "weights": (tmp_path / "policy" / "deep" / "weights").read_bytes(),
            "config.json": b"{}",
        }


def test_s3_fetch_missing_folder_raises(s3: RunFolder) -> None:
    with pytest.raises(FileNotFoundError):
        fetch_folder(s3.uri_of("none"))


def test_s3_metrics_are_read_back(s3: RunFolder) -> None:
    metrics = MetricsFile(s3)
    for step in range(1, 4):
        metrics.add({"step": step})
    metrics.flush()
    again = MetricsFile(s3)
    again.add({"step": 3, "again": True})
    assert steps(s3) == [1, 2, 3] and list(read_metrics(s3))[-1] == {"step": 3, "again": True}


def test_s3_filesystems_of_one_storage_are_equal(s3: RunFolder, s3_server: S3Server) -> None:
    sent = pickle.loads(pickle.dumps(s3.filesystem))
    assert sent == s3.filesystem and (sent != s3.filesystem) is False  # Ray uses !=
    assert pickle.loads(pickle.dumps(s3)).filesystem == s3.filesystem
    assert RunFolder(s3_server.storage_path, "another").filesystem == s3.filesystem
    elsewhere = RunFolder(storage_path(1), "run").filesystem
    assert elsewhere != s3.filesystem and s3.filesystem != pyarrow.fs.LocalFileSystem()


def test_s3_folder_pickled_keeps_retry_seconds(s3: RunFolder) -> None:
    folder = RunFolder(s3.storage_path, "run", retry_seconds=3.0)
    again = pickle.loads(pickle.dumps(folder))
    assert again.retry_seconds == 3.0 and again.filesystem.handler.retry_seconds == 3.0
    assert pickle.loads(pickle.dumps(folder.filesystem)).handler.retry_seconds == 3.0


def test_s3_credentials_in_path_work_and_stay_hidden(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    folder = RunFolder(storage_path(s3_server.port, user="mykey:my%2Fsecret@"), "run-of-somebody")
    folder = pickle.loads(pickle.dumps(folder))
    folder.write_text("text", "policy", "a.txt")
    assert Path(folder.fetch("policy"), "a.txt").read_text() == "text"
    assert Path(fetch_folder(folder.address_of("policy")), "a.txt").read_text() == "text"  # as an evaluation does
    assert folder.uri == RunFolder(s3_server.storage_path, "run-of-somebody").uri
    shown = f"{folder!r} {folder.filesystem} {folder.filesystem.handler} {folder.uri_of('a')}"
    nowhere = RunFolder(storage_path(s3_server.port, user="mykey:mysecret@", bucket="nosuchbucket"), "run")
    with pytest.raises(ConfigError) as refused:
        nowhere.check_writable()
    for wrong in ("s3://mykey:mysecret@bucket/runs?nosuch=1", "s3://mykey:my/se?cr et@bucket/runs"):
        with pytest.raises(ConfigError, match=r"^run\.storage_path=s3://bucket/runs") as unusable:
            RunFolder(wrong, "run")
        shown += str(unusable.value)
    shown += str(refused.value)
    assert "mykey" not in shown and "secret" not in shown and "cr et" not in shown


def test_s3_requests_have_timeouts(s3: RunFolder) -> None:
    _, (options,) = s3.filesystem.handler.filesystem.__reduce__()
    assert (options["connect_timeout"], options["request_timeout"]) == (5.0, 10.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda place: place.read_text("none.txt"),
        lambda place: place.filesystem.open_input_stream(place.path("none.txt")),
        lambda place: place.filesystem.delete_file(place.path("none.txt")),
    ],
)
def test_s3_missing_file_is_not_retried(
    s3: RunFolder, caplog: pytest.LogCaptureFixture, call: Callable[[RunFolder], object]
) -> None:
    s3.check_writable()
    with pytest.raises(FileNotFoundError):
        call(s3)
    assert "trying again" not in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        lambda place: place.write_text("text", "a.txt"),
        lambda place: place.filesystem.open_output_stream(place.path("a.txt")),
        lambda place: place.filesystem.create_dir(place.path("deep")),
    ],
)
def test_s3_missing_bucket_is_not_retried(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture, call: Callable[[RunFolder], object]
) -> None:
    with pytest.raises(OSError, match=r"(?i)bucket"):
        call(RunFolder(storage_path(s3_server.port, bucket="nosuchbucket"), "run"))
    assert "trying again" not in caplog.text


def call_during_outage(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, how: Literal["refuse", "hang"], call: Callable[[], object]
) -> object:
    """Call while the storage is unreachable; end the outage once the client has reported it."""
    proxy.disconnect(how)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        wait_for(lambda: "storage cannot be reached" in caplog.text or answer.done(), "the outage to be reported")
        assert not answer.done()
        proxy.restore()
        return answer.result(timeout=60)


@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_s3_call_during_outage_succeeds_after_it(
    s3: RunFolder,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: Literal["refuse", "hang"],
) -> None:
    monkeypatch.setattr(filesystem, "S3_REQUEST_TIMEOUT", 1.0)
    s3.write_text("text", "a.txt")
    proxied = RunFolder(proxy.storage_path, s3.name)
    calls: dict[str, Callable[[str], str | bytes]] = {
        "refuse": proxied.read_text,
        "hang": lambda name: proxied.filesystem.open_input_file(proxied.path(name)).read(),
    }
    assert call_during_outage(proxy, caplog, how, lambda: calls[how]("a.txt")) in ("text", b"text")
    assert caplog.messages[0].endswith("trying again for 600 s") and "storage is back after" in caplog.messages[1]


def test_s3_outage_longer_than_retries_raises(proxy: Proxy) -> None:
    proxied = RunFolder(proxy.storage_path, "run", retry_seconds=0.1)
    proxy.disconnect()
    with pytest.raises(OSError, match="Could not connect to server"):
        proxied.read_text("a.txt")


def test_s3_check_writable_outage_raises_at_once(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    proxied = RunFolder(proxy.storage_path, "run")
    proxy.disconnect()
    with pytest.raises(ConfigError, match=r"^run\.storage_path=s3://bucket/runs\?.*: cannot be written: "):
        proxied.check_writable()
    assert "trying again" not in caplog.text


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[RunFolder]:
    """Run folder on a disk of 256 kB."""
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder(str(disk), "run", retry_seconds=60)
        folder.check_writable()
        yield folder


def disk_of(folder: RunFolder) -> Path:
    assert folder.local is not None
    return folder.local.parent


def test_full_disk_write_keeps_old_file(small_folder: RunFolder) -> None:
    small_folder.write_text("old" * 1000, "a.txt")
    fill(disk_of(small_folder), leave=4096)
    with pytest.raises(OSError, match="No space left"):
        small_folder.write_text("new" * 10_000, "a.txt")
    assert small_folder.read_text("a.txt") == "old" * 1000 and names(small_folder) == ["a.txt"]


def test_full_disk_upload_waits_for_room(
    small_folder: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_bytes(bytes(100_000))
    filler = fill(disk_of(small_folder), leave=4096)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(small_folder.upload, tmp_path / "policy", "policy")
        wait_for(lambda: bool(caplog.messages) or answer.done(), "the disk to be full")
        assert not answer.done()
        filler.unlink()
        answer.result(timeout=60)
    assert small_folder.file_sizes("policy") == {"weights": 100_000}
    assert "No space left on device" in caplog.messages[0] and "trying again for 60 s" in caplog.messages[0]
    assert "storage is back" in caplog.messages[1]


def test_full_disk_metrics_lose_no_row(small_folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(small_folder)
    metrics.add({"step": 1, "note": "x" * 1000})
    filler = fill(disk_of(small_folder))
    for step in range(2, 20):  # the first rows fit into the last block, a later one is cut
        metrics.add({"step": step, "note": "x" * 1000})
    assert len(caplog.messages) == 1 and "the rows of metrics.jsonl are kept in memory" in caplog.text
    assert 1 <= len(steps(small_folder)) < 19
    filler.unlink()
    metrics.add({"step": 20})
    assert steps(small_folder) == list(range(1, 21))
    metrics.add({"step": 21})
    assert steps(small_folder) == list(range(1, 22)) and len(caplog.messages) == 1


def test_full_disk_flush_waits_then_raises(small_folder: RunFolder, short_pauses: None) -> None:
    small_folder.retry_seconds = 0.1
    metrics = MetricsFile(small_folder)
    filler = fill(disk_of(small_folder))
    metrics.add({"step": 1, "note": "x" * 10_000})
    with pytest.raises(OSError, match="No space left"):
        metrics.flush()
    filler.unlink()
    metrics.flush()
    assert steps(small_folder) == [1]


def test_s3_outage_metrics_are_in_next_file(s3: RunFolder, proxy: Proxy) -> None:
    proxied = RunFolder(proxy.storage_path, s3.name)
    metrics = MetricsFile(proxied)
    proxy.disconnect()
    for step in range(1, REMOTE_INTERVALS[0] + 1):
        metrics.add({"step": step})
    proxy.restore()
    metrics.flush()
    assert steps(s3) == list(range(1, REMOTE_INTERVALS[0] + 1))


def test_s3_upload_during_outage_is_whole_after_it(
    s3: RunFolder, proxy: Proxy, short_pauses: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    proxied = RunFolder(proxy.storage_path, s3.name)
    (tmp_path / "policy").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "policy" / name).write_bytes(os.urandom(6 << 20))  # more than one part of an upload
    before = proxy.connections
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(proxied.upload, tmp_path / "policy", "policy")
        wait_for(lambda: proxy.connections > before, "the upload to begin")
        proxy.disconnect()
        wait_for(lambda: "storage cannot be reached" in caplog.text or answer.done(), "the outage to be reported")
        assert not answer.done()
        proxy.restore()
        answer.result(timeout=120)
    local = Path(s3.fetch("policy"))
    for path in (tmp_path / "policy").iterdir():
        assert (local / path.name).read_bytes() == path.read_bytes()


def test_s3_small_files_are_read_back_unchanged(s3: RunFolder) -> None:
    for text in ("", "one\ntwo\n", "ünïcode 🧮\r\n", "a\x00b"):
        s3.write_text(text, "deep", "er", "a.txt")
        assert s3.read_text("deep", "er", "a.txt") == text
    s3.write_bytes(bytes(range(256)), "deep", "weights")
    assert s3.read_bytes("deep", "weights") == bytes(range(256))
    s3.write_text("text", "a.gz")
    assert s3.file_sizes() == {"a.gz": 4, "deep/er/a.txt": 3, "deep/weights": 256}
    assert s3.read_text("a.gz") == "text"
    with pytest.raises(FileNotFoundError):
        s3.read_text("none.txt")


def test_s3_folders_are_listed_measured_and_deleted(s3: RunFolder) -> None:
    assert not s3.exists() and not s3.exists("policy")
    s3.check_writable()
    assert s3.exists() and not s3.exists(".writable")
    assert s3.list_folders() == [] and s3.file_sizes("policy") == {}
    for name in ("checkpoint-2", "checkpoint-10"):
        s3.write_text("", name, "deep", "a.txt")
    s3.write_text("a plain file", "checkpoint-3")
    s3.write_text("12345", "policy", "config.json")
    s3.write_text("", "policy", "deep", "er", "empty")
    s3.write_text("beside it", "policy-2", "config.json")
    assert s3.exists() and s3.exists("policy") and s3.exists("policy", "config.json") and not s3.exists("config.json")
    assert s3.list_folders("checkpoint-") == ["checkpoint-10", "checkpoint-2"]
    assert s3.list_folders() == ["checkpoint-10", "checkpoint-2", "policy", "policy-2"]
    assert s3.file_sizes("policy") == {"config.json": 5, "deep/er/empty": 0}
    for _ in range(2):
        s3.delete_folder("checkpoint-2")
        s3.delete_file("policy-2", "config.json")
    assert not s3.exists("checkpoint-2") and not s3.exists("policy-2", "config.json")
    assert s3.exists("policy-2") and s3.exists("checkpoint-10", "deep", "a.txt")


def test_s3_events_keep_order_over_launches(s3: RunFolder) -> None:
    for launch in (1, 2):
        events = EventsFile(s3)
        for event in ("began", "step"):
            events.add({"event": event, "at": 0.0, "step": 0, "workers": 1, "launch": launch})
        events.flush()
    lines = map(json.loads, s3.read_text("events.jsonl").splitlines())
    assert [(line["event"], line["launch"]) for line in lines] == [
        ("began", 1),
        ("step", 1),
        ("began", 2),
        ("step", 2),
    ]
