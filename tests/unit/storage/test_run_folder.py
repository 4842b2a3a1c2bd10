"""Tests of storage: run folders on a disk and in memory, the files in them, and retries after storage errors."""

import errno
import json
import os
import pickle
import random
import stat
import tempfile
from io import UnsupportedOperation
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage import retry
from grpo_ray.storage.filesystem import RetryingFilesystem, fetch_folder
from grpo_ray.storage.jsonl import (
    HISTORY_ROWS,
    REMOTE_INTERVALS,
    EventsFile,
    MetricsFile,
    load_metrics_history,
    read_metrics,
    restore_metrics,
    save_metrics_history,
)
from grpo_ray.storage.plain_files import describe_unusual
from grpo_ray.storage.retry import describe_error, is_full, is_transient, retry_transient, single_attempt
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials, split_path

QUICK = settings(max_examples=50, deadline=None, derandomize=True)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


@pytest.fixture
def remote() -> RunFolder:
    """Run folder in an object store; pyarrow's `mock` keeps it in memory."""
    return RunFolder("mock://bucket/runs", "run")


@pytest.fixture(autouse=True)
def fetched(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put fetched folders below pytest's temporary folder, so that they are deleted with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("fetched")))


@pytest.fixture
def places(folder: RunFolder, remote: RunFolder) -> list[RunFolder]:
    return [folder, remote]


def names(folder: RunFolder) -> list[str]:
    assert folder.local is not None
    return sorted(path.name for path in folder.local.iterdir())


def test_folder_local_joins_path_and_name(folder: RunFolder, tmp_path: Path) -> None:
    assert folder.local == tmp_path / "run"
    assert folder.uri == folder.path() == str(tmp_path / "run")
    assert folder.path("a", "b.json") == str(tmp_path / "run" / "a" / "b.json")


def test_folder_home_or_relative_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/runs", "run").local == tmp_path / "runs" / "run"
    monkeypatch.chdir(tmp_path)
    relative = RunFolder("runs", "run")
    monkeypatch.chdir("/")
    assert relative.local == tmp_path / "runs" / "run"


def test_folder_trailing_slash_is_ignored(tmp_path: Path) -> None:
    assert RunFolder(f"{tmp_path}/", "run").path("a") == str(tmp_path / "run" / "a")
    assert RunFolder("mock://bucket/runs/", "run").uri == "mock://bucket/runs/run"


def test_folder_object_store_has_no_local_path(remote: RunFolder) -> None:
    assert remote.local is None
    assert remote.uri == "mock://bucket/runs/run"


def test_folder_unknown_scheme_raises() -> None:
    with pytest.raises(ConfigError, match=r"^run\.storage_path=nosuch://bucket: cannot be used: "):
        RunFolder("nosuch://bucket", "run")


def test_folder_pickled_reads_same_files(folder: RunFolder) -> None:
    folder.write_text("text", "a.txt")
    again = pickle.loads(pickle.dumps(folder))
    assert (again.uri, again.name) == (folder.uri, "run") and again.read_text("a.txt") == "text"


def test_folder_pickled_keeps_home_of_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sent = pickle.dumps(RunFolder("~/runs", "run"))
    monkeypatch.setenv("HOME", "/nowhere")
    assert pickle.loads(sent).local == tmp_path / "runs" / "run"


def test_write_twice_leaves_one_file(folder: RunFolder) -> None:
    for text in ("one", "two"):
        folder.write_text(text, "a.txt")
    assert names(folder) == ["a.txt"]


def test_write_during_read_leaves_reader_old_text(folder: RunFolder) -> None:
    folder.write_text("old " * 10_000, "a.txt")
    with open(folder.path("a.txt"), encoding="utf-8") as reader:
        begun = reader.read(4)
        folder.write_text("new", "a.txt")
        assert begun + reader.read() == "old " * 10_000
    assert folder.read_text("a.txt") == "new"


def test_write_failing_keeps_old_file(folder: RunFolder) -> None:
    folder.write_text("old", "a.txt")
    with pytest.raises(UnicodeEncodeError):
        folder.write_text("half \ud83d a pair", "a.txt")
    assert folder.read_text("a.txt") == "old" and names(folder) == ["a.txt"]


def test_write_makes_file_readable_by_others(folder: RunFolder) -> None:
    folder.write_text("text", "a.txt")
    assert stat.S_IMODE(os.stat(folder.path("a.txt")).st_mode) == 0o644


def test_read_missing_file_raises(places: list[RunFolder]) -> None:
    for place in places:
        with pytest.raises(FileNotFoundError):
            place.read_text("none.txt")


def test_write_json_is_indented(folder: RunFolder) -> None:
    folder.write_json({"steps": 3, "best": None}, "summary.json")
    assert folder.read_text("summary.json") == '{\n  "steps": 3,\n  "best": null\n}\n'


def test_exists_after_write_is_true(places: list[RunFolder]) -> None:
    for place in places:
        assert not place.exists() and not place.exists("deep")
        place.write_text("", "deep", "a.txt")
        assert place.exists() and place.exists("deep") and place.exists("deep", "a.txt")
        assert not place.exists("a.txt")


def test_list_folders_filters_by_prefix(places: list[RunFolder]) -> None:
    for place in places:
        assert place.list_folders() == []
        for name in ("checkpoint-2", "checkpoint-10", "policy"):
            place.write_text("", name, "deep", "a.txt")
        place.write_text("a plain file", "checkpoint-3")
        assert place.list_folders("checkpoint-") == ["checkpoint-10", "checkpoint-2"]
        assert place.list_folders() == ["checkpoint-10", "checkpoint-2", "policy"]


def test_file_sizes_includes_nested_files(places: list[RunFolder]) -> None:
    for place in places:
        assert place.file_sizes("policy") == {}
        place.write_text("12345", "policy", "config.json")
        place.write_text("", "policy", "deep", "er", "empty")
        place.write_text("beside it", "policy-2", "config.json")
        assert place.file_sizes("policy") == {"config.json": 5, "deep/er/empty": 0}


def test_delete_twice_is_harmless(places: list[RunFolder]) -> None:
    for place in places:
        place.write_text("", "checkpoint-1", "deep", "a.txt")
        place.write_text("", "checkpoint-2", "a.txt")
        for _ in range(2):
            place.delete_folder("checkpoint-1")
            place.delete_file("checkpoint-2", "a.txt")
        assert not place.exists("checkpoint-1") and not place.exists("checkpoint-2", "a.txt")
        assert place.exists("checkpoint-2")


def test_rename_folder_moves_its_files(folder: RunFolder) -> None:
    folder.write_text("text", "checkpoint-1.part", "a.txt")
    folder.rename_folder("checkpoint-1.part", "checkpoint-1")
    assert names(folder) == ["checkpoint-1"] and folder.read_text("checkpoint-1", "a.txt") == "text"


def test_rename_folder_onto_existing_raises(folder: RunFolder) -> None:
    for name in ("old", "new"):
        folder.write_text(name, name, "a.txt")
    with pytest.raises(OSError):
        folder.rename_folder("old", "new")
    assert folder.read_text("new", "a.txt") == "new" and folder.exists("old")


def test_rename_folder_object_store_raises(remote: RunFolder) -> None:
    with pytest.raises(UnsupportedOperation, match=r"^mock://bucket/runs/run: folders"):
        remote.rename_folder("old", "new")


def test_upload_copies_all_files(places: list[RunFolder], tmp_path: Path) -> None:
    local = tmp_path / "policy"
    (local / "deep").mkdir(parents=True)
    (local / "config.json").write_text("{}")
    (local / "deep" / "weights").write_bytes(b"\x00\x01")
    for place in places:
        assert place.upload(local, "policy") == place.uri_of("policy")
        assert place.read_text("policy", "config.json") == "{}"
        assert place.read_text("policy", "deep", "weights") == "\x00\x01"


def test_fetch_folder_path_or_hub_id_is_returned(tmp_path: Path) -> None:
    assert fetch_folder(str(tmp_path)) == str(tmp_path)
    assert fetch_folder("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_fetch_folder_uri_copies_all_files(tmp_path: Path) -> None:
    (tmp_path / "policy" / "deep").mkdir(parents=True)
    (tmp_path / "policy" / "deep" / "weights").write_bytes(b"\x00\x01")
    local = fetch_folder(f"file://{tmp_path}/policy")
    with open(os.path.join(local, "deep", "weights"), "rb") as file:
        assert file.read() == b"\x00\x01"


def test_fetch_folder_without_names_leaves_them_out(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "optimizer.pt.index", "shards/policy/a", "shards/optimizer/a"):
        (tmp_path / "policy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "policy" / name).write_text(name)
    local = fetch_folder(f"file://{tmp_path}/policy", without=["shards/optimizer", "optimizer.pt"])
    copied = {
        os.path.relpath(os.path.join(parent, file), local) for parent, _, files in os.walk(local) for file in files
    }
    assert copied == {"optimizer.pt.index", "shards/policy/a"}


def test_check_writable_leaves_empty_folder(folder: RunFolder, places: list[RunFolder]) -> None:
    for place in places:
        place.check_writable()
        assert place.exists() and not place.exists(".writable")
    assert names(folder) == []


def test_check_writable_below_plain_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "file" / "runs"
    with pytest.raises(ConfigError) as caught:
        RunFolder(str(path), "run").check_writable()
    assert str(caught.value).startswith(f"run.storage_path={path}: cannot be written: ")
    assert str(caught.value).endswith("; set another run.storage_path")
    assert "\n" not in str(caught.value)


def test_check_writable_plain_file_raises(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"^run\.storage_path="):
        folder.check_writable()


def test_set_aside_numbers_old_runs(folder: RunFolder, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder.write_text(f"{number}", "a.txt")
        assert folder.set_aside() == str(tmp_path / f"run.{number}")
        assert not folder.exists()
    assert [(tmp_path / f"run.{n}" / "a.txt").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]


def test_set_aside_number_taken_uses_next(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "run.1").write_text("in the way")
    folder.write_text("text", "a.txt")
    assert folder.set_aside() == str(tmp_path / "run.2")
    assert (tmp_path / "run.1").read_text() == "in the way"


def test_set_aside_object_store_raises(remote: RunFolder) -> None:
    with pytest.raises(UnsupportedOperation, match="cannot be renamed"):
        remote.set_aside()


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


@pytest.fixture
def begun(folder: RunFolder) -> RunFolder:
    """Run folder with three logged steps."""
    folder.check_writable()
    metrics = MetricsFile(folder)
    for step in (1, 2, 3):
        metrics.add({"step": step, "reward/mean": step / 10})
    return folder


def test_metrics_missing_file_has_no_rows(folder: RunFolder) -> None:
    assert steps(folder) == []


def test_metrics_add_writes_row_at_once(begun: RunFolder) -> None:
    lines = begun.read_text("metrics.jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "reward/mean": 0.3},
    ]


def test_metrics_reopened_continues_old_rows(begun: RunFolder) -> None:
    metrics = MetricsFile(begun)
    metrics.add({"step": 4})
    assert steps(begun) == [1, 2, 3, 4]


def test_metrics_repeated_step_drops_later_rows(begun: RunFolder) -> None:
    metrics = MetricsFile(begun)
    metrics.add({"step": 2, "reward/mean": 0.9})
    assert list(read_metrics(begun)) == [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.9}]
    metrics.add({"step": 3})
    assert steps(begun) == [1, 2, 3]


def test_metrics_truncated_line_is_skipped(begun: RunFolder) -> None:
    with open(begun.path("metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write('{"step": 4, "reward/me')
    assert steps(begun) == [1, 2, 3]


def test_metrics_add_after_truncated_line_is_read(begun: RunFolder) -> None:
    with open(begun.path("metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write('{"step": 4, "reward/me')
    metrics = MetricsFile(begun)
    metrics.add({"step": 4})
    metrics.add({"step": 5})
    assert steps(begun) == [1, 2, 3, 4, 5]


def test_metrics_reopened_drops_line_of_zeros(begun: RunFolder) -> None:
    with open(begun.path("metrics.jsonl"), "ab") as file:
        file.write(bytes(100) + b"\n")  # a power cut may leave blocks that were never written
    MetricsFile(begun).add({"step": 4})
    assert steps(begun) == [1, 2, 3, 4]


def test_metrics_file_deleted_by_hand_continues(begun: RunFolder) -> None:
    metrics = MetricsFile(begun)
    begun.delete_file("metrics.jsonl")
    metrics.add({"step": 4})
    assert steps(begun) == [4]


def test_metrics_nan_survives_reading(begun: RunFolder) -> None:
    MetricsFile(begun).add({"step": 4, "policy/kl": float("nan"), "policy/entropy": 1e-12})
    *_, last = read_metrics(begun)
    assert last["policy/kl"] != last["policy/kl"] and last["policy/entropy"] == 1e-12


def test_metrics_object_store_writes_in_intervals(remote: RunFolder) -> None:
    metrics, interval = MetricsFile(remote), REMOTE_INTERVALS[0]
    for step in range(1, interval):
        metrics.add({"step": step})
    assert not remote.exists("metrics.jsonl")
    metrics.add({"step": interval})
    assert len(steps(remote)) == interval
    metrics.add({"step": interval + 1})
    assert len(steps(remote)) == interval
    metrics.flush()
    assert steps(remote) == list(range(1, interval + 2))
    again = MetricsFile(remote)
    again.add({"step": interval + 1, "again": True})
    again.flush()
    assert steps(remote) == list(range(1, interval + 2)) and list(read_metrics(remote))[-1]["again"]


def test_metrics_object_store_long_run_uploads_seldom(remote: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []

    def upload_file(source: Path, *names: str) -> None:
        uploads.append(source.stat().st_size)

    monkeypatch.setattr(remote, "upload_file", upload_file)
    metrics = MetricsFile(remote)
    for step in range(10_000_000, 10_004_000):  # rows of equal size
        metrics.add({"step": step})
    # Every 20 rows up to 400, then at each growth by a twentieth: 20 + log(4000 / 400) / log(20 / 19) = 65.
    assert 50 <= len(uploads) <= 70
    assert uploads[-1] >= 0.95 * metrics._bytes


def test_metrics_resume_drops_later_rows_and_adds_missing_ones(places: list[RunFolder]) -> None:
    for place in places:
        metrics = MetricsFile(place)
        for step in (1, 2, 3, 4, 5):
            metrics.add({"step": step, "of": "file"})
        metrics.resume(4, [{"step": 3, "of": "checkpoint"}, {"step": 4, "of": "checkpoint"}])
        assert [row["of"] for row in read_metrics(place)] == ["file"] * 4 and steps(place) == [1, 2, 3, 4]
        metrics.resume(6, [{"step": step, "of": "checkpoint"} for step in (3, 4, 5, 6)])
        assert [row["of"] for row in read_metrics(place)] == ["file"] * 4 + ["checkpoint"] * 2
        metrics.add({"step": 7})
        metrics.flush()
        assert steps(place) == [1, 2, 3, 4, 5, 6, 7]
        metrics.resume(0, [])
        metrics.flush()
        assert steps(place) == []


def test_metrics_resume_unreadable_file_keeps_its_rows(begun: RunFolder) -> None:
    metrics = MetricsFile(begun)
    file = Path(begun.path("metrics.jsonl"))
    hidden = file.rename(file.with_name("hidden"))
    file.mkdir()  # reading it fails
    metrics.resume(2, [{"step": step, "of": "checkpoint"} for step in (1, 2)])
    file.rmdir()
    hidden.rename(file)
    metrics.add({"step": 3, "again": True})
    assert list(read_metrics(begun)) == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "again": True},
    ]


def test_metrics_merge_adds_to_row_of_step(begun: RunFolder) -> None:
    metrics = MetricsFile(begun)
    metrics.merge(2, {"heldout/accuracy": 0.5})
    metrics.merge(9, {"heldout/accuracy": 0.9})  # a step without a row
    assert list(read_metrics(begun))[1] == {"step": 2, "reward/mean": 0.2, "heldout/accuracy": 0.5}
    assert steps(begun) == [1, 2, 3]
    metrics.resume(2, [{"step": 2, "reward/mean": 0.2}])  # the checkpoint was written before it was measured
    assert list(read_metrics(begun))[-1]["heldout/accuracy"] == 0.5


@pytest.mark.long
@pytest.mark.parametrize("width", [1, 50, 5_000, 200_000])
def test_metrics_random_changes_match_a_list(folder: RunFolder, width: int) -> None:
    # Rows smaller and larger than the blocks in which the file is read from its end.
    folder.check_writable()
    dice, metrics = random.Random(width), MetricsFile(folder)
    expected: list[dict[str, Any]] = []
    for _ in range(60):
        last = expected[-1]["step"] if expected else 0
        step = dice.randint(max(0, last - 3), last + 2)
        row = {"step": step, "text": "é" * dice.randint(0, width)}
        action = dice.choice(["add", "add", "add", "merge", "resume", "reopen"])
        if action == "add":
            metrics.add(row)
            expected = [each for each in expected if each["step"] < step] + [row]
        elif action == "merge":
            metrics.merge(step, {"measured": 1.0})
            expected = [each | ({"measured": 1.0} if each["step"] == step else {}) for each in expected]
        elif action == "resume":
            metrics.resume(step, [row])
            expected = [each for each in expected if each["step"] <= step]
            expected += [row] if not expected or expected[-1]["step"] < step else []
        else:
            metrics = MetricsFile(folder)
        assert list(read_metrics(folder)) == expected, action


def test_metrics_history_is_bounded(tmp_path: Path) -> None:
    save_metrics_history(tmp_path, [{"step": step} for step in range(HISTORY_ROWS + 5)])  # more than a run writes
    history = load_metrics_history(tmp_path)
    assert (len(history), history.maxlen, history[0]) == (HISTORY_ROWS, HISTORY_ROWS, {"step": 5})


def test_events_keep_order_over_launches(places: list[RunFolder]) -> None:
    for place in places:
        for launch in (1, 2):
            events = EventsFile(place)
            for event in ("began", "step"):
                events.add({"event": event, "at": 1.0, "step": 1, "workers": 2, "launch": launch})
            events.flush()
        lines = map(json.loads, place.read_text("events.jsonl").splitlines())
        assert [(line["event"], line["launch"]) for line in lines] == [
            ("began", 1),
            ("step", 1),
            ("began", 2),
            ("step", 2),
        ]


HEAD = "When getting information for key 'x' in bucket 'b': AWS Error {} during HeadObject operation: {}"


MESSAGES = {
    HEAD.format("NETWORK_CONNECTION", "curlCode: 7, Could not connect to server; Details: Failed"): True,
    HEAD.format("NETWORK_CONNECTION", "curlCode: 6, Could not resolve hostname; Details: no"): True,
    HEAD.format("NETWORK_CONNECTION", "curlCode: 28, Timeout was reached; Details: Operation too slow"): True,
    HEAD.format("NETWORK_CONNECTION", "curlCode: 60, SSL peer certificate was not OK; Details: no"): False,
    HEAD.format("UNKNOWN (HTTP status 500)", "No response body."): True,
    HEAD.format("UNKNOWN (HTTP status 502)", "Unable to parse ExceptionName: BadGateway Message: m"): True,
    HEAD.format("UNKNOWN (HTTP status 429)", "No response body."): True,
    HEAD.format("SLOW_DOWN", "m"): True,
    HEAD.format("INTERNAL_FAILURE", "m"): True,
    HEAD.format("ACCESS_DENIED", "No response body."): False,
    HEAD.format("INVALID_ACCESS_KEY_ID", "m"): False,
    HEAD.format("SIGNATURE_DOES_NOT_MATCH", "m"): False,
    HEAD.format("UNKNOWN (HTTP status 400)", "Unable to parse ExceptionName: ExpiredToken Message: m"): False,
    HEAD.format("UNKNOWN (HTTP status 301)", "Unable to parse ExceptionName: PermanentRedirect"): False,
    HEAD.format("NO_SUCH_BUCKET", "The specified bucket does not exist"): False,
    "Bucket 'b' not found. To create buckets, enable the allow_bucket_creation option.": False,
    "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork())": True,
    "google::cloud::Status(PERMISSION_DENIED: no)": False,
}
"""Error message seen from pyarrow -> True if the same call may succeed later."""


@pytest.mark.parametrize("message", MESSAGES)
def test_transient_object_store_message_is_classified(message: str) -> None:
    assert is_transient(OSError(message)) is MESSAGES[message]
    assert not is_full(OSError(message))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError("timed out"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
    ],
)
def test_transient_network_error_is_true(error: OSError) -> None:
    assert is_transient(error) and not is_full(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        PermissionError(errno.EACCES, "Permission denied"),
        IsADirectoryError(errno.EISDIR, "Is a directory"),
        OSError(errno.EINVAL, "Invalid argument"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_transient_permanent_error_is_false(error: OSError) -> None:
    assert not is_transient(error) and not is_full(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_error_is_not_transient(number: int) -> None:
    error = OSError(number, f"Error writing bytes to file. Detail: [errno {number}] {os.strerror(number)}")
    assert is_full(error) and not is_transient(error)
    assert describe_error(error) == f"storage cannot be written ({os.strerror(number)})"


class Failing:
    """Action that fails a given number of times before it succeeds."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.tries = times, error, 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.times:
            raise self.error
        return "done"


UNREACHABLE = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FileNotFoundError("none"), PermissionError("no"), ValueError("wrong")])
def test_retry_permanent_error_raises_at_once(error: Exception) -> None:
    action = Failing(1, error)
    with pytest.raises(type(error)):
        retry_transient(action, 60)
    assert action.tries == 1


def test_retry_nested_repeats_outermost_only(clock: "Clock") -> None:
    inner, outer = Failing(3, UNREACHABLE), Failing(0, UNREACHABLE)
    assert retry_transient(lambda: (outer(), retry_transient(inner, 60)), 60) == ("done", "done")
    assert (outer.tries, inner.tries) == (4, 4)


def test_retry_inside_single_attempt_tries_once(clock: "Clock") -> None:
    action = Failing(1, UNREACHABLE)
    with single_attempt(), pytest.raises(ConnectionResetError):
        retry_transient(action, 60)
    assert retry_transient(action, 60) == "done" and action.tries == 2


class LostResponses:
    """Filesystem that deletes a file and then raises a connection error."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem) -> None:
        self.filesystem, self.lost = filesystem, 0

    def delete_file(self, path: str) -> None:
        self.filesystem.delete_file(path)
        self.lost += 1
        raise UNREACHABLE


def test_delete_file_lost_response_is_success(clock: "Clock") -> None:
    retrying = RetryingFilesystem("mock://bucket/runs", 60)
    with retrying.filesystem.open_output_stream("a.txt") as stream:
        stream.write(b"text")
    retrying.filesystem = LostResponses(retrying.filesystem)
    through = pyarrow.fs.PyFileSystem(retrying)
    through.delete_file("a.txt")
    assert retrying.filesystem.lost == 1
    with pytest.raises(FileNotFoundError):  # a file that was missing before the first try
        through.delete_file("a.txt")


def test_split_path_separates_folder_and_name() -> None:
    assert split_path("/runs/run/") == ("/runs", "run")
    assert split_path("run") == (".", "run") and split_path("/run") == ("/", "run")
    assert split_path("gs://bucket/run") == ("gs://bucket", "run")


def test_fetch_local_folder_is_not_copied(folder: RunFolder) -> None:
    assert folder.fetch("policy") == folder.path("policy")


def test_filesystem_local_is_plain_pyarrow(folder: RunFolder) -> None:
    assert type(folder.filesystem) is pyarrow.fs.LocalFileSystem
    assert type(pickle.loads(pickle.dumps(folder)).filesystem) is pyarrow.fs.LocalFileSystem


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a@b/c:d@e",
        "gs://anonymous@bucket/a",
        "hdfs://host:9000/a@b",
        "abfs://container@account.net/a",
        "/a@b",
    ],
)
def test_redact_credentials_plain_uri_is_unchanged(uri: str) -> None:
    assert redact_credentials(uri) == uri


# Round trips


@pytest.mark.parametrize("name", ["with space", "per%20cent", "sh#arp", "que?stion", "[brackets]", "ünïcode"])
def test_folder_special_characters_in_path_are_literal(tmp_path: Path, name: str) -> None:
    folder = RunFolder(str(tmp_path / name), "run")
    folder.write_text("text", "a.txt")
    assert (tmp_path / name / "run" / "a.txt").read_text() == "text"
    assert folder.exists("a.txt") and folder.read_text("a.txt") == "text"


@pytest.mark.parametrize("text", ["", "one\ntwo\n", "ünïcode 🧮\r\n", "a\x00b"])
def test_write_text_is_read_back_unchanged(places: list[RunFolder], text: str) -> None:
    for place in places:
        place.write_text(text, "deep", "er", "a.txt")
        assert place.read_text("deep", "er", "a.txt") == text


@QUICK
@given(text=st.text(), data=st.binary())
def test_write_any_content_is_read_back_unchanged(text: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for place in (RunFolder(folder, "run"), RunFolder("mock://bucket/runs", "run")):
            place.write_text(text, "a.txt")
            place.write_bytes(data, "deep", "weights")
            assert place.read_text("a.txt") == text and place.read_bytes("deep", "weights") == data
            assert place.file_sizes() == {"a.txt": len(text.encode()), "deep/weights": len(data)}


def test_write_name_of_compressed_file_is_not_compressed(places: list[RunFolder]) -> None:
    for place in places:
        place.write_text("text", "a.gz")
        assert place.file_sizes() == {"a.gz": 4}
        assert place.read_text("a.gz") == "text"


# Retries


class Clock:
    """Replacement for the module `time` in the retry loop: sleeping advances the clock and takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    return clock


@pytest.mark.parametrize("error", [UNREACHABLE, FULL])
def test_retry_passing_error_repeats_until_success(clock: Clock, error: Exception) -> None:
    action = Failing(8, error)
    assert retry_transient(action, 600) == "done" and action.tries == 9
    assert clock.pauses == [0.5, 1, 2, 4, 8, 15, 15, 15]  # doubled up to 15 s


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL, "storage cannot be written (No space left on device); trying again for 60 s"),
        (UNREACHABLE, "storage cannot be reached (Connection reset by peer); trying again for 60 s"),
    ],
)
def test_retry_reports_begin_and_end_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    reported: list[str] = []
    retry_transient(Failing(3, error), 60, reported.append)
    assert reported == [message, "storage is back after 4 s"]  # 0.5 + 1 + 2 s, rounded
    retry_transient(Failing(0, error), 60, reported.append)
    assert len(reported) == 2 and caplog.messages == []
    retry_transient(Failing(3, error), 60)  # without a function to report to, the log gets both lines
    assert caplog.messages == reported


@pytest.mark.parametrize("error", [UNREACHABLE, FULL])
def test_retry_time_over_raises_last_error(clock: Clock, error: Exception) -> None:
    action = Failing(10**9, error)
    with pytest.raises(OSError) as caught:
        retry_transient(action, 60)
    assert caught.value is error
    assert sum(clock.pauses) == 60 and action.tries == len(clock.pauses) + 1 == 9


def test_retry_zero_seconds_tries_once_silently(clock: "Clock") -> None:
    action = Failing(1, UNREACHABLE)
    reported: list[str] = []
    with pytest.raises(ConnectionResetError):
        retry_transient(action, 0, reported.append)
    assert action.tries == 1 and reported == [] and clock.pauses == []


def test_redact_credentials_cuts_user_names_and_passwords() -> None:
    assert redact_credentials("s3://KEY:SECRET@bucket/runs") == "s3://bucket/runs"
    assert redact_credentials("gs://user:pass@bucket/runs") == "gs://user@bucket/runs"
    assert redact_credentials("https://me:pass@host/x and s3://k:s@b") == "https://me@host/x and s3://b"
    assert redact_credentials("/tmp/a:b@c") == "/tmp/a:b@c"


class EntryWithoutBlocks:
    """Entry of a file on a file system that counts no blocks, such as ZFS for a new file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def is_symlink(self) -> bool:
        return False

    def is_dir(self, follow_symlinks: bool) -> bool:
        return False

    def stat(self, follow_symlinks: bool) -> Any:
        status = os.stat(self.path)
        return SimpleNamespace(st_mode=status.st_mode, st_size=status.st_size, st_blocks=0)


@pytest.mark.parametrize(
    ("data_mib", "is_sparse"), [(80, False), (6, False), (4, True), (0, True)], ids=["dense", "6/80", "4/80", "holes"]
)
def test_file_without_blocks_is_sparse_only_with_holes(tmp_path: Path, data_mib: int, is_sparse: bool) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:  # a sixteenth of 80 MiB is 5 MiB
        for place in range(data_mib):
            file.seek(place << 20 if data_mib == 80 else place << 22)
            file.write(b"1" * (1 << 20))
        file.truncate(80 << 20)
    entry: Any = EntryWithoutBlocks(path)
    assert describe_unusual(entry, tmp_path).startswith("is sparse: ") == is_sparse


def test_file_is_dense_where_holes_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    os.truncate(path, 80 << 20)

    def no_seek(descriptor: int, position: int, whence: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "lseek", no_seek)
    entry: Any = EntryWithoutBlocks(path)
    assert describe_unusual(entry, tmp_path) == ""


def test_link_to_itself_is_refused(folder: RunFolder) -> None:
    folder.write_text("{}", "config.yaml")
    Path(folder.path("loop")).symlink_to("loop")
    with pytest.raises(DamagedFileError, match="run/loop is a link to itself; delete it"):
        folder.require_plain_files()


def test_folder_that_may_not_be_listed_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_list(folder, errno.EACCES, monkeypatch)
    with pytest.raises(DamagedFileError, match="run/logs cannot be read: Permission denied; correct or delete it"):
        folder.require_plain_files()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_folder_that_a_live_run_replaces_is_passed_over(
    folder: RunFolder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_list(folder, number, monkeypatch)
    folder.require_plain_files()


def fail_to_list(folder: RunFolder, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the listing of the subfolder `logs` fail with an error number."""
    folder.write_text("", "logs", "worker.log")
    list_folder = os.scandir

    def fail(path: Path) -> Any:
        if path == Path(folder.path("logs")):
            raise OSError(number, os.strerror(number))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", fail)


def test_restore_metrics_adds_the_rows_that_a_killed_driver_has_not_written(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    metrics = MetricsFile(folder)
    for step in (1, 2):
        metrics.add({"step": step, "loss": 0.5, "heldout/accuracy": 0.25})  # measured after the checkpoint was written
    metrics.flush()
    (tmp_path / "run" / "checkpoint-000003").mkdir()
    for _ in range(2):
        restore_metrics(folder, "checkpoint-000003", 3)  # which has no copy of the rows yet
        assert [row["step"] for row in read_metrics(folder)] == [1, 2]
    save_metrics_history(tmp_path / "run" / "checkpoint-000003", [{"step": step, "loss": 0.5} for step in (1, 2, 3)])
    for _ in range(2):
        restore_metrics(folder, "checkpoint-000003", 3)
        rows = list(read_metrics(folder))
        assert [row["step"] for row in rows] == [1, 2, 3] and rows[1]["heldout/accuracy"] == 0.25
