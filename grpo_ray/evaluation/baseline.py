"""Baseline: the held-out evaluation of the initial policy, measured once per run, before the first step.

The workers measure it with the engines that they train with. If they cannot (the run resumes from a checkpoint, or the
baseline is needed before there are workers), the driver starts an engine for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.errors import DamagedFileError
from grpo_ray.evaluation.metrics import EvaluationResult, summarize_evaluation
from grpo_ray.storage.run_folder import RunFolder

FILE = "heldout_before.json"


class BaselineFile:
    """The file with the baseline in the run folder. A baseline measured on other held-out problems does not count."""

    def __init__(self, folder: RunFolder, fingerprint: DatasetFingerprint):
        """
        Args:
            folder: the run folder.
            fingerprint: fingerprint of the run's held-out problems.
        """
        self.folder = folder
        self.fingerprint = fingerprint

    def read(self) -> dict[str, Any] | None:
        """Return the baseline in JSON's types.

        None if it has not been measured on these held-out problems, or if the file is damaged: it is then measured
        again.
        """
        if not self.folder.exists(FILE):
            return None
        try:
            baseline = self.folder.read_json(FILE)
            float(baseline["pass_at_1"]["value"])
            is_usable = baseline["measured_on"] == asdict(self.fingerprint)
        except (DamagedFileError, KeyError, TypeError, ValueError):
            return None
        return baseline if is_usable else None

    def write(self, result: EvaluationResult) -> dict[str, Any]:
        """Write the baseline, and return it in JSON's types."""
        baseline = result.to_dict() | {"measured_on": asdict(self.fingerprint)}
        self.folder.write_json(baseline, FILE)
        return baseline


def describe_baseline(baseline: Mapping[str, Any]) -> str:
    """Format the baseline as one line for the log."""
    return f"held-out accuracy before training: {baseline['pass_at_1']['value']:.3f}"


def measure_baseline(
    file: BaselineFile,
    solve: Callable[[list[Problem]], Sequence[Mapping[str, Any]]],
    problems: list[Problem],
    num_samples: int,
    on_progress: Callable[[str], None],
    notify: Callable[[str], None],
) -> None:
    """Measure and write the baseline on all workers, unless a previous attempt did; collective.

    Args:
        solve: solves this worker's part of the problems; returns rows as `summarize_evaluation` takes them.
        problems: all held-out problems.
        num_samples: completions per problem.
        on_progress: called with the current activity, for the progress line.
        notify: called on rank 0 with the result as a line of text.
    """
    if all_gather_object(is_rank_zero() and file.read() is not None)[0]:
        return
    on_progress("measuring the policy before training")
    rows = [row for rows_of_worker in all_gather_object(solve(problems)) for row in rows_of_worker]
    if is_rank_zero():
        notify(describe_baseline(file.write(summarize_evaluation(rows, num_samples))))
