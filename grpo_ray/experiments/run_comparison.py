"""Paired comparison of a run and its fork: rewards on the same problems, held-out verdicts, first difference."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_ray.evaluation.paired import PairedComparison, compare_paired
from grpo_ray.experiments.step_difference import Difference, StepRecord, compare_steps, read_records
from grpo_ray.pages.report.read import RunData, RunReader, open_run
from grpo_ray.storage.records.heldout_files import list_heldout_files, read_measurement, read_verdicts
from grpo_ray.storage.records.rollout_files import list_rollout_files

EARLIER_LAUNCH = (
    "of the run was taken by an earlier launch, and the recorded settings are those of the latest one: where these "
    "differ, as with another grpo.max_steps, so do the steps"
)
"""Rest of a note about a step for which `is_of_latest_launch` is False."""


@dataclass(frozen=True)
class StepRewards:
    """Rewards of one step of both runs, on the problems that both have drawn for it."""

    step: int
    problems: int
    """Groups of the same problem and epoch; 0: the runs take other problems by now."""
    original: float | None
    """Mean reward of the original's completions on these problems; None if it is not known."""
    fork: float | None


@dataclass(frozen=True)
class HeldoutComparison:
    """Measurements of one held-out set at the same step of both runs."""

    key: str
    step: int
    result: PairedComparison
    """`before` is the original, `after` the fork."""


@dataclass(frozen=True)
class RunComparison:
    """Comparison of a run and its fork over the steps that both have taken."""

    original: str
    fork: str
    """Path, or URI without credentials."""
    at: int
    """Step of the checkpoint that the fork began with."""
    last: int
    """Last step that both have taken."""
    first_difference: Difference | None
    """None if all that both record is equal, bit for bit."""
    rewards: list[StepRewards]
    heldout: list[HeldoutComparison]
    same_rewards: bool = True
    """False if the fork computes other rewards, so that the difference of their values means nothing."""
    notes: Sequence[str] = ()
    """One line for each limit of this comparison."""

    @property
    def reward_difference(self) -> float | None:
        """Mean of the fork's reward minus the original's, over the problems of all steps; None if there are none.

        None, too, if the fork computes other rewards.
        """
        if not self.same_rewards:
            return None
        known = [
            (each.problems, each.fork - each.original)
            for each in self.rewards
            if each.fork is not None and each.original is not None
        ]
        total = sum(count for count, _ in known)
        return sum(count * difference for count, difference in known) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON's types."""
        return {**asdict(self), "reward_difference": self.reward_difference}


def read_contents(path: str) -> RunData:
    """Read metrics, events and checkpoints of the run folder at a local path or URI. Raises as `open_run`."""
    reader = RunReader(open_run(path), once=True)
    reader.refresh()
    return reader.contents()


def compare_runs(original: RunData, fork: RunData, at: int) -> RunComparison:
    """Compare a run with its fork.

    Args:
        at: step of the checkpoint that the fork began with.

    Raises:
        DataError: a file of `rollouts/` or of held-out records cannot be read.
    """
    last = min(last_step(original), last_step(fork))
    rewards: list[StepRewards] = []
    first: Difference | None = None
    for here, there in _pairs_of_records(original, fork, at + 1, last):
        if first is None:
            first = compare_steps(here, there).first
        if here.groups or there.groups:
            rewards.append(_compare_rewards(here, there))
    same_rewards = _have_same_rewards(original, fork)
    notes = []
    if not same_rewards:
        notes.append("the fork computes other rewards than the run, so their values are not compared")
    if last > at and not is_of_latest_launch(original, at + 1):
        notes.append(f"step {at + 1} {EARLIER_LAUNCH}")
    return RunComparison(
        original=original.folder.uri,
        fork=fork.folder.uri,
        at=at,
        last=last,
        first_difference=first,
        rewards=rewards,
        heldout=_compare_heldout(original, fork, at, last),
        same_rewards=same_rewards,
        notes=notes,
    )


def _have_same_rewards(original: RunData, fork: RunData) -> bool:
    """Return True if both runs have recorded the same settings that determine the rewards of common problems."""
    here, there = ((run.section("rewards"), run.section("grpo").get("reward_weights")) for run in (original, fork))
    own, other = map(_rewards_of_sources, (original, fork))
    return here == there and all(own[name] == other[name] for name in own.keys() & other.keys())


def _rewards_of_sources(run: RunData) -> dict[str, Any]:
    """Return source of a mixture -> its own reward functions; None: those of the run."""
    train = run.section("data").get("train")
    sources = train if isinstance(train, Mapping) else {}
    return {name: each.get("rewards") for name, each in sources.items() if isinstance(each, Mapping)}


def is_of_latest_launch(run: RunData, step: int) -> bool:
    """Return True if a step was taken by the run's latest launch, with whose settings `config.yaml` was written.

    False, too, for the steps of a fork that it has copied from its original.
    """
    launches = [number for number, each in enumerate(run.events) if each["event"] == "launched"]
    if not launches:
        return True
    starts = [each["step"] for each in run.events[launches[-1] :] if each["event"] == "began"]
    return step > min(starts) if starts else len(launches) == 1


def last_step(run: RunData) -> int:
    """Return the last step with metrics; 0 if there is none."""
    return int(run.rows[-1]["step"]) if run.rows else 0


def _pairs_of_records(
    original: RunData, fork: RunData, first: int, last: int
) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Yield the records of each step, in the order of steps, reading as many steps at once as one file has.

    Groups are written at checkpoints, and metrics at once: records of steps beyond the groups of one run have none.
    """
    files = list_rollout_files(original.folder)
    ends = sorted({min(file.last_step, last) for file in files if file.last_step >= first})
    written = [max((file.last_step for file in each), default=0) for each in (files, list_rollout_files(fork.folder))]
    for end in [*ends, last]:
        if end < first:
            continue
        here, there = (read_records(run, first, end) for run in (original, fork))
        for step in sorted({*here, *there}):
            pair = [records.get(step, StepRecord(step, ())) for records in (here, there)]
            if step > min(written):
                pair = [replace(record, groups=()) for record in pair]
            yield pair[0], pair[1]
        first = end + 1


def _compare_rewards(here: StepRecord, there: StepRecord) -> StepRewards:
    rewards = [_rewards(record) for record in (here, there)]
    common = [key for key in rewards[0] if key in rewards[1]]
    means = [float(np.mean([own[key] for key in common])) if common else None for own in rewards]
    return StepRewards(here.step, len(common), *means)


def _rewards(record: StepRecord) -> Mapping[tuple[int, str, str], float]:
    """Return the mean reward of each group whose completions were graded."""
    known = {
        (row["epoch"], row["source"], row["problem"]): [each for each in row["rewards"] or () if each is not None]
        for row in record.groups
    }
    means = {key: float(np.nanmean(values)) for key, values in known.items() if not np.isnan(values).all()}
    return means


def _compare_heldout(original: RunData, fork: RunData, at: int, last: int) -> list[HeldoutComparison]:
    """Compare the measurements under equal conditions of each held-out set, at the steps that both have measured."""
    compared = []
    for key in original.heldout_keys:
        files = [{each.step: each for each in list_heldout_files(run.folder, key)} for run in (original, fork)]
        for step in sorted(files[0].keys() & files[1].keys()):
            if not at < step <= last:
                continue
            pair = [(run.folder, own[step]) for run, own in zip((original, fork), files, strict=True)]
            here, there = (read_measurement(folder, file) for folder, file in pair)
            if here.conditions != there.conditions:
                continue
            result = compare_paired(*(read_verdicts(folder, file) for folder, file in pair))
            if result is not None:
                compared.append(HeldoutComparison(key, step, result))
    return compared
