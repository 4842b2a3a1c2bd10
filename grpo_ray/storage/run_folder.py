"""The run folder: one place on local disk, NFS, s3:// or gs:// that the driver and every worker see.

It is the folder that Ray Train itself writes to; what is ours lies beside Ray's files. Storage may be out of reach
for a while, or full: calls to an object store are repeated (`RetryingFilesystem`), and so is whatever is put into `patiently`.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from grpo_ray.errors import ConfigError
from grpo_ray.storage.retry import DEFAULT_TIMEOUT, retry_transient, single_attempt

T = TypeVar("T")

CONNECT_SECONDS, SILENT_SECONDS = 5.0, 10.0
"""How long one request to S3 waits for a connection, and for the next byte. The client itself tries three times."""
GCS_SECONDS = 30
"""How long the client of Google's storage tries by itself; left alone, it would for 15 minutes."""


def redact_credentials(uri: str) -> str:
    """A URI, or what was said of one, without the keys and passwords in it."""
    # A bucket's name holds no colon, so after one there is a key, whatever characters nobody encoded in it.
    uri = re.sub(r"(s3a?://)[^/?@:\s]*(?::[^@]*)?@", r"\1", uri)
    return re.sub(r"(://[^/?@:\s]*):[^/?@]*@", r"\1@", uri)


def split_path(path: str) -> tuple[str, str]:
    """A path or URI as the folder that it lies in, and its name; a URI's query goes with the folder."""
    if "://" not in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder or ("/" if path.startswith("/") else "."), name
    whole, mark, query = path.partition("?")
    folder, _, name = whole.rstrip("/").rpartition("/")
    return folder + mark + query, unquote(name)


def _below(folder: str, *names: str) -> str:
    """The path or URI of something below a folder: `split_path` the other way round."""
    if "://" not in folder:
        return "/".join((folder.rstrip("/"), *names))
    whole, mark, query = folder.partition("?")
    return "/".join((whole.rstrip("/"), *map(quote, names))) + mark + query


def _open(uri: str) -> tuple[Any, str]:
    """pyarrow's own filesystem of a URI or local path, and the path in it. May ask the network where a bucket is."""
    import pyarrow.fs

    scheme, _, rest = uri.partition("://")
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in rest:
        uri += f"{'&' if '?' in rest else '?'}retry_limit_seconds={GCS_SECONDS}"
    filesystem, path = pyarrow.fs.FileSystem.from_uri(uri)
    # A URI cannot say timeouts, so the filesystem is made again. With one of these it would come out another one.
    if filesystem.type_name == "s3" and not re.search(r"[?&](tls_verify|tls_ca_dir|smart_defaults)", rest):
        make, (options,) = filesystem.__reduce__()
        filesystem = make(options | {"connect_timeout": CONNECT_SECONDS, "request_timeout": SILENT_SECONDS})
    return filesystem, path


class RetryingFilesystem:
    """A filesystem whose calls are repeated while it cannot be reached; a handler for pyarrow's `PyFileSystem`.

    What is written to a stream cannot be repeated here: put the writing of a whole file into `patiently`.
    """

    def __init__(self, uri: str, patience: float):
        import pyarrow.fs

        # Not derived from it: this module can be imported without pyarrow.
        pyarrow.fs.FileSystemHandler.register(RetryingFilesystem)
        self.patience = patience
        self._uri = uri
        self.filesystem, self.path = retry_transient(lambda: _open(uri), patience)

    def __reduce__(self) -> tuple[Any, ...]:
        return RetryingFilesystem, (self._uri, self.patience)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryingFilesystem) and self.filesystem == other.filesystem

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Patient({redact_credentials(self._uri)!r})"

    def get_type_name(self) -> str:
        return self.filesystem.type_name

    def normalize_path(self, path: str) -> str:
        return self.filesystem.normalize_path(path)

    def get_file_info(self, paths: list[str]) -> Any:
        return self._repeat(lambda: self.filesystem.get_file_info(paths))

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._repeat(lambda: self.filesystem.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._repeat(lambda: self.filesystem.create_dir(path, recursive=recursive))

    def delete_dir(self, path: str) -> None:
        self._repeat_removal(lambda: self.filesystem.delete_dir(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._repeat(lambda: self.filesystem.delete_dir_contents(path, missing_dir_ok=missing_dir_ok))

    def delete_root_dir_contents(self) -> None:
        self._repeat(lambda: self.filesystem.delete_dir_contents("", accept_root_dir=True))

    def delete_file(self, path: str) -> None:
        self._repeat_removal(lambda: self.filesystem.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self._repeat_removal(lambda: self.filesystem.move(src, dest))

    def copy_file(self, src: str, dest: str) -> None:
        self._repeat(lambda: self.filesystem.copy_file(src, dest))

    # Without compression: the caller's own filesystem has seen to the ending `.gz` already.

    def open_input_stream(self, path: str) -> Any:
        return self._repeat(lambda: self.filesystem.open_input_stream(path, compression=None))

    def open_input_file(self, path: str) -> Any:
        return self._repeat(lambda: self.filesystem.open_input_file(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._repeat(lambda: self.filesystem.open_output_stream(path, compression=None, metadata=metadata))

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._repeat(lambda: self.filesystem.open_append_stream(path, compression=None, metadata=metadata))

    def _repeat(self, call: Callable[[], T]) -> T:
        return retry_transient(call, self.patience)

    def _repeat_removal(self, call: Callable[[], None]) -> None:
        tries = 0

        def remove() -> None:
            nonlocal tries
            tries += 1
            try:
                call()
            except FileNotFoundError:
                if tries == 1:  # later, it was an earlier try that removed it, and only the answer was lost
                    raise

        self._repeat(remove)


class RunFolder:
    """The folder of one run: <storage_path>/<name>."""

    def __init__(self, storage_path: str, name: str, patience: float = DEFAULT_TIMEOUT):
        """
        patience: seconds that an object store may be out of reach before a call fails. On local disks calls fail at
        once, but copies of whole folders wait so long for room.

        Raises ConfigError for a scheme that pyarrow does not know.
        """
        import pyarrow as pa
        import pyarrow.fs

        storage_path = storage_path.removeprefix("file://")
        self.storage_path = storage_path if "://" in storage_path else os.path.abspath(os.path.expanduser(storage_path))
        self.name = name
        self.patience = patience
        try:
            if self.local is not None:
                self._direct, root = _open(self.storage_path)
                self.filesystem = self._direct  # pyarrow's own: Ray looks at its type, and copies less
            else:
                patient = RetryingFilesystem(self.storage_path, patience)
                self._direct, root = patient.filesystem, patient.path
                self.filesystem = pyarrow.fs.PyFileSystem(patient)
        except (pa.ArrowInvalid, OSError) as error:
            said = redact_credentials(str(error))
            raise ConfigError(f"run.storage_path={redact_credentials(storage_path)}: cannot be used: {said}") from None
        self._folder = f"{root.rstrip('/')}/{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.storage_path, self.name, self.patience)

    def __repr__(self) -> str:
        return f"RunFolder({self.uri!r})"

    @property
    def uri(self) -> str:
        """Where the folder is, as a user would write it, but without credentials."""
        return self.uri_of()

    def uri_of(self, *names: str) -> str:
        """Where something below the folder is. Never put together from `uri`, which may end in a query."""
        return _below(redact_credentials(self.storage_path), self.name, *names)

    @property
    def local(self) -> Path | None:
        """The folder as a local path, or None if it is not on a file system of this machine."""
        return None if "://" in self.storage_path else Path(self.storage_path, self.name)

    def path(self, *names: str) -> str:
        """A path below the folder, as the filesystem wants it."""
        return "/".join((self._folder, *names))

    def exists(self, *names: str) -> bool:
        """Whether there is a file or folder of that name; with no name, the run folder itself."""
        import pyarrow.fs

        info = self._call(lambda: self._direct.get_file_info(self.path(*names)))
        return info.type != pyarrow.fs.FileType.NotFound

    def list_folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly below the run folder that begin so, sorted; none if there is no run folder."""
        import pyarrow.fs

        folders = [info for info in self._infos(self.path(), False) if info.type == pyarrow.fs.FileType.Directory]
        return sorted(info.base_name for info in folders if info.base_name.startswith(prefix))

    def file_sizes(self, *names: str) -> dict[str, int]:
        """Every file of a folder, however deep: path relative to that folder -> bytes. Empty if it is not there."""
        infos, below = self._infos(self.path(*names), True), f"{self.path(*names)}/"
        return {info.path.removeprefix(below): info.size for info in infos if info.is_file}

    def _infos(self, folder: str, recursive: bool) -> Any:
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        return self._call(lambda: self._direct.get_file_info(selector))

    def check_writable(self) -> None:
        """Make the folder, write a file and delete it. Raises ConfigError that says what the storage said, at once."""
        probe = ".writable"
        try:
            with single_attempt():
                self.write_text("", probe)
                self.delete_file(probe)
        except OSError as error:
            said = " ".join(str(error).split())
            where = redact_credentials(self.storage_path)
            raise ConfigError(f"run.storage_path={where}: cannot be written: {said}") from None

    def write_bytes(self, data: bytes, *names: str) -> None:
        """Write a small file whole: under another name first where names can be changed."""
        path = self.path(*names)
        if self.local is None:
            self._call(lambda: self._write_object(data, path))
            return
        self._direct.create_dir(path.rpartition("/")[0], recursive=True)
        aside = f"{path}.{os.getpid()}.tmp"
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # some file systems find out only here that there is no room
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)

    def _write_object(self, data: bytes, path: str) -> None:
        """Object stores show a file only when it is whole, and a stream that is closed early is whole to them."""
        self._direct.create_dir(path.rpartition("/")[0], recursive=True)
        with self._direct.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def read_bytes(self, *names: str) -> bytes:
        """Read a small file. FileNotFoundError if there is none."""

        def read() -> bytes:
            with self._direct.open_input_file(self.path(*names)) as file:
                return file.read(file.size())  # of S3 in one request; without a size, in one for each 256 kB

        return self._call(read)

    def write_text(self, text: str, *names: str) -> None:
        """Write a small text file, as `write_bytes` does."""
        self.write_bytes(text.encode(), *names)

    def read_text(self, *names: str) -> str:
        """Read a small text file. FileNotFoundError if there is none."""
        return self.read_bytes(*names).decode()

    def write_json(self, value: Any, *names: str) -> None:
        """Write a value as JSON, indented for people."""
        self.write_text(json.dumps(value, indent=2) + "\n", *names)

    def delete_file(self, name: str, *names: str) -> None:
        """Delete a file; nothing if it is not there."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._direct.delete_file(self.path(name, *names))

        self._call(delete)

    def delete_folder(self, name: str, *names: str) -> None:
        """Delete a folder below the run folder with all that is in it; nothing if it is not there."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._direct.delete_dir(self.path(name, *names))

        if self.exists(name, *names):
            self._call(delete)

    def rename_folder(self, old: str, new: str) -> None:
        """Give a folder below the run folder another name, at one stroke. UnsupportedOperation in an object store."""
        if self.local is None:
            raise UnsupportedOperation(f"{self.uri}: folders of an object store cannot be renamed")
        os.replace(self.path(old), self.path(new))

    def upload(self, folder: Path, *names: str) -> str:
        """Copy a local folder below the run folder, patiently; gives its URI."""
        import pyarrow.fs

        target = self.path(*names)

        def copy() -> None:
            self._direct.create_dir(target, recursive=True)
            # With threads, large files can block each other for good (apache/arrow issue 32372).
            pyarrow.fs.copy_files(str(folder), target, destination_filesystem=self._direct, use_threads=False)

        retry_transient(copy, self.patience)
        return self.uri_of(*names)

    def fetch(self, *names: str) -> str:
        """A local copy of a folder below the run folder; the folder itself where it is local."""
        return self.path(*names) if self.local else _fetch(self._direct, self.path(*names), self.patience)

    def set_aside(self) -> str:
        """Give the existing folder another name, and say which. Raises ConfigError where folders have no names."""
        if self.local is None:
            raise ConfigError(
                f"run.resume=never: the run {self.uri} exists, and folders cannot be renamed there; "
                "choose another run.name, or run.resume=latest to go on"
            )
        number = 1
        while (aside := self.local.with_name(f"{self.name}.{number}")).exists():
            number += 1
        self.local.rename(aside)
        return str(aside)

    def _call(self, action: Callable[[], T]) -> T:
        return retry_transient(action, self.patience) if self.local is None else action()


def fetch_folder(path: str, patience: float = DEFAULT_TIMEOUT, into: str | None = None) -> str:
    """A local copy of a folder given by URI; local paths and hub ids are given back as they are.

    patience: seconds that the storage may be out of reach.
    into: local folder that the copy is made in; None for the system's own temporary one.
    """
    if "://" not in path:
        return path
    filesystem, remote = retry_transient(lambda: _open(path), patience)
    return _fetch(filesystem, remote, patience, into)


def _fetch(filesystem: Any, path: str, patience: float, into: str | None = None) -> str:
    import pyarrow.fs

    local = tempfile.mkdtemp(prefix="grpo_ray-", dir=into)
    try:
        retry_transient(lambda: pyarrow.fs.copy_files(path, local, source_filesystem=filesystem), patience)
    except OSError:
        shutil.rmtree(local, ignore_errors=True)
        raise
    return local
