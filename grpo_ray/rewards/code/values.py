"""Plain Python values as JSON: arguments and results that pass between a program and its tests.

Both sides run this module's source, one of them in an interpreter without grpo_ray, so it imports nothing of
grpo_ray. JSON and not pickle: unpickling a program's result could run any code.
"""

import json
from typing import Any

MAX_DEPTH = 100


class NotPlainError(ValueError):
    """A value that is not made of numbers, texts, bytes, lists, tuples, sets and mappings."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value in JSON's types; instances of subclasses become those of the base. Raises NotPlainError."""
    if depth > MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    for name, kind in kinds.items():
        if isinstance(value, kind):
            items = [encode(each, depth + 1) for each in value]
            return {name: sorted(items, key=json.dumps) if "set" in name else items}
    if isinstance(value, dict):
        return {"dict": [[encode(key, depth + 1), encode(each, depth + 1)] for key, each in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    item = getattr(value, "tolist", None)  # of NumPy
    if callable(item) and type(value).__module__.partition(".")[0] == "numpy":
        return encode(item(), depth + 1)
    raise NotPlainError(f"an object of {type(value).__name__}")


def decode(value: Any, depth: int = 0) -> Any:
    """Return the value of `encode`. Raises NotPlainError for any other content."""
    if depth > 2 * MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise NotPlainError("unknown content")
    ((name, content),) = value.items()
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    try:
        if name in kinds:
            return kinds[name](decode(each, depth + 1) for each in content)
        if name == "dict":
            return {decode(key, depth + 1): decode(each, depth + 1) for key, each in content}
        if name == "bytes":
            return bytes.fromhex(content)
        if name == "complex":
            return complex(*content)
    except (TypeError, ValueError) as error:  # an unhashable key, for example
        raise NotPlainError(str(error)) from None
    raise NotPlainError("unknown content")
