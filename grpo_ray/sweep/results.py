"""Results of a sweep: the trials ranked by their best checkpoints, paired tests between them, and one page."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError, DamagedFileError, DataError
from grpo_ray.evaluation.paired import PairedComparison, compare_paired
from grpo_ray.storage import checkpoints
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.numbers import to_finite
from grpo_ray.storage.records.heldout_files import list_heldout_files, read_measurement, read_verdicts
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.sweep.halving import rank
from grpo_ray.sweep.state import SweepState
from grpo_ray.telemetry.measures import Measure, heldout_measure

PAGE = "report.html"
RESULT = "summary.json"


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Best checkpoint of a trial, and its comparison with the best trial's."""

    name: str
    steps: int
    """Steps that the trial has taken and saved."""
    checkpoint: CheckpointInfo | None
    """Best checkpoint; None if none was measured."""
    value: float | None
    """The metric that trials are compared by, of this checkpoint."""
    measure: Measure | None
    """The accuracy of this checkpoint with its interval, if trials are compared by that of a held-out set."""
    paired: PairedComparison | None = None
    """From this trial to the best one, problem by problem; None for the best trial, or without records."""
    p_value: float | None = None
    """Of `paired`, corrected for the choice of the best trial (`holm` with `count_pairs`)."""


def rank_trials(
    state: SweepState, configs: Mapping[str, Config], folders: Mapping[str, RunFolder]
) -> list[TrialResult]:
    """Return the trials by falling value of their best checkpoints; equal ones keep the order of the sweep.

    Args:
        configs: trial -> its config.
        folders: trial -> its run folder.
    """
    results: dict[str, TrialResult] = {}
    for name in state.names:
        config, stored = configs[name], checkpoints.list_checkpoints(folders[name])
        best = checkpoints.best_checkpoint(stored, config.ranking_metric)
        value = None if best is None else to_finite(best.metrics.get(config.ranking_metric))
        measure = None
        if best is not None and config.ranking_metric.endswith(("/accuracy", "/low")):
            measure = heldout_measure(best.metrics, config.primary_heldout, None)
        steps = stored[-1].step if stored else 0
        results[name] = TrialResult(name=name, steps=steps, checkpoint=best, value=value, measure=measure)
    order = rank({name: result.value for name, result in results.items()})
    return compare_with_best([results[name] for name in order], configs)


def compare_with_best(results: Sequence[TrialResult], configs: Mapping[str, Config]) -> list[TrialResult]:
    """Add the paired comparisons of all trials with the first one."""
    if not results or results[0].checkpoint is None:
        return list(results)
    best = results[0]
    pairs = {
        each.name: compare_checkpoints(each.checkpoint, best.checkpoint, configs[best.name].primary_heldout)
        for each in results[1:]
        if each.checkpoint is not None
    }
    p_values = {name: pair.p_value for name, pair in pairs.items() if pair is not None}
    corrected = holm(p_values, count_pairs(results))
    return [replace(each, paired=pairs.get(each.name), p_value=corrected.get(each.name)) for each in results]


def count_pairs(results: Sequence[TrialResult]) -> int:
    """Return the number of pairs of measured trials, K(K-1)/2.

    The best trial was chosen on the same problems that it is compared on, so that each pair might have been compared.
    """
    return math.comb(sum(each.checkpoint is not None for each in results), 2)


def holm(p_values: Mapping[str, float], comparisons: int) -> dict[str, float]:
    """Correct p-values for a number of comparisons (Holm, Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: those of some or all of the comparisons. The others count as larger, so that the result is at least
            that of Holm's procedure with all of them.
        comparisons: number of all comparisons.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for number, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (comparisons - number) * p_values[name]))
        corrected[name] = largest
    return corrected


def compare_checkpoints(
    before: CheckpointInfo | None, after: CheckpointInfo | None, key: str
) -> PairedComparison | None:
    """Compare two checkpoints on the problems of a held-out set; None unless both were recorded alike."""
    if before is None or after is None:
        return None
    try:
        read = [_read_verdicts(each, key) for each in (before, after)]
    except (DataError, OSError):
        return None
    if read[0] is None or read[1] is None or read[0][0] != read[1][0]:
        return None
    return compare_paired(read[0][1], read[1][1])


def _read_verdicts(checkpoint: CheckpointInfo, key: str) -> tuple[str, dict[str, list[float]]] | None:
    """Return the conditions of a checkpoint's measurement and problem -> verdicts; None if there is no record."""
    folder = checkpoint.folder
    file = next((file for file in list_heldout_files(folder, key) if file.step == checkpoint.step), None)
    if file is None:
        return None
    measurement = read_measurement(folder, file)
    if measurement.policy != checkpoint.name:  # of another checkpoint of this step, which was taken again
        return None
    return measurement.conditions, read_verdicts(folder, file)


def write_results(folder: RunFolder, results: Sequence[TrialResult], state: SweepState) -> None:
    """Write the ranking to `summary.json` of the sweep's folder."""
    rows = [
        {
            "trial": each.name,
            "overrides": dict(state.record(each.name).trial.overrides),
            "standing": state.record(each.name).standing,
            "reason": state.record(each.name).reason,
            "steps": each.steps,
            "value": each.value,
            "best_checkpoint": None if each.checkpoint is None else each.checkpoint.uri,
            "difference_to_best": None if each.paired is None else each.paired.difference.value,
            "p_value": each.p_value,
        }
        for each in results
    ]
    folder.write_json({"trials": rows}, RESULT)


def write_page(folder: RunFolder, results: Sequence[TrialResult], folders: Mapping[str, RunFolder]) -> str | None:
    """Write the page with the overlaid curves of the best trials; return its path, or None if it cannot be made."""
    from grpo_ray.pages.report.page import MAX_RUNS, render
    from grpo_ray.pages.report.read import read_run

    names = [each.name for each in results if each.steps > 0][:MAX_RUNS]
    try:
        runs = [read_run(folders[name].address_of()) for name in names]
    except (ConfigError, DamagedFileError, OSError):  # the sweep itself is complete, and `grpo-ray report` explains it
        return None
    if not runs:
        return None
    folder.write_text(render(runs, time.time(), title=folder.name), PAGE)
    return folder.uri_of(PAGE)
