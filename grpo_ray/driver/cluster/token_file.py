"""Protection of Ray's token file, `~/.ray/auth_token`, from other users of the machine.

Anyone who has the token can run code on the cluster. Ray creates the file with default permissions, with which every
user can read it on most systems, and never checks them again.
"""

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from grpo_ray.errors import ConfigError

FILE_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Environment variable with the path of a token file in place of the default one."""


def protect_token_file(creates: bool) -> str | None:
    """Remove other users' access to the token file.

    Args:
        creates: create a token if there is none, as Ray does for a cluster that it starts.

    Returns:
        A notice, if other users had access, or still have it because the file system is read-only.

    Raises:
        ConfigError: other users have access to a file that is not this user's, or a token cannot be stored.
    """
    environment = os.environ
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token" or environment.get("RAY_AUTH_TOKEN"):
        return None  # no file is read
    path = Path(environment.get(FILE_VARIABLE) or Path.home() / ".ray" / "auth_token")
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if creates and FILE_VARIABLE not in environment:
            _create(path)
        return None
    except OSError:  # Ray reports that it cannot read the file
        return None
    try:
        found = os.fstat(file)
        access = stat.S_IMODE(found.st_mode)
        if found.st_uid == os.geteuid() and access & 0o077:
            try:
                os.fchmod(file, 0o600)
            except OSError as error:  # mostly because the secret is mounted
                return (
                    f"Ray's token file {path} can be read by other users (mode {access:04o}), and its mode cannot be "
                    f"changed: {error.strerror}; mount it with mode 0400, or set {FILE_VARIABLE} to a file of your own"
                )
            return (
                f"Ray's token file {path} could be read by other users (mode {access:04o}); its mode is 0600 now; if "
                "others use this machine, delete it and run `ray get-auth-token --generate` for another token"
            )
    finally:
        os.close(file)
    if access & 0o007:  # group access is allowed: Kubernetes mounts a secret with the group of the container's user
        raise ConfigError(
            f"Ray's token file {path} belongs to user {found.st_uid} and every user has access to it (mode "
            f"{access:04o}); set its mode to 0440 with the group of its readers (in Kubernetes fsGroup), or to 0400 as "
            f"the file of its reader, or set {FILE_VARIABLE} to a file of your own"
        )
    return None


def _create(path: Path) -> None:
    """Write a new token. If another process writes one at the same time, the first one is kept."""
    data = secrets.token_hex(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with open(file, "w", encoding="ascii") as token:
                token.write(data)
            _publish(temporary, path, data)
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise ConfigError(
            f"Ray's token cannot be stored in {path}: {error.strerror}; set HOME to a folder in which you can write, "
            "or RAY_AUTH_TOKEN to a secret of at least 32 characters"
        ) from None


def _publish(temporary: str, path: Path, data: str) -> None:
    """Link a complete file to `path`, unless that exists. Raises OSError."""
    with suppress(FileExistsError):
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links; for a moment, other processes may see an empty file
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "w", encoding="ascii") as token:
                token.write(data)
