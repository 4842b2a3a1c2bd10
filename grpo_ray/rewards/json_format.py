"""Reward for completions whose answer is one JSON document, which may have to match a JSON schema.

A schema can have regular expressions and alternatives whose time grows exponentially with the text, so documents are
read and validated in a process with limits.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.processes.limited_process import LimitedProcess, StartError, cpu_limit, serve
from grpo_ray.rewards.completions import Completion, completion_text

CPU_SECONDS = 1.0
"""CPU time for one document. A usual one takes less than a millisecond."""
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 20
"""Characters of the longest document."""

_process = LimitedProcess("grpo_ray.rewards.json_format", needs="jsonschema")


class JsonFormat:
    """Reward for a completion whose answer is one JSON document that matches a schema: 1.0, else 0.0.

    The answer is the text after the last `</think>`, with or without a fence around it. A key that occurs twice in an
    object, and the numbers NaN and Infinity, are not JSON. A document beyond the limits of its process earns 0.0.
    """

    def __init__(self, *, schema: Mapping[str, Any] | None = None, credit: float = 0.0) -> None:
        """
        Args:
            schema: JSON schema; the draft is that of its `$schema`, or 2020-12. Formats are not checked. None: any
                document matches.
            credit: reward for a document that does not match the schema.

        Raises:
            RewardError: the schema is not valid, or refers to a document outside of it.
        """
        self.schema = {} if schema is None else dict(schema)
        self.credit = credit
        _require_valid(self.schema)

    def __call__(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        """Return the reward of each completion.

        Raises:
            RewardError: the schema has a reference to nothing, or the process cannot run.
        """
        return [self._reward(answer_text(completion_text(completion))) for completion in completions]

    def _reward(self, text: str) -> float:
        if not text or len(text) > MAX_CHARACTERS:
            return 0.0
        try:
            answer = _process.ask(json.dumps([self.schema, text]).encode())
        except StartError as error:
            raise RewardError(f"json_format: {error}") from None
        kind, message = ("invalid", "") if answer is None else json.loads(answer)
        if kind == "schema":
            raise RewardError(f"rewards.settings.json_format.schema: {message}")
        return {"valid": 1.0, "other": self.credit, "invalid": 0.0}[kind]


def answer_text(completion: str) -> str:
    """Return the answer of a completion without the fence around it; "" if its reasoning never ends."""
    text = completion.rpartition("</think>")[2]
    if "<think>" in text:
        return ""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        first, _, rest = text[3:-3].partition("\n")
        text = rest if first.strip() in ("", "json") else text
    return text.strip()


def _require_valid(schema: dict[str, Any]) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        json.dumps(schema)
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        message = error.message.splitlines()[0][:300]
        raise RewardError(f"rewards.settings.json_format.schema{f', {place}' if place else ''}: {message}") from None
    except (TypeError, ValueError) as error:
        raise RewardError(f"rewards.settings.json_format.schema is not JSON: {error}") from None
    if outside := next((each for each in _references(schema) if not each.startswith("#")), None):
        raise RewardError(
            f"rewards.settings.json_format.schema refers to {outside!r}; define it inside of the schema (`#/$defs/...`)"
        )


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from _references(each)


# The process


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    _validator("{}")  # imports jsonschema before the confinement
    serve(descriptor, _answer, MEMORY_BYTES)


def _answer(request: bytes) -> bytes:
    """Validate the document of a request; after `CPU_SECONDS` a signal ends the process."""
    from referencing.exceptions import Unresolvable

    schema, text = json.loads(request)
    validator = _validator(json.dumps(schema))
    try:
        with cpu_limit(CPU_SECONDS):
            document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
            result = ["valid" if validator.is_valid(document) else "other", ""]
    except Unresolvable as error:
        result = ["schema", f"the reference {error.ref!r} leads to nothing"]
    except (ValueError, ArithmeticError, RecursionError, MemoryError):
        result = ["invalid", ""]
    return json.dumps(result).encode()


@cache
def _validator(schema: str) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    parsed = json.loads(schema)
    # An empty registry: nothing is fetched from the network.
    return validator_for(parsed, default=Draft202012Validator)(parsed, registry=Registry())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
