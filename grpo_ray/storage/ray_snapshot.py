"""Repair of Ray Train's own record of a run's checkpoints (`checkpoint_manager_snapshot.json`).

Ray Train stores this snapshot in the run folder and restores it when a run starts. It has no public function to
correct the snapshot, and a killed run can leave a wrong one:

- Ray refuses to start if the snapshot names a checkpoint that was deleted, or if a full disk truncated the file.
- Ray never deletes a checkpoint that the snapshot does not name, so the storage would fill up.
- After `run.best_metric` was changed, Ray would delete checkpoints by scores of the old metric.

The snapshot is therefore rewritten from our own manifests before Ray Train starts. The new one includes surplus
checkpoints; Ray deletes them when it registers the first new checkpoint.

This module is the only one that uses Ray Train's private checkpoint manager; it was written for Ray 2.60.
"""

from collections.abc import Sequence

from grpo_ray.storage.checkpoints import SCORE, CheckpointInfo, checkpoint_score, list_checkpoints
from grpo_ray.storage.run_folder import RunFolder

SNAPSHOT = "checkpoint_manager_snapshot.json"


def repair_ray_snapshot(folder: RunFolder, metric: str) -> None:
    """Rewrite Ray Train's snapshot if it does not name exactly the checkpoints that exist, with their scores.

    Args:
        folder: the run folder.
        metric: `run.best_metric`, which the checkpoints are ranked by.
    """
    checkpoints = list_checkpoints(folder)
    scores = [(each.name, checkpoint_score(each.metrics, metric).get(SCORE)) for each in checkpoints]
    if _scores_in_snapshot(folder) != scores:
        folder.write_text(_make_snapshot(checkpoints, metric), SNAPSHOT)


def _make_snapshot(checkpoints: Sequence[CheckpointInfo], metric: str) -> str:
    """Return the snapshot of these checkpoints, given in the order of writing, in Ray's JSON format."""
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
        _CheckpointManagerState,
        _TrainingResultState,
    )

    def result(checkpoint: CheckpointInfo) -> _TrainingResultState:
        metrics = dict(checkpoint.metrics) | checkpoint_score(checkpoint.metrics, metric)
        return _TrainingResultState(checkpoint_dir_name=checkpoint.name, metrics=metrics)

    def rank(checkpoint: CheckpointInfo) -> tuple[float, int]:
        return checkpoint_score(checkpoint.metrics, metric).get(SCORE, float("-inf")), checkpoint.serial

    ranked = sorted(checkpoints, key=rank)  # Ray's order: worst first
    state = _CheckpointManagerState(
        checkpoint_results=[result(each) for each in ranked],
        checkpoint_report_indices=[each.serial for each in ranked],
        latest_checkpoint_result=result(checkpoints[-1]) if checkpoints else None,
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=max((each.serial for each in checkpoints), default=0) + 1,
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    return state.json()


def _scores_in_snapshot(folder: RunFolder) -> list[tuple[str, float | None]] | None:
    """Return names and scores of the checkpoints in Ray's snapshot, in the order of reports; None if it is damaged."""
    if not folder.exists(SNAPSHOT):
        return []
    try:
        snapshot = folder.read_json(SNAPSHOT)
        results = zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True)
        in_order = [result for _, result in sorted(results, key=lambda pair: pair[0])]
        return [(result["checkpoint_dir_name"], result["metrics"].get(SCORE)) for result in in_order]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
