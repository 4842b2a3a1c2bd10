"""Generator of grpo_ray/config/vllm_fields.json: the arguments of vLLM's engine in each supported release.

`engine.vllm` is checked against this file without importing vLLM, which takes seconds. It has the oldest and the newest
supported release; an argument that only a release between them has is not in it. The releases' sources are read, not
imported: `python scripts/vllm_field_table.py FOLDER...` writes the file from folders that hold the Python files of a
release (`vllm/`) and its metadata (`vllm-<version>.dist-info/`), as an unpacked wheel does. A test compares the file
with the installed release.
"""

import ast
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated_file import output_parser, write_file

from grpo_ray.config.vllm_fields import DATA, VllmField

JSON_TYPES = {
    "bool": "boolean", "int": "integer", "float": "number", "str": "string", "dict": "object", "list": "array",
    "set": "array", "None": "null", "Any": "any",
}  # fmt: skip
"""Name in an annotation -> JSON type. A class that ends with Config is an object too; any other name is not checked."""


def read_release(source: Path) -> dict[str, VllmField]:
    """Read the arguments of one release: name -> JSON types and, for enumerations, values.

    Args:
        source: the folder `vllm` of the release.
    """
    aliases = literal_aliases(
        [*sorted((source / "config").glob("*.py")), source / "model_executor/layers/quantization/__init__.py"]
    )
    tree = ast.parse((source / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = {}
    for node in arguments.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            parts = list(alternatives(node.annotation, aliases))
            types = {kind for kind, _ in parts}
            values = {value for _, value in parts if value is not None}
            # Free text beside an enumeration makes its values examples.
            is_closed = not any(kind == "string" and value is None for kind, value in parts)
            fields[node.target.id] = VllmField(
                types=() if "any" in types else tuple(sorted(types)),
                values=tuple(sorted(values)) if is_closed and "any" not in types else (),
            )
    return fields


def literal_aliases(files: Sequence[Path]) -> dict[str, ast.expr]:
    """Return the names that modules assign to a `Literal[...]`, each with this expression."""
    aliases = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Subscript):
                aliases[target.id] = value
    return {name: value for name, value in aliases.items() if ast.unparse(value.value) == "Literal"}


def alternatives(annotation: ast.expr, aliases: Mapping[str, ast.expr]) -> Iterator[tuple[str, str | None]]:
    """Yield the JSON types of a union's members, each with its value if it is one text of an enumeration."""
    if isinstance(annotation, ast.BinOp):
        yield from alternatives(annotation.left, aliases)
        yield from alternatives(annotation.right, aliases)
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from alternatives(ast.parse(annotation.value, mode="eval").body, aliases)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        choices = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        for choice in choices:
            value = choice.value if isinstance(choice, ast.Constant) else None
            yield JSON_TYPES.get(type(value).__name__, "any"), value if isinstance(value, str) else None
    else:
        name = ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)
        if name in aliases:
            yield from alternatives(aliases[name], aliases)
        else:
            yield JSON_TYPES.get(name, "object" if name.endswith("Config") else "any"), None


def render(releases: Mapping[str, Mapping[str, VllmField]]) -> str:
    """Render the file from the arguments of each release, by version: one line per argument, by name."""
    lines = []
    for name in sorted({name for fields in releases.values() for name in fields}):
        rows = {version: fields[name] for version, fields in releases.items() if name in fields}
        row: dict[str, Any] = {}
        if all(each.types for each in rows.values()):
            row["types"] = sorted({kind for each in rows.values() for kind in each.types})
            if all(each.values for each in rows.values()):
                row["values"] = sorted({value for each in rows.values() for value in each.values})
        if len(rows) < len(releases):
            row["only"] = sorted(rows)
        lines.append(f"    {json.dumps(name)}: {json.dumps(row)}")
    return '{\n  "releases": ' + json.dumps(sorted(releases)) + ',\n  "fields": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of the releases in the folders that the arguments name."""
    parser = output_parser("the arguments of vLLM's engine in each supported release", DATA)
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+", help="a release, as an unpacked wheel")
    options = parser.parse_args(arguments)
    releases = {}
    for folder in options.folders:
        (found,) = importlib.metadata.distributions(name="vllm", path=[str(folder)])
        releases[found.version] = read_release(folder / "vllm")
    return write_file(options.output, render(releases))


if __name__ == "__main__":
    sys.exit(main())
