"""A run under the Slurm script on several nodes: it is preempted, and a node is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from fake_slurm import LONG, FakeSlurm, fake_slurm
from faulty_runs import same, undisturbed
from gated_runs import Gates, attempts, gated_settings, outcome_without_gates
from small_runs import rows_of

SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sh"


def wait_in_job(slurm: FakeSlurm, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition in a job, which must not end before."""
    wait_for(lambda: condition() or slurm.status() is not None, what, LONG)
    assert slurm.status() is None, slurm.output.read_text()


@pytest.mark.slow
def test_slurm_job_requeued_and_without_a_lost_node_costs_nothing(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path
) -> None:
    folder, gates = tmp_path / "slurm", Gates(tmp_path / "gates", [4, 8])
    with fake_slurm(3) as slurm:
        slurm.sbatch(SCRIPT, gated_settings("slurm", tmp_path, policy, gates), nodes=[1, 2])
        wait_in_job(slurm, lambda: gates.reached(4, workers=2), "step 4")
        slurm.signal("USR1")
        wait_in_job(slurm, lambda: "step is finished and saved" in slurm.output.read_text(), "the driver's answer")
        gates.open(4)
        assert slurm.wait() == 143 and slurm.is_requeued(), slurm.output.read_text()
        # The workers read the request after a step: the gate's, or the next one if it has not arrived by then. Neither
        # is a step that the undisturbed run measures: a stopped run saves its last step without measuring it.
        saved = rows_of(folder)[-1]["step"]
        assert saved in (4, 5) and (folder / f"checkpoint-{saved:06d}" / "manifest.json").exists()

        slurm.restart()
        wait_in_job(slurm, lambda: gates.reached(8, workers=2), "step 8")
        wait_in_job(slurm, lambda: any(folder.glob("checkpoint-000006*/manifest.json")), "the checkpoint of step 6")
        slurm.kill_node(2)
        slurm.restart(nodes=[1, 3])
        gates.open(8)
        assert slurm.wait() == 0, slurm.output.read_text()
        output = slurm.output.read_text()
    assert attempts(folder) == [(0, 2), (saved, 2), (6, 2)]
    assert output.count("resuming from checkpoint-") == 2
    same(outcome_without_gates(folder), undisturbed(small_run))
