"""How good the policy is that a run begins with: measured once in the life of the run, before its first step.

The workers measure it with the engines that they start anyway. Where they cannot, because they go on from a checkpoint
or somebody asks before there are workers, an engine is started for it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.evaluation.metrics import Evaluation, summarize_evaluation
from grpo_ray.storage.run_folder import RunFolder

FILE = "heldout_before.json"


class Baseline:
    """The starting policy's evaluation in the run folder. One on other held-out problems than the present is none."""

    def __init__(self, folder: RunFolder, contents: DatasetFingerprint):
        """contents: what the held-out problems are."""
        self.folder = folder
        self.contents = contents

    def read(self) -> dict[str, Any] | None:
        """What was measured; None if it was not yet."""
        if not self.folder.exists(FILE):
            return None
        before = json.loads(self.folder.read_text(FILE))
        return before if before["measured_on"] == asdict(self.contents) else None

    def write(self, evaluation: Evaluation) -> dict[str, Any]:
        """Keep what was measured, and give it in JSON's types."""
        before = evaluation.to_dict() | {"measured_on": asdict(self.contents)}
        self.folder.write_json(before, FILE)
        return before


def describe_baseline(before: dict[str, Any]) -> str:
    """The line that says it."""
    return f"held-out accuracy before training: {before['pass_at_1']['value']:.3f}"


def measure_baseline(
    before: Baseline,
    solve: Callable[[list[Problem]], list[dict[str, Any]]],
    problems: list[Problem],
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """Measure the starting policy on all workers, unless an attempt before this one has; every worker must call it.

    solve: gives the rows of this worker's part of the problems (`Learner.solve`).
    say: told what is being done. tell: told what was measured.
    """
    if all_gather_object(is_rank_zero() and before.read() is not None)[0]:
        return
    say("measuring the policy before training")
    rows = [row for some in all_gather_object(solve(problems)) for row in some]
    if is_rank_zero():
        tell(describe_baseline(before.write(summarize_evaluation(rows, num_samples=1))))
