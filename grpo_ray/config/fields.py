"""Descriptions of config fields, read from the schema: for error messages, --help and docs/configuration.md."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

NOUNS = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "booleans"),
    "string": ("text", "texts"),
    "object": ("a mapping", "mappings"),
    "null": ("null", "nulls"),
}
"""JSON type -> its singular and plural in a sentence."""

LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""Keyword of a limit in JSON schema -> its wording."""

VALUES = "x-values"
"""Key of a JSON schema with a description of the allowed values, where the type does not give one."""

INTERNAL = frozenset({"grpo.trl"})
"""Paths of dataclass fields that the YAML does not have."""


@dataclass(frozen=True)
class FieldDescription:
    """Default, allowed values and meaning of one field."""

    default: Any
    """`dataclasses.MISSING` for a field that must be given."""
    values: str
    """Noun phrase that completes "must be ...", such as "a whole number of at least 1, or null"."""
    meaning: str
    """The field's docstring, on one line."""
    is_section: bool
    """True if the field has fields of its own."""

    @property
    def default_text(self) -> str:
        """Default as it is written in YAML; "required" if there is none."""
        if self.default is dataclasses.MISSING:
            return "required"
        return json.dumps(
            self.default, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value)
        )


@functools.cache
def type_adapter(cls: type) -> TypeAdapter[Any]:
    """Build pydantic's validator of a dataclass once per process: building takes tens of milliseconds."""
    return TypeAdapter(cls)


@functools.cache
def field_descriptions(cls: type) -> Mapping[str, FieldDescription]:
    """Describe the fields of a dataclass, including those of nested dataclasses.

    Returns:
        Dotted path, such as "lora.rank", -> description; a nested section precedes its fields.
    """
    described: dict[str, FieldDescription] = {}
    schema = type_adapter(cls).json_schema()["properties"]
    documented = attribute_docstrings(cls)
    for field in dataclasses.fields(cls):
        section = _dataclass_of(typing.get_type_hints(cls)[field.name])
        described[field.name] = FieldDescription(
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            values=values_text(schema[field.name]),
            meaning=documented.get(field.name, ""),
            is_section=section is not None,
        )
        for path, nested in field_descriptions(section).items() if section else ():
            described[f"{field.name}.{path}"] = nested
    return MappingProxyType(described)


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each documented field of a dataclass, on one line.

    pydantic can read them too (`use_attribute_docstrings`), but does so whenever it builds a validator, which then
    takes four times as long, in every process of a run.
    """
    documented: dict[str, str] = {}
    for base in reversed([each for each in cls.__mro__ if dataclasses.is_dataclass(each)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    documented[name] = " ".join(docstring.split())
    return documented


def _dataclass_of(hint: Any) -> type | None:
    """Return the dataclass in a type hint such as `LoraConfig | None`, or None if there is none."""
    candidates: Iterator[Any] = (each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each))
    return next(candidates, None)


def values_text(schema: Mapping[str, Any], *, plural: bool = False) -> str:
    """Describe the values that a JSON schema allows as a noun phrase, such as "a number above 0"."""
    if VALUES in schema:
        return str(schema[VALUES])
    if "anyOf" in schema:
        return ", or ".join(values_text(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return "a section with fields"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        *first, last = (json.dumps(value) for value in schema["enum"])
        return f"{', '.join(first)} or {last}"
    if schema["type"] == "array":
        return _list_values(schema)
    noun = NOUNS[schema["type"]][plural]
    if schema["type"] == "object":
        each = schema.get("additionalProperties", True)
        return f"{noun} from text to {'any value' if each is True else values_text(each, plural=True)}"
    limits = " and ".join(
        f"{wording} {_number_text(schema[limit])}" for limit, wording in LIMITS.items() if limit in schema
    )
    noun = f"non-empty {noun}" if schema.get("minLength") else noun
    return f"{noun} of {limits}" if limits.startswith("at ") else f"{noun} {limits}".strip()


def _number_text(number: float) -> str:
    """Format a limit; a whole number has neither exponent nor decimals."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def override_text(value: Any) -> str:
    """Format a scalar as in an override: true, not True."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _list_values(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"a list of {schema['minItems']} {values_text(schema['prefixItems'][0], plural=True)}"
    return f"{'a non-empty' if schema.get('minItems') else 'a'} list of {values_text(schema['items'], plural=True)}"


def describe_errors(
    error: ValidationError, cls: type, settings: Any, prefix: tuple[str, ...] = (), further: Sequence[str] = ()
) -> str:
    """Write one line for each field that pydantic refused: the field, the value found, and the values allowed.

    Args:
        cls: dataclass that the paths of the message start from.
        settings: the refused values, as nested mappings or as an instance of `cls`.
        prefix: path from `cls` to the validated part.
        further: keys that an unknown key is compared with, besides the fields of `cls`.
    """
    described = field_descriptions(cls)
    lines = []
    for each in error.errors():
        path = (*prefix, *map(str, each["loc"]))
        if each["type"] == "value_error":
            lines.append(str(each["ctx"]["error"]))
        elif each["type"] in ("unexpected_keyword_argument", "invalid_key"):
            lines.append(unknown_key_message(".".join(path), [*described, *further], is_flat="." in path[-1]))
        else:
            # Below a field, pydantic appends list indices, keys and alternatives of a union.
            known = [count for count in range(1, len(path) + 1) if ".".join(path[:count]) in described]
            path = path[: max(known, default=0)]
            field, name = described[".".join(path)], ".".join(path)
            has_text = field.default is not dataclasses.MISSING and not (field.is_section and field.default is not None)
            if each["type"] == "missing":
                lines.append(f"{name} is missing; it must be {field.values}")
                continue
            default = f"; the default is {field.default_text}" if has_text else ""
            lines.append(f"{name}={_value_at(settings, path)!r} must be {field.values}{default}")
    return "\n".join(dict.fromkeys(lines))


def _value_at(settings: Any, path: Sequence[str]) -> Any:
    for name in path:
        settings = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
    return settings


def unknown_key_message(key: str, known: Sequence[str], *, is_flat: bool = False) -> str:
    """Write the error for an unknown key, with the known key that was probably meant.

    The same field name in another section is preferred, then a similar name in the same section, then a similar name in
    any section.

    Args:
        is_flat: the path is written as one key with dots, which only overrides have.
    """
    if is_flat and key in known:
        section, _, field = key.partition(".")
        return f"unknown key {key}: in a YAML, sections are nested; write `{section}: {{{field}: ...}}`"
    known = sorted((path for path in known if path not in INTERNAL), key=lambda path: path.count("."))
    field_of = {path: path.rpartition(".")[2] for path in known}
    wanted = key.rpartition(".")[2]
    same_name = [path for path in known if field_of[path] == wanted and path != key]
    same_section = [path for path in known if path.rpartition(".")[0] == key.rpartition(".")[0]]
    near = same_name or _with_similar_field(wanted, same_section) or _with_similar_field(wanted, known)
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "; see grpo-ray train --help")


def _with_similar_field(wanted: str, paths: Sequence[str]) -> list[str]:
    """Return the paths whose field name is the most similar to `wanted`; none if no name is similar."""
    names = [path.rpartition(".")[2] for path in paths]
    near = difflib.get_close_matches(wanted, names, n=1)
    return [path for path, name in zip(paths, names, strict=True) if name in near]
