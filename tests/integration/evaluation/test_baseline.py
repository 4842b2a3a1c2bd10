"""Tests of the baseline of a run: the workers and the driver measure the same."""

import json
from pathlib import Path

from small_runs import REFERENCE, FinishedRun, small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.driver.run import prepare
from grpo_ray.evaluation.baseline import baseline_file


def test_workers_measure_the_same_baseline_as_the_driver(
    reference_run: FinishedRun, policy: Path, tmp_path: Path
) -> None:
    """The workers measure with the engines that they train with, the driver with a separate engine."""
    with prepare(load_config(None, [*small_settings("engine", tmp_path, policy), *REFERENCE])) as run:
        by_driver = run.heldout_before
        spec = run.plan.train_loop_config["spec"]
        assert spec.baseline_setup is None  # the workers will not measure it again
    by_workers = json.loads((reference_run.folder / baseline_file("heldout")).read_text())
    rate = "completions_per_second"
    assert by_workers.pop(rate) > 0 and by_driver.pop(rate) > 0
    assert by_workers == by_driver and by_workers["problems"] == 24
