"""Schedule of bounded staleness: every batch is complete when it is trained on, and no token is too old."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_ray.learner.rollouts.staleness_schedule import StalenessSchedule


@dataclass
class Simulation:
    """Run of the schedule on batches of one completion, whose length is known beforehand."""

    schedule: StalenessSchedule
    lengths: list[int]
    """Tokens of each batch's completion."""
    runs: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Batch -> version and number of tokens of each segment."""
    trained: list[int] = field(default_factory=list)

    def sampled(self, batch: int) -> int:
        return sum(tokens for _, tokens in self.runs[batch])

    def add(self, batch: int, version: int) -> None:
        """Sample a batch's next segment, unless it is complete."""
        before, runs = self.sampled(batch), self.runs[batch]
        if before < self.lengths[batch]:
            limit = self.schedule.token_limit(batch, runs[0][0] if runs else version, before)
            runs.append((version, min(limit, self.lengths[batch] - before)))

    def step(self, version: int) -> None:
        """Take a step, with its round."""
        if not self.runs[version]:
            self.add(version, version)
        assert self.sampled(version) == self.lengths[version], "the batch is not complete"
        self.trained.append(version)
        for batch in self.schedule.batches(version):
            self.add(batch, version)

    def ages(self, batch: int) -> list[int]:
        return [batch - version for version, _ in self.runs[batch]]


def run(staleness: int, lengths: list[int], longest: int, first: int = 0) -> Simulation:
    simulation = Simulation(StalenessSchedule(staleness, longest, len(lengths)), lengths)
    for version in range(first, len(lengths)):
        simulation.step(version)
    return simulation


def test_schedule_two_versions_worked_example() -> None:
    runs = run(2, [10, 10, 10, 7, 2], longest=10).runs
    assert runs[0] == [(0, 10)]  # with the weights that are trained on it
    assert runs[1] == [(0, 10)]  # one round only
    assert runs[2] == [(0, 5), (1, 5)]
    assert runs[3] == [(1, 5), (2, 2)]
    assert runs[4] == [(2, 2)]


def test_schedule_limit_is_rounded_up() -> None:
    assert [run(3, [10] * 6, longest=10).runs[5]] == [[(2, 4), (3, 4), (4, 2)]]


def test_schedule_begins_no_batch_after_the_last_step() -> None:
    schedule = StalenessSchedule(3, longest=9, max_steps=5)
    assert [list(schedule.batches(version)) for version in range(5)] == [[1, 2, 3], [2, 3, 4], [3, 4], [4], []]


@given(
    staleness=st.integers(1, 6),
    longest=st.integers(1, 40),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=14),
    first=st.integers(0, 13),
)
@example(staleness=6, longest=1, shares=[1.0] * 9, first=0)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_schedule_completes_every_batch_in_time(staleness: int, longest: int, shares: list[float], first: int) -> None:
    first = min(first, len(shares) - 1)
    simulation = run(staleness, [max(1, round(share * longest)) for share in shares], longest, first)
    assert simulation.trained == list(range(first, len(shares)))
    for batch in simulation.trained:
        ages = simulation.ages(batch)
        assert ages == sorted(ages, reverse=True) and max(ages) <= min(staleness, batch - first)
        assert min(ages) >= (batch > first)


@given(staleness=st.integers(1, 6), longest=st.integers(1, 40), steps=st.integers(1, 12), cut=st.integers(0, 11))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_schedule_resumed_with_open_completions_goes_on(staleness: int, longest: int, steps: int, cut: int) -> None:
    lengths = [longest] * steps
    whole, resumed = run(staleness, lengths, longest), run(staleness, lengths[: min(cut, steps)], longest)
    resumed.schedule = StalenessSchedule(staleness, longest, steps)
    # Up to the cut the schedule of fewer steps begins fewer batches; a checkpoint of the longer run has those too.
    resumed.runs = defaultdict(
        list,
        {batch: [run for run in runs if run[0] < min(cut, steps)] for batch, runs in whole.runs.items()},
    )
    resumed.lengths = lengths
    for version in range(min(cut, steps), steps):
        resumed.step(version)
    assert resumed.runs == whole.runs


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_schedule_resumed_without_open_completions_begins_anew(staleness: int) -> None:
    resumed = run(staleness, [12] * 9, longest=12, first=4)
    assert resumed.runs[4] == [(4, 12)] and resumed.runs[5] == [(4, 12)]
    assert resumed.ages(8) == list(range(min(staleness, 4), 0, -1))


@pytest.mark.parametrize("staleness", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("most", [1, 5, 8])
def test_turns_are_divided_among_the_rounds_that_are_left(staleness: int, most: int) -> None:
    schedule = StalenessSchedule(staleness, longest=1, max_steps=100)
    turns, parts = 0, []
    for version in range(10 - staleness, 10):
        limit = schedule.turn_limit(10, version, turns, most)
        parts.append(limit - turns)
        turns = limit
    assert turns == most and max(parts) - min(parts) <= 1 and parts == sorted(parts, reverse=True)
    assert schedule.turn_limit(10, 10, 1, most) == most  # the step waits for it
