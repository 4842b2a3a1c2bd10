import errno
import json
import os
import pickle
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import UnsupportedOperation
from itertools import count
from pathlib import Path

import pyarrow.fs
import pytest
from failing_storage import CREDENTIALS, Proxy, S3Server, fill, small_disk, storage_path, wait_for

from grpo_ray import patience, storage
from grpo_ray.errors import ConfigError
from grpo_ray.patience import asking_once, is_full, is_transient, patiently
from grpo_ray.rowfiles import EventsFile, MetricsFile, read_metrics
from grpo_ray.storage import (
    Patient,
    RunFolder,
    fetch_folder,
    split_path,
    without_credentials,
)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


@pytest.fixture
def remote() -> RunFolder:
    """A run folder in an object store; pyarrow's `mock` keeps it in memory."""
    return RunFolder("mock://bucket/runs", "run")


@pytest.fixture(autouse=True)
def fetched(tmp_path_factory, monkeypatch) -> None:
    """What is fetched is cleared away with the other folders of tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("fetched")))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, S3Server() as server:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


run_number = count(1)


@pytest.fixture
def s3(server) -> RunFolder:
    """A run folder in a real S3 server."""
    return RunFolder(server.storage_path, f"run-{next(run_number)}")


@pytest.fixture
def places(folder, remote, s3) -> list[RunFolder]:
    return [folder, remote, s3]


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Pauses of hundredths of a second."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.02)


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.local.iterdir())


# Where it lies


def test_a_run_lies_in_a_folder_of_its_name_below_the_storage_path(folder, tmp_path):
    assert folder.local == tmp_path / "run"
    assert folder.uri == folder.path() == str(tmp_path / "run")
    assert folder.path("a", "b.json") == str(tmp_path / "run" / "a" / "b.json")


def test_the_home_folder_and_relative_paths_are_made_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/runs", "run").local == tmp_path / "runs" / "run"
    monkeypatch.chdir(tmp_path)
    relative = RunFolder("runs", "run")
    monkeypatch.chdir("/")
    assert relative.local == tmp_path / "runs" / "run"


def test_a_slash_at_the_end_of_the_storage_path_changes_nothing(tmp_path):
    assert RunFolder(f"{tmp_path}/", "run").path("a") == str(tmp_path / "run" / "a")
    assert RunFolder("mock://bucket/runs/", "run").uri == "mock://bucket/runs/run"


@pytest.mark.parametrize("name", ["with space", "per%20cent", "sh#arp", "que?stion", "[brackets]", "ünïcode"])
def test_a_storage_path_of_any_characters_is_the_folder_that_was_named(tmp_path, name):
    folder = RunFolder(str(tmp_path / name), "run")
    folder.write_text("text", "a.txt")
    assert (tmp_path / name / "run" / "a.txt").read_text() == "text"
    assert folder.exists("a.txt") and folder.read_text("a.txt") == "text"


def test_an_object_store_is_no_local_folder(remote):
    assert remote.local is None
    assert remote.uri == "mock://bucket/runs/run"


def test_a_scheme_that_nobody_knows_is_refused_by_the_name_of_the_field():
    with pytest.raises(ConfigError, match=r"^run\.storage_path=nosuch://bucket: cannot be used: "):
        RunFolder("nosuch://bucket", "run")


def test_a_run_folder_can_be_sent_to_another_process(folder):
    folder.write_text("text", "a.txt")
    again = pickle.loads(pickle.dumps(folder))
    assert (again.uri, again.name) == (folder.uri, "run") and again.read_text("a.txt") == "text"


def test_a_folder_of_a_home_path_is_the_same_one_in_a_process_with_another_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sent = pickle.dumps(RunFolder("~/runs", "run"))
    monkeypatch.setenv("HOME", "/nowhere")
    assert pickle.loads(sent).local == tmp_path / "runs" / "run"


# Small files


@pytest.mark.parametrize("text", ["", "one\ntwo\n", "ünïcode 🧮\r\n", "a\x00b"])
def test_a_text_comes_back_as_it_was_written(places, text):
    for place in places:
        place.write_text(text, "deep", "er", "a.txt")
        assert place.read_text("deep", "er", "a.txt") == text


def test_writing_leaves_no_other_file_behind(folder):
    for text in ("one", "two"):
        folder.write_text(text, "a.txt")
    assert names(folder) == ["a.txt"]


def test_who_reads_a_file_while_it_is_written_again_reads_all_of_the_old_one(folder):
    folder.write_text("old " * 10_000, "a.txt")
    with open(folder.path("a.txt"), encoding="utf-8") as reader:
        begun = reader.read(4)
        folder.write_text("new", "a.txt")
        assert begun + reader.read() == "old " * 10_000
    assert folder.read_text("a.txt") == "new"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(folder):
    folder.write_text("old", "a.txt")
    with pytest.raises(UnicodeEncodeError):
        folder.write_text("half \ud83d a pair", "a.txt")
    assert folder.read_text("a.txt") == "old" and names(folder) == ["a.txt"]


def test_other_users_can_read_what_is_written(folder):
    folder.write_text("text", "a.txt")
    assert stat.S_IMODE(os.stat(folder.path("a.txt")).st_mode) == 0o644


def test_bytes_come_back_as_they_were_written(places):
    for place in places:
        place.write_bytes(bytes(range(256)), "deep", "weights")
        assert place.read_bytes("deep", "weights") == bytes(range(256))


def test_a_name_that_looks_compressed_is_not_compressed(places):
    for place in places:
        place.write_text("text", "a.gz")
        assert place.file_sizes() == {"a.gz": 4}
        assert place.read_text("a.gz") == "text"


def test_a_file_that_is_not_there_is_not_found(places):
    for place in places:
        with pytest.raises(FileNotFoundError):
            place.read_text("none.txt")


def test_json_is_written_for_people(folder):
    folder.write_json({"steps": 3, "best": None}, "summary.json")
    assert folder.read_text("summary.json") == '{\n  "steps": 3,\n  "best": null\n}\n'


def test_files_and_folders_exist_once_they_are_written(places):
    for place in places:
        assert not place.exists() and not place.exists("deep")
        place.write_text("", "deep", "a.txt")
        assert place.exists() and place.exists("deep") and place.exists("deep", "a.txt")
        assert not place.exists("a.txt")


def test_the_folders_of_a_run_are_listed_by_how_they_begin(places):
    for place in places:
        assert place.list_folders() == []
        for name in ("checkpoint-2", "checkpoint-10", "policy"):
            place.write_text("", name, "deep", "a.txt")
        place.write_text("a plain file", "checkpoint-3")
        assert place.list_folders("checkpoint-") == ["checkpoint-10", "checkpoint-2"]
        assert place.list_folders() == ["checkpoint-10", "checkpoint-2", "policy"]


def test_the_files_of_a_folder_are_measured_however_deep_they_lie(places):
    for place in places:
        assert place.file_sizes("policy") == {}
        place.write_text("12345", "policy", "config.json")
        place.write_text("", "policy", "deep", "er", "empty")
        place.write_text("beside it", "policy-2", "config.json")
        assert place.file_sizes("policy") == {"config.json": 5, "deep/er/empty": 0}


def test_what_is_deleted_is_gone_and_what_is_not_there_needs_no_deleting(places):
    for place in places:
        place.write_text("", "checkpoint-1", "deep", "a.txt")
        place.write_text("", "checkpoint-2", "a.txt")
        for _ in range(2):
            place.delete_folder("checkpoint-1")
            place.delete_file("checkpoint-2", "a.txt")
        assert not place.exists("checkpoint-1") and not place.exists("checkpoint-2", "a.txt")
        assert place.exists("checkpoint-2")


def test_a_folder_gets_another_name_at_one_stroke(folder):
    folder.write_text("text", "checkpoint-1.part", "a.txt")
    folder.rename_folder("checkpoint-1.part", "checkpoint-1")
    assert names(folder) == ["checkpoint-1"] and folder.read_text("checkpoint-1", "a.txt") == "text"


def test_a_folder_is_not_renamed_over_another_one(folder):
    for name in ("old", "new"):
        folder.write_text(name, name, "a.txt")
    with pytest.raises(OSError):
        folder.rename_folder("old", "new")
    assert folder.read_text("new", "a.txt") == "new" and folder.exists("old")


def test_an_object_store_renames_no_folder(remote):
    with pytest.raises(UnsupportedOperation, match=r"^mock://bucket/runs/run: folders"):
        remote.rename_folder("old", "new")


def test_a_folder_is_uploaded_with_all_that_is_in_it(places, tmp_path):
    local = tmp_path / "policy"
    (local / "deep").mkdir(parents=True)
    (local / "config.json").write_text("{}")
    (local / "deep" / "weights").write_bytes(b"\x00\x01")
    for place in places:
        assert place.upload(local, "policy") == place.uri_of("policy")
        assert place.read_text("policy", "config.json") == "{}"
        assert place.read_text("policy", "deep", "weights") == "\x00\x01"


def test_a_path_and_a_hub_id_need_no_fetching(tmp_path):
    assert fetch_folder(str(tmp_path)) == str(tmp_path)
    assert fetch_folder("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_a_folder_given_by_uri_is_fetched_whole(tmp_path):
    (tmp_path / "policy" / "deep").mkdir(parents=True)
    (tmp_path / "policy" / "deep" / "weights").write_bytes(b"\x00\x01")
    local = fetch_folder(f"file://{tmp_path}/policy")
    with open(os.path.join(local, "deep", "weights"), "rb") as file:
        assert file.read() == b"\x00\x01"


# Can it be written, and putting an old run aside


def test_a_folder_that_can_be_written_is_made_and_left_empty(folder, places):
    for place in places:
        place.check_writable()
        assert place.exists() and not place.exists(".writable")
    assert names(folder) == []


def test_a_storage_path_below_a_plain_file_is_refused_by_the_name_of_the_field(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "file" / "runs"
    with pytest.raises(ConfigError) as caught:
        RunFolder(str(path), "run").check_writable()
    assert str(caught.value).startswith(f"run.storage_path={path}: cannot be written: ")
    assert "\n" not in str(caught.value)


def test_a_run_folder_that_is_a_plain_file_is_refused(folder, tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"^run\.storage_path="):
        folder.check_writable()


def test_old_runs_are_put_aside_under_numbers_of_their_own(folder, tmp_path):
    for number in (1, 2, 3):
        folder.write_text(f"{number}", "a.txt")
        assert folder.set_aside() == str(tmp_path / f"run.{number}")
        assert not folder.exists()
    assert [(tmp_path / f"run.{n}" / "a.txt").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]


def test_a_number_that_a_file_has_taken_is_passed_over(folder, tmp_path):
    (tmp_path / "run.1").write_text("in the way")
    folder.write_text("text", "a.txt")
    assert folder.set_aside() == str(tmp_path / "run.2")
    assert (tmp_path / "run.1").read_text() == "in the way"


def test_a_run_in_an_object_store_cannot_be_put_aside_and_says_what_to_do(remote):
    with pytest.raises(ConfigError, match=r"choose another run\.name, or run\.resume=latest"):
        remote.set_aside()


# metrics.jsonl


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


@pytest.fixture
def begun(folder) -> RunFolder:
    """A run with three logged steps."""
    folder.check_writable()
    metrics = MetricsFile(folder)
    for step in (1, 2, 3):
        metrics.add({"step": step, "reward/mean": step / 10})
    return folder


def test_a_run_without_metrics_has_no_rows(folder):
    assert read_metrics(folder) == [] and MetricsFile(folder).rows == []


def test_each_row_is_in_the_file_as_soon_as_it_is_added(begun):
    lines = begun.read_text("metrics.jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "reward/mean": 0.3},
    ]


def test_a_fresh_object_goes_on_from_the_rows_of_the_old_one(begun):
    metrics = MetricsFile(begun)
    metrics.add({"step": 4})
    assert [row["step"] for row in metrics.rows] == steps(begun) == [1, 2, 3, 4]


def test_a_step_taken_again_replaces_itself_and_all_later_ones(begun):
    metrics = MetricsFile(begun)
    metrics.add({"step": 2, "reward/mean": 0.9})
    assert read_metrics(begun) == metrics.rows
    assert metrics.rows == [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.9}]
    metrics.add({"step": 3})
    assert steps(begun) == [1, 2, 3]


def test_a_line_that_a_crash_cut_short_is_left_out(begun):
    with open(begun.path("metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write('{"step": 4, "reward/me')
    assert steps(begun) == [1, 2, 3]


def test_rows_added_behind_a_line_cut_short_are_read_again(begun):
    with open(begun.path("metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write('{"step": 4, "reward/me')
    metrics = MetricsFile(begun)
    metrics.add({"step": 4})
    metrics.add({"step": 5})
    assert steps(begun) == [1, 2, 3, 4, 5]


def test_flushing_writes_what_was_taken_out_by_hand(begun):
    metrics = MetricsFile(begun)
    metrics.rows = [row for row in metrics.rows if row["step"] <= 1]
    metrics.flush()
    assert steps(begun) == [1]


def test_a_number_that_is_none_comes_back_as_one(begun):
    MetricsFile(begun).add({"step": 4, "policy/kl": float("nan"), "policy/entropy": 1e-12})
    last = read_metrics(begun)[-1]
    assert last["policy/kl"] != last["policy/kl"] and last["policy/entropy"] == 1e-12


def test_an_object_store_is_written_every_so_many_rows_and_when_flushed(remote):
    metrics = MetricsFile(remote)
    for step in range(1, MetricsFile.REMOTE_INTERVAL):
        metrics.add({"step": step})
    assert not remote.exists("metrics.jsonl")
    metrics.add({"step": MetricsFile.REMOTE_INTERVAL})
    assert len(steps(remote)) == MetricsFile.REMOTE_INTERVAL
    metrics.add({"step": MetricsFile.REMOTE_INTERVAL + 1})
    assert len(steps(remote)) == MetricsFile.REMOTE_INTERVAL
    metrics.flush()
    assert steps(remote) == list(range(1, MetricsFile.REMOTE_INTERVAL + 2))


def test_all_rows_at_once_can_be_replaced(begun):
    metrics = MetricsFile(begun)
    metrics.replace([{"step": 1}, {"step": 2}])
    assert read_metrics(begun) == metrics.rows == [{"step": 1}, {"step": 2}]


def test_what_was_measured_later_joins_the_row_of_its_step(begun):
    metrics = MetricsFile(begun)
    metrics.merge(2, {"heldout/accuracy": 0.5})
    metrics.merge(9, {"heldout/accuracy": 0.9})  # of a step that the run has gone back behind
    assert read_metrics(begun)[1] == {"step": 2, "reward/mean": 0.2, "heldout/accuracy": 0.5}
    assert steps(begun) == [1, 2, 3]


def test_events_are_kept_in_the_order_of_happening_over_all_launches(places):
    for place in places:
        for launch in (1, 2):
            events = EventsFile(place)
            for event in ("began", "step"):
                events.add({"event": event, "launch": launch})
            events.flush()
        lines = map(json.loads, place.read_text("events.jsonl").splitlines())
        assert [(line["event"], line["launch"]) for line in lines] == [
            ("began", 1),
            ("step", 1),
            ("began", 2),
            ("step", 2),
        ]


# What is worth another try

HEAD = "When getting information for key 'x' in bucket 'b': AWS Error {} during HeadObject operation: {}"
SAID = {
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
"""What pyarrow was seen to say of faults, and whether the same call may succeed later."""


@pytest.mark.parametrize("said", SAID)
def test_what_an_object_store_says_is_told_apart(said):
    assert is_transient(OSError(said)) is SAID[said]
    assert not is_full(OSError(said))


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
def test_errors_of_the_network_pass(error):
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
def test_errors_that_stay_are_neither_transient_nor_a_full_disk(error):
    assert not is_transient(error) and not is_full(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_full_and_can_be_reached(number):
    error = OSError(number, os.strerror(number))
    assert is_full(error) and not is_transient(error)


class Failing:
    """An action that fails some times before it succeeds."""

    def __init__(self, times: int, error: Exception):
        self.times, self.error, self.tries = times, error, 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.times:
            raise self.error
        return "done"


AWAY = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [AWAY, NO_ROOM])
def test_an_action_is_repeated_until_it_succeeds(hasty, error):
    action = Failing(5, error)
    assert patiently(action, 60) == "done" and action.tries == 6


def test_trouble_is_told_once_when_it_begins_and_once_when_it_is_over(hasty):
    for error, said in (
        (NO_ROOM, "storage cannot be written (No space left on device); trying again for 60 s"),
        (AWAY, "storage cannot be reached (Connection reset by peer); trying again for 60 s"),
    ):
        told: list[str] = []
        patiently(Failing(3, error), 60, told.append)
        assert told == [said, "storage is back after 0 s"]
    told = []
    patiently(Failing(0, AWAY), 60, told.append)
    assert told == []


def test_the_log_is_told_where_nobody_else_is(hasty, caplog):
    patiently(Failing(1, AWAY), 60)
    assert caplog.messages == [
        "storage cannot be reached (Connection reset by peer); trying again for 60 s",
        "storage is back after 0 s",
    ]


def test_the_last_error_is_raised_when_patience_is_over(hasty):
    action = Failing(10**9, NO_ROOM)
    with pytest.raises(OSError, match="No space left") as caught:
        patiently(action, 0.2)
    assert caught.value is NO_ROOM and action.tries > 2


def test_without_patience_there_is_one_try_and_no_word(hasty):
    action, told = Failing(1, AWAY), []
    with pytest.raises(ConnectionResetError):
        patiently(action, 0, told.append)
    assert action.tries == 1 and told == []


@pytest.mark.parametrize("error", [FileNotFoundError("none"), PermissionError("no"), ValueError("wrong")])
def test_what_waiting_does_not_mend_is_raised_at_once(error):
    action = Failing(1, error)
    with pytest.raises(type(error)):
        patiently(action, 60)
    assert action.tries == 1


def test_only_the_outermost_action_is_repeated(hasty):
    inner, outer = Failing(3, AWAY), Failing(0, AWAY)
    assert patiently(lambda: (outer(), patiently(inner, 60)), 60) == ("done", "done")
    assert (outer.tries, inner.tries) == (4, 4)


def test_who_asks_once_is_answered_once(hasty):
    action = Failing(1, AWAY)
    with asking_once(), pytest.raises(ConnectionResetError):
        patiently(action, 60)
    assert patiently(action, 60) == "done" and action.tries == 2


class LostAnswers:
    """A filesystem whose first answer gets lost, although it has done what it was asked."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem):
        self.filesystem, self.lost = filesystem, 0

    def delete_file(self, path: str) -> None:
        self.filesystem.delete_file(path)
        self.lost += 1
        raise AWAY


def test_a_file_that_is_gone_at_the_second_try_was_deleted_at_the_first(hasty):
    patient = Patient("mock://bucket/runs", 60)
    with patient.filesystem.open_output_stream("a.txt") as stream:
        stream.write(b"text")
    patient.filesystem = LostAnswers(patient.filesystem)
    through = pyarrow.fs.PyFileSystem(patient)
    through.delete_file("a.txt")
    assert patient.filesystem.lost == 1
    with pytest.raises(FileNotFoundError):  # at the first try it is as wrong as ever
        through.delete_file("a.txt")


# An S3 server


def test_the_query_of_a_storage_path_stays_at_the_end_of_a_uri(s3, server):
    query = f"?endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1"
    assert s3.local is None
    assert s3.path("a") == f"bucket/runs/{s3.name}/a"
    assert s3.uri == f"s3://bucket/runs/{s3.name}{query}"
    assert s3.uri_of("policy", "a b.json") == f"s3://bucket/runs/{s3.name}/policy/a%20b.json{query}"
    assert split_path(s3.uri_of("a b.json")) == (s3.uri, "a b.json")
    assert split_path(s3.uri) == (server.storage_path, s3.name)


def test_a_path_is_split_into_folder_and_name():
    assert split_path("/runs/run/") == ("/runs", "run")
    assert split_path("run") == (".", "run") and split_path("/run") == ("/", "run")
    assert split_path("gs://bucket/run") == ("gs://bucket", "run")


def test_a_folder_goes_to_s3_and_comes_back(s3, tmp_path):
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


def test_a_folder_that_is_not_in_s3_is_not_fetched(s3):
    with pytest.raises(FileNotFoundError):
        fetch_folder(s3.uri_of("none"))


def test_a_local_folder_is_fetched_where_it_lies(folder):
    assert folder.fetch("policy") == folder.path("policy")


def test_metrics_go_to_s3_and_come_back(s3):
    metrics = MetricsFile(s3)
    for step in range(1, 4):
        metrics.add({"step": step})
    metrics.flush()
    again = MetricsFile(s3)
    again.add({"step": 3, "again": True})
    assert steps(s3) == [1, 2, 3] and read_metrics(s3)[-1] == {"step": 3, "again": True}


def test_two_filesystems_of_one_storage_are_equal_wherever_they_were_made(s3, server):
    sent = pickle.loads(pickle.dumps(s3.filesystem))
    assert sent == s3.filesystem and (sent != s3.filesystem) is False  # Ray asks the second way
    assert pickle.loads(pickle.dumps(s3)).filesystem == s3.filesystem
    assert RunFolder(server.storage_path, "another").filesystem == s3.filesystem
    elsewhere = RunFolder(storage_path(1), "run").filesystem
    assert elsewhere != s3.filesystem and s3.filesystem != pyarrow.fs.LocalFileSystem()


def test_the_local_filesystem_is_the_one_that_ray_knows(folder):
    assert type(folder.filesystem) is pyarrow.fs.LocalFileSystem
    assert type(pickle.loads(pickle.dumps(folder)).filesystem) is pyarrow.fs.LocalFileSystem


def test_patience_is_sent_along(s3):
    folder = RunFolder(s3.storage_path, "run", patience=3.0)
    again = pickle.loads(pickle.dumps(folder))
    assert again.patience == 3.0 and again.filesystem.handler.patience == 3.0
    assert pickle.loads(pickle.dumps(folder.filesystem)).handler.patience == 3.0


def test_credentials_in_a_storage_path_work_and_are_never_shown(server, monkeypatch, tmp_path):
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    folder = RunFolder(storage_path(server.port, user="mykey:my%2Fsecret@"), "run-of-somebody")
    folder = pickle.loads(pickle.dumps(folder))
    folder.write_text("text", "policy", "a.txt")
    assert Path(folder.fetch("policy"), "a.txt").read_text() == "text"
    assert folder.uri == RunFolder(server.storage_path, "run-of-somebody").uri
    shown = f"{folder!r} {folder.filesystem} {folder.filesystem.handler} {folder.uri_of('a')}"
    nowhere = RunFolder(storage_path(server.port, user="mykey:mysecret@", bucket="nosuchbucket"), "run")
    with pytest.raises(ConfigError) as refused:
        nowhere.check_writable()
    for wrong in ("s3://mykey:mysecret@bucket/runs?nosuch=1", "s3://mykey:my/se?cr et@bucket/runs"):
        with pytest.raises(ConfigError, match=r"^run\.storage_path=s3://bucket/runs") as unusable:
            RunFolder(wrong, "run")
        shown += str(unusable.value)
    shown += str(refused.value)
    assert "mykey" not in shown and "secret" not in shown and "cr et" not in shown


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
def test_a_uri_without_credentials_stays_as_it_is(uri):
    assert without_credentials(uri) == uri


def test_requests_to_s3_give_up_after_seconds_of_silence(s3):
    _, (options,) = s3.filesystem.handler.filesystem.__reduce__()
    assert (options["connect_timeout"], options["request_timeout"]) == (5.0, 10.0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda place: place.read_text("none.txt"),
        lambda place: place.filesystem.open_input_stream(place.path("none.txt")),
        lambda place: place.filesystem.delete_file(place.path("none.txt")),
    ],
)
def test_a_file_that_is_not_in_s3_is_looked_for_once(s3, caplog, ask):
    s3.check_writable()
    with pytest.raises(FileNotFoundError):
        ask(s3)
    assert "trying again" not in caplog.text


@pytest.mark.parametrize(
    "ask",
    [
        lambda place: place.write_text("text", "a.txt"),
        lambda place: place.filesystem.open_output_stream(place.path("a.txt")),
        lambda place: place.filesystem.create_dir(place.path("deep")),
    ],
)
def test_a_bucket_that_is_not_there_is_refused_at_once(server, caplog, ask):
    with pytest.raises(OSError, match=r"(?i)bucket"):
        ask(RunFolder(storage_path(server.port, bucket="nosuchbucket"), "run"))
    assert "trying again" not in caplog.text


# An S3 server that is out of reach


def while_away(proxy: Proxy, caplog: pytest.LogCaptureFixture, how: str, ask: Callable[[], object]) -> object:
    """Ask while the storage is away, and bring it back once its absence was noticed."""
    proxy.cut(how)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        wait_for(lambda: "storage cannot be reached" in caplog.text or answer.done(), "the trouble")
        assert not answer.done()
        proxy.mend()
        return answer.result(timeout=60)


@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_a_call_comes_through_when_the_storage_is_back(s3, proxy, caplog, monkeypatch, how):
    monkeypatch.setattr(storage, "SILENT_SECONDS", 1.0)
    s3.write_text("text", "a.txt")
    away = RunFolder(proxy.storage_path, s3.name)
    ask = {"refuse": away.read_text, "hang": lambda name: away.filesystem.open_input_file(away.path(name)).read()}
    assert while_away(proxy, caplog, how, lambda: ask[how]("a.txt")) in ("text", b"text")
    assert caplog.messages[0].endswith("trying again for 600 s") and "storage is back after" in caplog.messages[1]


def test_an_upload_that_is_cut_off_is_whole_in_the_end(s3, proxy, tmp_path):
    away = RunFolder(proxy.storage_path, s3.name)
    (tmp_path / "policy").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "policy" / name).write_bytes(os.urandom(12 << 20))
    before = proxy.connections
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(away.upload, tmp_path / "policy", "policy")
        wait_for(lambda: proxy.connections > before, "the upload to begin")
        proxy.cut()
        threading.Timer(2.5, proxy.mend).start()
        answer.result(timeout=60)
    local = Path(s3.fetch("policy"))
    for path in (tmp_path / "policy").iterdir():
        assert (local / path.name).read_bytes() == path.read_bytes()


def test_a_storage_that_stays_away_is_an_error_that_says_so(proxy):
    away = RunFolder(proxy.storage_path, "run", patience=0.1)
    proxy.cut()
    with pytest.raises(OSError, match="Could not connect to server"):
        away.read_text("a.txt")


def test_a_storage_that_is_away_when_a_run_begins_is_refused_by_the_name_of_the_field(proxy, caplog):
    away = RunFolder(proxy.storage_path, "run")
    proxy.cut()
    with pytest.raises(ConfigError, match=r"^run\.storage_path=s3://bucket/runs\?.*: cannot be written: "):
        away.check_writable()
    assert "trying again" not in caplog.text


# A disk that is full


@pytest.fixture
def small(tmp_path) -> Iterator[RunFolder]:
    """A run folder on a disk of 256 kB."""
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder(str(disk), "run", patience=60)
        folder.check_writable()
        yield folder


def test_a_file_that_does_not_fit_leaves_the_old_one_whole(small):
    small.write_text("old" * 1000, "a.txt")
    fill(small.local.parent, leave=4096)
    with pytest.raises(OSError, match="No space left"):
        small.write_text("new" * 10_000, "a.txt")
    assert small.read_text("a.txt") == "old" * 1000 and names(small) == ["a.txt"]


def test_a_folder_that_does_not_fit_is_copied_when_room_is_made(small, tmp_path, caplog):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_bytes(bytes(100_000))
    filler = fill(small.local.parent, leave=4096)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(small.upload, tmp_path / "policy", "policy")
        wait_for(lambda: bool(caplog.messages) or answer.done(), "the disk to be full")
        assert not answer.done()
        filler.unlink()
        answer.result(timeout=60)
    assert small.file_sizes("policy") == {"weights": 100_000}
    assert "No space left on device" in caplog.messages[0] and "trying again for 60 s" in caplog.messages[0]
    assert "storage is back" in caplog.messages[1]


def test_a_full_disk_loses_no_row_of_the_metrics(small, caplog):
    metrics = MetricsFile(small)
    metrics.add({"step": 1, "note": "x" * 1000})
    filler = fill(small.local.parent)
    for step in range(2, 20):  # the first fit into the last block of the file, then one is cut off in the middle
        metrics.add({"step": step, "note": "x" * 1000})
    assert len(caplog.messages) == 1 and "the rows of metrics.jsonl are kept in memory" in caplog.text
    assert [row["step"] for row in metrics.rows] == list(range(1, 20))
    assert 1 <= len(steps(small)) < 19
    filler.unlink()
    metrics.add({"step": 20})
    assert steps(small) == list(range(1, 21))
    metrics.add({"step": 21})
    assert steps(small) == list(range(1, 22)) and len(caplog.messages) == 1


def test_the_last_flush_waits_for_room_and_fails_if_there_is_none(small, hasty):
    small.patience = 0.1
    metrics = MetricsFile(small)
    filler = fill(small.local.parent)
    metrics.add({"step": 1, "note": "x" * 10_000})
    with pytest.raises(OSError, match="No space left"):
        metrics.flush()
    filler.unlink()
    metrics.flush()
    assert steps(small) == [1]


def test_rows_that_an_object_store_could_not_take_are_in_its_next_file(s3, proxy):
    away = RunFolder(proxy.storage_path, s3.name)
    metrics = MetricsFile(away)
    proxy.cut()
    for step in range(1, MetricsFile.REMOTE_INTERVAL + 1):
        metrics.add({"step": step})
    proxy.mend()
    metrics.flush()
    assert steps(s3) == list(range(1, MetricsFile.REMOTE_INTERVAL + 1))
