"""Tests of pushing to a server with the hub's HTTP interface, through huggingface_hub itself."""

import array
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from fake_hub import XET_TOKEN, FakeHub, Fault, Repo, closed_port, fake_hub, wait_until
from page_samples import CONFIG, write_run

from grpo_ray.cli import main
from grpo_ray.errors import ConfigError, HubError
from grpo_ray.export.hub import Hub, token_from_environment

TOKEN = "good-token-of-alice"
PAUSE = 0.01


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A server that gets large files through git LFS, as from a client without `hf_xet`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # what HF_HUB_DISABLE_XET=1 sets
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def xet_server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A server that gets large files through Xet."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path_factory.getbasetemp() / "xet"))  # one session per process keeps it
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like an exported one: a card, small files, two large ones, and a hidden one."""
    folder = tmp_path / "exported"
    (folder / "more").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# card\n")
    (folder / "config.json").write_text("{}")
    (folder / "more" / "text.txt").write_text("text")
    (folder / "model-00001-of-00002.safetensors").write_bytes(os.urandom(3_000_000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(os.urandom(5000))
    (folder / ".DS_Store").write_bytes(b"hidden")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def push(
    server: FakeHub, folder: Path, name: str = "alice/model", *, public: bool = False, token: str = TOKEN
) -> list[str]:
    """Push a folder; return the lines for the user."""
    lines: list[str] = []
    hub = Hub(token, lines.append, server.endpoint, PAUSE)
    address = hub.upload(folder, hub.open_repo(name, public), "checkpoint-000002 of the run r")
    assert address == f"{server.endpoint}/{name if '/' in name else f'alice/{name}'}"
    return lines


def test_push_everything_arrives_in_one_commit_of_a_private_repo(server: FakeHub, folder: Path) -> None:
    lines = push(server, folder)
    repo = server.repos["alice/model"]
    assert repo.files == contents(folder) and repo.private
    assert repo.commits == ["checkpoint-000002 of the run r"]
    assert lines == [
        "created the private repository alice/model",
        "uploading 5 files, 3.0 MB, to the private alice/model",
    ]
    assert server.seen_tokens == set()


def test_push_through_xet_everything_arrives_once(xet_server: FakeHub, folder: Path) -> None:
    text = b"text that can be compressed, again and again\n" * 5000
    (folder / "tokenizer.json").write_bytes(text)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        array.array("f", (i**0.5 for i in range(50_001))).tobytes()
    )
    push(xet_server, folder)
    assert xet_server.repos["alice/model"].files == contents(folder)
    assert xet_server.count("PUT /lfs/") == 0 and xet_server.seen_tokens == {f"Bearer {XET_TOKEN}"}
    packs = len(xet_server.xorbs)
    push(xet_server, folder)
    assert len(xet_server.xorbs) == packs and len(xet_server.repos["alice/model"].commits) == 1


def test_push_through_xet_transient_error_is_tried_again(xet_server: FakeHub, folder: Path) -> None:
    xet_server.faults += [Fault("GET .*/xet-write-token/"), Fault("POST /v1/xorbs/", None)]
    push(xet_server, folder)
    assert xet_server.repos["alice/model"].files == contents(folder)
    assert [fault.times for fault in xet_server.faults] == [0, 0]


@pytest.mark.parametrize("request_pattern", ["GET .*/xet-write-token/", "POST /v1/xorbs/"])
def test_push_refused_by_xet_is_one_line(xet_server: FakeHub, folder: Path, request_pattern: str) -> None:
    xet_server.faults.append(Fault(request_pattern, 403, times=99))
    with pytest.raises((ConfigError, HubError)) as error:
        push(xet_server, folder)
    assert "alice/model" in str(error.value) and "\n" not in str(error.value)
    assert xet_server.repos["alice/model"].files == {}


def test_push_public_creates_a_public_repo(server: FakeHub, folder: Path) -> None:
    assert push(server, folder, "model", public=True)[0] == "created the public repository alice/model"
    assert not server.repos["alice/model"].private


def test_push_again_sends_changed_files_only(server: FakeHub, folder: Path) -> None:
    push(server, folder)
    (folder / "config.json").write_text('{"changed": 1}')
    (folder / "model-00002-of-00002.safetensors").write_bytes(os.urandom(6000))
    assert "exists and stays private; the upload is a new commit" in push(server, folder)[0]
    repo = server.repos["alice/model"]
    assert repo.files == contents(folder) and len(repo.commits) == 2 and server.count("PUT /lfs/") == 3
    push(server, folder)
    assert len(repo.commits) == 2  # nothing has changed


def test_push_replaces_weights_of_an_earlier_upload(server: FakeHub, folder: Path) -> None:
    old = {"model.safetensors": b"old", "pytorch_model.bin": b"old"}
    others = {"LICENSE": b"kept", "sub/x.safetensors": b"kept", "training_args.bin": b"kept"}
    server.repos["alice/model"] = Repo(private=True, files=old | others)
    assert "replacing model.safetensors, pytorch_model.bin" in push(server, folder)
    assert server.repos["alice/model"].files == contents(folder) | others


def test_push_public_repo_without_flag_is_refused(server: FakeHub, folder: Path) -> None:
    server.repos["alice/model"] = Repo(private=False)
    with pytest.raises(ConfigError, match="alice/model exists and is public; add --public"):
        push(server, folder)
    assert not server.repos["alice/model"].commits
    assert "stays public" in push(server, folder, public=True)[0]


def test_push_private_repo_stays_private(server: FakeHub, folder: Path) -> None:
    server.repos["alice/model"] = Repo(private=True)
    assert "stays private" in push(server, folder, public=True)[0]
    assert server.repos["alice/model"].private


def test_push_refused_token_is_one_line_without_it(server: FakeHub, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        push(server, folder, token="bad-token-of-mallory")
    assert str(error.value) == "the hub refused the token in HF_TOKEN (401); set a valid one with write access"
    assert server.count(".") == 1


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_push_repo_of_another_owner_is_one_line(server: FakeHub, folder: Path, exists: bool) -> None:
    if exists:
        server.repos["bob/model"] = Repo(private=False)
    with pytest.raises(ConfigError) as error:
        push(server, folder, "bob/model", public=True)
    assert "may not write to bob/model (403): " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a/b/c", "../model", "https://host/a/b", "", "a b"])
def test_push_malformed_name_is_refused_before_any_request(server: FakeHub, name: str) -> None:
    with pytest.raises(ConfigError):
        Hub(TOKEN, print, server.endpoint, PAUSE).open_repo(name, public=False)
    assert server.requests == []


@pytest.mark.parametrize(
    "request_pattern",
    ["GET /api/whoami-v2", "GET /api/models/", "POST /api/repos/create", "PUT /lfs/", ".*commit/main"],
)
@pytest.mark.parametrize("status", [503, None], ids=["503", "connection lost"])
def test_push_transient_error_is_tried_again(
    server: FakeHub, folder: Path, request_pattern: str, status: int | None
) -> None:
    server.faults.append(Fault(request_pattern, status))
    push(server, folder)
    assert server.repos["alice/model"].files == contents(folder) and server.faults[0].times == 0


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (503, "the push to alice/model failed: status 503; run the same command again: "),
        (413, "the push to alice/model failed: planted fault"),
    ],
)
def test_push_lasting_error_is_one_line(server: FakeHub, status: int, line: str) -> None:
    server.faults.append(Fault("GET /api/models/", status, times=99))
    with pytest.raises(HubError) as error:
        Hub(TOKEN, print, server.endpoint, PAUSE).open_repo("alice/model", public=False)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    assert server.count("GET /api/models/") == (4 if status == 503 else 1)


def test_push_without_a_server_is_one_line() -> None:
    with pytest.raises(HubError, match=r"^the push to alice/model failed: .*; run the same command again: ") as error:
        Hub(TOKEN, print, closed_port(), PAUSE).open_repo("alice/model", public=False)
    assert "\n" not in str(error.value)


def test_push_malformed_card_is_refused_before_files_are_sent(server: FakeHub, folder: Path) -> None:
    (folder / "README.md").write_text("# a card without metadata\n")
    with pytest.raises(HubError, match=r"the push to alice/model failed: .*no metadata"):
        push(server, folder)
    assert server.large == {}


@pytest.mark.parametrize("value", [None, "", "  "])
def test_push_without_token_is_one_line(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_TOKEN", value)
    with pytest.raises(
        ConfigError, match=r"--push needs a token .* in the environment variable HF_TOKEN; it is not set"
    ):
        token_from_environment()


def test_push_option_public_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "folder", "--public"]) == 2
    assert capsys.readouterr().err.startswith("grpo-ray: --public has an effect with --push REPO only")


def checkpoint_of(tmp_path: Path, policy: Path) -> Path:
    """Return the checkpoint of a run folder with the policy in it."""
    write_run(tmp_path, "run", config=CONFIG | {"versions": {"commit": "abc"}})
    checkpoint = tmp_path / "run" / "checkpoint-000040"
    for path in policy.iterdir():
        shutil.copy(path, checkpoint)
    list_files(checkpoint)
    return checkpoint


def list_files(checkpoint: Path) -> None:
    """List all files of a checkpoint in its manifest, also those behind links."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in checkpoint.iterdir()
        if path.name != "manifest.json"
    }
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": files}))


LINKED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", "config.json", "README.md")


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("is_listed", [True, False])
def test_push_of_a_checkpoint_with_a_link_sends_nothing(
    server: FakeHub,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    is_listed: bool,
) -> None:
    # What HF_ENDPOINT sets when the client is imported; a process for each of these refusals would take its imports.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    checkpoint, private = checkpoint_of(tmp_path, policy), tmp_path / "private.txt"
    private.write_text("private")
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(private)
    if is_listed:
        list_files(checkpoint)
    assert main(["export", str(checkpoint), str(tmp_path / "plain"), "--push", "alice/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} is a link that leads out of the run" in line
    assert server.repos == {} and not (tmp_path / "plain").exists()


def test_push_of_a_checkpoint_without_links_arrives(policy: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, policy)
    with fake_hub() as server:
        words = ["export", str(checkpoint), str(tmp_path / "plain"), "--push", "alice/model"]
        environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "grpo_ray.cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.repos["alice/model"].files == contents(tmp_path / "plain")


@pytest.mark.slow
def test_push_killed_in_the_middle_can_be_repeated(policy: Path, tmp_path: Path) -> None:
    run = checkpoint_of(tmp_path, policy).parent
    plain = tmp_path / "plain"
    with fake_hub() as server:
        command = [sys.executable, "-m", "grpo_ray.cli", "export", str(run), str(plain), "--push", "alice/model"]
        environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        arrived, killed = threading.Event(), threading.Event()

        def hang_at_second_large_file(request: str) -> None:
            if request.startswith("PUT /lfs/") and server.large and not killed.is_set():
                arrived.set()
                killed.wait()
                raise ConnectionAbortedError("the client of this request was killed")

        server.pause_before = hang_at_second_large_file
        first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: arrived.is_set() or first.poll() is not None, seconds=600)
        first.kill()
        output, _ = first.communicate()
        killed.set()
        assert arrived.is_set(), output
        assert server.repos["alice/model"].files == {} and len(server.large) >= 1
        before = set(server.large)

        sent = server.count("PUT /lfs/")
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert second.returncode == 0, second.stdout + second.stderr
        repo = server.repos["alice/model"]
        assert repo.files == contents(plain) and repo.private and len(repo.commits) == 1
        assert server.count("PUT /lfs/") - sent == len(server.large) - len(before)  # what had arrived is not sent again
        for text in (output, second.stdout, second.stderr, *map(str, repo.files.values())):
            assert TOKEN not in text
        assert f"{plain} has the export of" in second.stdout
        assert "pushed to" in second.stdout and "(private)" in second.stdout
        card = yaml.safe_load(repo.files["README.md"].decode().split("---")[1])
        assert card["library_name"] == "transformers"
