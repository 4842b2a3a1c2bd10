"""Measuring the policy before training: once, by the workers or by the driver."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import REFERENCE, FinishedRun, small_settings

from grpo_ray import launch
from grpo_ray.before import FILE, Before, in_words, measure
from grpo_ray.ledger import Contents
from grpo_ray.problem import Problem
from grpo_ray.settings import load
from grpo_ray.storage import RunFolder

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"{n} + 1"}], solution=f"${n + 1}$") for n in range(3)
]
CONTENTS = Contents.of(problem.id for problem in PROBLEMS)


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
    measure(Before(folder, CONTENTS), rows, PROBLEMS, said.append, said.append)
    before = Before(folder, CONTENTS).read()
    assert before is not None
    assert (before["problems"], before["unscorable"], before["pass_at_1"]["value"]) == (2, 1, 0.5)
    assert said == ["measuring the policy before training", in_words(before)]
    measure(Before(folder, CONTENTS), lambda problems: pytest.fail("measured twice"), [], said.append, said.append)
    assert len(said) == 2


def test_before_measured_on_other_problems_is_none(folder):
    measure(Before(folder, CONTENTS), rows, PROBLEMS, print, print)
    assert Before(folder, Contents.of(["another"])).read() is None
    assert Before(folder, CONTENTS).read() is not None


def test_workers_measure_the_same_baseline_as_the_driver(
    reference_run: FinishedRun, policy: Path, tmp_path: Path
) -> None:
    """The workers measure with the engines that they train with, the driver with an engine of its own."""
    with launch.prepare(load(None, [*small_settings("engine", tmp_path, policy), *REFERENCE])) as run:
        alone = run.heldout_before
        assert not run.train_loop_config["assignment"].measures_before  # the workers are spared
    together = json.loads((reference_run.folder / FILE).read_text())
    rate = "completions_per_second"
    assert together.pop(rate) > 0 and alone.pop(rate) > 0
    assert together == alone and together["problems"] == 24
