"""Check of the folder in which vLLM keeps compiled models: no other user may write to it.

An engine executes the code in this folder, as this user and on this user's GPUs.
"""

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from grpo_ray.config.schema import Config

DEFAULT = "~/.cache/vllm"
UID_MAP = Path("/proc/self/uid_map")
"""A line for each range of ids in this user namespace: first id, first id in the outer namespace, number of ids."""
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
"""File with the id that is shown as the owner of the files of unmapped users."""


def cache_folder(config: Config) -> Path:
    """Return the folder that the engines of this node use."""
    default = os.environ.get("VLLM_CACHE_ROOT")
    if default is None:
        home = os.environ.get("XDG_CACHE_HOME")
        default = os.path.join(home, "vllm") if home else DEFAULT
    return Path(config.engine.compile_cache or default).expanduser()


def compile_cache_issue(config: Config) -> str | None:
    """Return the reason why this node's compile cache cannot be used, in one line; None if it can."""
    folder = cache_folder(config)
    name = "engine.compile_cache" if config.engine.compile_cache else "vLLM's compile cache"
    if not folder.exists():
        if config.engine.compile_cache is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                return f"{name}: {folder} cannot be created: {error.strerror}; name a folder that this user can write"
        return _parents_issue(name, folder)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{name}: {folder} is not a folder; name another one with engine.compile_cache"
    if found.st_uid != os.geteuid():
        return (
            f"{name}: {folder} belongs to user {found.st_uid}, who could run code on this node's GPUs through it; name "
            "a folder of your own with engine.compile_cache"
        )
    if _others_write(found):
        return (
            f"{name}: other users can write to {folder}, and could run code on this node's GPUs through it; delete it, "
            "or name a folder with engine.compile_cache that has mode 0700"
        )
    return _parents_issue(name, folder)


def _parents_issue(name: str, folder: Path) -> str | None:
    """Return an issue if other users can replace the folder by another one."""
    trusted = {0, os.geteuid(), *_unmapped_root()}
    # Parents of the path as given and of the resolved path: a link and its target can both be replaced.
    for parent in dict.fromkeys((*folder.absolute().parents, *folder.resolve().parents)):
        if not parent.exists():
            continue
        found = parent.stat()
        is_trusted = found.st_uid in trusted
        if not is_trusted or (_others_write(found) and not found.st_mode & stat.S_ISVTX):
            return (
                f"{name}: other users can replace {folder}, because they can write to {parent}; name another folder "
                "with engine.compile_cache"
            )
    return None


def _unmapped_root() -> set[int]:
    """Return the id shown as owner of root's folders in a container that does not map root (Apptainer); else none.

    It is shown for the folders of all other unmapped users too, which cannot be distinguished from root's.
    """
    try:
        lines = [line.split() for line in UID_MAP.read_text().splitlines()]
        if not lines or any(int(first) == 0 for first, _, _ in lines):
            return set()
        return {int(OVERFLOW_UID.read_text())}
    except (OSError, ValueError):
        return set()


def _others_write(found: os.stat_result) -> bool:
    """Return True if a user other than the owner can write to a folder."""
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and _has_others(found.st_gid)))


def _has_others(group: int) -> bool:
    """Return True unless a group is this user's own: the primary group of this user alone, without other members."""
    try:
        entry = grp.getgrgid(group)
        name, members = entry.gr_name, set(entry.gr_mem)
    except KeyError:  # a container may have no entry for it
        name, members = "", set()
    user = ""
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
    if group != os.getegid() or members - {user}:
        return True
    # A group's entry does not list the users that have it as their primary group. A directory service may list no
    # users at all, but a group with a user's name is by convention that user's own.
    return name != user and any(each.pw_gid == group and each.pw_name != user for each in pwd.getpwall())
