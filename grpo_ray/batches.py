"""A worker's batches: the problems of each, and what of its completions the learner reads in which micro-batches.

`thrift.py` says when less is read than there is; `arrange` is the way in.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_ray.errors import DataError
from grpo_ray.problem import Problem

Batch = dict[str, Any]
"""One micro-batch, as TRL's loss takes it: tensors with a row for each completion, and scalars."""

PER_ROW = ("grpo", "sapo", "dr_grpo", "luspo")
"""Loss types that divide by the number of rows in a micro-batch. `bnpo` divides by its tokens, and `dapo`, `cispo` and
`vespo` by those of the whole batch over all workers, which stand in the batch."""

COMPLETION_SIDE = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
KNOWN = {*COMPLETION_SIDE, "prompt_ids", "prompt_mask", "advantages", "num_items_in_batch", "part"}

ENOUGH_TOKENS = 32
"""Tokens that a row should have to prove the sync alone: over a few, 16-bit rounding can look like a mismatch."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Which savings are made; `thrift.py` says what each is."""

    one_pass: bool = False
    rows: bool = False
    regroup: bool = False
    fewer_passes: bool = False
    trim_prompts: bool = False
    trim_completions: bool = False
    pack: bool = False
    head: bool = False

    @property
    def arranges(self) -> bool:
        """Whether batches are made smaller."""
        return self.rows or self.regroup or self.trim_prompts or self.trim_completions


def is_text(batch: Batch) -> bool:
    """Whether a batch holds nothing but text; one with images is left as it is."""
    return all(value is None or key in KNOWN for key, value in batch.items())


def loss_mask(batch: Batch) -> torch.Tensor:
    """(B, T), 1 on tokens that count in the loss."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def has_gradient(batch: Batch) -> torch.Tensor:
    """(B,) bool: whether a row can move the policy."""
    return (batch["advantages"] != 0) & loss_mask(batch).any(dim=1)


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, in the given order."""
    index = torch.tensor(rows, dtype=torch.long, device=batch["advantages"].device)
    return {k: v[index] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in batch.items()}


def choose_rows(needed: Sequence[bool], lengths: Sequence[int], count: int) -> list[int]:
    """The rows that are needed, filled up to `count` with others, in their old order.

    Others are the cheapest that can prove the sync: the shortest of at least ENOUGH_TOKENS tokens, else the longest.
    """
    others = [row for row in range(len(needed)) if not needed[row]]
    others.sort(key=lambda row: (lengths[row] < ENOUGH_TOKENS, abs(lengths[row] - ENOUGH_TOKENS), row))
    chosen = [row for row in range(len(needed)) if needed[row]]
    return sorted(chosen + others[: count - len(chosen)])


def by_length(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Deal rows out to parts of equal number (or one less), the longest together, in a fixed order."""
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    least, more = divmod(len(ordered), parts)
    ends = [least * part + min(part, more) for part in range(parts + 1)]
    return [ordered[first:end] for first, end in itertools.pairwise(ends)]


def trimmed(batch: Batch, prompts: bool = True, completions: bool = True) -> Batch:
    """A batch without the columns that are padding in every row."""
    if prompts:
        first = _first(batch["prompt_mask"].any(dim=0))
        batch = batch | {key: batch[key][:, first:] for key in ("prompt_ids", "prompt_mask")}
    if completions:
        used = batch["completion_mask"].any(dim=0)
        width = max(1, len(used) - _first(used.flip(0)))
        batch = batch | {
            key: batch[key][:, :width] for key in COMPLETION_SIDE if isinstance(batch.get(key), torch.Tensor)
        }
    return batch


def _first(used: torch.Tensor) -> int:
    """Index of the first True; the length where there is none."""
    return int(used.int().argmax()) if used.any() else len(used)


@dataclass(frozen=True)
class Part:
    """What is left of a micro-batch, against what it was. Shares are over all workers."""

    loss_factor: float = 1.0
    """What the loss of the rows left is to be multiplied with, so that the denominator is the old one."""
    row_weight: float = 1.0
    """What a mean over its rows is to be multiplied with to be their part of the mean over all micro-batches."""
    token_weight: float = 1.0
    """The same for a mean over its tokens."""
    whole: bool = True
    """Whether no row was left out."""


def arrange(
    batches: list[Batch], savings: Savings, loss_type: str, over_workers: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[tuple[Batch, Part]], dict[str, float]]:
    """The micro-batches of a generation batch with less in them, and what was saved.

    over_workers: gives (workers, N) from each worker's (N,); every worker must call it.
    Every worker keeps as many rows in a micro-batch as the others, so that the passes' collective calls stay the same,
    and at least one row of all, which proves the sync. Micro-batches without rows come first.
    Returns each micro-batch with its `Part`, and the metrics.
    """
    size, count = len(batches[0]["advantages"]), len(batches)
    # Rows stay in their micro-batch, or all go into one pot and are dealt out again.
    pots = [merged(batches)] if savings.regroup else batches
    facts = [_facts(pot, savings) for pot in pots]
    device = batches[0]["advantages"].device
    needed = over_workers(torch.tensor([float(sum(need)) for need, _, _ in facts], device=device)).amax(dim=0)
    kept: list[Batch] = []
    for pot, (need, lengths, tokens), most in zip(pots, facts, needed.tolist(), strict=True):
        if savings.regroup:
            rows = choose_rows(need, tokens, max(int(most), 1 if savings.fewer_passes else count))
            filled = -(-len(rows) // size) if savings.fewer_passes else count
            dealt: list[list[int]] = [[]] * (count - filled)
            dealt += by_length(lengths, rows, filled)
            kept += [rows_of(pot, each) for each in dealt]
        else:
            rows = choose_rows(need, tokens, max(int(most), 1))
            kept.append(rows_of(pot, rows) if len(rows) < size else pot)
    kept = [trimmed(batch, savings.trim_prompts, savings.trim_completions) for batch in kept]
    tokens_left = torch.tensor([float(loss_mask(batch).sum()) for batch in kept], device=device)
    tokens_all = torch.tensor([float(loss_mask(batch).sum()) for batch in batches], device=device)
    if savings.regroup:
        tokens_all = tokens_all.mean().expand(count)
    read = [sum(_positions(batch, savings.pack) for batch in kept), sum(_positions(batch, False) for batch in batches)]
    totals = over_workers(torch.cat([tokens_left, tokens_all, torch.tensor(read, device=device).float()])).sum(dim=0)
    token_shares = (totals[:count] / totals[count : 2 * count].clamp(min=1)).tolist()
    passes = sum(len(batch["advantages"]) > 0 for batch in kept) / count
    made = []
    for batch, own_left, own_all, tokens in zip(
        kept, tokens_left.tolist(), tokens_all.tolist(), token_shares, strict=True
    ):
        rows_left = len(batch["advantages"]) / size
        factor = rows_left if loss_type in PER_ROW else 1.0
        if loss_type == "bnpo":
            factor = max(own_left, 1.0) / max(own_all, 1.0)
        made.append((batch, Part(factor, rows_left * passes, tokens * passes, rows_left == 1.0)))
    metrics = {
        "learner/completions_share": sum(len(batch["advantages"]) for batch in kept) / (size * count),
        "learner/positions_share": (totals[-2] / totals[-1]).item(),
        "learner/tokens_saved": (totals[count : 2 * count].sum() - totals[:count].sum()).item(),
    }
    return made, metrics


@dataclass(frozen=True)
class Packed:
    """The rows of a batch one after the other, without padding. N tokens in all."""

    input_ids: torch.Tensor
    """(1, N)"""
    position_ids: torch.Tensor
    """(1, N), from 0 in each row: by them a model knows where rows begin."""
    labels: torch.Tensor
    """(1, N), -100 where no token of a completion is."""
    mask: torch.Tensor
    """(B, L) bool, where the tokens came from."""

    def spread(self, values: torch.Tensor, completions: int) -> torch.Tensor:
        """A model's values of all tokens but the first, (1, N - 1), as (B, `completions`), 0 on padding."""
        values = torch.nn.functional.pad(values[0], (1, 0))
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)[:, -completions:]


def packed(input_ids: torch.Tensor, attention_mask: torch.Tensor, completions: int) -> Packed:
    """Pack (B, L) tokens, of which the last `completions` columns are completions, by their (B, L) mask."""
    mask = attention_mask.bool()
    labels = input_ids.clone()
    labels[:, :-completions] = -100
    positions = mask.long().cumsum(dim=1) - 1
    return Packed(input_ids[mask][None], positions[mask][None], labels[mask][None], mask)


def merged(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one batch again."""
    return {
        key: torch.cat([batch[key] for batch in batches]) if isinstance(value, torch.Tensor) and value.ndim else value
        for key, value in batches[0].items()
    }


def _facts(batch: Batch, savings: Savings) -> tuple[list[bool], list[int], list[int]]:
    """Of each row: whether it must stay, its length with the prompt, and its tokens that count."""
    tokens = loss_mask(batch).sum(dim=1)
    lengths = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    need = has_gradient(batch) if savings.rows else torch.ones_like(tokens, dtype=torch.bool)
    return need.tolist(), lengths.tolist(), tokens.tolist()


def _positions(batch: Batch, pack: bool) -> int:
    """Token positions that a pass reads, padding included if it is not left out."""
    sides = (batch["prompt_mask"], batch["completion_mask"])
    return sum(int(mask.sum()) if pack else mask.numel() for mask in sides)


class GroupBatches:
    """The batches of one worker: `prompts` problems at a time, each `num_generations` times in a row.

    TRL generates once for a batch and takes several forward passes (and, with num_iterations > 1, several steps)
    from it; its loop asks for the batch again each time. A step that is topped up draws further ones in between.
    """

    def __init__(self, problems: Iterable[tuple[Problem, int]], prompts: int, num_generations: int, repeats: int):
        self.problems = iter(problems)
        self.prompts = prompts
        self.num_generations = num_generations
        self.repeats = repeats

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for first in self.problems:
            yield from itertools.repeat(self._batch([first]), self.repeats)

    def draw(self) -> list[dict[str, Any]]:
        """One more batch, for the step that is under way. Raises DataError if there is none."""
        return self._batch([])

    def _batch(self, drawn: list[tuple[Problem, int]]) -> list[dict[str, Any]]:
        drawn += itertools.islice(self.problems, self.prompts - len(drawn))
        if len(drawn) < self.prompts:
            raise DataError(f"the stream of problems ended with {len(drawn)} of a step's {self.prompts} problems")
        return [
            problem.row() | {"epoch": epoch, "index": index}
            for problem, epoch in drawn
            for index in range(self.num_generations)
        ]
