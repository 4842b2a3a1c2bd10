"""pyarrow's filesystems of URIs, with timeouts and retries, and copies of folders from them."""

import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_ray.storage.process_end import process_end
from grpo_ray.storage.retry import DEFAULT_RETRY_SECONDS, retry_transient
from grpo_ray.storage.uris import redact_credentials

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

T = TypeVar("T")

S3_CONNECT_TIMEOUT, S3_REQUEST_TIMEOUT = 5.0, 10.0
"""Seconds that one request to S3 waits for a connection, and for the next byte. The client makes three attempts."""
GCS_RETRY_SECONDS = 30
"""Time for which Google Cloud Storage's client retries on its own, in seconds; its default is 15 minutes."""


def open_filesystem(uri: str) -> "tuple[pyarrow.fs.FileSystem, str]":
    """Open pyarrow's filesystem of a URI or local path.

    May send requests, to find the region of a bucket.

    Returns:
        The filesystem, and the path in it.
    """
    import pyarrow.fs

    scheme, _, rest = uri.partition("://")
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in rest:
        uri += f"{'&' if '?' in rest else '?'}retry_limit_seconds={GCS_RETRY_SECONDS}"
    filesystem, path = pyarrow.fs.FileSystem.from_uri(uri)
    # A URI cannot contain timeouts, so the filesystem is created again with them from its pickled options. These do
    # not include the options in this pattern, which would be lost.
    if filesystem.type_name == "s3" and not re.search(r"[?&](tls_verify|tls_ca_dir|smart_defaults)", rest):
        constructor, (options,) = filesystem.__reduce__()
        timeouts = {"connect_timeout": S3_CONNECT_TIMEOUT, "request_timeout": S3_REQUEST_TIMEOUT}
        filesystem = constructor(options | timeouts)
    return filesystem, path


class RetryingFilesystem:
    """Filesystem that retries its calls while storage is unreachable; a handler for pyarrow's `PyFileSystem`.

    Writes to an open stream cannot be retried here: run the writing of a whole file in `retry_transient`.
    """

    def __init__(self, uri: str, retry_seconds: float):
        """Open the filesystem of a URI, with retries.

        Args:
            uri: a URI that pyarrow supports.
            retry_seconds: how long a call is retried, in seconds.
        """
        import pyarrow.fs

        # Registered as a virtual subclass: deriving from it would import pyarrow with this module.
        pyarrow.fs.FileSystemHandler.register(RetryingFilesystem)
        process_end.register()
        self.retry_seconds = retry_seconds
        self._uri = uri
        self.filesystem, self.path = retry_transient(lambda: open_filesystem(uri), retry_seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        return RetryingFilesystem, (self._uri, self.retry_seconds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryingFilesystem) and self.filesystem == other.filesystem

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RetryingFilesystem({redact_credentials(self._uri)!r})"

    def get_type_name(self) -> str:
        return self.filesystem.type_name

    def normalize_path(self, path: str) -> str:
        return self.filesystem.normalize_path(path)

    def get_file_info(self, paths: list[str]) -> Any:
        return self._retry(lambda: self.filesystem.get_file_info(paths))

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._retry(lambda: self.filesystem.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._retry(lambda: self.filesystem.create_dir(path, recursive=recursive))

    def delete_dir(self, path: str) -> None:
        self._retry_removal(lambda: self.filesystem.delete_dir(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._retry(lambda: self.filesystem.delete_dir_contents(path, missing_dir_ok=missing_dir_ok))

    def delete_root_dir_contents(self) -> None:
        self._retry(lambda: self.filesystem.delete_dir_contents("", accept_root_dir=True))

    def delete_file(self, path: str) -> None:
        self._retry_removal(lambda: self.filesystem.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self._retry_removal(lambda: self.filesystem.move(src, dest))

    def copy_file(self, src: str, dest: str) -> None:
        self._retry(lambda: self.filesystem.copy_file(src, dest))

    # Without compression: the caller's `PyFileSystem` has already detected it from the suffix of the path.

    def open_input_stream(self, path: str) -> Any:
        return self._retry(lambda: self.filesystem.open_input_stream(path, compression=None))

    def open_input_file(self, path: str) -> Any:
        return self._retry(lambda: self.filesystem.open_input_file(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._retry(lambda: self.filesystem.open_output_stream(path, compression=None, metadata=metadata))

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._retry(lambda: self.filesystem.open_append_stream(path, compression=None, metadata=metadata))

    def _retry(self, call: Callable[[], T]) -> T:
        with process_end.call():
            return retry_transient(call, self.retry_seconds, sleep=process_end.pause)

    def _retry_removal(self, call: Callable[[], None]) -> None:
        """Retry a call that removes a file; a missing file is an error at the first attempt only.

        If it is missing later, an earlier attempt has removed it and only the response was lost.
        """
        attempts = 0

        def remove() -> None:
            nonlocal attempts
            attempts += 1
            try:
                call()
            except FileNotFoundError:
                if attempts == 1:
                    raise

        self._retry(remove)


def fetch_folder(
    path: str,
    retry_seconds: float = DEFAULT_RETRY_SECONDS,
    into: str | None = None,
    without: Collection[str] = (),
) -> str:
    """Copy a folder from an object store to a local temporary folder.

    Args:
        path: URI of a folder; local paths and hub ids are returned unchanged.
        retry_seconds: how long the copy is retried, in seconds.
        into: local folder in which the temporary folder is created; None: the system's.
        without: files and folders in it that are not copied.

    Returns:
        The local path.
    """
    if "://" not in path:
        return path
    filesystem, remote = retry_transient(lambda: open_filesystem(path), retry_seconds)
    return download_folder(filesystem, remote, retry_seconds, into, without)


def download_folder(
    filesystem: "pyarrow.fs.FileSystem",
    path: str,
    retry_seconds: float,
    into: str | None = None,
    without: Collection[str] = (),
) -> str:
    """Copy a folder of a filesystem into a new local temporary folder; returns its path."""
    import pyarrow.fs

    local = tempfile.mkdtemp(prefix="grpo_ray-", dir=into)

    def copy() -> None:
        if not without:
            pyarrow.fs.copy_files(path, local, source_filesystem=filesystem)
            return
        for info in filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True)):
            name = info.path.removeprefix(f"{path.rstrip('/')}/")
            if info.is_file and not any(f"{name}/".startswith(f"{each}/") for each in without):
                Path(local, name).parent.mkdir(parents=True, exist_ok=True)
                pyarrow.fs.copy_files(info.path, f"{local}/{name}", source_filesystem=filesystem)

    try:
        retry_transient(copy, retry_seconds)
    except OSError:
        shutil.rmtree(local, ignore_errors=True)
        raise
    return local
