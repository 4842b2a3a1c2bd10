"""Storage of `hf://`, `s3://` and `gs://` in a local folder: made-up files at the addresses that a config names."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

PROTOCOLS = ("hf", "s3", "gs")


class StoreOnDisk(DirFileSystem):
    """File system of one protocol, whose files are in a folder; subclasses set protocol and folder."""

    root = ""
    cachable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(path=self.root, fs=LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.removeprefix(f"{cls.protocol}://") if isinstance(path, str) else path


@contextmanager
def stores_on_disk(folder: Path) -> Iterator[None]:
    """Open `<protocol>://path` as `<folder>/<protocol>/path` in this process, for every protocol of `PROTOCOLS`."""
    known = importlib.import_module("fsspec.registry")._registry  # `fsspec.registry` itself is a view of it
    with pytest.MonkeyPatch.context() as patch:
        for protocol in PROTOCOLS:
            attributes = {"protocol": protocol, "root": str(folder / protocol)}
            patch.setitem(known, protocol, type("StoreOnDisk", (StoreOnDisk,), attributes))
        yield
