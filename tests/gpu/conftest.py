"""Tests on one real GPU: `make test-gpu`. With `--dry` the same tests compute on the CPU, with tiny sizes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import start

from grpo_ray.config.loader import load_config
from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.evaluation.evaluate import worker_environment
from grpo_ray.resilience.chaos import Fault

HERE = Path(__file__).parent
TESTS = HERE.parent
LENGTH_MODEL = TESTS / "benchmarks" / "length_model.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dry", action="store_true", help="compute on the CPU in place of a GPU, with tiny sizes")
    parser.addoption("--policies", type=Path, help="folder that keeps the policies with random weights")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    missing = not config.getoption("--dry") and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU, and --dry is not set"))


@dataclass(frozen=True)
class Machine:
    """The GPU under test, or the CPU in its place."""

    dry: bool
    policies: Path
    folder: Path
    """Folder of runs and results."""
    observations: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    """Name and overrides of a probe -> its observations."""

    @cached_property
    def policy(self) -> Path:
        """A policy with random weights, of the shape of Qwen2.5-0.5B; its completions have up to 256 tokens."""
        shape, lengths = ("tiny", "tiny") if self.dry else ("0.5B", "256")
        folder = self.policies / f"{shape}-{lengths}"
        if not folder.exists():
            make = [sys.executable, str(LENGTH_MODEL), "--shape", shape, "--lengths", lengths, "--keep", str(folder)]
            subprocess.run(make, env=self.environment, check=True)
        return folder

    @property
    def settings(self) -> list[str]:
        """Overrides that all runs and probes share."""
        prompts, generations, longest, context = (4, 4, 32, 288) if self.dry else (16, 8, 256, 512)
        return [
            f"model.path={self.policy}",
            "cluster.num_workers=1",
            "cluster.use_gpu=true",
            f"engine.max_model_len={context}",
            f"grpo.prompts_per_step={prompts}",
            f"grpo.num_generations={generations}",
            f"grpo.max_completion_length={longest}",
            "grpo.learning_rate=1e-4",
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of all processes."""
        paths = [str(TESTS.parent), str(TESTS / "helpers"), os.environ.get("PYTHONPATH", "")]
        device = {LOGICAL_GPUS: "1"} if self.dry else {}
        return os.environ | device | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}

    def probe(self, name: str, *overrides: str) -> dict[str, Any]:
        """Run a function of `probes.py` once, in a process of its own; return its observations."""
        if (name, *overrides) in self.observations:
            return self.observations[name, *overrides]
        settings = [*self.settings, *overrides]
        file = self.folder / f"{name}.json"
        command = [sys.executable, str(HERE / "probes.py"), name, str(file), json.dumps(settings)]
        # Not set in this process: the config of a logical GPU names it.
        environment = self.environment | worker_environment(load_config(None, settings), threads=None)
        subprocess.run(command, env=environment, check=True)
        observed = self.observations[name, *overrides] = json.loads(file.read_text())
        print(f"{name} {' '.join(overrides)}: {json.dumps(observed)}")
        return observed

    def train(self, name: str, *overrides: str, faults: Sequence[Fault] = ()) -> Path:
        """Train with `grpo-ray train` in a process of its own and return the run's folder."""
        own = [
            f"run.name={name}", f"run.storage_path={self.folder}", "run.max_failures=1", "data.heldout_limit=24",
            # Random weights never answer: a reward that depends on every token gives each group a signal.
            "rewards.functions=[correctness, 'reward_spies:vary']",
        ]  # fmt: skip
        process = start([*self.settings, *own, *overrides], faults, own_group=False, **self.environment)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        print(output)
        return self.folder / name

    def command(self, *words: str) -> str:
        """Run `grpo-ray` in a process of its own and return its output."""
        program = [sys.executable, "-m", "grpo_ray.cli", *words]
        done = subprocess.run(program, env=self.environment, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The GPU under test."""
    dry, folder = request.config.getoption("--dry"), tmp_path_factory.mktemp("machine")
    policies = request.config.getoption("--policies") or folder / "policies"
    return Machine(dry, policies.resolve(), folder)
