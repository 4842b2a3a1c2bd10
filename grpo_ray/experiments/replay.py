"""Replay of a recorded step: the step is computed again from the checkpoint before it, and compared bit for bit.

For bug reports, upgrades of libraries and other machines: a step that gives the same bits was computed by the same
code on the same numbers; otherwise the first quantity that differs shows where to look (`step_difference.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.driver.run import train
from grpo_ray.errors import ConfigError, DataError, TrainingError
from grpo_ray.experiments.branch import find_start, require_sound, write_branch
from grpo_ray.experiments.fork import (
    branch_config,
    has_files,
    require_other_folder,
    require_same_run,
    require_same_start,
    run_folder_of,
    with_run,
    write_origin,
)
from grpo_ray.experiments.fork_fields import require_changeable
from grpo_ray.experiments.run_comparison import EARLIER_LAUNCH, is_of_latest_launch, last_step, read_contents
from grpo_ray.experiments.step_difference import StepComparison, StepRecord, compare_steps, read_records
from grpo_ray.pages.report.read import RunData, open_run
from grpo_ray.resilience.nodes import versions
from grpo_ray.storage.checkpoints import resume_candidates
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Replay:
    """Outcome of a replay."""

    run: str
    """Path, or URI without credentials."""
    start: int
    """Step of the checkpoint that the replay began with; 0: the start of the run."""
    comparison: StepComparison
    """Of the recorded step with the replayed one; where several steps share a generation batch, their groups are those
    of its first step."""
    changed_versions: Mapping[str, tuple[str, str]]
    """Library, or the commit -> version that the run recorded at its latest launch, and that of the replay; "none" if
    it is not installed."""
    folder: str | None
    """Folder of the replay, if it was kept."""
    notes: Sequence[str] = ()
    """One line for each limit of this replay."""

    @property
    def is_equal(self) -> bool:
        """True if all that both record is equal, bit for bit."""
        return self.comparison.first is None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome in JSON's types."""
        return {**asdict(self), "is_equal": self.is_equal}


def replay(
    path: str,
    step: int,
    overrides: Sequence[str] = (),
    *,
    config_path: str | None = None,
    trusts_settings: bool = False,
    keeps_folder: bool = False,
) -> Replay:
    """Compute a recorded step again, and compare it with the record.

    Args:
        path: run folder, local path or URI; it is only read.
        step: step to compute, from 1.
        overrides: settings of this launch, such as `cluster.num_workers=1`.
        config_path: YAML file of the run's settings; None: those that its folder records.
        trusts_settings: use recorded settings that run code of the run folder's author, or call an address.
        keeps_folder: keep the run folder of the replay, which is deleted otherwise.

    Raises:
        CheckpointError: the checkpoint before the step is damaged.
        ConfigError: the run has not taken the step, or a setting cannot change.
        DataError: the run has not recorded the step's groups.
        TrainingError: the workers failed, or the replay ended before the step.
    """
    require_changeable(overrides, is_replay=True)
    source = open_run(path)
    recorded = read_contents(path)
    if not 1 <= step <= last_step(recorded):
        raise ConfigError(f"--step {step}: {source.uri} has recorded the steps from 1 to {last_step(recorded)} only")
    config = branch_config(source, overrides, config_path=config_path, trusts_settings=trusts_settings)
    if config.grpo.max_steps < step:
        raise ConfigError(
            f"--step {step}: the settings end with grpo.max_steps={config.grpo.max_steps}; give those of the launch "
            "that has taken the step with --config"
        )
    first = first_of_batch(step, config.steps_per_batch)
    step_record(recorded, step, first)  # raises before anything is computed
    kept = (each.step for each in resume_candidates(source, "latest", ""))
    start = max((each for each in kept if each < first), default=0)
    require_same_run(config, source, start, is_given=config_path is not None)
    config = replay_config(config, source, step, overrides)
    target = run_folder_of(config)
    require_other_folder(source, target)
    checkpoint = find_start(source, start)
    if checkpoint is None:
        require_same_start(config, source)
    else:
        require_sound(checkpoint)
    is_own = False
    try:
        if target.exists():
            raise ConfigError(f"{target.uri} exists; delete it, or set another run.name")
        with RunLease.acquire(target, config.run.takeover, print):
            if has_files(target):
                raise ConfigError(f"another replay writes {target.uri}; set another run.name")
            is_own = True
            write_branch(source, checkpoint, target)
            write_origin(source, checkpoint, target, overrides)
        origin = "the start of the run" if checkpoint is None else checkpoint.name
        print(f"computing steps {start + 1} to {config.run.pause_at} again, from {origin}", flush=True)
        train(config)
        replayed = read_contents(target.address_of())
        if last_step(replayed) < step:
            raise TrainingError(f"the replay ended after step {last_step(replayed)}, before step {step}")
        comparison = compare_step(recorded, replayed, step, first)
    except TrainingError as error:
        if keeps_folder:
            raise
        raise TrainingError(f"{error}\nthe folder of the replay is deleted; --keep keeps it, with its logs") from error
    finally:
        if is_own and not keeps_folder:
            delete_run(target)
    return Replay(
        run=source.uri,
        start=start,
        comparison=comparison,
        changed_versions=compare_versions(recorded.section("versions"), versions()),
        folder=target.uri if keeps_folder else None,
        # An earlier step that was computed with other settings changes the later ones too.
        notes=() if is_of_latest_launch(recorded, start + 1) else (f"step {start + 1} {EARLIER_LAUNCH}",),
    )


def replay_config(config: Config, source: RunFolder, step: int, overrides: Sequence[str]) -> Config:
    """Return the config of a replay: the run's, in a folder of its own, which ends with the step's generation batch."""
    name = None if any(each.startswith("run.name=") for each in overrides) else f"{source.name}-replay-{step}"
    return with_run(
        config,
        name=name or config.run.name,
        # The pause saves the step, so that its weights can be compared.
        pause_at=first_of_batch(step, config.steps_per_batch) + config.steps_per_batch - 1,
        trackers=(),
        notify=None,
        trace=False,
        stop_on=(),
        max_failures=0,
        measure="inline",
    )


def first_of_batch(step: int, steps_per_batch: int) -> int:
    """Return the first step on the generation batch of a step."""
    return step - (step - 1) % steps_per_batch


def compare_step(recorded: RunData, replayed: RunData, step: int, first: int) -> StepComparison:
    """Compare a step of two runs.

    Args:
        first: first step on its generation batch.

    Raises:
        DataError: one of them has not recorded the groups, or a file of `rollouts/` cannot be read.
    """
    return compare_steps(step_record(recorded, step, first), step_record(replayed, step, first))


def step_record(run: RunData, step: int, first: int) -> StepRecord:
    """Return the record of a step, with the groups of the first step on its generation batch.

    Raises:
        DataError: the run has not recorded the groups, or a file of `rollouts/` cannot be read.
    """
    records = read_records(run, first, step)
    if first not in records or not records[first].groups:
        raise DataError(
            f"{run.folder.uri} has no rollouts of step {first}; they are written with checkpoints, so those of the "
            "steps after the latest one are missing"
        )
    own = records.get(step, StepRecord(step, ()))
    return replace(own, groups=records[first].groups)


def compare_versions(recorded: Mapping[str, Any], current: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the names whose versions differ, with the recorded and the current one; "none" is a missing one.

    Empty if no versions are recorded.
    """
    pairs = {
        name: (str(recorded.get(name, "none")), str(current.get(name, "none")))
        for name in sorted({*recorded, *current} if recorded else ())
    }
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def delete_run(folder: RunFolder) -> None:
    """Delete the run folder of a replay."""
    if folder.exists():
        folder.filesystem.delete_dir(folder.path())
