"""What of a worker's completions the learner reads, in which micro-batches.

`thrift.py` says when less is read than there is; `arrange` is the way in.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
class SavingsPlan:
    """Which savings are made; `thrift.py` says what each is."""

    one_pass: bool = False
    rows: bool = False
    regroup: bool = False
    share: bool = False
    fewer_passes: bool = False
    trim_prompts: bool = False
    trim_completions: bool = False
    shift: bool = False
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


def split_by_length(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Deal rows out to parts of equal number (or one less), the longest together, in a fixed order."""
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    least, more = divmod(len(ordered), parts)
    ends = [least * part + min(part, more) for part in range(parts + 1)]
    return [ordered[first:end] for first, end in itertools.pairwise(ends)]


def trim_padding(batch: Batch, prompts: bool = True, completions: bool = True) -> Batch:
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


UNEVEN = 1.1
"""Workers share their rows where the fullest has so many times the mean worker's tokens to read."""

PASS_COST = 128
"""What a forward and backward pass on a CPU costs beside what it reads, in token positions: it goes through all weights
and gradients. Measured with 20 million parameters and 2 threads: 0.10 s a pass, 0.85 ms a position; both grow with the
policy."""

RowIndex = tuple[int, int]
"""Of a row: the worker that generated it, and its place among that worker's rows."""


@dataclass(frozen=True)
class Workers:
    """The workers of a run, as `arrange` sees them; every worker must make the same calls."""

    rank: int = 0
    table: Callable[[torch.Tensor], torch.Tensor] = lambda own: own[None]
    """Gives (workers, N) from each worker's (N,)."""
    exchange: Callable[[dict[RowIndex, Batch]], dict[RowIndex, Batch]] = lambda away: away
    """Gives what all workers have put in."""


def plan_micro_batches(
    batches: list[Batch], savings: SavingsPlan, loss_type: str, workers: Workers
) -> tuple[list[tuple[Batch, Part]], dict[str, float]]:
    """The micro-batches of a generation batch with less in them, and what was saved.

    Every worker reads as many rows in each pass as the others, so that their collective calls stay the same, and each
    worker's engine has at least one row among all, which proves its sync. Micro-batches without rows come first.
    Returns each micro-batch with its `Part`, and the metrics.
    """
    size, count = len(batches[0]["advantages"]), len(batches)
    device = batches[0]["advantages"].device
    if savings.regroup:  # all rows go into one pot and are dealt out again
        kept = _dealt(concatenate_batches(batches), size, count, savings, workers)
    else:  # rows stay in their micro-batch
        facts = [_facts(batch, savings) for batch in batches]
        needed = workers.table(torch.tensor([float(sum(need)) for need, _, _ in facts], device=device)).amax(dim=0)
        kept = []
        for batch, (need, _, tokens), most in zip(batches, facts, needed.tolist(), strict=True):
            rows = choose_rows(need, tokens, max(int(most), 1))
            kept.append(rows_of(batch, rows) if len(rows) < size else batch)
    kept = [trim_padding(batch, savings.trim_prompts, savings.trim_completions) for batch in kept]
    tokens_left = torch.tensor([float(loss_mask(batch).sum()) for batch in kept], device=device)
    tokens_all = torch.tensor([float(loss_mask(batch).sum()) for batch in batches], device=device)
    if savings.regroup:
        tokens_all = tokens_all.mean().expand(count)
    rows_left = [len(batch["advantages"]) for batch in kept]
    read = [
        sum(_positions(batch, savings) for batch in kept),
        sum(_positions(batch, SavingsPlan()) for batch in batches),
    ]
    totals = workers.table(
        torch.cat([tokens_left, tokens_all, torch.tensor([sum(rows_left), *read], device=device).float()])
    )
    count_of_workers, totals = len(totals), totals.sum(dim=0)
    token_shares = (totals[:count] / totals[count : 2 * count].clamp(min=1)).tolist()
    passes = sum(rows > 0 for rows in rows_left) / count
    made = []
    for batch, left, own_left, own_all, tokens in zip(
        kept, rows_left, tokens_left.tolist(), tokens_all.tolist(), token_shares, strict=True
    ):
        factor = left / size if loss_type in PER_ROW else 1.0
        if loss_type == "bnpo":
            factor = max(own_left, 1.0) / max(own_all, 1.0)
        made.append((batch, Part(factor, left / size * passes, tokens * passes, left == size)))
    metrics = {
        "learner/completions_share": totals[-3].item() / (size * count * count_of_workers),
        "learner/positions_share": (totals[-2] / totals[-1]).item(),
        "learner/tokens_saved": (totals[count : 2 * count].sum() - totals[:count].sum()).item(),
    }
    return made, metrics


def _dealt(pot: Batch, size: int, count: int, savings: SavingsPlan, workers: Workers) -> list[Batch]:
    """This worker's `count` micro-batches of at most `size` rows, out of the rows of all workers."""
    need, lengths, tokens = _facts(pot, savings)
    device = pot["advantages"].device
    table = workers.table(torch.tensor([*need, *lengths, *tokens], device=device).float())
    all_need, all_lengths, all_tokens = (part.long().tolist() for part in table.chunk(3, dim=1))
    own = [choose_rows(n, t, max(sum(n), 1)) for n, t in zip(all_need, all_tokens, strict=True)]
    loads = [sum(all_lengths[rank][row] for row in rows) for rank, rows in enumerate(own)]
    shared = savings.share and max(loads) > UNEVEN * sum(loads) / len(loads)
    most = -(-sum(map(len, own)) // len(own)) if shared else max(map(len, own))

    def passes(hands: Sequence[Sequence[RowIndex]]) -> int:
        least = -(-most // size)
        lengths_of = [[all_lengths[rank][row] for rank, row in hand] for hand in hands]
        return number_of_passes(lengths_of, least, least if savings.fewer_passes else max(least, min(count, most)))

    if not shared:
        hands = [
            [(rank, row) for row in choose_rows(*facts, most)]
            for rank, facts in enumerate(zip(all_need, all_tokens, strict=True))
        ]
        filled = passes(hands)
        rows = [row for _, row in hands[workers.rank]]
        return _empty(pot, count - filled) + [rows_of(pot, part) for part in split_by_length(lengths, rows, filled)]
    chosen = {(rank, row) for rank, rows in enumerate(own) for row in rows}
    places = [(rank, row) for rank in range(len(own)) for row in range(len(need))]
    enough = choose_rows(
        [place in chosen for place in places], [all_tokens[rank][row] for rank, row in places], most * len(own)
    )
    hands = balance_rows([places[at] for at in enough], lambda at: all_lengths[at[0]][at[1]], len(own))
    filled = passes(hands)
    mine_before = [row for rank, row in (places[at] for at in enough) if rank == workers.rank]
    rows_here = {(workers.rank, row): trim_padding(rows_of(pot, [row])) for row in mine_before}
    stay = {place for place in hands[workers.rank] if place in rows_here}
    away = {place: _to(row, "cpu") for place, row in rows_here.items() if place not in stay}
    come = workers.exchange(away)
    mine = [rows_here[at] if at in stay else _to(come[at], device) for at in hands[workers.rank]]
    parts = split_by_length([all_lengths[rank][row] for rank, row in hands[workers.rank]], range(len(mine)), filled)
    return _empty(pot, count - filled) + [stack_batches([mine[at] for at in part]) for part in parts]


def _empty(pot: Batch, count: int) -> list[Batch]:
    return [rows_of(pot, [])] * count


def number_of_passes(lengths: Sequence[Sequence[int]], least: int, most: int) -> int:
    """In how many passes workers read their rows soonest; a pass costs `PASS_COST` beside what it reads.

    lengths: of each worker's rows; all have as many.
    """

    def cost(passes: int) -> int:
        parts = [
            [[own[row] for row in part] for part in split_by_length(own, range(len(own)), passes)] for own in lengths
        ]
        return passes * PASS_COST + max(sum(len(part) * max(part) for part in worker) for worker in parts)

    return min(range(least, most + 1), key=cost)


def balance_rows(places: Sequence[RowIndex], length: Callable[[RowIndex], int], workers: int) -> list[list[RowIndex]]:
    """Deal rows out to workers so that each has as many, and as much to read, as the others, or nearly.

    The longest go round first, there and back in turn.
    """
    ordered = sorted(places, key=lambda place: (-length(place), place))
    hands: list[list[RowIndex]] = [[] for _ in range(workers)]
    for at, place in enumerate(ordered):
        turn, rank = divmod(at, workers)
        hands[rank if turn % 2 == 0 else workers - 1 - rank].append(place)
    return hands


def stack_batches(rows: Sequence[Batch]) -> Batch:
    """Rows of different widths as one batch: prompts padded on the left, completions on the right, with zeros."""
    batch: Batch = {}
    for key, value in rows[0].items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            batch[key] = value
            continue
        values = [row[key] for row in rows]
        if value.ndim > 1:
            width = max(each.shape[1] for each in values)
            left = key.startswith("prompt")
            values = [
                torch.nn.functional.pad(each, (width - each.shape[1], 0) if left else (0, width - each.shape[1]))
                for each in values
            ]
        batch[key] = torch.cat(values)
    return batch


def _to(batch: Batch, device: Any) -> Batch:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@dataclass(frozen=True)
class Shifted:
    """The rows of a batch, each begun at once: all padding comes last, where a causal model's tokens do not see it."""

    input_ids: torch.Tensor
    """(B, W), W the longest row; 0 on padding."""
    labels: torch.Tensor
    """(B, W), -100 where no token of a completion is."""
    counts: torch.Tensor
    """(B, T) bool, the completions' tokens."""
    at: torch.Tensor
    """(B, T), where in a row each column of the completions came to be."""

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A model's values of all tokens but the first, (B, W - 1), as (B, T), 0 on padding."""
        values = torch.nn.functional.pad(values, (1, 0))
        return values.gather(1, self.at.clamp(max=values.size(1) - 1)).masked_fill(~self.counts, 0.0)


def shift_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, completions: int) -> Shifted:
    """Shift (B, L) tokens, padded on both sides, to the left by the padding of their prompts.

    completions: the last columns, which are theirs; their tokens follow each other, as a prompt's do.
    """
    mask = attention_mask.bool()
    prompt = mask[:, :-completions].sum(dim=1, keepdim=True)
    lengths = mask.sum(dim=1, keepdim=True)
    columns = torch.arange(input_ids.size(1), device=input_ids.device)
    padding = input_ids.size(1) - completions - prompt
    width = int(lengths.max())
    places = columns[:width].expand(len(mask), -1)
    ids = input_ids.gather(1, (places + padding).clamp(max=input_ids.size(1) - 1)).masked_fill(places >= lengths, 0)
    labels = ids.masked_fill((places < prompt) | (places >= lengths), -100)
    return Shifted(ids, labels, mask[:, -completions:], prompt + columns[:completions])


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


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, completions: int) -> Packed:
    """Pack (B, L) tokens, of which the last `completions` columns are completions, by their (B, L) mask."""
    mask = attention_mask.bool()
    labels = input_ids.clone()
    labels[:, :-completions] = -100
    positions = mask.long().cumsum(dim=1) - 1
    return Packed(input_ids[mask][None], positions[mask][None], labels[mask][None], mask)


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one batch again."""
    return {
        key: torch.cat([batch[key] for batch in batches]) if isinstance(value, torch.Tensor) and value.ndim else value
        for key, value in batches[0].items()
    }


def _facts(batch: Batch, savings: SavingsPlan) -> tuple[list[bool], list[int], list[int]]:
    """Of each row: whether it must stay, its length with the prompt, and its tokens that count."""
    tokens = loss_mask(batch).sum(dim=1)
    lengths = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    need = has_gradient(batch) if savings.rows else torch.ones_like(tokens, dtype=torch.bool)
    return need.tolist(), lengths.tolist(), tokens.tolist()


def _positions(batch: Batch, savings: SavingsPlan) -> int:
    """Token positions that a pass reads, padding included if it is not left out."""
    sides = (batch["prompt_mask"], batch["completion_mask"])
    if not (savings.pack or savings.shift):
        return sum(mask.numel() for mask in sides)
    lengths = sum(mask.sum(dim=1) for mask in sides)
    return int(lengths.sum() if savings.pack else lengths.max() * len(lengths)) if len(lengths) else 0
