"""Reading of the Parquet files of a run folder, which may be untrusted, in bounded memory.

A file of kilobytes can expand to gigabytes: pages compress by a factor of thousands, a run of equal values takes six
bytes, a long text in a dictionary is copied for each row that has it, and the footer may declare any size. Two checks
prevent that. Before a column is decoded, the sizes in the headers of its pages are checked, since the decoder allocates
that much. Texts are decoded as dictionaries, and their full size is computed before they are expanded. Files with
encodings, types or structures that grpo_ray does not write are refused.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_ray.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

FOOTER_BYTES = 1 << 21
"""Largest footer, bytes; a hostile one takes 230 times its size in memory."""
GROUP_BYTES = 1 << 29
"""Largest size of a row group's columns when they are decoded: texts once, and `VALUE_BYTES` for each value."""
TABLE_BYTES = 1 << 29
"""Largest size of a file's columns in memory."""
FOLDER_BYTES = 1 << 31
"""Largest size in memory of the columns of all files that are read together."""
VALUE_BYTES = 24
"""Upper bound of the memory of one value beside its text, bytes: number or index, levels, offset, validity."""
MAX_ROW_GROUPS = 256
"""Most row groups in a file that grpo_ray writes, so that footers stay small."""
MAX_PAGES = 200_000
"""Most pages of a file that is read; each page has a header to parse."""
HEADER_BYTES = 1 << 16
"""Largest header of a page."""
MAX_DEPTH = 8
"""Deepest nesting of structs in a footer or a page header."""
MAX_ENTRIES = 10_000
"""Most entries of one list in a footer: row groups, columns."""
ENCODINGS = frozenset({0, 2, 3, 8})
"""Encodings of pages: plain, dictionary (old and new), runs. Others, such as common prefixes, may expand."""
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Kinds of pages."""
MAX_VALUES = 1_000_000
"""Most values in a footer."""
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
"""Types of Thrift's compact protocol."""
Fields = Mapping[int, "tuple[int, Fields]"]
"""Number of each used field of a struct -> its type, and the fields of a nested struct or of a list's structs."""
_DATA_FIELDS: Fields = {1: (_I32, {}), 2: (_I32, {})}
_PAGE: Fields = {
    **{number: (_I32, {}) for number in (1, 2, 3, 4)},
    **{5: (_STRUCT, _DATA_FIELDS), 7: (_STRUCT, _DATA_FIELDS), 8: (_STRUCT, {1: (_I32, {}), 4: (_I32, {})})},
}
"""1: kind, 2: decompressed size, 3: size in the file; 5, 7, 8: header of its kind, with 1: values, 2 or 4: encoding."""
_STATISTICS: Fields = {5: (_BINARY, {}), 6: (_BINARY, {})}
_COLUMN: Fields = {**{number: (_I64, {}) for number in (5, 7, 9, 11)}, 12: (_STRUCT, _STATISTICS)}
"""5: values, 7: size in the file, 9: place of the first data page, 11: of the dictionary, 12: statistics."""
_CHUNK: Fields = {1: (_BINARY, {}), 3: (_STRUCT, _COLUMN)}
"""1: name of another file, 3: the column's own data."""
_GROUP: Fields = {1: (_LIST, _CHUNK), 3: (_I64, {})}
"""1: columns, 3: rows."""
_FOOTER: Fields = {4: (_LIST, _GROUP)}
"""4: row groups."""


class UnusualFileError(ValueError):
    """Refusal of a Parquet file that is larger than those of grpo_ray, or has parts that grpo_ray does not write."""


def read_columns(
    stream: Any,
    schema: "pa.Schema",
    defaults: Mapping[str, Any],
    *,
    ordered_by: str | None = None,
    has_rows: Callable[[int, int], bool] = lambda least, most: True,
    limit: int = TABLE_BYTES,
) -> "pa.Table":
    """Read the columns of a schema from a file.

    Args:
        stream: the file, which can be read at any position.
        schema: columns and their types.
        defaults: columns that the file may lack -> value in all rows.
        ordered_by: column of integers by which row groups are chosen.
        has_rows: called with the least and the largest value of that column in a row group; those for which it returns
            False are not read. Groups without these statistics are read.
        limit: largest size of the table, bytes.

    Returns:
        The table, with the metadata of the file's schema.

    Raises:
        UnusualFileError: the file exceeds a bound, or has parts that grpo_ray does not write.
        pyarrow.ArrowException, ValueError, OSError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    end, groups = _read_footer(stream)
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
    # pyarrow's metadata of single row groups and columns is not used: unusual values in it end the process.
    leaves = [about.schema.column(number) for number in range(len(about.schema))]
    wanted = {place: each.path for place, each in enumerate(leaves) if each.path.partition(".")[0] in names}
    order = next((place for place, path in wanted.items() if path == ordered_by), None)
    parts, pages = [], MAX_PAGES
    for part, group in enumerate(groups):
        chunks = [_chunk_of(chunk) for chunk in group.get(1, ())]
        if len(chunks) != len(leaves):
            raise UnusualFileError(f"row group {part}: it has {len(chunks)} columns in place of {len(leaves)}")
        if group.get(3) == 0:  # its columns have no pages of data
            continue
        if order is None or (span := _span_of(chunks[order])) is None or has_rows(*span):
            parts.append(part)
            columns = {f"row group {part}, column {path}": chunks[place] for place, path in wanted.items()}
            pages = _check_row_group(stream, end, group.get(3, -1), columns, pages)
    texts = [leaves[place].path for place in wanted if leaves[place].physical_type == "BYTE_ARRAY"]
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

    def __init__(self, limit: int | None = FOLDER_BYTES):
        """
        Args:
            limit: bytes; None: any number.
        """
        self.limit = limit
        self.left = math.inf if limit is None else limit

    def take(self, table: "pa.Table", where: str) -> "pa.Table":
        """Charge a table to the budget, and return the table. Raises DataError, with `where`, if it does not fit."""
        self.left -= table.nbytes
        if self.left < 0:
            raise DataError(f"{where}: the files up to this one take more than {self.limit} bytes in memory")
        return table


def _read_footer(stream: Any) -> tuple[int, list[dict[int, Any]]]:
    """Return the position of the footer, and its row groups, as the fields of `_GROUP`."""
    size = stream.size()
    if size < 12:
        raise UnusualFileError("it is no Parquet file: it is too short")
    stream.seek(size - 8)
    (length,), mark = struct.unpack("<I", stream.read(4)), stream.read(4)
    if mark != b"PAR1":
        raise UnusualFileError("it is no Parquet file, or it is encrypted")
    if length > min(FOOTER_BYTES, size - 12):
        raise UnusualFileError(f"its footer has {length} bytes; the limit is {min(FOOTER_BYTES, size - 12)}")
    stream.seek(size - 8 - length)
    try:
        footer = _CompactReader(stream.read(length)).struct(_FOOTER)
    except (IndexError, UnusualFileError) as error:
        raise UnusualFileError(f"its footer is unusual: {error}") from None
    return int(size - 8 - length), footer.get(4, [])


def _chunk_of(chunk: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return the fields of `_COLUMN` of a column in a row group."""
    if 1 in chunk or 3 not in chunk:
        raise UnusualFileError("a column is in another file")
    return {5: -1, 7: -1, 9: -1, **chunk[3]}


def _span_of(chunk: Mapping[int, Any]) -> tuple[int, int] | None:
    """Return the least and the largest value of a column of integers of 64 bits; None without statistics."""
    ends = [chunk.get(12, {}).get(number, b"") for number in (6, 5)]
    if any(len(each) != 8 for each in ends):
        return None
    least, most = (int.from_bytes(each, "little", signed=True) for each in ends)
    return least, most


def _check_row_group(stream: Any, end: int, rows: int, columns: Mapping[str, Mapping[int, Any]], pages: int) -> int:
    """Raise UnusualFileError if decoding a row group could take more than `GROUP_BYTES`.

    Args:
        end: position of the footer.
        rows: rows of the group.
        columns: name for messages -> fields of `_COLUMN`, of the columns that are read.
        pages: number of pages that may be read.

    Returns:
        Number of pages that may still be read after this row group.
    """
    size = 0
    for where, column in columns.items():
        start = column[9]
        if 0 < column.get(11, 0) < start:
            start = column[11]
        stop = start + column[7]
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
        if start != stop or values != column[5] or not 0 <= rows <= values:
            raise UnusualFileError(f"{where}: its pages do not match the footer")
        size += VALUE_BYTES * values
        if size > GROUP_BYTES:
            raise UnusualFileError(f"{where}: it takes more than {GROUP_BYTES} bytes in memory")
    return pages


class _PageHeader:
    """Sizes in the header of a page."""

    def __init__(self, data: bytes):
        """Parse the header at the beginning of `data`. Raises UnusualFileError or IndexError."""
        reader = _CompactReader(data)
        fields = reader.struct(_PAGE)
        kind, self.bytes, self.stored_bytes = (fields.get(number, -1) for number in (1, 2, 3))
        """`bytes`: size of the decompressed page; `stored_bytes`: its size in the file."""
        part = fields.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0))
        # pyarrow keeps 32 bits of a larger number.
        if not isinstance(part, dict) or not all(0 <= each < 1 << 31 for each in (self.bytes, self.stored_bytes)):
            raise UnusualFileError(f"kind {kind}")
        encoding = part.get(4 if kind == DATA_V2 else 2)
        values = part.get(1, -1)
        if encoding not in ENCODINGS or not 0 <= values < 1 << 31:
            raise UnusualFileError(f"encoding {encoding}, {values} values")
        self.values = 0 if kind == DICTIONARY else values
        self.length = reader.at
        """Bytes of the header."""


class _CompactReader:
    """Reader of structs in Thrift's compact protocol.

    Readers of Parquet skip a field of the wrong type, and keep the last one of a repeated field. Both are refused here,
    so that pyarrow cannot read another value than the one that was checked.
    """

    def __init__(self, data: bytes):
        self._data, self.at = data, 0
        self._left = MAX_VALUES

    def struct(self, fields: Fields, depth: int = 0) -> dict[int, Any]:
        """Parse a struct. Raises UnusualFileError, or IndexError if it does not end.

        Returns:
            Number -> value of all fields; floating-point numbers are None.
        """
        found: dict[int, Any] = {}
        number = 0
        if depth > MAX_DEPTH:
            raise UnusualFileError("nested too deep")
        while byte := self._byte():
            kind, delta = byte & 15, byte >> 4
            number = number + delta if delta else self._integer()
            expected, inner = fields.get(number, (kind, {}))
            if number in found or expected != kind:
                raise UnusualFileError(f"field {number}")
            found[number] = (kind == _TRUE) if kind in (_TRUE, _FALSE) else self._value(kind, inner, depth)
        return found

    def _value(self, kind: int, inner: Fields, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise UnusualFileError(f"more than {MAX_VALUES} values")
        if kind in (_I16, _I32, _I64):
            return self._integer()
        if kind == _BINARY:
            length = self._varint()
            self.at += length
            return self._data[self.at - length : self.at] if length <= 8 else b""
        if kind == _STRUCT:
            return self.struct(inner, depth + 1)
        if kind == _LIST:
            byte = self._byte()
            count, each = (byte >> 4 if byte >> 4 < 15 else self._varint()), byte & 15
            if inner and each != _STRUCT:
                raise UnusualFileError(f"a list of type {each}")
            return [self._value(each, inner, depth + 1) for _ in range(count)]
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list
            return self._byte()
        if kind == _DOUBLE:
            self.at += 8
            return None
        raise UnusualFileError(f"type {kind}")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise UnusualFileError("a number of more than 63 bits")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]


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
