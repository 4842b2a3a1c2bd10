"""Tests of the baseline: measured once per run, by the workers or by the driver."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import REFERENCE, FinishedRun, small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.driver.run import prepare
from grpo_ray.evaluation.baseline import FILE, BaselineFile, describe_baseline, measure_baseline
from grpo_ray.storage.run_folder import RunFolder

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n} + 1"}], solution=f"${n + 1}$") for n in range(3)
]
FINGERPRINT = DatasetFingerprint.of(problem.id for problem in PROBLEMS)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run", 1.0)


def rows(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return scores of three problems: the first is solved, the second is not, the third cannot be scored."""
    scores = [1.0, 0.0, float("nan")]
    return [
        {"id": problem.id, "scores": [score], "answers": [""], "truncated": 0, "seconds": 0.5}
        for problem, score in zip(problems, scores, strict=True)
    ]


def test_measure_baseline_second_call_measures_nothing(folder: RunFolder) -> None:
    messages: list[str] = []
    measure_baseline(BaselineFile(folder, FINGERPRINT), rows, PROBLEMS, 1, messages.append, messages.append)
    baseline = BaselineFile(folder, FINGERPRINT).read()
    assert baseline is not None
    assert (baseline["problems"], baseline["unscorable"], baseline["pass_at_1"]["value"]) == (2, 1, 0.5)
    assert messages == ["measuring the policy before training", describe_baseline(baseline)]
    measure_baseline(
        BaselineFile(folder, FINGERPRINT),
        lambda problems: pytest.fail("measured twice"),
        [],
        1,
        messages.append,
        messages.append,
    )
    assert len(messages) == 2


def test_baseline_of_other_problems_is_not_read(folder: RunFolder) -> None:
    measure_baseline(BaselineFile(folder, FINGERPRINT), rows, PROBLEMS, 1, print, print)
    assert BaselineFile(folder, DatasetFingerprint.of(["another"])).read() is None
    assert BaselineFile(folder, FINGERPRINT).read() is not None


def test_workers_measure_the_same_baseline_as_the_driver(
    reference_run: FinishedRun, policy: Path, tmp_path: Path
) -> None:
    """The workers measure with the engines that they train with, the driver with a separate engine."""
    with prepare(load_config(None, [*small_settings("engine", tmp_path, policy), *REFERENCE])) as run:
        by_driver = run.heldout_before
        assert not run.plan.train_loop_config["spec"].measures_baseline  # the workers will not measure it again
    by_workers = json.loads((reference_run.folder / FILE).read_text())
    rate = "completions_per_second"
    assert by_workers.pop(rate) > 0 and by_driver.pop(rate) > 0
    assert by_workers == by_driver and by_workers["problems"] == 24
