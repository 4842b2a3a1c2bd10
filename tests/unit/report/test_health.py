"""Tests of a run's health."""

from pathlib import Path

import pytest
from page_samples import metric_rows, write_run

from grpo_ray.report.health import DAMAGED_CHECKPOINT_NOTICE, HANG_NOTICE, health_findings
from grpo_ray.report.read import read_run

PACKAGE = Path(__file__).parents[3] / "grpo_ray"


@pytest.mark.parametrize("gap, level", [(1e-4, "ok"), (1e-2, "error")])
def test_health_largest_logprob_gap_decides(tmp_path: Path, gap: float, level: str) -> None:
    """One step beyond the tolerance of 0.001 is an error, however small the gap is in the others."""
    metrics = metric_rows(3)
    metrics[1]["engine/logprob_gap_mean"] = gap
    findings = health_findings(read_run(str(write_run(tmp_path, metrics=metrics).local)))
    (finding,) = (finding for finding in findings if "gap between engine and learner" in finding.text)
    assert finding.level == level


@pytest.mark.parametrize(
    "writer, notice", [("resilience/watchdog.py", HANG_NOTICE), ("training/start_point.py", DAMAGED_CHECKPOINT_NOTICE)]
)
def test_health_notice_pattern_is_in_its_writer(writer: str, notice: str) -> None:
    """The page recognises these notices by their text, so a writer that rewords them must change the pattern too."""
    assert notice in (PACKAGE / writer).read_text()
