"""Tokens of older weights with a real engine: each is of the version recorded with it, and faults stop the run."""

from pathlib import Path
from typing import Any

import pytest
from stale_rollouts import FAULTS, observe_stale_faults, observe_versions

QUICK_FAULT = "kept cache, without checksums"


def in_ray(function: Any, *args: Any) -> Any:
    """Call a function in a process of its own."""
    import ray

    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import worker_environment

    environment = worker_environment(load_config(), threads=2)
    task = ray.remote(max_calls=1)(function).options(runtime_env={"env_vars": environment})
    return ray.get(task.remote(*args))


@pytest.mark.parametrize(
    "staleness", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_each_token_is_of_the_version_that_it_is_recorded_with(cluster: None, policy: Path, staleness: int) -> None:
    observed = in_ray(observe_versions, str(policy), staleness)
    assert observed["batches"] == [1, 2, 3, 4, 5]
    assert observed["tokens"].keys() == set(range(1, staleness + 1))
    assert max(observed["gaps"].values()) < 1e-4  # rounding of float32
    assert observed["neighbours"] > 1e-2  # with the weights of the next step they would differ
    logged = [row for row in observed["logged"] if "rollout/segments_mean" in row]
    assert len(logged) == 6 and logged[0]["rollout/staleness_0"] == 1
    assert all(row["engine/logprob_gap_mean"] < 1e-4 for row in logged[:-1])
    assert "engine/logprob_gap_mean" not in logged[-1]  # the last step samples nothing


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=[] if each == QUICK_FAULT else [pytest.mark.slow]) for each in FAULTS]
)
def test_planted_fault_of_a_round_stops_the_run(cluster: None, policy: Path, fault: str) -> None:
    error = in_ray(observe_stale_faults, str(policy), fault)
    assert bool(error) == (fault != "none")
    if "checksums" in fault or fault.startswith("mixed"):
        assert "differ by" in error  # the log-probabilities of the probes
