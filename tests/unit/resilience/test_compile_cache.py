"""Tests of the compile cache's owner and mode: an engine runs the code in it."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.resilience import compile_cache
from grpo_ray.resilience.compile_cache import cache_folder, compile_cache_issue
from grpo_ray.resilience.nodes import engine_issue_here

FOREIGN = 12345


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "cache"


def config_for(folder: Path) -> Config:
    return load_config(None, [f"engine.compile_cache={folder}"])


def test_compile_cache_that_is_missing_is_created_for_its_owner(folder: Path) -> None:
    assert compile_cache_issue(config_for(folder)) is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500, 0o775])  # 775: of a group that has no other member
def test_compile_cache_of_the_user_is_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    assert compile_cache_issue(config_for(folder)) is None


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_compile_cache_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    issue = compile_cache_issue(config_for(folder))
    assert issue is not None and issue.startswith(f"engine.compile_cache: other users can write to {folder}")
    assert "\n" not in issue


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(("owner", "group"), [(FOREIGN, -1), (-1, FOREIGN)], ids=["owner", "group"])
def test_compile_cache_of_others_is_refused(folder: Path, owner: int, group: int) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    os.chown(folder, owner, group)
    issue = compile_cache_issue(config_for(folder))
    assert issue is not None and "could run code on this node's GPUs through it" in issue


@pytest.mark.parametrize(("group", "is_refused"), [("users", True), ("ann", False)])
def test_compile_cache_of_a_main_group_of_several_users_is_refused(
    folder: Path, group: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    gid = folder.stat().st_gid
    ann, bob = (SimpleNamespace(pw_name=name, pw_gid=gid) for name in ("ann", "bob"))
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=group, gr_mem=[]))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: ann)
    monkeypatch.setattr(pwd, "getpwall", lambda: [ann, bob])
    assert ("other users can write" in str(compile_cache_issue(config_for(folder)))) == is_refused
    monkeypatch.setattr(pwd, "getpwall", lambda: [ann])
    assert compile_cache_issue(config_for(folder)) is None


def test_compile_cache_whose_link_others_can_replace_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    shared = folder.parent / "shared"
    shared.mkdir()
    (shared / "cache").symlink_to(folder)
    assert compile_cache_issue(config_for(shared / "cache")) is None
    shared.chmod(0o777)
    assert f"because they can write to {shared}" in str(compile_cache_issue(config_for(shared / "cache")))


def test_compile_cache_in_a_folder_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)
    issue = compile_cache_issue(config_for(folder))
    assert issue is not None and f"other users can replace {folder}" in issue
    folder.parent.chmod(0o1777)  # like /tmp: entries belong to those who made them
    assert compile_cache_issue(config_for(folder)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_compile_cache_in_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder.parent, FOREIGN, -1)
    assert f"other users can replace {folder}" in str(compile_cache_issue(config_for(folder)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(
    ("uid_map", "is_refused"),
    [("1000 1000 1\n", False), ("0 1000 1\n1 100000 65536\n", True), ("0 0 4294967295\n", True)],
    ids=["Apptainer", "rootless", "host"],
)
def test_compile_cache_below_an_unmapped_root_is_used(
    folder: Path, uid_map: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder.parent, FOREIGN, -1)
    files = folder.parent / "uid_map", folder.parent / "overflowuid"
    for file, text in zip(files, (uid_map, f"{FOREIGN}\n"), strict=True):
        file.write_text(text)
    monkeypatch.setattr(compile_cache, "UID_MAP", files[0])
    monkeypatch.setattr(compile_cache, "OVERFLOW_UID", files[1])
    assert ("other users can replace" in str(compile_cache_issue(config_for(folder)))) == is_refused
    folder.parent.chmod(0o777)
    assert "other users can replace" in str(compile_cache_issue(config_for(folder)))


def test_compile_cache_that_is_a_file_is_refused(folder: Path) -> None:
    folder.write_text("")
    assert "is not a folder" in str(compile_cache_issue(config_for(folder)))


def test_compile_cache_by_default_is_vllms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert cache_folder(load_config()) == folder.parent / ".cache" / "vllm"
    assert compile_cache_issue(load_config()) is None and not (folder.parent / ".cache").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(load_config()) == Path("/xdg/vllm")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
    folder.mkdir()
    folder.chmod(0o777)
    assert str(compile_cache_issue(load_config())).startswith("vLLM's compile cache: other users can write")


def test_engine_issue_names_the_compile_cache(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert "other users can write" in str(engine_issue_here(False, config_for(folder)))
