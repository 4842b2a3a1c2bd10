"""Fields of other libraries in terms of JSON types, from a generated table: checked without importing the library."""

from dataclasses import dataclass
from typing import Any

from grpo_ray.config.fields import VALUES, values_text

CLASSES: dict[str, Any] = {
    "boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "array": (list, tuple),
    "null": type(None),
}  # fmt: skip
"""JSON type -> the classes of its values in YAML."""


@dataclass(frozen=True)
class JsonField:
    """Types and values that a field takes."""

    types: tuple[str, ...] = ()
    """JSON types; empty if they are not checked."""
    values: tuple[str, ...] = ()
    """Texts of an enumeration; empty for any text."""

    @property
    def allowed(self) -> str:
        """Noun phrase of the allowed values, such as "true or false, or null"."""
        texts = [{"enum": list(self.values)}] if self.values else [{"type": "string"}] if "string" in self.types else []
        lists = [{VALUES: "a list"}] if "array" in self.types else []
        others = [{"type": kind} for kind in self.types if kind not in ("array", "string")]
        return values_text({"anyOf": [*texts, *lists, *others]})

    def fits(self, value: Any) -> bool:
        """Return whether a value has one of the types, and is one of the values if it is text."""
        if not self.types:
            return True
        if isinstance(value, str) and self.values:
            return value in self.values
        if isinstance(value, bool):
            return "boolean" in self.types
        return any(isinstance(value, CLASSES[kind]) for kind in self.types)
