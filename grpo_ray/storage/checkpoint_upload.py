"""Upload of checkpoints: every worker copies its files, then rank 0 commits the checkpoint.

1. Each worker copies its files into a staging folder, reads them back, and writes a file list (`files-<rank>.json`
   with size and checksum of each file).
2. Rank 0 waits for all file lists, writes the manifest, and renames the staging folder to the checkpoint's name.

An object store cannot rename: there the files are written under the final name. In both cases the manifest, written
last, makes the checkpoint complete, and nothing here deletes a folder that has one.

A call to the storage may succeed although its reply is lost; it is then repeated. Every step is therefore safe to
repeat, even after rank 0 has committed the checkpoint.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train

from grpo_ray.errors import CheckpointError
from grpo_ray.storage.checkpoint_integrity import BLOCK_BYTES, file_checksum
from grpo_ray.storage.checkpoints import (
    DAMAGED,
    MANIFEST,
    NAME_PATTERN,
    PREFIX,
    STAGING_SUFFIX,
    list_checkpoints,
    manifest_serial,
)
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.retry import retry_transient
from grpo_ray.storage.run_folder import RunFolder

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class CheckpointUploader:
    """One worker's part of a checkpoint upload: the `checkpoint_upload_fn` of `ray.train.report`.

    Ray Train calls it in a background thread of each worker.
    """

    folder: RunFolder
    rank: int
    world_size: int
    metrics: Mapping[str, Any]
    serial: int
    """Number in the order of writing; see `CheckpointInfo`."""
    retry_seconds: float
    """Time for which copies are retried while the storage is unreachable or full, in seconds."""
    on_progress: Callable[[str], None]
    """Receives a message when retrying starts and when storage works again."""
    before_commit: Callable[[], None] = lambda: None
    """Called by rank 0 when the files of all workers are written and verified."""
    fence: FencingToken | None = None
    """Stops an attempt that another attempt has replaced; None: no check."""
    measured_on: Mapping[str, Any] | None = None
    """Key of each held-out set measured in `metrics` -> conditions of its measurement."""

    def __call__(self, checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        """Upload this worker's files and, on rank 0, commit the checkpoint.

        Args:
            checkpoint: local folder with this worker's files.
            name: folder name of the checkpoint, the same on all workers.

        Raises:
            CheckpointError: the storage could not be written within `retry_seconds`.
            SupersededError: another attempt has replaced this one.
        """
        local = Path(checkpoint.path)
        try:
            self._retry(lambda: self._upload(local, name))
            if self.rank == 0:
                self._retry(lambda: self._commit(name))
        except CheckpointError:
            raise
        except OSError as error:
            message = " ".join(str(error).split())
            raise CheckpointError(
                f"{name} could not be written to {self.folder.uri}: {message}; earlier checkpoints are complete, and "
                "once the storage works again the same command goes on from there"
            ) from error
        return ray.train.Checkpoint(self.folder.path(name), filesystem=self.folder.filesystem)

    def staging_name(self, name: str) -> str:
        """Return the name of the folder until the checkpoint is committed, different in each attempt."""
        if self.folder.local is None:
            return name
        return f"{name}.{self.fence.token}{STAGING_SUFFIX}" if self.fence else name + STAGING_SUFFIX

    def _check_fence(self) -> None:
        if self.fence:
            self.fence.check()

    def _retry(self, action: Callable[[], None]) -> None:
        retry_transient(action, self.retry_seconds, self.on_progress)

    def _upload(self, local: Path, name: str) -> None:
        """Copy this worker's files, read them back, and write the file list."""
        if self._is_committed(name):
            return  # an earlier try of this call wrote the file list, and its reply was lost
        staging = self.staging_name(name)
        files = {}
        for path in sorted(path for path in local.rglob("*") if path.is_file()):
            self._check_fence()
            file = path.relative_to(local).as_posix()
            files[file] = {"bytes": path.stat().st_size, "sha256": self._copy_file(path, staging, *file.split("/"))}
        self._check_fence()  # on an object store another attempt may write to the same folder by now
        self.folder.write_json(files, staging, _file_list_name(self.rank))

    def _copy_file(self, path: Path, *names: str) -> str:
        """Copy one file and return its checksum. Raises OSError if the storage returns other bytes afterwards."""
        target, digest = self.folder.path(*names), hashlib.sha256()
        self.folder.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        with open(path, "rb") as source, self.folder.filesystem.open_output_stream(target) as stream:
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
                stream.write(block)
        if file_checksum(self.folder, *names) != digest.hexdigest():
            raise OSError(f"{target}: the storage returned other bytes than were written")
        return digest.hexdigest()

    def _commit(self, name: str) -> None:
        """Wait for the file lists of all workers, write the manifest, and give the folder its final name."""
        if self._is_committed(name):
            return  # by an earlier try of this call, whose reply was lost
        staging = self.staging_name(name)
        files: dict[str, Any] = {}
        for rank in range(self.world_size):
            # Without a timeout: if a worker dies, Ray Train ends this one too.
            while not self.folder.exists(staging, _file_list_name(rank)):
                time.sleep(POLL_SECONDS)
                self._check_fence()
            listed = json.loads(self.folder.read_text(staging, _file_list_name(rank)))
            if twice := sorted(files.keys() & listed.keys()):
                raise CheckpointError(
                    f"{name}: worker {rank} and one before it both wrote {', '.join(twice)}, and only one of them is "
                    "kept; a file that each worker writes needs the rank in its name"
                )
            files |= listed
        self._check_fence()
        self.before_commit()
        self._check_fence()
        manifest = {
            "metrics": dict(self.metrics),
            "measured_on": self.measured_on,
            "serial": self.serial,
            "workers": self.world_size,
            "files": files,
        }
        self.folder.write_json(manifest, staging, MANIFEST)
        if self.folder.local is not None:
            self.folder.rename_folder(staging, name)

    def _is_committed(self, name: str) -> bool:
        """Return True if rank 0 has committed the checkpoint; no other checkpoint ever gets its name."""
        self._check_fence()
        return self.folder.exists(name, MANIFEST)


def _file_list_name(rank: int) -> str:
    """Return the name of the file that lists a worker's files; it is written after them."""
    return f"files-{rank}.json"


def finish_commits(folder: RunFolder) -> list[str]:
    """Rename the folders of checkpoints that were complete when their writer died, just before it renamed them.

    A checkpoint of an attempt that was replaced keeps its staging name: the later attempt has written newer ones.

    Returns:
        The names of the renamed checkpoints, from which a run can now resume.
    """
    if folder.local is None:
        return []  # the manifest alone commits a checkpoint
    finished = []
    for match in _our_folders(folder):
        serial = manifest_serial(folder, match[0]) if match["staging"] else None
        if serial is None or any(each.serial >= serial for each in list_checkpoints(folder)):
            continue
        if not folder.exists(match["final"]):
            folder.rename_folder(match[0], match["final"])
            finished.append(match["final"])
    return finished


def clear_unfinished(folder: RunFolder) -> list[str]:
    """Delete folders of checkpoints that are not complete; no upload may be running.

    They are remains of uploads whose worker died, and of deletions that were cut off. A folder with a manifest,
    or with the list of faults of a damaged checkpoint, is never deleted.

    Returns:
        The names of the deleted folders.
    """
    names = [match[0] for match in _our_folders(folder)]
    unfinished = [name for name in names if not (folder.exists(name, MANIFEST) or folder.exists(name, DAMAGED))]
    for name in unfinished:
        folder.delete_folder(name)
    return unfinished


def _our_folders(folder: RunFolder) -> list[re.Match[str]]:
    return [match for name in folder.list_folders(PREFIX) if (match := NAME_PATTERN.fullmatch(name))]
