"""Repacking of an optimizer step's rows into micro-batches: selection of rows, and their division into passes.

`plan_micro_batches` is the entry point. `exact_savings.py` describes the savings and when each is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from grpo_ray.learner.batch import (
    Batch,
    concatenate,
    has_gradient,
    loss_mask,
    move_to,
    select_rows,
    trim_padding,
)
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.exact_savings import SavingsPlan
from grpo_ray.learner.passes import PASS_COST, PassLimit, count_positions, number_of_passes, split_rows
from grpo_ray.learner.trl_internals import Metrics

MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Loss types that divide by the number of rows in a micro-batch. `bnpo` divides by its tokens; `dapo`, `cispo` and
`vespo` divide by the tokens of the whole batch over all workers, a number that the batch carries."""

CLIP_METRICS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
"""TRL's means over all tokens (over rows, with ratios of sequences) to which a row without advantage adds 0."""

ENOUGH_TOKENS = 32
"""Number of tokens with which one row can prove the weight sync; with few, 16-bit rounding can look like a mismatch."""

UNEVEN = 1.1
"""Workers exchange rows if one has more than this many times the mean number of tokens to read."""

RowIndex = tuple[int, int]
"""Rank of the worker that generated a row, and the row's index among that worker's rows."""


@dataclass(frozen=True)
class LossScale:
    """Factors that convert the loss and metrics of a repacked micro-batch to those of the original one."""

    loss_factor: float = 1.0
    """Factor of the loss, which restores its original denominator."""
    row_weight: float = 1.0
    """Factor of a mean over the remaining rows: their weight in the mean over all micro-batches."""
    token_weight: float = 1.0
    """The same for a mean over tokens, with the tokens of all workers."""
    is_complete: bool = True
    """True if no row was left out."""


@dataclass(frozen=True)
class RowFacts:
    """Facts about each of B rows that determine whether it is read, and in which pass."""

    needed: list[bool]
    """True if the row must be read."""
    lengths: list[int]
    """Tokens of prompt and completion."""
    loss_tokens: list[int]
    """Tokens that count in the loss."""


def plan_micro_batches(
    batches: list[Batch], savings: SavingsPlan, loss_type: str, workers: Workers, tokens: int | None = None
) -> tuple[list[tuple[Batch, LossScale]], dict[str, float]]:
    """Repack the micro-batches of an optimizer step, or of the part of it that a generation batch has; collective.

    All workers read the same number of rows in each pass, so that their collective calls stay the same. At least one
    row of each worker is read (by any worker), so that the weight sync of its engine can be checked.
    Micro-batches without rows come first.

    Args:
        batches: micro-batches of equal size, as TRL split them.
        tokens: maximum token positions of a micro-batch on one worker. TRL's micro-batches must be small enough to fit
            at any length of their rows. None: a micro-batch has no more rows than TRL's.

    Returns:
        The same number of micro-batches, each with its scale, and the metrics of the saving.
    """
    if savings.regroup:
        limit = savings.pass_limit(len(batches[0]["advantages"]), tokens)
        kept = _regroup(concatenate(batches), limit, len(batches), savings, workers)
    else:
        kept = _select_in_place(batches, savings, workers)
    kept = [trim_padding(batch, savings.trim_prompts, savings.trim_completions) for batch in kept]
    return _scale(kept, batches, savings, loss_type, workers)


def _select_in_place(batches: list[Batch], savings: SavingsPlan, workers: Workers) -> list[Batch]:
    """Leave out rows, and keep the others in their micro-batch."""
    facts = [_row_facts(batch, savings) for batch in batches]
    device = batches[0]["advantages"].device
    needed = workers.gather(torch.tensor([float(sum(each.needed)) for each in facts], device=device)).amax(dim=0)
    kept = []
    for batch, each, most in zip(batches, facts, needed.tolist(), strict=True):
        rows = choose_rows(each.needed, each.loss_tokens, max(int(most), 1))
        kept.append(select_rows(batch, rows) if len(rows) < len(each.needed) else batch)
    return kept


def _scale(
    kept: list[Batch], batches: list[Batch], savings: SavingsPlan, loss_type: str, workers: Workers
) -> tuple[list[tuple[Batch, LossScale]], dict[str, float]]:
    """Compute the scale of each repacked micro-batch from the rows and tokens left over all workers; collective."""
    size, count = len(batches[0]["advantages"]), len(batches)
    device = batches[0]["advantages"].device
    tokens_left = torch.tensor([float(loss_mask(batch).sum()) for batch in kept], device=device)
    tokens_all = torch.tensor([float(loss_mask(batch).sum()) for batch in batches], device=device)
    if savings.regroup:
        tokens_all = tokens_all.mean().expand(count)
    rows_left = [len(batch["advantages"]) for batch in kept]
    positions = [
        sum(_positions(batch, savings) for batch in kept),
        sum(_positions(batch, SavingsPlan()) for batch in batches),
    ]
    totals = workers.gather(
        torch.cat([tokens_left, tokens_all, torch.tensor([sum(rows_left), *positions], device=device).float()])
    )
    worker_count, totals = len(totals), totals.sum(dim=0)
    token_shares = (totals[:count] / totals[count : 2 * count].clamp(min=1)).tolist()
    passes = sum(rows > 0 for rows in rows_left) / count
    scaled = []
    for batch, left, own_left, own_all, tokens in zip(
        kept, rows_left, tokens_left.tolist(), tokens_all.tolist(), token_shares, strict=True
    ):
        factor = left / size if loss_type in MEAN_OVER_ROWS else 1.0
        if loss_type == "bnpo":
            factor = max(own_left, 1.0) / max(own_all, 1.0)
        scaled.append((batch, LossScale(factor, left / size * passes, tokens * passes, left == size)))
    metrics = {
        "learner/completions_share": totals[-3].item() / (size * count * worker_count),
        "learner/positions_share": (totals[-2] / totals[-1]).item(),
        "learner/tokens_saved": (totals[count : 2 * count].sum() - totals[:count].sum()).item(),
    }
    return scaled, metrics


def _regroup(pool: Batch, limit: PassLimit, count: int, savings: SavingsPlan, workers: Workers) -> list[Batch]:
    """Build this worker's `count` micro-batches from the rows of all workers; collective."""
    device = pool["advantages"].device
    facts = _gather_facts(_row_facts(pool, savings), device, workers)
    assignment = assign_rows(facts, savings.share)
    lengths = [[facts[rank].lengths[row] for rank, row in rows] for rows in assignment.rows]
    passes = number_of_passes(lengths, limit, count, PASS_COST[device.type])
    parts = split_rows(lengths[workers.rank], passes, limit, lengths)
    if assignment.is_shared:
        rows = _exchange_rows(pool, assignment, workers)
        # VESPO adds up the logarithms of ratios over padding too (`exact_savings.py`): there they have to be 0.
        fill = {"importance_sampling_ratio": 1.0}
        filled = [concatenate([rows[index] for index in part], fill=fill) for part in parts]
    else:
        own = [row for _, row in assignment.rows[workers.rank]]
        filled = [select_rows(pool, [own[index] for index in part]) for part in parts]
    return [select_rows(pool, [])] * (count - passes) + filled


@dataclass(frozen=True)
class RowAssignment:
    """Rows that each worker reads."""

    rows: list[list[RowIndex]]
    """Rows by worker; all workers have the same number."""
    is_shared: bool
    """True if a worker may read rows of others."""


def assign_rows(facts: Sequence[RowFacts], share: bool) -> RowAssignment:
    """Choose the rows that are read, and the worker that reads each.

    Args:
        facts: facts about each worker's rows; all workers have the same number of rows.
        share: let workers exchange rows if one of them has more than `UNEVEN` times the mean to read.
    """
    own = [choose_rows(each.needed, each.loss_tokens, max(sum(each.needed), 1)) for each in facts]
    loads = [sum(each.lengths[row] for row in rows) for each, rows in zip(facts, own, strict=True)]
    if not (share and max(loads) > UNEVEN * sum(loads) / len(loads)):
        most = max(map(len, own))
        rows = [
            [(rank, row) for row in choose_rows(each.needed, each.loss_tokens, most)] for rank, each in enumerate(facts)
        ]
        return RowAssignment(rows, is_shared=False)
    most = -(-sum(map(len, own)) // len(own))
    chosen = {(rank, row) for rank, rows in enumerate(own) for row in rows}
    indices = [(rank, row) for rank, each in enumerate(facts) for row in range(len(each.lengths))]
    read = choose_rows(
        [index in chosen for index in indices],
        [facts[rank].loss_tokens[row] for rank, row in indices],
        most * len(own),
    )
    balanced = balance_rows([indices[at] for at in read], lambda index: facts[index[0]].lengths[index[1]], len(own))
    return RowAssignment(balanced, is_shared=True)


def _exchange_rows(pool: Batch, assignment: RowAssignment, workers: Workers) -> list[Batch]:
    """Return this worker's rows, each a batch of one row without padding, in the order assigned; collective."""
    mine = assignment.rows[workers.rank]
    generated_here = sorted(row for rows in assignment.rows for rank, row in rows if rank == workers.rank)
    here = {(workers.rank, row): trim_padding(select_rows(pool, [row])) for row in generated_here}
    given = {index: move_to(row, "cpu") for index, row in here.items() if index not in mine}
    received = workers.exchange(given)
    device = pool["advantages"].device
    return [here[index] if index in here else move_to(received[index], device) for index in mine]


def choose_rows(needed: Sequence[bool], lengths: Sequence[int], count: int) -> list[int]:
    """Return the rows that are needed, filled up to `count` with others, in their original order.

    The others are the cheapest that can prove the weight sync: the shortest of at least `ENOUGH_TOKENS` tokens, then
    the longest of those that are too short.
    """
    others = [row for row in range(len(needed)) if not needed[row]]
    others.sort(key=lambda row: (lengths[row] < ENOUGH_TOKENS, abs(lengths[row] - ENOUGH_TOKENS), row))
    chosen = [row for row in range(len(needed)) if needed[row]]
    return sorted(chosen + others[: count - len(chosen)])


def balance_rows(rows: Sequence[RowIndex], length: Callable[[RowIndex], int], workers: int) -> list[list[RowIndex]]:
    """Assign rows to workers, so that all have the same number of rows and nearly the same number of tokens.

    The longest rows are assigned first, in rounds that go through the workers forwards and backwards by turns.
    """
    ordered = sorted(rows, key=lambda row: (-length(row), row))
    assigned: list[list[RowIndex]] = [[] for _ in range(workers)]
    for number, row in enumerate(ordered):
        turn, rank = divmod(number, workers)
        assigned[rank if turn % 2 == 0 else workers - 1 - rank].append(row)
    return assigned


def _row_facts(batch: Batch, savings: SavingsPlan) -> RowFacts:
    tokens = loss_mask(batch).sum(dim=1)
    lengths = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    needed = has_gradient(batch) if savings.rows else torch.ones_like(tokens, dtype=torch.bool)
    return RowFacts(needed.tolist(), lengths.tolist(), tokens.tolist())


def _gather_facts(own: RowFacts, device: torch.device, workers: Workers) -> list[RowFacts]:
    """Return the facts about every worker's rows, by rank; collective."""
    table = workers.gather(torch.tensor([*own.needed, *own.lengths, *own.loss_tokens], device=device).float())
    needed, lengths, tokens = (part.long().tolist() for part in table.chunk(3, dim=1))
    return [
        RowFacts([bool(need) for need in each[0]], each[1], each[2])
        for each in zip(needed, lengths, tokens, strict=True)
    ]


def _positions(batch: Batch, savings: SavingsPlan) -> int:
    """Count the token positions that a pass reads, including its remaining padding."""
    sides = (batch["prompt_mask"], batch["completion_mask"])
    if savings.layout == "padded":
        return sum(mask.numel() for mask in sides)
    return count_positions(sum(mask.sum(dim=1) for mask in sides).tolist(), savings.layout)


def scale_metrics(metrics: Metrics, scale: LossScale, importance_level: str) -> None:
    """Scale the metrics that TRL appended for a repacked micro-batch to those of the original one.

    Args:
        importance_level: TRL's `importance_sampling_level`, `token` or `sequence`.
    """
    weight = scale.row_weight if importance_level == "sequence" else scale.token_weight
    for name in CLIP_METRICS:
        if name in metrics:
            metrics[name][-1] *= weight
    if not scale.is_complete and "clip_ratio/low_min" in metrics:
        metrics["clip_ratio/low_min"][-1] = 0.0  # a row without advantage is never clipped
