"""Baseline: the held-out evaluation of the initial policy, measured once per run, before the first step.

The workers measure it with their training engines. If they cannot (the run resumes from a checkpoint, or the baseline
is needed before there are workers), the driver starts a separate engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.reward_names import score_noun
from grpo_ray.data.problem import Problem
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import DamagedFileError
from grpo_ray.evaluation.metrics import EvaluationResult
from grpo_ray.evaluation.records import write_records
from grpo_ray.storage.records.heldout_files import baseline_file
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.measures import format_measures

MEASURING = "measuring the policy before training"
"""Description of the measurement for the user."""


@dataclass(frozen=True)
class Baseline:
    """Files with the baseline in the run folder, one for each held-out set.

    A baseline that was measured under other conditions, or of another policy, is ignored: an earlier launch of the run
    may have ended before its first checkpoint, and this one may have other settings.
    """

    folder: RunFolder
    conditions: Mapping[str, Mapping[str, Any]]
    """Key of a held-out set -> conditions of its measurement (`metrics.measurement_conditions`)."""
    setup: Mapping[str, Any]
    """Policy that was measured (`baseline_setup`)."""

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the evaluations so far by key, as JSON values; damaged files are ignored."""
        found = {}
        for key, conditions in self.conditions.items():
            if self.folder.exists(baseline_file(key)):
                try:
                    evaluation = self.folder.read_json(baseline_file(key))
                    EvaluationResult.from_dict(evaluation)
                    if evaluation["measured_on"] == conditions and evaluation["setup"] == self.setup:
                        found[key] = evaluation
                except (DamagedFileError, ValueError, KeyError, TypeError):  # the policy is measured again
                    continue
        return found

    def missing(self) -> list[str]:
        """Return the keys of the held-out sets that have not been measured."""
        found = self.read()
        return [key for key in self.conditions if key not in found]

    def write(self, results: Mapping[str, EvaluationResult]) -> None:
        """Write the evaluations of some or all held-out sets, and the records of their completions."""
        for key in results:  # a crash must not leave the records of one policy beside the evaluation of another
            self.folder.delete_file(baseline_file(key))
        write_records(self.folder, 0, results, policy="", conditions=self.conditions)
        for key, result in results.items():
            evaluation = result.to_dict() | {"measured_on": dict(self.conditions[key]), "setup": dict(self.setup)}
            self.folder.write_json(evaluation, baseline_file(key))


def baseline_setup(policy: str) -> dict[str, Any]:
    """Return the setup that the baseline depends on in addition to the conditions of every measurement.

    Args:
        policy: identity of the initial policy (`stages.InitialPolicy`), without secrets.
    """
    return {"policy": policy}


def describe_baseline(results: Mapping[str, EvaluationResult], score: str) -> str:
    """Format the baseline as one line for the log.

    Args:
        score: `Config.heldout_score`.
    """
    values = format_measures({key: result.pass_at_1 for key, result in results.items()})
    return f"held-out {score_noun(score)} before training: {values}"


def baseline_metrics(results: Mapping[str, EvaluationResult]) -> dict[str, float]:
    """Return the baseline's measures as metrics by name, for the event `baseline`."""
    return {f"{key}/{name}": value for key, each in results.items() for name, value in each.measures().items()}


def measure_baseline(
    baseline: Baseline,
    evaluate: Callable[[Mapping[str, list[Problem]]], dict[str, EvaluationResult]],
    sets: Mapping[str, list[Problem]],
    on_progress: Callable[[str], None],
    on_results: Callable[[Mapping[str, EvaluationResult]], None],
) -> None:
    """Measure and write the baseline of the held-out sets that have none yet; collective.

    Args:
        evaluate: evaluates the policy on held-out sets, given and returned by key; collective.
        sets: key of a held-out set -> its problems.
        on_progress: called with the current activity, for the progress line.
        on_results: called on rank 0 with the new results.
    """
    missing = all_gather_object(baseline.missing() if is_rank_zero() else [])[0]
    if not missing:
        return
    on_progress(MEASURING)
    results = evaluate({key: sets[key] for key in missing})
    if is_rank_zero():
        baseline.write(results)
        on_results(results)
