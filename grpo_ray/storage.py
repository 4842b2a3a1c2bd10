"""The run folder: one place on local disk, NFS, s3:// or gs:// that the driver and every worker see.

It is the folder that Ray Train itself writes to; what is ours lies beside Ray's files.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from grpo_ray.errors import ConfigError


class RunFolder:
    """The folder of one run: <storage_path>/<name>."""

    def __init__(self, storage_path: str, name: str):
        """Raises ConfigError for a scheme that pyarrow does not know."""
        import pyarrow as pa
        import pyarrow.fs

        storage_path = storage_path.removeprefix("file://")
        self.storage_path = storage_path if "://" in storage_path else os.path.abspath(os.path.expanduser(storage_path))
        self.name = name
        try:
            self.filesystem, root = pyarrow.fs.FileSystem.from_uri(self.storage_path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"run.storage_path={storage_path}: cannot be used: {error}") from None
        self._folder = f"{root.rstrip('/')}/{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.storage_path, self.name)

    @property
    def uri(self) -> str:
        """Where the folder is, as a user would write it."""
        return f"{self.storage_path.rstrip('/')}/{self.name}"

    @property
    def local(self) -> Path | None:
        """The folder as a local path, or None if it is not on a file system of this machine."""
        return None if "://" in self.storage_path else Path(self.uri)

    def path(self, *names: str) -> str:
        """A path below the folder, as the filesystem wants it."""
        return "/".join((self._folder, *names))

    def exists(self, *names: str) -> bool:
        """Whether there is a file or folder of that name; with no name, the run folder itself."""
        import pyarrow.fs

        return self.filesystem.get_file_info(self.path(*names)).type != pyarrow.fs.FileType.NotFound

    def check_writable(self) -> None:
        """Make the folder, write a file and delete it. Raises ConfigError that says what the storage said."""
        probe = ".writable"
        try:
            self.write_text("", probe)
            self.filesystem.delete_file(self.path(probe))
        except OSError as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"run.storage_path={self.storage_path}: cannot be written: {said}") from None

    def write_text(self, text: str, *names: str) -> None:
        """Write a small file whole: under another name first where names can be changed."""
        path = self.path(*names)
        self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        if self.local is None:  # object stores show a file only when it is whole
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(text.encode())
            return
        aside = f"{path}.{os.getpid()}.tmp"
        try:
            Path(aside).write_text(text, encoding="utf-8")
            os.replace(aside, path)
        finally:
            Path(aside).unlink(missing_ok=True)

    def read_text(self, *names: str) -> str:
        """Read a small file. FileNotFoundError if there is none."""
        with self.filesystem.open_input_stream(self.path(*names)) as stream:
            return stream.read().decode()

    def write_json(self, value: Any, *names: str) -> None:
        """Write a value as JSON, indented for people."""
        self.write_text(json.dumps(value, indent=2) + "\n", *names)

    def upload(self, folder: Path, *names: str) -> str:
        """Copy a local folder below the run folder; gives its URI."""
        import pyarrow.fs

        target = self.path(*names)
        self.filesystem.create_dir(target, recursive=True)
        pyarrow.fs.copy_files(str(folder), target, destination_filesystem=self.filesystem)
        return "/".join((self.uri, *names))

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


def fetch_folder(path: str) -> str:
    """A local copy of a folder given by URI; local paths and hub ids are given back as they are."""
    if "://" not in path:
        return path
    import pyarrow.fs

    filesystem, remote = pyarrow.fs.FileSystem.from_uri(path)
    local = tempfile.mkdtemp(prefix="grpo_ray-")
    pyarrow.fs.copy_files(remote, local, source_filesystem=filesystem)
    return local


class MetricsFile:
    """`metrics.jsonl` of a run folder: one line for each logging step, in the order of steps.

    A step that is taken again after a restart replaces what stood there, so no step has two lines.
    """

    NAME = "metrics.jsonl"
    REMOTE_INTERVAL = 20
    """Lines between two writes to an object store, which can only replace whole files."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.rows: list[dict[str, Any]] = read_metrics(folder)
        self._unwritten = 0
        if folder.exists(self.NAME):
            self.flush()  # without a line that a crash cut short: the next one would be joined to it

    def add(self, row: dict[str, Any]) -> None:
        """Put a row at the end, after dropping all rows of the same or a later step."""
        kept = [r for r in self.rows if r["step"] < row["step"]]
        again = len(kept) < len(self.rows)
        self.rows = [*kept, row] if again else self.rows
        if again:
            self.flush()
            return
        self.rows.append(row)
        self._unwritten += 1
        if self.folder.local is not None:
            with open(self.folder.path(self.NAME), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self._unwritten = 0
        elif self._unwritten >= self.REMOTE_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Write the whole file."""
        self.folder.write_text("".join(json.dumps(row) + "\n" for row in self.rows), self.NAME)
        self._unwritten = 0


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`; a line that a crash cut short is left out."""
    if not folder.exists(MetricsFile.NAME):
        return []
    rows = []
    for line in folder.read_text(MetricsFile.NAME).splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
