"""Tests of a run's health."""

from pathlib import Path

import pytest
from page_samples import metric_rows, write_run

from grpo_ray.report.health import health_findings
from grpo_ray.report.read import read_run


@pytest.mark.parametrize("gap, level", [(1e-4, "ok"), (1e-2, "error")])
def test_health_largest_logprob_gap_decides(tmp_path: Path, gap: float, level: str) -> None:
    """One step beyond the tolerance of 0.001 is an error, however small the gap is in the others."""
    metrics = metric_rows(3)
    metrics[1]["engine/logprob_gap_mean"] = gap
    findings = health_findings(read_run(str(write_run(tmp_path, metrics=metrics).local)))
    (finding,) = (finding for finding in findings if "gap between engine and learner" in finding.text)
    assert finding.level == level


def test_health_hangs_and_damage_are_found_by_their_kind(tmp_path: Path) -> None:
    texts = {"notice": "a reward hangs: is damaged", "hang": "no progress", "damaged_checkpoint": "a byte differs"}
    events = [{"event": kind, "at": 1.0, "what": text} for kind, text in texts.items()]
    findings = health_findings(read_run(str(write_run(tmp_path, events=events).local)))
    errors = [finding.text for finding in findings if finding.level == "error"]
    assert errors == ["1 hang; last: no progress", "1 damaged checkpoint; last: a byte differs"]
