"""Generator of grpo_ray/config/peft_fields.json: the fields of each type of adapter that PEFT can merge.

`model.peft` is checked against this file without importing PEFT, which takes seconds. Run
`python scripts/peft_field_table.py` after an update of PEFT; a test compares the file with the installed release, and
fails for a type that is neither in the file nor in `REFUSED_TYPES`.
"""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import peft
from generated_file import output_parser, write_file
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from grpo_ray.config.peft_fields import DATA, OURS, REFUSED_TYPES

JSON_TYPES = {
    int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", list: "array", type(None): "null",
}  # fmt: skip
"""Python type -> its name in a JSON schema. Any other class, such as a nested config, is an object."""

OPEN_TEXTS = ("[",)
"""Parts of a literal that describe its values in place of naming one, as in `pissa_niter_[number of iters]`."""


def render() -> str:
    """Render the file: for each type one line per field, in PEFT's order."""
    kinds = []
    for kind, config in sorted(PEFT_TYPE_TO_CONFIG_MAPPING.items(), key=lambda item: str(item[0].value)):
        if kind.value not in REFUSED_TYPES:
            hints = typing.get_type_hints(config)
            lines = [
                f"      {json.dumps(field.name)}: {json.dumps(describe(hints[field.name]))}"
                for field in dataclasses.fields(config)
                if field.init and field.name not in OURS
            ]
            kinds.append(f"    {json.dumps(kind.value)}: {{\n" + ",\n".join(lines) + "\n    }")
    return f'{{\n  "release": {json.dumps(peft.__version__)},\n  "types": {{\n' + ",\n".join(kinds) + "\n  }\n}\n"


def describe(hint: Any) -> dict[str, Any]:
    """Return the JSON types of a field and, if it is an enumeration of texts, its values."""
    members = list(members_of(hint))
    row: dict[str, Any] = {"types": sorted({kind for kind, _ in members})}
    texts = [value for kind, value in members if kind == "string"]
    if texts and all(isinstance(value, str) and not any(part in value for part in OPEN_TEXTS) for value in texts):
        row["values"] = sorted(texts)
    return row


def members_of(hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the JSON type of each member of a union, with its value if it is one of a literal."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from members_of(each)
    elif origin is typing.Literal:
        yield from ((JSON_TYPES[type(value)], value) for value in typing.get_args(hint))
    else:
        yield JSON_TYPES.get(origin or hint, "object"), None


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table."""
    options = output_parser("the fields of each type of adapter that PEFT can merge", DATA).parse_args(arguments)
    return write_file(options.output, render())


if __name__ == "__main__":
    sys.exit(main())
