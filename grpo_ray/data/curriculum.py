"""Curriculum of an epoch, derived from the groups of earlier epochs."""

from typing import TYPE_CHECKING

import numpy as np

from grpo_ray.storage.records.group_columns import SORT_KEYS, solve_counts

if TYPE_CHECKING:
    import pyarrow as pa


def plan_curriculum(
    table: "pa.Table", epoch: int, skip_solved: int | None, prefer_mixed: bool
) -> tuple[list[str], list[str]]:
    """Choose which problems an epoch skips and which come first, from the groups of earlier epochs.

    A group is solved if it has completions and all of them are correct; an unknown verdict makes it unsolved.

    Args:
        table: from `groups_table` or `read_rollouts`, rows in any order; rows of `epoch` and later ones are ignored.
        epoch: the epoch that begins.
        skip_solved: skip a problem whose last `skip_solved` groups are solved; None or 0 skips nothing. Only problems
            that the previous epoch used are skipped, so a solved problem returns every other epoch, in case the policy
            no longer solves it.
        prefer_mixed: prefer problems that have both correct and incorrect completions over all their groups
            (completions of unknown verdict do not count): their groups have a gradient.

    Returns:
        Sorted ids of the skipped problems, and sorted ids of the preferred problems.
    """
    import pyarrow.compute as pc

    table = table.filter(pc.field("epoch") < epoch).sort_by([("problem", "ascending"), *SORT_KEYS[:2]])
    if not len(table):
        return [], []
    known, correct, solved = solve_counts(table)

    # The rows of problem i are begins[i] to ends[i] - 1, in order of step.
    id_of_row = np.array(table["problem"].to_pylist(), dtype=str)
    begins = np.flatnonzero(np.append(True, id_of_row[1:] != id_of_row[:-1]))
    ends = np.append(begins[1:], len(id_of_row))
    ids = id_of_row[begins]

    skipped = np.zeros(len(ids), dtype=bool)
    if skip_solved:
        solved_before = np.append(0, np.cumsum(solved))  # solved_before[r]: solved groups in rows 0 to r - 1
        last_groups = np.maximum(ends - skip_solved, begins)
        used_just_before = table["epoch"].to_numpy()[ends - 1] == epoch - 1
        skipped = used_just_before & (solved_before[ends] - solved_before[last_groups] == skip_solved)

    preferred = np.zeros(len(ids), dtype=bool)
    if prefer_mixed:
        known, correct = np.add.reduceat(known, begins), np.add.reduceat(correct, begins)
        preferred = (correct > 0) & (correct < known) & ~skipped
    return ids[skipped].tolist(), ids[preferred].tolist()
