"""Tests that importing a light module does not import a heavy library: one new process for each row."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "trl", "transformers", "pandas", "pyarrow")

LIGHT = (
    *(
        "grpo_ray",
        "grpo_ray.telemetry.coordinator",
        "grpo_ray.config.loader",
        "grpo_ray.data.stream",
        "grpo_ray.errors",
        "grpo_ray.resilience.error_triage",
    ),
    *(
        "grpo_ray.data.ledger",
        "grpo_ray.telemetry.goodput",
        "grpo_ray.data.problem",
        "grpo_ray.rewards.registry",
        "grpo_ray.storage.checkpoints",
        "grpo_ray.storage.records.rollout_files",
    ),
    *("grpo_ray.storage.run_folder", "grpo_ray.models.embedded_policy", "grpo_ray.models.warm_up"),
)
"""Modules that import none of HEAVY. One process imports them in turn: the first that loads one is reported."""

TRACKERS = ("wandb", "mlflow", "trackio")

ROWS = {
    "light modules": [(LIGHT, HEAVY)],
    "config": [(["grpo_ray.config.loader"], [*HEAVY, "numpy"])],
    "driver, then train worker": [
        (["grpo_ray.learner.trl_config", "grpo_ray.driver.run"], ["vllm", *TRACKERS]),
        (["grpo_ray.training.worker", "grpo_ray.learner.learner", "grpo_ray.evaluation.evaluate"], TRACKERS),
    ],
    "report and live page": [(["grpo_ray.pages.report", "grpo_ray.pages.watch"], HEAVY)],
    "commands other than watch": [(["grpo_ray.cli", "grpo_ray.pages.report"], ["starlette", "uvicorn"])],
    "rewards": [(["grpo_ray.rewards.registry"], [*HEAVY, "sympy", "math_verify", "latex2sympy2_extended", "mpmath"])],
}
"""Name -> parts of one process, in order: modules that are imported, and libraries that none of them may import."""

CODE = """
import importlib, json, sys
for modules, libraries in json.loads(sys.argv[1]):
    for module in modules:
        importlib.import_module(module)
        loaded = [library for library in libraries if library in sys.modules]
        assert not loaded, f"{module} imports {loaded}"
"""


@pytest.mark.parametrize("row", ROWS)
def test_import_does_not_load_heavy_library(row: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(ROWS[row])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
