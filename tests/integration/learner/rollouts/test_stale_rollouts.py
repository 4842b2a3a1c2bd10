"""Tokens of older weights with a real engine: each is of the version recorded with it, and faults stop the run."""

from pathlib import Path

import pytest
from stale_rollouts import FAULTS, observe_stale_faults, observe_versions
from worker_tasks import call_in_worker

QUICK_FAULT = "kept cache, without checksums"


@pytest.mark.parametrize(
    "staleness", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_each_token_is_of_the_version_that_it_is_recorded_with(cluster: None, policy: Path, staleness: int) -> None:
    observed = call_in_worker(observe_versions, str(policy), staleness)
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
    error = call_in_worker(observe_stale_faults, str(policy), fault)
    assert bool(error) == (fault != "none")
    if "checksums" in fault or fault.startswith("mixed"):
        assert "differ by" in error  # the log-probabilities of the probes
