"""Generator of grpo_ray/config/trl_fields.json: type, default and meaning of every field of TRL's GRPOConfig.

The config is checked against this file without importing TRL, which takes seconds. Run
`python scripts/trl_field_table.py` after an update of TRL or transformers; a test compares the file with the
installed releases.
"""

import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from generated_file import output_parser, write_file
from trl import GRPOConfig

from grpo_ray.config.trl_fields import DATA

JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", list: "array"}
"""Python type -> its name in a JSON schema. Any other class, such as accelerate's ParallelismConfig, is an object."""


def render() -> str:
    """Render the file: one line per field, in TRL's order."""
    hints = typing.get_type_hints(GRPOConfig)
    fields = {field.name: describe(field, hints[field.name]) for field in dataclasses.fields(GRPOConfig) if field.init}
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def describe(field: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    """Return a field's JSON types, default, meaning and, for an enumeration, its values."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    classes = list(classes_of(hint))
    row: dict[str, Any] = {
        "types": sorted({json_type(cls) for cls in classes}),
        "default": default.value if isinstance(default, enum.Enum) else default,
        "meaning": " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split()),
    }
    for cls in classes:
        if issubclass(cls, enum.Enum):
            row["values"] = [member.value for member in cls]
    return row


def classes_of(hint: Any) -> Iterator[type]:
    """Yield the classes that a type hint is a union of; a literal counts as the class of its values."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from classes_of(each)
    elif origin is typing.Literal:
        yield from (type(value) for value in typing.get_args(hint))
    else:
        yield origin or hint


def json_type(cls: type) -> str:
    """Return the name that a class has in a JSON schema; an enumeration is written as text."""
    if cls is type(None):
        return "null"
    return "string" if issubclass(cls, enum.Enum) else JSON_TYPES.get(cls, "object")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table."""
    options = output_parser("type, default and meaning of every field of TRL's GRPOConfig", DATA).parse_args(arguments)
    return write_file(options.output, render())


if __name__ == "__main__":
    sys.exit(main())
