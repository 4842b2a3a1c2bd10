import json
import os
import pickle
import stat

import pytest

from grpo_ray.errors import ConfigError
from grpo_ray.storage import MetricsFile, RunFolder, fetch_folder, read_metrics


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


@pytest.fixture
def remote() -> RunFolder:
    """A run folder in an object store; pyarrow's `mock` keeps it in memory."""
    return RunFolder("mock://bucket/runs", "run")


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
def test_a_text_comes_back_as_it_was_written(folder, remote, text):
    for place in (folder, remote):
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


def test_a_file_that_is_not_there_is_not_found(folder, remote):
    for place in (folder, remote):
        with pytest.raises(FileNotFoundError):
            place.read_text("none.txt")


def test_json_is_written_for_people(folder):
    folder.write_json({"steps": 3, "best": None}, "summary.json")
    assert folder.read_text("summary.json") == '{\n  "steps": 3,\n  "best": null\n}\n'


def test_files_and_folders_exist_once_they_are_written(folder, remote):
    for place in (folder, remote):
        assert not place.exists() and not place.exists("deep")
        place.write_text("", "deep", "a.txt")
        assert place.exists() and place.exists("deep") and place.exists("deep", "a.txt")
        assert not place.exists("a.txt")


def test_a_folder_is_uploaded_with_all_that_is_in_it(folder, remote, tmp_path):
    local = tmp_path / "policy"
    (local / "deep").mkdir(parents=True)
    (local / "config.json").write_text("{}")
    (local / "deep" / "weights").write_bytes(b"\x00\x01")
    for place in (folder, remote):
        assert place.upload(local, "policy") == f"{place.uri}/policy"
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


def test_a_folder_that_can_be_written_is_made_and_left_empty(folder, remote):
    for place in (folder, remote):
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
