"""Accuracy on held-out problems with its confidence interval: type, recorded metrics, and text.

A measured set has the metrics `<key>/accuracy`, `<key>/low` and `<key>/high`, where `<key>` is `heldout` or
`heldout/<name>` (`config/heldout_keys.py`); a baseline file has the same numbers as `value`, `low` and `high`. In a
recorded file they may be missing, or not be numbers. Imports no heavy library.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from grpo_ray.config.heldout_keys import HELDOUT, heldout_label
from grpo_ray.storage.numbers import to_float

T = TypeVar("T")

ACCURACY_MEASURES = ("accuracy", "low", "high")
"""Names of a set's accuracy and of the ends of its interval within the set's metrics."""
BASELINE_MEASURES = ("value", "low", "high")
"""Their names in a baseline file."""


@dataclass(frozen=True, eq=False)
class Measure:
    """Mean over problems with its 95 % confidence interval. Unknown fields (NaN) compare as equal."""

    value: float
    """The mean: a share from 0 to 1, or a difference of two, from -1 to 1. NaN without problems."""
    low: float = math.nan
    """Lower end of the interval; NaN if it is unknown."""
    high: float = math.nan
    """Upper end of the interval; NaN if it is unknown."""
    count: int | None = None
    """Problems that the mean is taken over; None if their number is unknown."""

    def __eq__(self, other: object) -> bool:
        # Written by hand, because since Python 3.13 a dataclass compares NaN by value, and so is unequal to its copy.
        return isinstance(other, Measure) and self._known() == other._known()

    def __hash__(self) -> int:
        return hash(self._known())

    def _known(self) -> tuple[float | None, ...]:
        """Return the fields, None in place of NaN."""
        return tuple(None if field is None or math.isnan(field) else field for field in astuple(self))

    def __str__(self) -> str:
        return self.format(".3f")

    def format(self, number: str) -> str:
        """Return the value and, if it is known, its interval: `0.500 [0.400, 0.600]`.

        Args:
            number: format of each number, such as `.3f`.
        """
        return f"{self.value:{number}}{f' {self.interval(number)}' if self.has_interval else ''}"

    def interval(self, number: str = ".3f") -> str:
        """Return the ends of the interval in brackets."""
        return f"[{self.low:{number}}, {self.high:{number}}]"

    @property
    def has_interval(self) -> bool:
        """True if both ends of the interval are known."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def numbers(self, names: Sequence[str]) -> dict[str, float]:
        """Return value and ends of the interval by these names, as `recorded_measure` reads them."""
        return dict(zip(names, (self.value, self.low, self.high), strict=True))

    def overlaps(self, other: "Measure") -> bool:
        """Return True if the intervals have a point in common; both must be known."""
        return self.low <= other.high and other.low <= self.high


def recorded_measure(values: object, names: Sequence[str], count: int | None = None) -> Measure | None:
    """Read a measure from recorded numbers.

    Args:
        values: numbers by name, read from a file of a run; any value but a mapping has no measure.
        names: names of the mean and of both ends of its interval.
        count: problems that the mean is taken over.

    Returns:
        None if there is no finite mean.
    """
    if not isinstance(values, Mapping):
        return None
    value, low, high = (to_float(values.get(name)) for name in names)
    return Measure(value, low, high, count) if math.isfinite(value) else None


def heldout_measure(metrics: object, key: str, count: int | None = None) -> Measure | None:
    """Return the accuracy on one held-out set among metrics; None if it was not measured."""
    return recorded_measure(metrics, [f"{key}/{name}" for name in ACCURACY_MEASURES], count)


def heldout_measures(metrics: Mapping[str, Any]) -> dict[str, Measure]:
    """Return the accuracy on each held-out set among metrics, by key and in their order.

    With several sets, those of the primary one are not repeated under `heldout`.
    """
    keys = [name.removesuffix("/accuracy") for name in metrics if name.endswith("/accuracy")]
    found = {key: each for key in keys if is_heldout(key) and (each := heldout_measure(metrics, key)) is not None}
    if len(found) > 1:
        found.pop(HELDOUT, None)
    return found


def is_heldout(key: str) -> bool:
    """Return True for a key of a held-out set, the part of a metric's name before its last slash."""
    return f"{key}/".startswith(f"{HELDOUT}/")


def heldout_part(metrics: Mapping[str, T]) -> dict[str, T]:
    """Return the held-out metrics among the metrics of a step."""
    return {name: value for name, value in metrics.items() if name.startswith(f"{HELDOUT}/")}


def heldout_title(key: str, noun: str) -> str:
    """Return the title of a held-out set's measure.

    Args:
        noun: word for it (`RunFacts.heldout_noun`).
    """
    return f"held-out {noun}, {heldout_label(key)}".removesuffix(", ")


def format_measures(measures: Mapping[str, Measure]) -> str:
    """Format the accuracy on held-out sets, given by key: `math 0.500, gsm8k 0.750`."""
    return ", ".join(f"{heldout_label(key)} {measure.value:.3f}".strip() for key, measure in measures.items())


def format_heldout(metrics: Mapping[str, Any]) -> str | None:
    """Format the accuracy on each held-out set among metrics; None if there is none."""
    measures = heldout_measures(metrics)
    return f"held-out {format_measures(measures)}" if measures else None
