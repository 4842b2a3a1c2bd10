"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step is filled up with groups that have signal.

A group of equal rewards has no gradient, so a step with many of them learns from few groups. With
`grpo.dynamic_sampling` above 0, a step draws, generates and scores further rounds of `grpo.prompts_per_step` problems,
at most `grpo.dynamic_sampling` of them, until `grpo.prompts_per_step` groups over all workers have signal. The step is
taken on the first of these in the order in which they were drawn: by round, and in a round by their position in the
stream. That order is the same for any number of workers, and so is the step (worker-count invariance). If the limit of
rounds is reached first, groups without signal fill the step up, in the same order.

Groups that are not trained on count as used: each problem of an epoch is drawn once. An epoch that begins during a step
does not use that step's groups for its curriculum (`data.skip_solved`, `data.prefer_mixed`).

A generation batch of several optimizer steps (`grpo.steps_per_generation`) is filled up as a whole. Groups with signal
are then divided evenly among its steps.

Dynamic sampling changes the gradient: the step has as many groups as without it, but more of them have signal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from grpo_ray.learner.advantages import combine_rewards
from grpo_ray.learner.batch import (
    COMPLETION_COLUMNS,
    PROMPT_COLUMNS,
    concatenate,
    has_gradient,
    loss_mask,
)
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Rollout

ROUNDING = 1e-6
"""Relative difference (absolute below 1) up to which two rewards count as equal, because of rounding to 32 bits."""

GroupIndex = tuple[int, int, int]
"""Round of a group, rank of its worker, and its index among that worker's groups of the round. Within one optimizer
step, sorting the indices gives the order in which the problems were drawn, since the workers' parts of a step follow
each other in the stream."""


@dataclass(frozen=True)
class FilledStep:
    """Groups on which a step is taken, and the metrics of their selection."""

    rollout: Rollout
    """Groups that this worker trains on."""
    trained: list[list[bool]]
    """Flag of each group that this worker drew, by round: True if the step is taken on it, on any worker."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DynamicSampler:
    """Filler of one worker's steps; its methods are collective."""

    max_rounds: int
    """Maximum number of rounds after the first one (`grpo.dynamic_sampling`)."""
    num_generations: int
    reward_weights: torch.Tensor
    """(R,), weight of each reward function."""
    padding: Padding
    workers: Workers
    parts: int = 1
    """Optimizer steps that the groups are divided among."""

    def fill_step(self, first: Rollout, draw_round: Callable[[], Rollout]) -> FilledStep:
        """Fill a step up with groups that have signal.

        Args:
            first: this worker's part of the step as it was drawn.
            draw_round: draws, generates and scores the same number of groups again; all workers call it equally often.
        """
        share = len(first.rows) // self.num_generations
        wanted = share * self.workers.count
        signal, held = self._draw_rounds(first, draw_round, wanted)
        found = sum(has for workers in signal for groups in workers for has in groups)
        metrics = {"group/rounds": float(len(signal)), "group/signal_share": min(found, wanted) / wanted}
        if not held:  # the step stays as it was drawn
            return FilledStep(first, [[True] * share], metrics)
        assigned: list[list[GroupIndex]] = [[] for _ in range(self.workers.count)]
        for part in divide_groups(*choose_groups(signal, wanted, self.parts), self.parts):
            for groups, more in zip(assigned, assign_groups(*part, [share // self.parts] * len(assigned)), strict=True):
                groups += more
        chosen = {index for groups in assigned for index in groups}
        self._exchange(held, assigned)
        joined = self._join([held[index] for index in assigned[self.workers.rank]])
        rank = self.workers.rank
        trained = [[(number, rank, at) in chosen for at in range(share)] for number in range(len(signal))]
        return FilledStep(joined, trained, metrics)

    def _draw_rounds(
        self, first: Rollout, draw_round: Callable[[], Rollout], wanted: int
    ) -> tuple[list[list[list[bool]]], dict[GroupIndex, Rollout]]:
        """Draw rounds until `wanted` groups have signal, or the limit of rounds is reached.

        Returns:
            For each round, worker and group, True if it has signal; and this worker's groups that the step may be taken
            on, or none if the first round is enough.
        """
        signal: list[list[list[bool]]] = []
        held: dict[GroupIndex, Rollout] = {}
        rollout, found = first, 0
        while True:
            number, own = len(signal), has_signal(rollout, self.reward_weights, self.num_generations)
            signal.append(self.workers.gather_objects(own))
            found += sum(map(sum, signal[-1]))
            is_enough = found >= wanted or number == self.max_rounds
            if is_enough and number == 0:
                return signal, {}
            for at, has in enumerate(own):
                if has or number == 0:  # groups without signal are taken from the first round only: it has `wanted`
                    group = range(at * self.num_generations, (at + 1) * self.num_generations)
                    held[number, self.workers.rank, at] = rollout.take(group)
            if is_enough:
                return signal, held
            rollout = draw_round()

    def _exchange(self, held: dict[GroupIndex, Rollout], assigned: list[list[GroupIndex]]) -> None:
        """Add the groups of other workers that are assigned to this one to `held`; collective."""
        mine = assigned[self.workers.rank]
        if any(index[1] != rank for rank, groups in enumerate(assigned) for index in groups):
            chosen = {index for groups in assigned for index in groups}
            given = {index: held[index].to("cpu") for index in held if index in chosen and index not in mine}
            held |= self.workers.exchange(given)

    def _join(self, groups: Sequence[Rollout]) -> Rollout:
        """Make one batch of a step's groups, with the number of loss tokens over all workers; collective."""
        step = join_rows([group.to(self.workers.device) for group in groups], self.padding)
        step.batch["num_items_in_batch"] = self.workers.sum(loss_mask(step.batch).sum())
        return step


def has_signal(rollout: Rollout, weights: torch.Tensor, num_generations: int) -> list[bool]:
    """Return, for each group, True if it has signal: its rewards differ, and one of its completions has a gradient."""
    rewards = combine_rewards(rollout.rewards, weights).view(-1, num_generations).tolist()
    with_gradient = has_gradient(rollout.batch).view(-1, num_generations).any(dim=1).tolist()
    return [rewards_differ(group) and counts for group, counts in zip(rewards, with_gradient, strict=True)]


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ by more than rounding; NaN rewards are ignored."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return bool(known) and not math.isclose(min(known), max(known), rel_tol=ROUNDING, abs_tol=ROUNDING)


def choose_groups(
    signal: Sequence[Sequence[Sequence[bool]]], wanted: int, parts: int = 1
) -> tuple[list[GroupIndex], list[GroupIndex]]:
    """Choose the groups for a step, or for all steps of a generation batch.

    Args:
        signal: for each round, worker and group, True if the group has signal.
        wanted: number of groups to choose.
        parts: optimizer steps of the generation batch. Each has its part of the problems of every worker.

    Returns:
        Groups with signal, and groups without that fill the step up, both in the order in which they were drawn.
    """
    indices: dict[bool, list[GroupIndex]] = {True: [], False: []}
    for number, workers in enumerate(signal):
        for part in range(parts):
            for rank, groups in enumerate(workers):
                size = len(groups) // parts
                for at in range(part * size, (part + 1) * size):
                    indices[groups[at]].append((number, rank, at))
    chosen = indices[True][:wanted]
    return chosen, indices[False][: wanted - len(chosen)]


def divide_groups(
    chosen: Sequence[GroupIndex], fillers: Sequence[GroupIndex], parts: int
) -> list[tuple[Sequence[GroupIndex], Sequence[GroupIndex]]]:
    """Divide the groups of a generation batch among its optimizer steps in order, those with signal evenly.

    Returns:
        Groups with signal and groups without, of each step.
    """
    size = (len(chosen) + len(fillers)) // parts
    divided = []
    for left in range(parts, 0, -1):
        count = -(-len(chosen) // left)
        divided.append((chosen[:count], fillers[: size - count]))
        chosen, fillers = chosen[count:], fillers[size - count :]
    return divided


def assign_groups(
    chosen: Sequence[GroupIndex], fillers: Sequence[GroupIndex], capacity: Sequence[int]
) -> list[list[GroupIndex]]:
    """Assign the groups of a step to workers, with as few moves as possible.

    Groups with signal are distributed evenly before the others, since every step waits for the slowest worker.

    Args:
        chosen: groups with signal.
        fillers: groups without signal.
        capacity: number of groups of each worker.

    Returns:
        Each worker's groups, sorted.
    """
    workers = len(capacity)
    even = [len(chosen) // workers + (rank < len(chosen) % workers) for rank in range(workers)]
    assigned = _assign(chosen, even)
    rest = _assign(fillers, [total - len(groups) for total, groups in zip(capacity, assigned, strict=True)])
    return [sorted(groups + more) for groups, more in zip(assigned, rest, strict=True)]


def _assign(indices: Sequence[GroupIndex], capacity: Sequence[int]) -> list[list[GroupIndex]]:
    """Leave groups on their own worker up to its capacity, and move the others to workers with free places, by rank."""
    assigned: list[list[GroupIndex]] = [[] for _ in capacity]
    moved: list[GroupIndex] = []
    for index in indices:
        own = assigned[index[1]]
        (own if len(own) < capacity[index[1]] else moved).append(index)
    for groups, most in zip(assigned, capacity, strict=True):
        free = most - len(groups)
        groups += moved[:free]
        del moved[:free]
    return assigned


def join_rows(parts: Sequence[Rollout], padding: Padding) -> Rollout:
    """Concatenate rows of several rounds into one batch, as wide as TRL would pad it; scalars are left out.

    Where the batch is wider than its rows were, the learner's log-probabilities on padding are 0; no loss reads them.
    """
    prompt = padding.width(max(int(part.batch["prompt_mask"].sum(dim=1).max()) for part in parts))
    completion = padding.width(max(len(ids) for part in parts for ids in part.token_ids))
    widths = dict.fromkeys(PROMPT_COLUMNS, prompt) | dict.fromkeys(COMPLETION_COLUMNS, completion)
    fill: dict[str, float] = {"prompt_ids": padding.token, "completion_ids": padding.token, "tool_mask": 1}
    if padding.ratio is None:
        del widths["importance_sampling_ratio"]
    else:
        fill["importance_sampling_ratio"] = padding.ratio
    columns = [
        {key: value for key, value in part.batch.items() if isinstance(value, torch.Tensor) and value.ndim}
        for part in parts
    ]
    return Rollout(
        [row for part in parts for row in part.rows],
        [ids for part in parts for ids in part.token_ids],
        torch.cat([part.rewards for part in parts]),
        concatenate(columns, widths, fill),
    )
