"""Parquet files of a stranger, each a rollouts file that is small on disk and breaks a bound or the format."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.storage.parquet import FOOTER_BYTES
from grpo_ray.storage.records.group_columns import groups_table

SCHEMA = groups_table([], with_tokens=True).schema


def rows(count: int, **columns: Any) -> pa.Table:
    """Return rows of plausible groups without texts and tokens, with some columns replaced."""
    values: dict[str, Any] = {field.name: pa.nulls(count, field.type) for field in SCHEMA} | {
        "step": pa.array([1] * count, pa.int64()),
        "epoch": pa.array([0] * count, pa.int64()),
        "problem": pa.array(["a" * 16] * count),
        "rewards": pa.array([[1.0]] * count, pa.list_(pa.float32())),
        "correct": pa.array([[1.0]] * count, pa.list_(pa.float32())),
        "lengths": pa.array([[5]] * count, pa.list_(pa.int32())),
        "truncated": pa.array([[False]] * count, pa.list_(pa.bool_())),
        "trained": pa.array([True] * count),
    }
    return pa.table(values | columns)


def write(path: Path, table: pa.Table, **options: Any) -> None:
    pq.write_table(table, path, compression="zstd", **options)


def long_text_repeated(path: Path) -> None:
    """Write one text of 1 MB in 3,000 rows: 18 kB that expand to 3 GB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 1_000_000]))
    write(path, rows(3000, prompt=texts), store_schema=False)


def long_list(path: Path) -> None:
    """Write one row with a list of 23 million flags."""
    count = 23_000_000
    flags = pa.Array.from_buffers(pa.bool_(), count, [None, pa.py_buffer(bytes(count // 8 + 1))])
    write(path, rows(1, truncated=pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), flags)))


def huge_page(path: Path) -> None:
    """Write one text of 600 MB, which takes 60 kB in the file."""
    text = pa.StringArray.from_buffers(
        1, pa.py_buffer(struct.pack("<2i", 0, 600_000_000)), pa.py_buffer(bytes(600_000_000))
    )
    write(path, rows(1, problem=text), use_dictionary=False, write_statistics=False)


def large_footer(path: Path) -> None:
    """Write a footer of the size of many column chunks without contents, which take 230 times as much in memory."""
    path.write_bytes(b"PAR1" + bytes(2 * FOOTER_BYTES) + struct.pack("<I", 2 * FOOTER_BYTES) + b"PAR1")


def lying_footer(path: Path) -> None:
    """Write a file whose footer declares 50 steps, and the header of their page 20."""
    write(path, rows(50))
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    place = data.index(b"\x2c\x15", start) + 2  # a struct, whose first field is the number of values, zigzag
    assert data[place] == 100
    data[place] = 40
    path.write_bytes(data)


def prefixes(path: Path) -> None:
    """Write texts in an encoding that stores common prefixes once."""
    write(path, rows(9), use_dictionary=False, column_encoding={"problem": "DELTA_BYTE_ARRAY"})


def other_type(path: Path) -> None:
    write(path, rows(9, step=pa.array(["1"] * 9)))


def no_steps(path: Path) -> None:
    write(path, rows(9).drop_columns(["step"]))


def encrypted(path: Path) -> None:
    write(path, rows(9))
    path.write_bytes(path.read_bytes()[:-4] + b"PARE")


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "text repeated": (long_text_repeated, "take more than 536870912 bytes in memory"),
    "long list": (long_list, "column truncated.list.element: it takes more than 536870912 bytes"),
    "large footer": (large_footer, "its footer has 4194304 bytes; the limit is"),
    "lying footer": (lying_footer, "row group 0, column step: its pages do not match the footer"),
    "prefixes": (prefixes, "column problem: a page has an unusual header: encoding 7"),
    "type": (other_type, "the column step has the type string, not int64"),
    "column": (no_steps, "it has no column step"),
    "encrypted": (encrypted, "it is encrypted"),
}
"""Name -> function that writes the file, and part of the message."""
SLOW_BOMBS = {"huge page": (huge_page, "column problem: it takes more than 536870912 bytes")}
"""The same for files that take gigabytes to write."""
assert SCHEMA.names == rows(0).column_names
