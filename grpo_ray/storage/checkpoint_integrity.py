"""Verification of checkpoints against the sizes and SHA-256 checksums in their manifest."""

import hashlib
from collections.abc import Sequence

from grpo_ray.storage.checkpoints import DAMAGED, MANIFEST, CheckpointInfo
from grpo_ray.storage.run_folder import RunFolder

BLOCK_BYTES = 1 << 24
"""Bytes that are read or copied at once."""


def find_faults(checkpoint: CheckpointInfo, part: int = 0, parts: int = 1) -> list[str]:
    """Compare a checkpoint's files with its manifest.

    Args:
        checkpoint: the checkpoint to verify.
        part, parts: compute the checksums of every `parts`-th file only, from number `part` on, so that workers
            share the reading. Sizes are cheap: they are always compared.

    Returns:
        One short message per missing, truncated or altered file; empty if there is no fault.
    """
    sizes = checkpoint.folder.file_sizes(checkpoint.name)
    faults = []
    for name, recorded in checkpoint.files.items():
        if name not in sizes:
            faults.append(f"{name} is missing")
        elif sizes[name] != recorded.get("bytes") or not isinstance(recorded.get("sha256"), str):
            faults.append(f"{name} has {sizes[name]} of {recorded.get('bytes')} bytes")
    if faults:
        return faults
    largest_first = sorted(checkpoint.files, key=lambda name: (-checkpoint.files[name]["bytes"], name))
    return [
        f"{name} was altered"
        for name in largest_first[part::parts]
        if file_checksum(checkpoint.folder, checkpoint.name, name) != checkpoint.files[name]["sha256"]
    ]


def file_checksum(folder: RunFolder, *names: str) -> str:
    """Return the SHA-256 checksum of a file of a run folder, 64 hex digits."""
    digest = hashlib.sha256()
    with folder.filesystem.open_input_stream(folder.path(*names)) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def mark_damaged(checkpoint: CheckpointInfo, faults: Sequence[str]) -> None:
    """Remove a damaged checkpoint from the catalogue, but keep its files for inspection.

    Its name is not used again: Ray Train's record still contains it, and Ray may later delete the folder.
    """
    checkpoint.folder.write_json(list(faults), checkpoint.name, DAMAGED)
    checkpoint.folder.delete_file(checkpoint.name, MANIFEST)
