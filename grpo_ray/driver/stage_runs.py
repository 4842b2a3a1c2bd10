"""Runs of the stages of one YAML, one after the other: each from the best checkpoint of the stage before it.

Only the policy is taken over. Optimizer, schedule, problems and rewards are those of the stage, so that a stage is a
plain run whose `model.path` names a policy:

| checkpoint of the stage before | `model.path` |
|---|---|
| whole policy | the checkpoint itself |
| adapter, or parts of a sharded learner | `policies/<stage>` beside the run folders: the exported policy |

An adapter is merged, and a stage with `model.lora` or `model.peft` trains a new one. So stages may differ in their
adapters, and the reference of `grpo.beta` is the policy that the stage begins with, with and without adapters.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import IdArray
from grpo_ray.data.stream import build_index
from grpo_ray.driver.cluster.connection import owns_cluster, run_resources
from grpo_ray.driver.preflight.checks import CHECKS, run_preflight
from grpo_ray.driver.preflight.resume_fields import changed_settings
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import read_recorded_config
from grpo_ray.driver.run import prepare
from grpo_ray.driver.stage_config import RunStage, Stages
from grpo_ray.driver.summary import RunSummary
from grpo_ray.errors import CheckpointError, ConfigError, DamagedFileError, GrpoRayError, TakenRunError
from grpo_ray.export.checkpoint import describe_origin, export, find_checkpoint
from grpo_ray.models.adapter_folders import ADAPTER_CONFIG
from grpo_ray.models.shards import POLICY_SHARDS
from grpo_ray.observers.terminal.progress import ProgressLine, build_progress
from grpo_ray.resilience.chaos import Fault
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints, require_listed_files
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.stage_folders import POLICIES, STAGES_FILE
from grpo_ray.storage.uris import split_path

BEFORE_LAUNCH = ("old run", "same run", "storage")
"""Checks that only a stage's own launch makes: they compare its run folder with its final config."""
NOT_OF_THE_POLICY = ("optimizer.pt", "scheduler.pt", "rng_state")
"""Beginnings of the names of files that a stage does not take over, so that they are not verified."""


@dataclass(frozen=True)
class StageResult:
    """Stage whose run has ended, or was skipped because it had ended before."""

    stage: RunStage
    summary: RunSummary | None
    """None for a stage that was skipped."""


def train_stages(
    stages: Stages,
    on_result: Callable[[StageResult], None] = lambda result: None,
    make_progress: Callable[[Config], ProgressLine] = build_progress,
    faults: Mapping[str, Sequence[Fault]] | None = None,
) -> list[StageResult]:
    """Run the stages that have not ended yet, in order; all of them are checked before the first one begins.

    Args:
        on_result: called with each result as soon as there is one.
        make_progress: creates the display of a run.
        faults: name of a stage -> faults injected into it on purpose (`chaos.py`).

    Returns:
        Results up to the last stage, or to one that was stopped (`RunSummary.stopped`).

    Raises:
        ConfigError: a setting of a stage that has ended was changed, a stage cannot work, or the folder of all stages
            cannot be written.
        GrpoRayError: a stage was refused, or has failed; the same command continues with it.
    """
    remaining = unfinished_stages(stages)
    results = [StageResult(stage, None) for stage in stages.stages[: len(stages) - len(remaining)]]
    for result in results:
        on_result(result)
    if not remaining:
        return results
    _folder(stages).check_writable()
    check_stages(remaining, make_progress)
    _folder(stages).write_json([each.folder_name for each in stages], STAGES_FILE)
    before = remaining[0]
    for stage in remaining:
        ready = stage if stage is remaining[0] else _with_policy(stage, stages)
        _end_cluster_of_other_size(ready.config, before=before.config)
        with prepare(ready.config, make_progress(ready.config), (faults or {}).get(stage.name, ())) as run:
            if run.has_steps_left:
                run.fit(run.trainer())
            summary, before = run.finish(), ready
            if stage is not remaining[-1] and summary.stopped is None:
                # A stop in the last step of a stage: that stage is complete, but the next one must not begin.
                summary = replace(summary, stopped=run.stopped_by)
        results.append(StageResult(ready, summary))
        on_result(results[-1])
        if summary.stopped is not None:
            break
    return results


# Stages that have ended


def unfinished_stages(stages: Stages) -> list[RunStage]:
    """Return the stages that have not ended, the first one with the policy that it begins with.

    Raises:
        ConfigError: see `finished_stages`.
        CheckpointError: the stage before the first one has no usable checkpoint.
    """
    remaining = stages.stages[len(finished_stages(stages)) :]
    return [_with_policy(stage, stages) if stage is remaining[0] else stage for stage in remaining]


def finished_stages(stages: Stages) -> list[RunStage]:
    """Return the stages that have ended and are skipped, the first ones of the list.

    Raises:
        ConfigError: settings of one of them were changed, a stage begins before the one before it has ended, or the
            folder of all stages belongs to a plain run.
    """
    if (folder := _folder(stages)).exists(RECORDED_CONFIG):
        raise ConfigError(f"{folder.uri} is the run folder of a plain run; set another run.name for the stages")
    begun = [stage for stage in stages if run_folder(stage).exists(RECORDED_CONFIG)]
    finished: list[RunStage] = []
    for stage in stages:
        is_last = not any(each.number > stage.number for each in begun)
        recorded = _recorded_if_finished(stage)
        starts_over = stage.config.run.resume == "never"
        if recorded is None or (starts_over and is_last):
            if not is_last:
                later = next(each for each in begun if each.number > stage.number)
                raise ConfigError(
                    f"stage {stage.name} has not ended, but {later.name} after it has begun; set another run.name, or "
                    f"restore {run_folder(stage).uri}"
                )
            break
        if starts_over:
            raise ConfigError(
                f"stage {stage.name}: run.resume=never would start it over, but a stage after it has begun; set "
                "another run.name"
            )
        _require_unchanged(stage, recorded)
        finished.append(stage)
    return finished


def run_folder(stage: RunStage) -> RunFolder:
    """Return the run folder of a stage; nothing is created."""
    run = stage.config.run
    return RunFolder(run.storage_path, run.name, run.storage_retry_seconds)


def _folder(stages: Stages) -> RunFolder:
    """Return the folder of all stages."""
    retry_seconds = stages.stages[0].config.run.storage_retry_seconds
    return RunFolder(stages.storage_path, stages.name, retry_seconds)


def _recorded_if_finished(stage: RunStage) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the config that a stage has ended with; None if it has not ended."""
    folder = run_folder(stage)
    if not (folder.exists(RECORDED_CONFIG) and folder.exists("summary.json")):
        return None
    recorded = read_recorded_config(folder)
    last = recorded.get("grpo", {}).get("max_steps", Config().grpo.max_steps)
    stored = list_checkpoints(folder)
    try:
        summarised = str(folder.read_json("summary.json").get("latest_checkpoint"))
    except (DamagedFileError, AttributeError):  # the next launch writes it again
        return None
    # A launch that was killed after the last checkpoint has left the summary of an earlier launch. Its number of steps
    # is that of `metrics.jsonl`, in which the row of the last step may be missing after a kill.
    is_summarised = bool(stored) and split_path(summarised)[1] == stored[-1].name
    return recorded if is_summarised and stored[-1].step >= last else None


def _require_unchanged(stage: RunStage, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if settings of a stage differ from those that it has ended with."""
    # The policy of a later stage follows from the stages before it.
    ignored = () if stage.number == 1 else ("model.path",)
    changed = {key: both for key, both in changed_settings(stage.config, recorded).items() if key not in ignored}
    if changed:
        key, (old, new) = next(iter(changed.items()))
        others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConfigError(
            f"stage {stage.name} has ended with {key}={old}, and it is now {new}{others}; restore it, or set another "
            "run.name, or add a stage with it at the end"
        )


# Checks of all stages


def check_stages(stages: Sequence[RunStage], make_progress: Callable[[Config], ProgressLine] = build_progress) -> None:
    """Check settings, policy, data and resources of all stages, and read their problems; no worker is started.

    Stages whose policy does not exist yet are checked with that of the first one.

    Args:
        stages: the stages that have not ended, each with a policy.

    Raises:
        GrpoRayError: the first check that fails; the message begins with the name of the stage.
    """
    trained: dict[str, IdArray] = {}
    last = stages[-1]
    with ExitStack() as stack:
        progress = stack.enter_context(make_progress(stages[0].config))
        # The first stage comes last, so that the cluster that is started for it can be kept.
        ids: dict[str, tuple[IdArray, Mapping[str, IdArray]]] = {}
        for stage in reversed(stages):
            _end_cluster_of_other_size(stage.config, before=last.config)
            last = stage
            progress.phase(f"checking stage {stage.name}")
            try:
                ids[stage.name] = _check_stage(stage, progress)
            except GrpoRayError as error:
                raise type(error)(f"stage {stage.name}: {error}") from None
        for stage in stages:
            training, heldout = ids[stage.name]
            for notice in _overlaps(stage, heldout, trained):
                progress.notice(notice)
            trained[stage.name] = training


def _check_stage(stage: RunStage, progress: ProgressLine) -> tuple[IdArray, Mapping[str, IdArray]]:
    """Check one stage, and return the sorted ids of its problems: those of training, and held-out sets by key."""
    context = RunContext(stage.config, run_folder(stage), progress, owns_cluster=owns_cluster())
    run_preflight(context, [check for check in CHECKS if check.name not in BEFORE_LAUNCH])
    training, heldout = context.splits
    of_training = np.unique(np.concatenate([build_index(split).ids for split in training.values()]))
    return of_training, {key: build_index(split).ids for key, split in heldout.items()}


def _overlaps(stage: RunStage, heldout: Mapping[str, IdArray], trained: Mapping[str, IdArray]) -> Iterator[str]:
    """Yield a notice for each stage before that trains on held-out problems of this one."""
    for key, ids in heldout.items():
        for name, training in trained.items():
            if count := len(np.intersect1d(ids, training, assume_unique=True)):
                yield (
                    f"stage {name} trains on {count} of the {len(ids)} held-out problems ({key}) of stage "
                    f"{stage.name}, so its accuracy there is no measure of unseen problems; set data.heldout"
                )


def _end_cluster_of_other_size(config: Config, *, before: Config) -> None:
    """End the cluster that this process has started, if a stage needs another one than the stage before."""
    if not _has_same_cluster(config, before) and ray.is_initialized() and owns_cluster():
        ray.shutdown()


def _has_same_cluster(config: Config, other: Config) -> bool:
    """Return True if a cluster that was started for one of two configs has what the other one needs."""
    cpus = [run_resources(each)["CPU"] for each in (config, other)]  # of an engine that measures in the background, too
    return config.cluster == other.cluster and config.engine == other.engine and cpus[0] == cpus[1]


# The policy of a stage


def _with_policy(stage: RunStage, stages: Stages) -> RunStage:
    """Return a stage with the best policy of the stage before it; the first one begins with its own `model.path`."""
    if stage.number == 1:
        return stage
    before = stages.stages[stage.number - 2]
    return stage.begin_with(policy_after(before, _folder(stages), stage.config.model.trust_remote_code))


def policy_after(stage: RunStage, folder: RunFolder, trust_remote_code: bool = False) -> str:
    """Return the path or URI of the best policy of a stage that has ended; an adapter's is exported first.

    Args:
        folder: folder of all stages.

    Raises:
        CheckpointError: the stage has no complete checkpoint, or its best one is damaged.
        TakenRunError: another driver exports it.
    """
    checkpoint = find_checkpoint(run_folder(stage).address_of())
    require_listed_files(checkpoint)
    if not _needs_export(checkpoint):
        files = {name: each for name, each in checkpoint.files.items() if not name.startswith(NOT_OF_THE_POLICY)}
        if faults := find_faults(replace(checkpoint, files=files)):
            raise CheckpointError(f"stage {stage.name}: {checkpoint.uri} is damaged: {'; '.join(faults)}")
        return checkpoint.folder.address_of(checkpoint.name)
    _export_once(checkpoint, stage.folder_name, folder, trust_remote_code)
    return folder.address_of(POLICIES, stage.folder_name)


def _export_once(checkpoint: CheckpointInfo, name: str, folder: RunFolder, trust_remote_code: bool) -> None:
    """Export a checkpoint to `policies/<name>`, unless it is there already.

    A second driver of the same stages is refused meanwhile. It would otherwise delete the policy that the first one has
    just exported, and that workers may already read: a stage's own lease begins after its policy is there.

    Raises:
        TakenRunError: another driver exports a policy of these stages.
    """
    origin, record = describe_origin(checkpoint, None), f"{name}.json"

    def is_exported() -> bool:
        # The record is written last: without it, a killed driver may have left a part of the policy.
        is_recorded = folder.exists(POLICIES, record) and folder.read_json(POLICIES, record) == origin
        return is_recorded and folder.exists(POLICIES, name, "config.json")

    if is_exported():
        return
    try:
        lease = RunLease.acquire(folder, None, print)
    except TakenRunError:
        raise TakenRunError(
            f"another driver exports the policy {folder.uri_of(POLICIES, name)} for the next stage; let it go on, or "
            "end it and run the same command again"
        ) from None
    with lease:
        if is_exported():  # by another driver, which has released the lease just now
            return
        folder.delete_folder(POLICIES, name)
        with tempfile.TemporaryDirectory(prefix="grpo_ray-stage-") as scratch:
            target = Path(scratch, name)
            export(checkpoint.folder.address_of(checkpoint.name), target, trust_remote_code=trust_remote_code)
            folder.upload(target, POLICIES, name)
        folder.write_json(origin, POLICIES, record)


def _needs_export(checkpoint: CheckpointInfo) -> bool:
    """Return True if the files of a checkpoint are not a whole policy that a model library can load."""
    return any(name == ADAPTER_CONFIG or name.startswith(f"{POLICY_SHARDS}/") for name in checkpoint.files)
