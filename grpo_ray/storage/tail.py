"""Incremental reader of the files of a run folder that grow line by line."""

from dataclasses import dataclass

from grpo_ray.storage.retry import retry_transient
from grpo_ray.storage.run_folder import RunFolder

COMPARED_BYTES = 4096
"""Bytes before the end of the known part of a file that are compared, to detect that it was cut and written again.
They include at least one row, whose times a second attempt does not repeat."""
BLOCK_BYTES = 1 << 23
"""Most bytes that one call reads."""


@dataclass(frozen=True)
class NewLines:
    """Complete lines that a file has gained, without their ends."""

    lines: list[bytes]
    is_reset: bool
    """True if all earlier lines are void: the file was cut, replaced or deleted, and is read from its start."""
    has_more: bool
    """True if the file is longer than the part that was read."""


class LineTail:
    """Reader of a file that another process appends to, and truncates when it repeats steps.

    Only new bytes are read. The file may also be replaced as a whole, as in an object store.
    """

    def __init__(self, folder: RunFolder, name: str):
        self._folder, self._name = folder, name
        self._version: tuple[int, int] | None = None
        """Size and time of the last change when everything had been read."""
        self._offset = 0
        """End of the last complete line that was read."""
        self._before = b""
        """Last bytes before the offset, at most `COMPARED_BYTES`."""
        self.exists = False
        """True if there was a file at the last reading."""
        self.has_half_line = False
        """True if the file did not end with a complete line at the last reading."""

    def read(self) -> NewLines:
        """Read the next lines, at most `BLOCK_BYTES`.

        Raises:
            OSError: the file cannot be read.
            DamagedFileError: it is larger than any that grpo_ray writes.
        """
        return retry_transient(self._read, self._folder.retry_seconds)

    def _read(self) -> NewLines:
        import pyarrow.fs

        path = self._folder.path(self._name)
        (info,) = self._folder.filesystem.get_file_info([path])
        self.exists = info.type == pyarrow.fs.FileType.File
        if not self.exists:
            self.has_half_line = False
            was_read, self._version, self._offset, self._before = self._offset > 0, None, 0, b""
            return NewLines([], was_read, False)
        self._folder.require_readable_lines(self._name)
        version = (info.size, info.mtime_ns)
        if version == self._version:
            return NewLines([], False, False)
        with self._folder.filesystem.open_input_file(path) as file:
            start = self._offset - len(self._before)
            file.seek(min(start, info.size))
            data = file.read(min(info.size - min(start, info.size), len(self._before) + BLOCK_BYTES))
            offset, before = self._offset, self._before  # written back after the last read, which may fail
            is_reset = not data.startswith(before)
            if is_reset:
                start, offset, before = 0, 0, b""
                file.seek(0)
                data = file.read(min(info.size, BLOCK_BYTES))
        known = len(before)
        end = data.rfind(b"\n") + 1
        has_more = start + len(data) < info.size
        if end > known:
            lines = data[known : end - 1].split(b"\n")
            self._offset, self._before = start + end, data[max(0, end - COMPARED_BYTES) : end]
        elif has_more and len(data) - known >= BLOCK_BYTES:  # one line of megabytes, which the package never writes
            lines, self._offset, self._before = [b""], start + len(data), data[-COMPARED_BYTES:]
        else:
            lines, self._offset, self._before = [], offset, before
        self.has_half_line = start + len(data) > self._offset
        self._version = None if has_more else version
        return NewLines(lines, is_reset, has_more)
