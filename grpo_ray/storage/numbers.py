"""Conversion of numbers from a run's files, which may hold any other value in their place, and for JSON."""

import math
from collections.abc import Mapping
from typing import Any

LARGEST_NUMBER = 1e15
"""Upper bound of plausible steps, times, durations and counts; larger numbers count as malformed."""


def is_plausible(value: object) -> bool:
    """Return True for a step, a time, a duration or a count: a number from 0 to below `LARGEST_NUMBER`."""
    return 0 <= to_float(value) < LARGEST_NUMBER


def to_float(value: object) -> float:
    """Convert a number of JSON or YAML to a float; NaN for anything else and for integers beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def to_finite(value: object) -> float | None:
    """Convert a finite number of JSON or YAML to a float; None for anything else."""
    number = to_float(value)
    return number if math.isfinite(number) else None


def to_bounded(value: object) -> float | None:
    """Convert a number whose size is at most `LARGEST_NUMBER` to a float; None for anything else."""
    number = to_finite(value)
    return number if number is not None and abs(number) <= LARGEST_NUMBER else None


def json_values(value: Any) -> Any:
    """Return nested data with None in place of numbers that JSON does not have: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return value
