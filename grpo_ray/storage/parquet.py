"""Reading of the Parquet files of a run folder, whose author may be a stranger, in bounded memory.

A file of kilobytes can expand to gigabytes: pages compress by a factor of thousands, a run of equal values takes six
bytes, a long text in a dictionary is copied for each row that has it, and the footer may declare any size. So before
a column is decoded, the headers of its pages are read, which the decoder allocates by, and texts are decoded as
dictionaries, whose size in full is computed before they are expanded. Files with encodings, types or structures that
grpo_ray does not write are refused.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from grpo_ray.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FOOTER_BYTES = 1 << 21
"""Largest footer. One of a stranger takes 230 times its size in memory."""
GROUP_BYTES = 1 << 29
"""Largest size of a row group's columns when they are decoded: texts once, and `VALUE_BYTES` for each value."""
TABLE_BYTES = 1 << 29
"""Largest size of a file's columns in memory."""
FOLDER_BYTES = 1 << 31
"""Largest size in memory of the columns of all files that are read together."""
VALUE_BYTES = 24
"""Upper bound of the memory of one value beside its text: number or index, levels, offset, validity."""
MAX_ROW_GROUPS = 256
"""Row groups of a file of grpo_ray, so that footers stay small."""
MAX_PAGES = 200_000
"""Pages of a file whose headers are read."""
HEADER_BYTES = 1 << 16
"""Largest header of a page."""
MAX_DEPTH = 8
"""Levels of nested structs in a header."""
MAX_ENTRIES = 10_000
"""Entries of one list of a footer: row groups, columns."""
ENCODINGS = frozenset({0, 2, 3, 8})
"""Encodings of pages: plain, dictionary (old and new), runs. Others, such as common prefixes, may expand."""
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Kinds of pages."""
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
"""Types of Thrift's compact protocol."""
_HEADER_FIELDS = {1: _I32, 2: _I32, 3: _I32, 4: _I32, 5: _STRUCT, 7: _STRUCT, 8: _STRUCT}
"""Fields of a page header -> their types. 1: kind, 2: size, 3: size in the file, 5, 7, 8: header of its kind."""


class UnusualFileError(ValueError):
    """A Parquet file is larger than those of grpo_ray, or has parts that grpo_ray does not write."""


def read_columns(
    stream: Any,
    schema: "pa.Schema",
    defaults: Mapping[str, Any],
    *,
    has_rows: "Callable[[pq.RowGroupMetaData], bool]" = lambda group: True,
    limit: int = TABLE_BYTES,
) -> "pa.Table":
    """Read the columns of a schema from a file.

    Args:
        stream: the file, which can be read at any position.
        schema: columns and their types.
        defaults: columns that the file may lack -> value in all rows.
        has_rows: called with each row group; those for which it returns False are not read.
        limit: largest size of the table, bytes.

    Returns:
        The table, with the metadata of the file's schema.

    Raises:
        UnusualFileError: the file exceeds a bound, or has parts that grpo_ray does not write.
        pyarrow.ArrowException, ValueError, OSError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    end = _start_of_footer(stream)
    options = {"pre_buffer": False, "thrift_container_size_limit": MAX_ENTRIES}
    about = pq.ParquetFile(stream, **options)
    stored = about.schema_arrow
    for field in schema:
        if field.name in stored.names:
            if (found := stored.field(field.name).type) != field.type:
                raise UnusualFileError(f"the column {field.name} has the type {str(found)[:100]}, not {field.type}")
        elif field.name not in defaults:
            raise UnusualFileError(f"it has no column {field.name}")
    names = [name for name in schema.names if name in stored.names]
    leaves = _leaves(about.metadata, set(names))
    parts = [part for part in range(about.num_row_groups) if has_rows(about.metadata.row_group(part))]
    pages = MAX_PAGES
    for part in parts:
        pages = _check_row_group(stream, end, about.metadata.row_group(part), part, leaves, pages)
    texts = [path for path, kind in leaves.items() if kind == "BYTE_ARRAY"]
    file = pq.ParquetFile(stream, metadata=about.metadata, read_dictionary=texts, **options)
    tables, size = [], 0
    for part in parts:
        table = file.read_row_group(part, columns=names)
        size += sum(_expanded_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if size > limit:
            raise UnusualFileError(f"its columns take more than {limit} bytes in memory")
        tables.append(table.cast(pa.schema([schema.field(name) for name in names])))
    whole = pa.concat_tables([pa.schema([schema.field(name) for name in names]).empty_table(), *tables])
    whole = whole.combine_chunks()
    whole.validate(full=True)
    for place, field in enumerate(schema):
        if field.name not in names:
            value = defaults[field.name]
            rows = len(whole)
            column = pa.nulls(rows, field.type) if value is None else pa.repeat(pa.scalar(value, field.type), rows)
            whole = whole.add_column(place, field, column)
    return whole.replace_schema_metadata(stored.metadata)


def row_group_rows(rows: int, wanted: int) -> int:
    """Return the rows of each row group of a file, `wanted` unless there would be more than `MAX_ROW_GROUPS`."""
    return max(wanted, -(-rows // MAX_ROW_GROUPS))


class MemoryBudget:
    """Memory that the tables of a run folder may take together."""

    def __init__(self, limit: int = FOLDER_BYTES):
        """
        Args:
            limit: bytes.
        """
        self.limit = self.left = limit

    def take(self, table: "pa.Table", where: str) -> "pa.Table":
        """Return the table. Raises DataError, with the file's place, if it does not fit."""
        self.left -= table.nbytes
        if self.left < 0:
            raise DataError(f"{where}: the files up to this one take more than {self.limit} bytes in memory")
        return table


def _start_of_footer(stream: Any) -> int:
    """Return the position of the footer, which is small enough to be parsed."""
    size = stream.size()
    if size < 12:
        raise UnusualFileError("it is no Parquet file: it is too short")
    stream.seek(size - 8)
    (length,), mark = struct.unpack("<I", stream.read(4)), stream.read(4)
    if mark != b"PAR1":
        raise UnusualFileError("it is no Parquet file, or it is encrypted")
    if length > min(FOOTER_BYTES, size - 12):
        raise UnusualFileError(f"its footer has {length} bytes; the limit is {min(FOOTER_BYTES, size - 12)}")
    return int(size - 8 - length)


def _leaves(metadata: "pq.FileMetaData", names: Collection[str]) -> dict[str, str]:
    """Return path -> physical type of all columns of the file that belong to the named ones."""
    schema = metadata.schema
    columns = (schema.column(number) for number in range(len(schema)))
    found = {each.path: each.physical_type for each in columns if each.path.partition(".")[0] in names}
    return found


def _check_row_group(
    stream: Any, end: int, group: "pq.RowGroupMetaData", part: int, leaves: Mapping[str, str], pages: int
) -> int:
    """Raise UnusualFileError if decoding a row group could take more than `GROUP_BYTES`.

    Args:
        end: position of the footer.
        part: number of the row group.
        leaves: columns that are read.
        pages: pages that may be read.

    Returns:
        Pages that may be read after it.
    """
    size = 0
    for number in range(group.num_columns):
        column = group.column(number)
        path = column.path_in_schema
        if path not in leaves:
            continue
        where = f"row group {part}, column {path}"
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < (column.dictionary_page_offset or 0) < start:
            start = column.dictionary_page_offset
        stop = start + column.total_compressed_size
        if not 4 <= start <= stop <= end:
            raise UnusualFileError(f"{where}: it is not inside of the file")
        values = 0
        while start < stop:
            if (pages := pages - 1) < 0:
                raise UnusualFileError(f"it has more than {MAX_PAGES} pages")
            stream.seek(start)
            try:
                header = _PageHeader(stream.read(min(HEADER_BYTES, stop - start)))
            except (IndexError, UnusualFileError) as error:
                raise UnusualFileError(f"{where}: a page has an unusual header: {error}") from None
            start += header.length + header.stored_bytes
            values += header.values
            size += header.bytes
        if start != stop or values != column.num_values or group.num_rows > values:
            raise UnusualFileError(f"{where}: its pages do not have what the footer declares")
        size += VALUE_BYTES * values
        if size > GROUP_BYTES:
            raise UnusualFileError(f"{where}: it takes more than {GROUP_BYTES} bytes in memory")
    return pages


class _PageHeader:
    """Sizes in the header of a page, in Thrift's compact protocol; fields that grpo_ray does not write are refused."""

    def __init__(self, data: bytes):
        """Parse the header at the beginning of `data`. Raises UnusualFileError or IndexError."""
        self._data, self._at = data, 0
        fields = self._struct(_HEADER_FIELDS)
        kind, self.bytes, self.stored_bytes = (fields.get(number, -1) for number in (1, 2, 3))
        """`bytes`: size of the decompressed page; `stored_bytes`: its size in the file."""
        part = fields.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0))
        if not isinstance(part, dict) or self.bytes < 0 or self.stored_bytes < 0:
            raise UnusualFileError(f"kind {kind}")
        encoding = part.get(4 if kind == DATA_V2 else 2)
        values = part.get(1, -1)
        if encoding not in ENCODINGS or values < 0:
            raise UnusualFileError(f"encoding {encoding}, {values} values")
        self.values = 0 if kind == DICTIONARY else values
        self.length = self._at
        """Bytes of the header."""

    def _struct(self, types: Mapping[int, int] | None = None, depth: int = 0) -> dict[int, Any]:
        """Parse a struct: number -> integer, or struct, of each field; other values are skipped."""
        fields: dict[int, Any] = {}
        number = 0
        if depth > MAX_DEPTH:
            raise UnusualFileError("nested too deep")
        while byte := self._byte():
            kind, delta = byte & 15, byte >> 4
            number = number + delta if delta else self._integer()
            if number in fields or (types is not None and types.get(number) != kind):
                raise UnusualFileError(f"field {number}")
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_I16, _I32, _I64):
            return self._integer()
        if kind == _STRUCT:
            return self._struct(depth=depth + 1)
        if kind == _BINARY:
            length = self._varint()
            self._at += length
            return None
        raise UnusualFileError(f"type {kind}")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                # pyarrow keeps 32 bits of a longer size.
                if value >> 32:
                    break
                return value
        raise UnusualFileError("a number of more than 32 bits")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]


def _expanded_bytes(array: "pa.Array") -> int:
    """Return the size of an array whose texts are in dictionaries once they are expanded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary)
        total = pc.sum(lengths.take(array.indices).cast(pa.int64())).as_py() or 0
        return int(total) + 8 * len(array)
    if isinstance(array, pa.ListArray):
        return 4 * len(array) + _expanded_bytes(array.flatten())
    if isinstance(array, pa.StructArray):
        return len(array) + sum(_expanded_bytes(child) for child in array.flatten())
    return int(array.nbytes)
