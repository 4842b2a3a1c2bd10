"""The run folder: one folder on local disk, NFS, s3:// or gs:// that the driver and every worker can access.

Ray Train writes to the same folder; our files are beside Ray's. Storage may be unreachable or full for a while: calls
to an object store are retried (`RetryingFilesystem`), and so are larger operations that run in `retry_transient`.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage.filesystem import RetryingFilesystem, download_folder, open_filesystem
from grpo_ray.storage.plain_files import describe_unusual
from grpo_ray.storage.retry import DEFAULT_RETRY_SECONDS, retry_transient, single_attempt
from grpo_ray.storage.uris import join_path, redact_credentials
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

T = TypeVar("T")

SMALL_FILE_BYTES = 1 << 26
"""Largest file that is read at once: an untrusted run folder may have one that takes all memory."""
RECORD_BYTES = 1 << 22
"""Largest JSON record of a page or of a checkpoint: once parsed, a hostile one takes 20 times its size in memory."""
LINE_BYTES = 1 << 23
"""Largest line of a file that is read line by line."""
LINES_BYTES = 1 << 31
"""Largest file that is read line by line: millions of steps."""
WHOLE_BYTES = 1 << 24
"""Largest file of an object store that is read at once, although only parts of it may be needed."""
COPY_BYTES = 1 << 20
"""Size of the blocks in which large files are copied."""


class RunFolder:
    """The folder of one run: <storage_path>/<name>. Picklable; `names` in its methods are path components below it."""

    def __init__(self, storage_path: str, name: str, retry_seconds: float = DEFAULT_RETRY_SECONDS):
        """Open the storage; nothing is created.

        Args:
            storage_path: local path or URI of the folder of all runs.
            name: name of the run.
            retry_seconds: how long a call to an object store is retried, in seconds. On a local disk calls fail at
                once, but copies of whole folders are retried for this time, in case the disk is full.

        Raises:
            ConfigError: pyarrow does not support the URI.
        """
        import pyarrow as pa
        import pyarrow.fs

        storage_path = storage_path.removeprefix("file://")
        self.storage_path = storage_path if "://" in storage_path else os.path.abspath(os.path.expanduser(storage_path))
        self.name = name
        self.retry_seconds = retry_seconds
        try:
            if self.local is not None:
                self._arrow_filesystem, root = open_filesystem(self.storage_path)
                # Not wrapped: Ray copies less if the type is pyarrow's LocalFileSystem.
                self.filesystem = self._arrow_filesystem
            else:
                retrying = RetryingFilesystem(self.storage_path, retry_seconds)
                self._arrow_filesystem, root = retrying.filesystem, retrying.path
                self.filesystem = pyarrow.fs.PyFileSystem(retrying)
        except (pa.ArrowInvalid, OSError) as error:
            where, message = redact_credentials(storage_path), redact_credentials(str(error))
            raise ConfigError(f"run.storage_path={where}: cannot be used: {message}") from None
        self._folder = f"{root.rstrip('/')}/{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.storage_path, self.name, self.retry_seconds)

    def __repr__(self) -> str:
        return f"RunFolder({self.uri!r})"

    @property
    def uri(self) -> str:
        """Path or URI of the folder as in the config, without credentials."""
        return self.uri_of()

    def uri_of(self, *names: str) -> str:
        """Return the path or URI of a file below the folder, without credentials. (`uri` may end in a query.)"""
        return join_path(redact_credentials(self.storage_path), self.name, *names)

    def address_of(self, *names: str) -> str:
        """Return the path or URI with which another process can open a file below the folder.

        It contains the credentials of the config, if there are any: never show or record it.
        """
        return join_path(self.storage_path, self.name, *names)

    @property
    def local(self) -> Path | None:
        """Local path of the folder, or None if it is in an object store."""
        return None if "://" in self.storage_path else Path(self.storage_path, self.name)

    def path(self, *names: str) -> str:
        """Return a path below the folder in the form that `filesystem` takes."""
        return "/".join((self._folder, *names))

    def exists(self, *names: str) -> bool:
        """Return True if the file or folder exists; without names, if the run folder exists."""
        import pyarrow.fs

        info = self._call(lambda: self._arrow_filesystem.get_file_info(self.path(*names)))
        return info.type != pyarrow.fs.FileType.NotFound

    def has_entry(self, *names: str) -> bool:
        """Return True if there is a file, folder or link of this name; reads nothing, and follows no local link."""
        return self.exists(*names) if self.local is None else os.path.lexists(self.local.joinpath(*names))

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the direct subfolders with a prefix; empty if there is no run folder."""
        import pyarrow.fs

        infos = self._list_infos(self.path(), recursive=False)
        folders = [info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory]
        return sorted(name for name in folders if name.startswith(prefix))

    def file_sizes(self, *names: str, recursive: bool = True) -> dict[str, int]:
        """Return relative path -> bytes for all files below a folder; empty if it does not exist.

        Args:
            recursive: False: only files of the folder itself, not those at any depth.
        """
        folder = self.path(*names)
        infos = self._list_infos(folder, recursive=recursive)
        return {info.path.removeprefix(f"{folder}/"): info.size for info in infos if info.is_file}

    def _list_infos(self, folder: str, *, recursive: bool) -> "list[pyarrow.fs.FileInfo]":
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        return self._call(lambda: self._arrow_filesystem.get_file_info(selector))

    def check_writable(self) -> None:
        """Create the folder, write a file and delete it, without retries.

        Raises:
            ConfigError: one of them fails; the message has the storage's own error.
        """
        probe = ".writable"
        try:
            with single_attempt():
                self.write_text("probe", probe)  # an empty file fits on a full disk
                self.delete_file(probe)
        except OSError as error:
            message = " ".join(str(error).split())
            where = redact_credentials(self.storage_path)
            raise ConfigError(
                f"run.storage_path={where}: cannot be written: {message}; set another run.storage_path"
            ) from None

    def write_bytes(self, data: bytes, *names: str) -> None:
        """Write a small file atomically: on a file system, into a temporary file that is then renamed."""
        path = self.path(*names)
        if self.local is None:
            self._call(lambda: self._write_object(data, path))
            return
        self._arrow_filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # some file systems report a full disk only here
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _write_object(self, data: bytes, path: str) -> None:
        """Write one object; it becomes visible when the stream is closed, so an object is always complete."""
        self._arrow_filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with self._arrow_filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def read_bytes(self, *names: str, limit: int = SMALL_FILE_BYTES) -> bytes:
        """Read a small file.

        Args:
            limit: largest size that is read, bytes.

        Raises:
            FileNotFoundError: there is none.
            DamagedFileError: it is larger; grpo_ray never writes such a file.
        """

        def read() -> bytes:
            with self._arrow_filesystem.open_input_file(self.path(*names)) as file:
                if (size := file.size()) > limit:
                    raise DamagedFileError(
                        f"{self.uri_of(*names)} is damaged: it has {size} bytes; the limit is {limit}"
                    )
                return file.read(size)  # one request to S3; without a size, one per 256 kB

        return self._call(read)

    def open_input_file(self, *names: str) -> "pyarrow.NativeFile":
        """Open a file for reading at any position; a context manager.

        A file of an object store of at most `WHOLE_BYTES` is read at once: each read of an open one is a request.

        Raises:
            FileNotFoundError: there is none.
        """
        import pyarrow as pa

        def open_file() -> pa.NativeFile:
            file = self._arrow_filesystem.open_input_file(self.path(*names))
            if self.local is not None or (size := file.size()) > WHOLE_BYTES:
                return file
            with file:
                return pa.BufferReader(file.read_buffer(size))

        return self._call(open_file)

    def write_text(self, text: str, *names: str) -> None:
        """Write a small text file in UTF-8 with `write_bytes`."""
        self.write_bytes(text.encode(), *names)

    def read_text(self, *names: str, limit: int = SMALL_FILE_BYTES) -> str:
        """Read a small text file in UTF-8; arguments and errors as in `read_bytes`."""
        return self.read_bytes(*names, limit=limit).decode()

    def upload_file(self, source: Path, *names: str) -> None:
        """Copy a local file of any size to a file of an object store; it becomes visible when it is complete."""
        path = self.path(*names)

        def copy() -> None:
            self._arrow_filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with open(source, "rb") as file, self._arrow_filesystem.open_output_stream(path, compression=None) as sink:
                shutil.copyfileobj(file, sink, COPY_BYTES)

        self._call(copy)

    def download_file(self, target: Path, *names: str) -> None:
        """Copy a file of any size to a local file. Raises FileNotFoundError if there is none."""

        def copy() -> None:
            stored = self._arrow_filesystem.open_input_stream(self.path(*names), compression=None)
            with stored, open(target, "wb") as file:
                shutil.copyfileobj(stored, file, COPY_BYTES)

        self._call(copy)

    def read_lines(self, *names: str) -> Iterator[bytes]:
        """Yield the lines of a file, with their ends; none if there is no file.

        A line of more than `LINE_BYTES`, which grpo_ray never writes, comes in parts.

        Raises:
            DamagedFileError: it has more than `LINES_BYTES`.
        """
        if not self.exists(*names):
            return
        self.require_readable_lines(*names)
        with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
            path = self.local.joinpath(*names) if self.local is not None else Path(scratch, "lines")
            if self.local is None:  # a copy, because reading from an open stream cannot be retried
                self.download_file(path, *names)
            with open(path, "rb") as file:
                while line := file.readline(LINE_BYTES):
                    yield line

    def require_readable_lines(self, *names: str) -> None:
        """Raise DamagedFileError if a file has more than `LINES_BYTES`."""
        (info,) = self._call(lambda: self._arrow_filesystem.get_file_info([self.path(*names)]))
        if info.is_file and info.size > LINES_BYTES:
            raise DamagedFileError(
                f"{self.uri_of(*names)} is damaged: it has {info.size} bytes; the limit is {LINES_BYTES}"
            )

    def require_plain_files(self) -> None:
        """Check that a local folder holds nothing that grpo_ray does not write, before anything in it is read.

        An untrusted folder may have links, through which files of this user would be read, exported or overwritten;
        pipes and devices, which block their reader; and sparse files, which take terabytes of memory but no disk space.

        Raises:
            DamagedFileError: there is a link that leads out of the folder, a file that is not regular, a sparse one, or
                a folder that may not be listed.
        """
        if self.local is None or not self.local.exists():
            return
        root = self.local.resolve()
        folders = [root]
        while folders:
            folder = folders.pop()
            with self._passing_over_deleted(folder, root):
                for entry in list(os.scandir(folder)):
                    path = Path(entry.path)
                    with self._passing_over_deleted(path, root):
                        if issue := describe_unusual(entry, root):
                            raise DamagedFileError(f"{self.uri_of(*path.relative_to(root).parts)} {issue}")
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(path)

    @contextmanager
    def _passing_over_deleted(self, path: Path, root: Path) -> Iterator[None]:
        """Skip a path that a live run deletes or replaces at this moment.

        Raises:
            DamagedFileError: the block fails with any other error of the file system, such as missing permission.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):  # ESTALE: deleted, on NFS
                where = self.uri_of(*path.relative_to(root).parts)
                raise DamagedFileError(f"{where} cannot be read: {error.strerror}; correct or delete it") from None

    def write_json(self, value: Any, *names: str) -> None:
        """Write a value as indented JSON, with secrets hidden in its texts."""
        self.write_text(json.dumps(redact(value), indent=2) + "\n", *names)

    def read_json(self, *names: str, limit: int = SMALL_FILE_BYTES) -> Any:
        """Read a small JSON file.

        Args:
            limit: largest size that is read, bytes.

        Raises:
            FileNotFoundError: there is none.
            DamagedFileError: it is not JSON; a crash, a full disk or a person damaged it.
        """
        try:
            return json.loads(self.read_text(*names, limit=limit))
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{self.uri_of(*names)} is damaged: it is not JSON: {error}") from None

    def delete_file(self, name: str, *names: str) -> None:
        """Delete a file, if it exists."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._arrow_filesystem.delete_file(self.path(name, *names))

        self._call(delete)

    def delete_folder(self, name: str, *names: str) -> None:
        """Delete a folder below the run folder with all its files, if it exists."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._arrow_filesystem.delete_dir(self.path(name, *names))

        if self.exists(name, *names):
            self._call(delete)

    def delete_if_only(self, names: Collection[str]) -> None:
        """Delete the run folder if it contains no other files than those named (paths below it)."""
        if not set(self.file_sizes()) <= set(names):
            return

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._arrow_filesystem.delete_dir(self.path())

        self._call(delete)

    def rename_folder(self, old: str, new: str) -> None:
        """Rename a folder below the run folder atomically. Raises UnsupportedOperation in an object store."""
        if self.local is None:
            raise UnsupportedOperation(f"{self.uri}: folders of an object store cannot be renamed")
        os.replace(self.path(old), self.path(new))

    def upload(self, folder: Path, *names: str) -> str:
        """Copy a local folder to a folder below the run folder, with retries; returns its URI."""
        import pyarrow.fs

        target = self.path(*names)

        def copy() -> None:
            self._arrow_filesystem.create_dir(target, recursive=True)
            # With threads, large files can deadlock (apache/arrow issue 32372).
            pyarrow.fs.copy_files(str(folder), target, destination_filesystem=self._arrow_filesystem, use_threads=False)

        retry_transient(copy, self.retry_seconds)
        return self.uri_of(*names)

    def fetch(self, *names: str, without: Collection[str] = ()) -> str:
        """Return the path of a local copy of a folder below the run folder, or of the folder itself if it is local.

        Args:
            without: files and folders in it that are not copied.
        """
        if self.local:
            return self.path(*names)
        return download_folder(self._arrow_filesystem, self.path(*names), self.retry_seconds, without=without)

    def set_aside(self) -> str:
        """Rename the existing folder to the first free `<name>.<number>`.

        Returns:
            The new path.

        Raises:
            UnsupportedOperation: the folder is in an object store.
        """
        if self.local is None:
            raise UnsupportedOperation(f"{self.uri}: folders of an object store cannot be renamed")
        number = 1
        while (target := self.local.with_name(f"{self.name}.{number}")).exists():
            number += 1
        self.local.rename(target)
        return str(target)

    def _call(self, action: Callable[[], T]) -> T:
        """Run one call to the storage; with retries in an object store."""
        return retry_transient(action, self.retry_seconds) if self.local is None else action()
