"""Division of a worker's rows into forward passes: as few as the limit allows, with little padding.

Arithmetic on lengths, without tensors. The same functions plan the passes of the loss and those that only score
completions, on a CPU and on a GPU; only `PASS_COST` depends on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_ray.models.memory import PASS_COST as GPU_PASS_COST

Layout = Literal["padded", "shifted", "packed"]
"""Arrangement of rows in a forward pass (`forward_pass.py`): TRL's own; shifted, with all padding at the end of a row;
or packed one after the other, without padding."""

PASS_COST = {"cpu": 128, "cuda": GPU_PASS_COST}
"""Device -> fixed cost of a forward and backward pass, in token positions: every pass reads all weights and writes all
gradients. CPU: measured with 20 million parameters and 2 threads: 0.10 s a pass, 0.85 ms a position; both grow with the
policy. CUDA: assumed, as in the memory estimate, which uses it to choose the size of passes."""


@dataclass(frozen=True, kw_only=True)
class PassLimit:
    """Limit of one worker's forward pass; a pass may always hold one row."""

    rows: int | None = None
    """Number of rows; None for no limit."""
    tokens: int | None = None
    """Token positions, as `count_positions` counts them; None for no limit."""
    layout: Layout = "shifted"
    """Arrangement of the rows."""

    def fitting(self, lengths: Sequence[int], first: int) -> int:
        """Return how many rows fit into one pass that begins with row `first`.

        Args:
            lengths: tokens of each row, the longest first.
        """
        most = len(lengths) - first
        if self.rows is not None:
            most = min(most, self.rows)
        if self.tokens is None:
            return most
        if self.layout != "packed":
            return max(1, min(most, self.tokens // max(lengths[first], 1)))
        count, total = 1, lengths[first]
        while count < most and total + lengths[first + count] <= self.tokens:
            total += lengths[first + count]
            count += 1
        return count


def count_positions(lengths: Sequence[int], layout: Layout) -> int:
    """Count the token positions of a pass over rows of these lengths, with the padding between them."""
    return sum(lengths) if layout == "packed" else len(lengths) * max(lengths, default=0)


def fewest_passes(lengths: Sequence[int], limit: PassLimit, others: Sequence[Sequence[int]] = ()) -> int:
    """Return the smallest number of passes in which rows of these lengths can be read.

    Args:
        lengths: tokens of each row.
        others: lengths of the other workers' rows, if all must read the same number of rows in each pass.
    """
    ordered = _longest_first(lengths, others)
    passes = first = 0
    while first < len(lengths):
        first += min(limit.fitting(each, first) for each in ordered)
        passes += 1
    return passes


def split_rows(
    lengths: Sequence[int], passes: int, limit: PassLimit, others: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Split rows into parts for a number of passes, the longest rows together; ties keep a fixed order.

    All parts have the same number of rows (or one less), except that a part of long rows ends at the limit.

    Args:
        lengths: tokens of each row.
        passes: from `fewest_passes` to the number of rows.
        others: lengths of the other workers' rows, if each pass must have the same number of rows on all workers: TRL
            gathers one number per row in the loss, and a gather of different sizes ends the process.

    Returns:
        The rows' indices in each part; no part is empty.

    Raises:
        ValueError: the rows do not fit, or there are fewer rows than passes.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    ordered = _longest_first(lengths, others)
    parts, first = [], 0
    for left in range(passes, 0, -1):
        even = -(-(len(order) - first) // left)
        # Later rows are shorter, so rows that a part leaves to later parts fit there.
        end = first + min(even, *(limit.fitting(each, first) for each in ordered)) if even else first
        parts.append(order[first:end])
        first = end
    if first < len(order) or not all(parts):
        raise ValueError(f"{len(order)} rows of up to {max(lengths, default=0)} tokens do not fill {passes} passes")
    return parts


def _longest_first(lengths: Sequence[int], others: Sequence[Sequence[int]]) -> list[list[int]]:
    return [sorted(each, reverse=True) for each in (lengths, *others)]


def number_of_passes(lengths: Sequence[Sequence[int]], limit: PassLimit, most: int, pass_cost: int) -> int:
    """Return the number of passes that minimizes the time of the slowest worker.

    More passes have less padding, and each has a fixed cost. All workers make the same number of passes, with the same
    number of rows in each, because a sharded learner gathers its weights in every pass.

    Args:
        lengths: lengths of each worker's rows; all workers have the same number of rows.
        most: largest number of passes.
        pass_cost: fixed cost of a pass, in token positions.

    Raises:
        ValueError: `most` passes are too few for the limit.
    """
    least = fewest_passes(lengths[0], limit, lengths[1:])
    if least > most:
        longest = max(max(own) for own in lengths)
        raise ValueError(f"rows of up to {longest} tokens need {least} passes under {limit}, but there are only {most}")
    no_padding = max(sum(own) for own in lengths)
    best, best_cost = least, None
    for passes in range(least, min(most, len(lengths[0])) + 1):
        if best_cost is not None and passes * pass_cost + no_padding >= best_cost:
            break  # neither this number nor a larger one can be better
        cost = passes * pass_cost + max(
            sum(
                count_positions([own[row] for row in part], limit.layout)
                for part in split_rows(own, passes, limit, lengths)
            )
            for own in lengths
        )
        if best_cost is None or cost < best_cost:
            best, best_cost = passes, cost
    return best
