"""The policy's accuracy before training: who measures it, and when."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_settings

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


def test_the_policy_is_measured_once(folder):
    said: list[str] = []
    measure(Before(folder, CONTENTS), rows, PROBLEMS, said.append, said.append)
    before = Before(folder, CONTENTS).read()
    assert before is not None
    assert (before["problems"], before["unscorable"], before["pass_at_1"]["value"]) == (2, 1, 0.5)
    assert said == ["measuring the policy before training", in_words(before)]
    measure(Before(folder, CONTENTS), lambda problems: pytest.fail("measured twice"), [], said.append, said.append)
    assert len(said) == 2


def test_a_measurement_on_other_problems_does_not_count(folder):
    measure(Before(folder, CONTENTS), rows, PROBLEMS, print, print)
    assert Before(folder, Contents.of(["another"])).read() is None
    assert Before(folder, CONTENTS).read() is not None


def test_workers_measure_what_an_engine_of_its_own_measures(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path
) -> None:
    summary, folder = small_run("workers", "grpo.max_steps=1", "data.heldout_limit=64", measured=True)
    settings = [*small_settings("engine", tmp_path, policy), "data.heldout_limit=64"]
    with launch.prepare(load(None, settings)) as run:
        alone = run.heldout_before
        assert run.train_loop_config["assignment"].unmeasured is None  # the workers are spared
    together = json.loads((folder / FILE).read_text())
    assert summary.heldout_before == together["pass_at_1"]["value"] > 0
    rate = "completions_per_second"
    assert together.pop(rate) > 0 and alone.pop(rate) > 0
    assert together == alone and together["problems"] == 64
