"""Fixtures of all tiers: one Ray cluster, a small policy, and real runs on them."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import REFERENCE, FinishedRun, small_settings

TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster on this machine, with enough logical cores for every test whatever the machine has."""
    import ray

    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.cluster import connect

    # Workers import the tests' own reward functions (reward_spies.py) by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    connect(load_config(None, ["cluster.num_workers=8"]))
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded policy after a few steps of warm-up: the right shape, soon made, and random enough to sample."""
    from grpo_ray.models import toy_policy

    steps, toy_policy.RECIPE["steps"] = toy_policy.RECIPE["steps"], 40
    try:
        return toy_policy.build_toy_policy(seed=0, cache=tmp_path_factory.mktemp("policy"))
    finally:
        toy_policy.RECIPE["steps"] = steps


@pytest.fixture
def small_run(cluster: None, policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """A function that trains a small run with the given overrides and returns (summary, run folder)."""
    return runner(policy, tmp_path)


@pytest.fixture(scope="session")
def reference_run(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run of two workers in which nothing happens. Tests read its folder, and change nothing in it."""
    return FinishedRun(*runner(policy, tmp_path_factory.mktemp("reference"))("reference", *REFERENCE))


def runner(policy: Path, folder: Path) -> Callable[..., Any]:
    """A function that trains small runs in a folder."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver import run

    def train(name: str, *overrides: str, faults: Sequence[Any] = ()) -> tuple[Any, Path]:
        config = load_config(None, [*small_settings(name, folder, policy), *overrides])
        return run.train(config, faults=faults), folder / name

    return train


@pytest.fixture
def real_problems() -> Callable[[str], Path]:
    """Finds a file of real problems that lies beside the checkout in some places; skips the test where it does not."""

    def find(name: str) -> Path:
        path = TESTS.parents[1] / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"{name} is not here")
        return path

    return find


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch: over small matrices more of them only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
