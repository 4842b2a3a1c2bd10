"""Tests of Ray's token file: no other user of the machine can read it."""

import errno
import os
import stat
from pathlib import Path

import pytest

from grpo_ray.driver.cluster.token_file import protect_token_file
from grpo_ray.errors import ConfigError


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Default path of the token of a user without a token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def write(path: Path, mode: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("0" * 64)
    path.chmod(mode)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_token_of_a_new_cluster_is_its_owners_alone(token: Path) -> None:
    before = os.umask(0)
    try:
        assert protect_token_file(creates=True) is None
    finally:
        os.umask(before)
    assert mode_of(token) == 0o600 and mode_of(token.parent) == 0o700
    assert len(token.read_text()) == 64
    assert os.listdir(token.parent) == [token.name]


def test_token_that_exists_stays(token: Path) -> None:
    write(token, 0o600)
    assert protect_token_file(creates=True) is None
    assert token.read_text() == "0" * 64


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_token_others_can_read_is_mended_once_and_reported(token: Path, mode: int) -> None:
    write(token, mode)
    notice = protect_token_file(creates=False)
    assert notice is not None and str(token) in notice and f"{mode:04o}" in notice and "\n" not in notice
    assert mode_of(token) == 0o600
    assert protect_token_file(creates=False) is None


def test_token_of_the_path_variable_is_mended(token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    write(other, 0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    assert str(other) in str(protect_token_file(creates=True))
    assert mode_of(other) == 0o600 and not token.exists()


@pytest.mark.parametrize("variables", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}])
def test_token_without_use_of_the_file_is_not_created(
    token: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert protect_token_file(creates=True) is None
    assert not token.exists()


def test_token_for_a_joined_cluster_is_not_created(token: Path) -> None:
    assert protect_token_file(creates=False) is None
    assert not token.exists()


def test_token_that_is_a_fifo_does_not_block(token: Path) -> None:
    token.parent.mkdir()
    os.mkfifo(token, 0o600)
    assert protect_token_file(creates=True) is None


def test_token_on_a_read_only_mount_is_reported(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    write(token, 0o644)
    monkeypatch.setattr(os, "fchmod", refuse)
    notice = protect_token_file(creates=True)
    assert notice is not None and "(mode 0644), and its mode cannot be changed: Read-only file system; mount" in notice


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_token_is_created_without_hard_links(token: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    before = os.umask(0)
    try:
        assert protect_token_file(creates=True) is None
    finally:
        os.umask(before)
    assert mode_of(token) == 0o600 and len(token.read_text()) == 64
    assert os.listdir(token.parent) == [token.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("mode", "is_refused"), [(0o644, True), (0o440, False)])
def test_token_of_another_user_is_refused_if_everyone_can_read_it(token: Path, mode: int, is_refused: bool) -> None:
    write(token, mode)
    os.chown(token, 12345, 12345)
    if is_refused:
        with pytest.raises(ConfigError, match="belongs to user 12345 and every user has access to it") as refused:
            protect_token_file(creates=False)
        assert "0440 with the group of its readers (in Kubernetes fsGroup), or to 0400" in str(refused.value)
    else:
        assert protect_token_file(creates=False) is None
    assert mode_of(token) == mode


def test_token_that_cannot_be_stored_is_refused(token: Path) -> None:
    token.parent.write_text("a file in the folder's place")
    with pytest.raises(ConfigError, match=r"Ray's token cannot be stored in .*; set HOME"):
        protect_token_file(creates=True)
