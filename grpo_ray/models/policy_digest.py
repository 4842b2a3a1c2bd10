"""Digest of a policy's weights, by which a run recognises the policy that it began with in whatever folder it lies."""

import hashlib
import os
from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "*.bin")
BLOCKS, BLOCK_BYTES = 64, 1 << 14
"""Number and size of the blocks of each file that are read: 1 MiB, spread evenly. Training changes all of a policy."""


def policy_digest(path: str) -> str | None:
    """Return a hash of the weights in a policy's folder, 16 hex digits; None if the path is not that of a local one.

    Reads names and sizes of the files, and `BLOCKS` blocks of each, so that a policy of any size takes less than a
    second.
    """
    if not os.path.isdir(path):
        return None
    files = sorted(file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as stream:
            for number in range(BLOCKS):
                stream.seek(number * max(0, size - BLOCK_BYTES) // max(1, BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16] if files else None
