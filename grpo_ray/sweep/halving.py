"""Choice of the trials that stay at a rung of successive halving (arXiv 1502.07943)."""

import math
from collections.abc import Mapping
from fractions import Fraction


def rank(values: Mapping[str, float | None]) -> list[str]:
    """Return the trials by falling value; those without one come last. Equal ones keep the order of `values`.

    Args:
        values: trial -> its metric; None if it is not known.
    """

    def key(name: str) -> tuple[bool, float]:
        value = values[name]
        is_known = value is not None and not math.isnan(value)
        return (not is_known, -value if value is not None and is_known else 0.0)

    return sorted(values, key=key)  # stable


def choose(values: Mapping[str, float | None], keep: float) -> list[str]:
    """Return the trials that stay: the best share `keep`, rounded up to whole trials, in the order of `values`.

    Args:
        values: trial -> its metric; None if it is not known.
        keep: between 0 and 1.
    """
    # As a fraction: 0.07 * 100 is above 7 in floating point, and would keep eight of a hundred trials.
    count = max(1, math.ceil(Fraction(str(keep)) * len(values)))
    kept = set(rank(values)[:count])
    return [name for name in values if name in kept]
