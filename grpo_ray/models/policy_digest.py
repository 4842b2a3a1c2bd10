"""Hashes of a policy's files, which show whether a run still has the policy it began with, even at another path."""

import fnmatch
import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from grpo_ray.errors import ConfigError
from grpo_ray.storage.filesystem import RetryingFilesystem
from grpo_ray.storage.retry import DEFAULT_RETRY_SECONDS, retry_transient
from grpo_ray.storage.uris import redact_credentials
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    import pyarrow.fs

PARTS: Mapping[str, tuple[str, ...]] = {
    "config": ("config.json", "*.py"),
    "tokenizer": (
        "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
        "*.jinja",
    ),
    "weights": ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"),
}  # fmt: skip
"""Part of a policy -> patterns of its files. Others, such as a README, do not matter."""
COMMIT = "commit"
"""Key of the revision of a policy on the hub."""
BLOCKS, BLOCK_BYTES = 64, 1 << 14
"""Number and size of the blocks that are read of a larger file: 1 MiB in all, spread evenly. They suffice, since
training changes all of a policy."""
READERS = 16
"""Number of blocks that are read from a store concurrently."""


def policy_contents(path: str, retry_seconds: float = DEFAULT_RETRY_SECONDS) -> dict[str, str]:
    """Return hashes of a policy's files, or its revision on the hub, or both.

    The hashes cover the name, the size and at most 1 MiB of each file of a local folder or a store, so that a policy of
    any size takes seconds. For a policy on the hub, the revision is the one of the config in this machine's cache. For
    the folder of a revision in that cache, both are returned.

    Args:
        path: `model.path`, not the name of an embedded policy.
        retry_seconds: how long a call to a store is retried, in seconds.

    Returns:
        Part in `PARTS` -> hash, 16 hex digits; `COMMIT` -> revision. Empty if there is nothing to read: no weights in
        the folder, or a revision that is not known.

    Raises:
        ConfigError: a file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.fs

    is_uri = "://" in path
    if not is_uri and not os.path.isdir(path):
        return _revision(path)
    try:
        if is_uri:
            store = RetryingFilesystem(path, retry_seconds)
            return _digests(store.filesystem, store.path, retry_seconds)
        folder = os.path.abspath(path)
        found = re.search(r"/snapshots/([0-9a-f]{40})$", folder)
        return _digests(pyarrow.fs.LocalFileSystem(), folder, 0) | ({COMMIT: found[1]} if found else {})
    except (OSError, pa.ArrowInvalid) as error:
        message = f"model.path={path}: cannot be read: {' '.join(str(error).split())}; correct it, or grant access"
        raise ConfigError(redact(redact_credentials(message))) from None


def _digests(filesystem: "pyarrow.fs.FileSystem", folder: str, retry_seconds: float) -> dict[str, str]:
    import pyarrow.fs

    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    infos = retry_transient(lambda: filesystem.get_file_info(selector), retry_seconds)
    digests = {part: hashlib.sha256() for part in PARTS}
    has_weights = False
    for info in sorted((each for each in infos if each.is_file), key=lambda each: each.base_name):
        if (part := part_of(info.base_name)) is None:
            continue
        has_weights |= part == "weights"
        digests[part].update(f"{info.base_name} {info.size}\n".encode())
        for block in retry_transient(partial(_read_blocks, filesystem, info.path), retry_seconds):
            digests[part].update(block)
    return {part: digest.hexdigest()[:16] for part, digest in digests.items()} if has_weights else {}


def _read_blocks(filesystem: "pyarrow.fs.FileSystem", path: str) -> list[bytes]:
    """Return a whole file as one block, or evenly spread blocks of a larger one."""
    with filesystem.open_input_file(path) as file:
        size = file.size()
        if size <= BLOCKS * BLOCK_BYTES:
            return [file.read_at(size, 0)]
        offsets = [number * (size - BLOCK_BYTES) // (BLOCKS - 1) for number in range(BLOCKS)]
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(lambda offset: file.read_at(BLOCK_BYTES, offset), offsets))


def part_of(file: str) -> str | None:
    """Return the part of a policy that a file belongs to; None if it does not matter."""
    return next((part for part, patterns in PARTS.items() if any(fnmatch.fnmatch(file, p) for p in patterns)), None)


def _revision(path: str) -> dict[str, str]:
    """Return the revision of a policy on the hub by its config in this machine's cache; empty if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # neither a folder nor a hub id
        return {}
    return {COMMIT: os.path.basename(os.path.dirname(found))} if isinstance(found, str) else {}


def changed_parts(begun: Mapping[str, str], current: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the parts in which two policies differ; None if their known contents cannot be compared.

    Args:
        begun, current: from `policy_contents`.
    """
    if COMMIT in begun and begun[COMMIT] == current.get(COMMIT):
        return ()
    if all(part in contents for part in PARTS for contents in (begun, current)):
        return tuple(part for part in PARTS if begun[part] != current[part])
    return None


def changed_on_hub(name: str, begun: str, current: str) -> tuple[str, ...] | None:
    """Return the parts in which two revisions of a policy on the hub differ; None if the hub does not list them.

    A new revision often changes only the README.
    """
    import httpx
    from huggingface_hub import HfApi

    api = HfApi(library_name="grpo_ray")
    files = []
    try:
        for commit in (begun, current):
            siblings = api.model_info(name, revision=commit, files_metadata=True).siblings or ()
            files.append({(part_of(each.rfilename), each.rfilename, each.blob_id) for each in siblings})
    except (OSError, httpx.HTTPError):
        return None
    changed = {part for part, _, _ in files[0] ^ files[1]}
    return tuple(part for part in PARTS if part in changed)


def describe_contents(contents: Mapping[str, str]) -> str:
    """Return contents as one line; equal contents give the same line."""
    return " ".join(f"{part} {value}" for part, value in sorted(contents.items()))
