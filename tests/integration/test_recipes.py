"""The recipes that run on CPUs are checked, and take two steps; other tests train the arithmetic one in many ways."""

import json
from pathlib import Path

import pytest
from small_runs import rows_of

from grpo_ray.cli import main
from grpo_ray.config.loader import load_config
from grpo_ray.examples import example_names, example_path

ON_CPU = [name for name in example_names() if not load_config(example_path(name)).cluster.use_gpu]
SHORT = ["grpo.max_steps=2", "grpo.save_steps=2", "data.heldout_limit=4", "cluster.threads_per_worker=1"]
IN_CI = {"guessing-game"}
"""Recipe whose test is not slow; other tests of CI take steps of arithmetic, tools and mixtures."""


def test_recipes_on_cpu_are_found() -> None:
    assert len(ON_CPU) == 7


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow]) for name in ON_CPU]
)
def test_recipe_is_checked_and_takes_two_steps(cluster: None, name: str, tmp_path: Path) -> None:
    overrides = ["--example", name, f"run.storage_path={tmp_path}", *SHORT]
    report = tmp_path / "check.json"
    assert main(["check", "--sample", "5", "--json", str(report), *overrides]) == 0
    assert json.loads(report.read_text())
    assert main(["train", *overrides]) == 0
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert folder.name == name and [row["step"] for row in rows_of(folder)] == [1, 2]
