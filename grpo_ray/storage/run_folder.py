"""The run folder: one folder on local disk, NFS, s3:// or gs:// that the driver and every worker can access.

Ray Train writes to the same folder; our files are beside Ray's. Storage may be unreachable or full for a while: calls
to an object store are retried (`RetryingFilesystem`), and so are larger operations that run in `retry_transient`.
"""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage.process_end import process_end
from grpo_ray.storage.retry import DEFAULT_RETRY_SECONDS, retry_transient, single_attempt
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

T = TypeVar("T")

S3_CONNECT_TIMEOUT, S3_REQUEST_TIMEOUT = 5.0, 10.0
"""Seconds that one request to S3 waits for a connection, and for the next byte. The client makes three attempts."""
SMALL_FILE_BYTES = 1 << 26
"""Largest file that is read at once: a stranger's run folder may have one that takes all memory."""
RECORD_BYTES = 1 << 22
"""Largest record in JSON of a page or of a checkpoint: parsed, a stranger's takes 20 times its size in memory."""
LINE_BYTES = 1 << 23
"""Largest line of a file that is read line by line."""
LINES_BYTES = 1 << 31
"""Largest file that is read line by line: millions of steps."""
SPARSE_BYTES, SPARSE_RATIO = 1 << 26, 16
"""Files from this size on have at least one part in this many on disk, unless they are sparse."""
MAX_EXTENTS = 10_000
"""Parts of a file between holes; files with more of them count as sparse."""
WANDB_LOG_LINK = "wandb/*/logs/debug-core.log"
"""Link that W&B makes to the log of its own process, in the user's cache; grpo_ray never reads or writes it."""
WHOLE_BYTES = 1 << 24
"""Largest file of an object store that is read at once, although only parts of it may be needed."""
COPY_BYTES = 1 << 20
"""Size of the blocks in which large files are copied."""
GCS_RETRY_SECONDS = 30
"""Time for which Google Cloud Storage's client retries on its own, in seconds; its default is 15 minutes."""


def redact_credentials(uri: str) -> str:
    """Remove keys and passwords from a URI, or from a message that contains one."""
    # The name of a bucket has no colon: text after a colon is a key, even if its special characters are not encoded.
    uri = re.sub(r"(s3a?://)[^/?@:\s]*(?::[^@]*)?@", r"\1", uri)
    return re.sub(r"(://[^/?@:\s]*):[^/?@]*@", r"\1@", uri)


def split_path(path: str) -> tuple[str, str]:
    """Split a path or URI into its parent folder and its name; the query of a URI stays with the folder."""
    if "://" not in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder or ("/" if path.startswith("/") else "."), name
    location, mark, query = path.partition("?")
    folder, _, name = location.rstrip("/").rpartition("/")
    return folder + mark + query, unquote(name)


def _join_path(folder: str, *names: str) -> str:
    """Join a folder's path or URI with names: the inverse of `split_path`."""
    if "://" not in folder:
        return "/".join((folder.rstrip("/"), *names))
    location, mark, query = folder.partition("?")
    return "/".join((location.rstrip("/"), *map(quote, names))) + mark + query


def _open_filesystem(uri: str) -> "tuple[pyarrow.fs.FileSystem, str]":
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
        self.filesystem, self.path = retry_transient(lambda: _open_filesystem(uri), retry_seconds)

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

        At a later attempt, an earlier one has removed the file and only its response was lost.
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


class RunFolder:
    """The folder of one run: <storage_path>/<name>. Picklable; `names` in its methods are path components below it."""

    def __init__(self, storage_path: str, name: str, retry_seconds: float = DEFAULT_RETRY_SECONDS):
        """Open the storage; nothing is created.

        Args:
            storage_path: local path or URI of the folder of all runs.
            name: of the run.
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
                self._arrow_filesystem, root = _open_filesystem(self.storage_path)
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
        """Return the path or URI of a file below the folder, without credentials; `uri` may end in a query."""
        return _join_path(redact_credentials(self.storage_path), self.name, *names)

    def address_of(self, *names: str) -> str:
        """Return the path or URI of a file below the folder as other processes open it.

        With the credentials of the config, if it has any: pass it on, and never show or write it.
        """
        return _join_path(self.storage_path, self.name, *names)

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
        """Return True if there is a file, folder or link of this name; nothing is read, and no local link followed."""
        return self.exists(*names) if self.local is None else os.path.lexists(self.local.joinpath(*names))

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the direct subfolders with a prefix; empty if there is no run folder."""
        import pyarrow.fs

        infos = self._list_infos(self.path(), recursive=False)
        folders = [info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory]
        return sorted(name for name in folders if name.startswith(prefix))

    def file_sizes(self, *names: str) -> dict[str, int]:
        """Return relative path -> bytes for all files at any depth below a folder; empty if it does not exist."""
        folder = self.path(*names)
        infos = self._list_infos(folder, recursive=True)
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
            raise ConfigError(f"run.storage_path={where}: cannot be written: {message}") from None

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
        """Read a small text file in UTF-8; argument and errors are those of `read_bytes`."""
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

        A stranger's folder may have links, by which files of this user would be read, exported or overwritten; pipes
        and devices, which block their reader; and files that take terabytes in memory, and none on disk.

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
                        if issue := _describe_unusual(entry, root):
                            raise DamagedFileError(f"{self.uri_of(*path.relative_to(root).parts)} {issue}")
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(path)

    @contextmanager
    def _passing_over_deleted(self, path: Path, root: Path) -> Iterator[None]:
        """Pass over a path that a live run deletes or replaces in this moment.

        Raises:
            DamagedFileError: the block fails with any other error of the file system, such as missing permission.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):  # NFS: the last one
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
        return _download(self._arrow_filesystem, self.path(*names), self.retry_seconds, without=without)

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


def _describe_unusual(entry: "os.DirEntry[str]", root: Path) -> str:
    """Return the reason why an entry of a run folder is not used, and the remedy; "" for a plain file or folder."""
    if entry.is_symlink():
        # A link whose target is missing resolves too, and may be written through.
        link = Path(entry.path)
        try:
            target = link.resolve()
        except RuntimeError:  # of Python 3.12 and earlier
            target = link
        if target.is_symlink():
            return "is a link to itself; delete it"
        if target.is_relative_to(root) or link.relative_to(root).match(WANDB_LOG_LINK):
            return ""
        return "is a link that leads out of the run; put a copy of the file in its place"
    if entry.is_dir(follow_symlinks=False):
        return ""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # deleted in this moment, as by the run itself
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file; delete it"
    has_few_blocks = status.st_size > SPARSE_BYTES and status.st_blocks * 512 * SPARSE_RATIO < status.st_size
    if has_few_blocks and _has_mostly_holes(entry.path, status.st_size):
        return (
            f"is sparse: it has {status.st_size} bytes, and {status.st_blocks * 512} of them on disk; delete it, or "
            "copy it with cp --sparse=never"
        )
    return ""


def _has_mostly_holes(path: str, size: int) -> bool:
    """Return True if less than one part in `SPARSE_RATIO` of a file is data; False if its holes are unknown.

    ZFS counts the blocks of a new file late, and some file systems in user space count none.
    """
    try:
        # O_NONBLOCK: a pipe that is in the file's place by now must not block this process.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    data = end = 0
    try:
        for _ in range(MAX_EXTENTS):
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            data += end - start
            if data * SPARSE_RATIO >= size:
                return False
        return True
    except OSError as error:
        return error.errno == errno.ENXIO  # no data follows; any other error: the file system reports no holes
    finally:
        os.close(descriptor)


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
    filesystem, remote = retry_transient(lambda: _open_filesystem(path), retry_seconds)
    return _download(filesystem, remote, retry_seconds, into, without)


def _download(
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
