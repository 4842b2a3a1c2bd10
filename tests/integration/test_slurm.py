"""The Slurm script with Ray's own `ray symmetric-run`, a stand-in for Slurm, and a driver that only waits."""

from pathlib import Path

import pytest
from failing_storage import wait_for
from fake_slurm import LONG, fake_slurm

SCRIPT = Path(__file__).parents[2] / "jobs" / "slurm.sh"

DRIVER = """#!/bin/bash
# Waits for the signal in its first start, and ends at once in the next.
echo "address $RAY_ADDRESS" >>"{log}"
echo "arguments $*" >>"{log}"
trap 'echo saved >>"{log}"; exit 143' TERM
[[ $SLURM_RESTART_COUNT -gt 0 ]] && exit 0
echo waiting >>"{log}"
while :; do sleep 0.1; done
"""


@pytest.mark.slow
def test_slurm_signal_reaches_the_driver_and_the_job_is_requeued(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    (tmp_path / "grpo-ray").write_text(DRIVER.format(log=log))
    (tmp_path / "grpo-ray").chmod(0o755)
    with fake_slurm(1, tmp_path) as slurm:
        slurm.sbatch(SCRIPT, ["my run.yaml", "grpo.max_steps=2"], nodes=[1])
        wait_for(lambda: "waiting" in (log.read_text() if log.exists() else ""), "the driver", LONG)
        token = slurm.folder / "home" / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600 and token.stat().st_size >= 32
        slurm.signal("USR1")
        assert slurm.wait() == 143 and slurm.is_requeued(), slurm.output.read_text()
        slurm.restart()
        assert slurm.wait() == 0 and not slurm.is_requeued(), slurm.output.read_text()
        output = slurm.output.read_text()
    address = f"10.77.0.1:{20000 + 4711}"
    start = [f"address {address}", "arguments train my run.yaml grpo.max_steps=2"]
    assert log.read_text().splitlines() == [*start, "waiting", "saved", *start]
    assert output.count("On head node. Starting Ray cluster head") == 2
    assert "goes back into the queue" in output
