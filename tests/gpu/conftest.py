"""Tests on one real GPU: `make test-gpu`. With `--dry` the same tests compute on the CPU, with tiny sizes.

On a GPU each probe and each command has processes of its own, which give their memory back. A dry run needs no memory,
and would spend most of its time on imports: its probes are forked from a process that has the libraries imported, and
its runs share one Ray cluster and its driver.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from faulty_runs import start
from length_model import LENGTHS, SHAPES, make_model
from worker_group import run_workers

from grpo_ray.config.loader import load_config
from grpo_ray.device import LOGICAL_GPUS
from grpo_ray.evaluation.evaluate import worker_environment
from grpo_ray.resilience.chaos import Fault

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # worker processes import the probes by name

import probes  # noqa: E402

TESTS = HERE.parent
LENGTH_MODEL = TESTS / "benchmarks" / "length_model.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dry", action="store_true", help="compute on the CPU in place of a GPU, with tiny sizes")
    parser.addoption("--policies", type=Path, help="folder that keeps the policies with random weights")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = False
    if not config.getoption("--dry"):
        import torch

        missing = not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU, and --dry is not set"))


@dataclass(frozen=True)
class Machine:
    """The GPU under test, or the CPU in its place."""

    steps: ClassVar = ("grpo.max_steps=4", "grpo.save_steps=2", "data.limit=24")
    """Settings of `whole`, and of runs that are compared with it."""

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
        if folder.exists():
            return folder
        if self.dry:  # the imports of a process of its own would take ten times as long
            make_model(folder, SHAPES[shape], LENGTHS[lengths])
        else:
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
        threads = 1 if self.dry else None  # run_workers gives each process one
        environment = self.environment | worker_environment(load_config(None, settings), threads)
        if self.dry:
            # The environment is that of the process which is forked, and the same for all probes.
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in environment.items():
                    patch.setenv(variable, value)
                (observed,) = run_workers(probes.observe, 1, name, settings)
        else:
            file = self.folder / f"{name}.json"
            command = [sys.executable, str(HERE / "probes.py"), name, str(file), json.dumps(settings)]
            subprocess.run(command, env=environment, check=True)
            observed = json.loads(file.read_text())
        self.observations[name, *overrides] = observed
        print(f"{name} {' '.join(overrides)}: {json.dumps(observed)}")
        return observed

    def train(self, name: str, *overrides: str, faults: Sequence[Fault] = ()) -> Path:
        """Train and return the run's folder."""
        own = [
            f"run.name={name}", f"run.storage_path={self.folder}", "run.max_failures=1", "data.heldout_limit=24",
            # Random weights never answer: a reward that depends on every token gives each group a signal.
            "rewards.functions=[correctness, 'reward_spies:vary']",
        ]  # fmt: skip
        settings = [*self.settings, *own, *overrides]
        if self.dry:
            from grpo_ray.driver.run import train

            train(load_config(None, settings), faults=faults)
        else:
            process = start(settings, faults, own_group=False, **self.environment)
            output, _ = process.communicate()
            assert process.returncode == 0, output
            print(output)
        return self.folder / name

    @cached_property
    def whole(self) -> Path:
        """A run that nothing disturbs, which the tests of one process share."""
        return self.train("whole", *self.steps)

    def command(self, *words: str) -> None:
        """Run `grpo-ray` to its end."""
        if self.dry:
            from grpo_ray.cli import main

            assert main(words) == 0
            return
        program = [sys.executable, "-m", "grpo_ray.cli", *words]
        done = subprocess.run(program, env=self.environment, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The GPU under test."""
    dry, folder = request.config.getoption("--dry"), tmp_path_factory.mktemp("machine")
    policies = request.config.getoption("--policies") or folder / "policies"
    machine = Machine(dry, policies.resolve(), folder)
    if dry:  # before a cluster starts, whose workers inherit it
        os.environ.update(machine.environment)
    return machine
