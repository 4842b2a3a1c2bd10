"""Measuring the policy before training: once, by the workers or by the driver."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import REFERENCE, FinishedRun, small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.driver.run import prepare
from grpo_ray.evaluation.baseline import FILE, Baseline, describe_baseline, measure_baseline
from grpo_ray.storage.run_folder import RunFolder

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n} + 1"}], solution=f"${n + 1}$") for n in range(3)
]
CONTENTS = DatasetFingerprint.of(problem.id for problem in PROBLEMS)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run", 1.0)


def rows(problems: list[Problem]) -> list[dict[str, Any]]:
    """The first is solved, the second not, and the third cannot be scored."""
    scores = [1.0, 0.0, float("nan")]
    return [
        {"id": problem.id, "scores": [score], "answers": [""], "truncated": 0, "seconds": 0.5}
        for problem, score in zip(problems, scores, strict=True)
    ]


def test_measure_second_call_measures_nothing(folder):
    said: list[str] = []
    measure_baseline(Baseline(folder, CONTENTS), rows, PROBLEMS, said.append, said.append)
    before = Baseline(folder, CONTENTS).read()
    assert before is not None
    assert (before["problems"], before["unscorable"], before["pass_at_1"]["value"]) == (2, 1, 0.5)
    assert said == ["measuring the policy before training", describe_baseline(before)]
    measure_baseline(
        Baseline(folder, CONTENTS), lambda problems: pytest.fail("measured twice"), [], said.append, said.append
    )
    assert len(said) == 2


def test_before_measured_on_other_problems_is_none(folder):
    measure_baseline(Baseline(folder, CONTENTS), rows, PROBLEMS, print, print)
    assert Baseline(folder, DatasetFingerprint.of(["another"])).read() is None
    assert Baseline(folder, CONTENTS).read() is not None


def test_workers_measure_the_same_baseline_as_the_driver(
    reference_run: FinishedRun, policy: Path, tmp_path: Path
) -> None:
    """The workers measure with the engines that they train with, the driver with an engine of its own."""
    with prepare(load_config(None, [*small_settings("engine", tmp_path, policy), *REFERENCE])) as run:
        alone = run.heldout_before
        assert not run.train_loop_config["assignment"].measures_before  # the workers are spared
    together = json.loads((reference_run.folder / FILE).read_text())
    rate = "completions_per_second"
    assert together.pop(rate) > 0 and alone.pop(rate) > 0
    assert together == alone and together["problems"] == 24
