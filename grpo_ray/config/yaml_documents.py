"""Reading and writing of YAML: configs, values of overrides, and the `config.yaml` of a run folder."""

import re
from typing import Any

import yaml

MAX_BYTES = 1 << 18
"""Size limit of an untrusted document, bytes."""
MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`: other keys of the mapping are meant to override the values that it merges."""
FLOAT = "tag:yaml.org,2002:float"
EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Numbers such as 1e-6, which YAML 1.1, and therefore PyYAML, treats as text."""


class YamlError(ValueError):
    """A text cannot be read as YAML; the message is one line."""


class RepeatedKeyError(YamlError):
    """A mapping in a YAML document has a key twice."""

    def __init__(self, key: str, first_line: int, line: int):
        super().__init__(key, first_line, line)
        self.key, self.first_line, self.line = key, first_line, line

    def __str__(self) -> str:
        return f"repeats the key {self.key!r} of line {self.first_line}; merge them, or remove one"


class _Loader(yaml.SafeLoader):
    """Loader of plain data that reads 1e-6 as a number and refuses a repeated key.

    PyYAML silently takes the last value of a repeated key: a second section `grpo` would replace the first one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping. Raises RepeatedKeyError."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise RepeatedKeyError(key.value, lines[key.value], line)
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _LoaderWithoutAliases(_Loader):
    """Loader for untrusted documents that refuses aliases, because nested ones can expand to any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Dumper that puts texts such as "1e5" in quotes, so that they are read as texts again."""


_Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+0123456789"))
_Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+0123456789"))


def parse_yaml(text: str | bytes, *, is_trusted: bool = True) -> Any:
    """Parse a document of plain data.

    Args:
        is_trusted: False for an untrusted document: its size is limited, and aliases are refused.

    Raises:
        RepeatedKeyError: a mapping has a key twice.
        YamlError: the document is not YAML, or is refused.
    """
    if not is_trusted and len(text) > MAX_BYTES:
        raise YamlError(f"it has {len(text)} bytes; the limit is {MAX_BYTES}")
    try:
        return yaml.load(text, Loader=_Loader if is_trusted else _LoaderWithoutAliases)
    except RepeatedKeyError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise YamlError(" ".join(str(error).split())) from None
    # PyYAML converts some values without checking them: "!!bool maybe", "!!set [1]", 1:00:...:00.0.
    except (KeyError, IndexError, AttributeError, TypeError, OverflowError):
        raise YamlError("a value does not have the type of its tag") from None


def dump_yaml(value: Any) -> str:
    """Write plain data as YAML that `parse_yaml` reads as an equal value; keys keep their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
