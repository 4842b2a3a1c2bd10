"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step is topped up with groups that have signal.

A group of equal rewards has no gradient, so a step with many of them learns from few. With `grpo.dynamic_sampling`
above 0 a step draws, generates and scores as many problems again, at most so many times, until `grpo.prompts_per_step`
groups over all workers have signal. The step is taken on the first of these in the order in which they were drawn: by
round, and in a round by their place in the stream. That order is the same for any number of workers, and so is the step
(law 1). Where the rounds end too early, groups without signal fill the step up, in the same order.

What is put aside counts as used: each problem of an epoch is drawn once. An epoch that begins inside of a step does not
know of that step's groups yet (`data.skip_solved`, `data.prefer_mixed`).

It changes the gradient: the step has as many groups as ever, and all of them count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_ray.distributed import all_gather_object
from grpo_ray.errors import ConfigError
from grpo_ray.training.exact_savings import importance_ratio
from grpo_ray.training.micro_batches import COMPLETION_SIDE, Batch, has_gradient, is_text, loss_mask, rows_of

ROUNDING = 1e-6
"""Rewards that differ by less, of the larger one or of 1, are equal but for rounding in 32 bits."""

GroupIndex = tuple[int, int, int]
"""Of a group: its round, its worker, and its place among that worker's groups of the round. Places in rising order are
in the order in which the problems were drawn, since the workers' parts of a step follow each other in the stream."""


@dataclass(frozen=True)
class CompletionRows:
    """A worker's completions in whole groups: what each came of, and what became of it."""

    inputs: list[dict[str, Any]]
    """(B,) rows that TRL was given."""
    token_ids: list[list[int]]
    """(B,) token ids of each completion."""
    rewards: torch.Tensor
    """(B, R), of each reward function; NaN where it does not apply."""
    output: Batch
    """What TRL makes of them: tensors with B rows, and scalars."""

    def take(self, rows: Sequence[int]) -> "CompletionRows":
        """Some of the rows, copied: the others can be forgotten."""
        return CompletionRows(
            [self.inputs[row] for row in rows],
            [self.token_ids[row] for row in rows],
            self.rewards[list(rows)],
            rows_of(self.output, rows),
        )

    def to(self, device: Any) -> "CompletionRows":
        """The same on a device."""
        output = {key: _to(value, device) for key, value in self.output.items()}
        return CompletionRows(self.inputs, self.token_ids, self.rewards.to(device), output)


@dataclass(frozen=True)
class FilledStep:
    """What a step is taken on."""

    rows: CompletionRows
    """This worker's part."""
    kept: list[list[bool]]
    """For each round and each group that this worker drew in it: whether the step is taken on it, here or elsewhere."""


def fill_step(trainer: Any, first: CompletionRows, another: Callable[[], CompletionRows], rounds: int) -> FilledStep:
    """Top a step up with groups that have signal. Every worker must call it.

    first: this worker's part of the step as it was drawn.
    another: draws, generates and scores as many groups again.
    rounds: how often it may be called; it is called equally often on every worker.
    Raises ConfigError for completions that come with more than text.
    """
    if not is_text(first.output):
        raise ConfigError(f"grpo.dynamic_sampling={rounds} knows only text, and these problems have more; set it to 0")
    size, rank = trainer.num_generations, trainer.accelerator.process_index
    share = len(first.inputs) // size
    wanted = share * trainer.accelerator.num_processes
    signal: list[list[list[bool]]] = []
    held: dict[GroupIndex, CompletionRows] = {}
    rows, found = first, 0
    while True:
        number, mine = len(signal), has_signal(rows, trainer.reward_weights, size)
        signal.append(all_gather_object(mine))
        found += sum(map(sum, signal[-1]))
        enough = found >= wanted or number == rounds
        if enough and not number:
            break  # the step stays as it was drawn
        for at, has in enumerate(mine):
            if has or not number:  # what fills a step up is always of the first round: it has `wanted` groups
                held[number, rank, at] = rows.take(range(at * size, (at + 1) * size))
        if enough:
            break
        rows = another()
    metrics = trainer._metrics["train"]
    metrics["group/rounds"].append(float(len(signal)))
    metrics["group/signal_share"].append(min(found, wanted) / wanted)
    if not held:
        return FilledStep(first, [[True] * share])
    hands = assign_groups(*choose_groups(signal, wanted), [share] * len(signal[0]))
    chosen = {place for hand in hands for place in hand}
    if any(place[1] != holder for holder, hand in enumerate(hands) for place in hand):
        away = {place: held[place].to("cpu") for place in held if place in chosen and place not in hands[rank]}
        for theirs in all_gather_object(away):
            held |= theirs
    step = join_rows([held[place].to(trainer.accelerator.device) for place in hands[rank]], padding_of(trainer))
    step.output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(step.output).sum()).sum()
    kept = [[(number, rank, at) in chosen for at in range(share)] for number in range(len(signal))]
    return FilledStep(step, kept)


def combine_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each completion's reward, all functions together: (B,), NaN where none of them applies. rewards: (B, R)."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = torch.nan
    return total


def has_signal(rows: CompletionRows, weights: torch.Tensor, size: int) -> list[bool]:
    """Whether each group has signal: its rewards differ, and a completion with an advantage counts in the loss."""
    rewards = combine_rewards(rows.rewards, weights).view(-1, size).tolist()
    moves = has_gradient(rows.output).view(-1, size).any(dim=1).tolist()
    return [rewards_differ(group) and moved for group, moved in zip(rewards, moves, strict=True)]


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ by more than rounding; those that are NaN do not count."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return bool(known) and not math.isclose(min(known), max(known), rel_tol=ROUNDING, abs_tol=ROUNDING)


def choose_groups(signal: Sequence[Sequence[Sequence[bool]]], wanted: int) -> tuple[list[GroupIndex], list[GroupIndex]]:
    """The groups that a step is taken on: those with signal, and those without that fill it up to `wanted`.

    signal: of each round, each worker and each of its groups, whether it has signal.
    """
    places: dict[bool, list[GroupIndex]] = {True: [], False: []}
    for number, workers in enumerate(signal):
        for rank, groups in enumerate(workers):
            for at, has in enumerate(groups):
                places[has].append((number, rank, at))
    chosen = places[True][:wanted]
    return chosen, places[False][: wanted - len(chosen)]


def assign_groups(
    chosen: Sequence[GroupIndex], fillers: Sequence[GroupIndex], room: Sequence[int]
) -> list[list[GroupIndex]]:
    """Each worker's groups of a step, in rising order: as many as it has room for, and as few moved as can be.

    Those with signal are shared out evenly before the others: the slowest worker is waited for.
    """
    workers = len(room)
    even = [len(chosen) // workers + (rank < len(chosen) % workers) for rank in range(workers)]
    hands = _placed(chosen, even)
    rest = _placed(fillers, [all_ - len(hand) for all_, hand in zip(room, hands, strict=True)])
    return [sorted(hand + more) for hand, more in zip(hands, rest, strict=True)]


def _placed(places: Sequence[GroupIndex], room: Sequence[int]) -> list[list[GroupIndex]]:
    """Places by worker: where they are while there is room, the others where there is some left, in order of rank."""
    hands: list[list[GroupIndex]] = [[] for _ in room]
    moved: list[GroupIndex] = []
    for place in places:
        home = hands[place[1]]
        (home if len(home) < room[place[1]] else moved).append(place)
    for hand, most in zip(hands, room, strict=True):
        free = most - len(hand)
        hand += moved[:free]
        del moved[:free]
    return hands


@dataclass(frozen=True)
class Padding:
    """How TRL pads a batch."""

    token: int
    """Token id of padding."""
    multiple: int | None
    """Widths are a multiple of it."""
    ratio: float | None
    """Importance ratio of a token of padding; None where there is one ratio for a whole completion."""

    def width(self, longest: int) -> int:
        """Width of a batch whose longest row has so many tokens."""
        return longest if self.multiple is None else -(-longest // self.multiple) * self.multiple


def padding_of(trainer: Any) -> Padding:
    """How a GRPO trainer pads."""
    mode = trainer.vllm_importance_sampling_mode
    ratio = None
    if mode.startswith("token"):
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        ratio = importance_ratio(torch.zeros(1, 1), mode, low, high).item()
    return Padding(trainer._tokenizer.pad_token_id, trainer.pad_to_multiple_of, ratio)


def join_rows(parts: Sequence[CompletionRows], padding: Padding) -> CompletionRows:
    """Rows of several rounds as one batch, as wide as TRL would have made it; its scalars are left out.

    The learner's log-probabilities on padding, which no loss reads, are 0 where a batch is wider than its rows were.
    """
    prompt = padding.width(max(int(part.output["prompt_mask"].sum(dim=1).max()) for part in parts))
    completion = padding.width(max(len(ids) for part in parts for ids in part.token_ids))
    fill: dict[str, float] = {"prompt_ids": padding.token, "completion_ids": padding.token, "tool_mask": 1}
    fill["importance_sampling_ratio"] = 1 if padding.ratio is None else padding.ratio
    output: Batch = {}
    for key, value in parts[0].output.items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        values = [part.output[key] for part in parts]
        if key in COMPLETION_SIDE and not (key == "importance_sampling_ratio" and padding.ratio is None):
            values = [_fitted(each, completion, fill.get(key, 0)) for each in values]
        elif key.startswith("prompt"):
            values = [_fitted(each.flip(1), prompt, fill.get(key, 0)).flip(1) for each in values]
        output[key] = torch.cat(values)
    return CompletionRows(
        [row for part in parts for row in part.inputs],
        [ids for part in parts for ids in part.token_ids],
        torch.cat([part.rewards for part in parts]),
        output,
    )


def _fitted(rows: torch.Tensor, width: int, value: float) -> torch.Tensor:
    """(B, T) made `width` wide: padding is cut off on the right, or put there."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=value)


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
