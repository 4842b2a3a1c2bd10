"""Tests of a run's health."""

from pathlib import Path
from typing import Any

import pytest
from page_samples import CONFIG, metric_rows, write_run

from grpo_ray.pages.report.health import health_findings
from grpo_ray.pages.report.read import read_run


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


def findings_of(tmp_path: Path, **run: Any) -> list[tuple[str, str]]:
    folder = write_run(tmp_path, **run)
    return [(finding.level, finding.text) for finding in health_findings(read_run(str(folder.local)))]


def test_health_warnings_are_listed_once_each_with_their_latest_text(tmp_path: Path) -> None:
    events = [
        {"event": "warning", "at": 1.0, "step": 12, "name": "truncation", "what": "25 % are cut off"},
        {"event": "warning", "at": 2.0, "step": 13, "name": "no_signal", "what": "no gradient"},
        {"event": "warning", "at": 3.0, "step": 40, "name": "truncation", "what": "30 % are cut off"},
        {"event": "warning", "at": 4.0, "what": 5},
    ]
    assert [text for level, text in findings_of(tmp_path, events=events) if "warning" in text] == [
        "warning: 5 (?)",
        "warning at step 13: no gradient (no_signal)",
        "warning at step 40, 2 times in all: 30 % are cut off (truncation)",
    ]


@pytest.mark.parametrize(("threshold", "level"), [(0.4, "warning"), (0.6, "ok"), (None, None), ("x", "ok")])
def test_health_rules_have_the_thresholds_of_the_run(tmp_path: Path, threshold: Any, level: str | None) -> None:
    metrics = metric_rows(10)
    for row in metrics:
        row["group/equal_share"] = 0.5
    found = findings_of(tmp_path, metrics=metrics, config={**CONFIG, "health": {"no_signal": threshold}})
    rules = [(level, text) for level, text in found if text.endswith("(no_signal)")]
    text = "50 % of the groups have equal rewards, and so no gradient (no_signal)"
    assert rules == ([] if level is None else [(level, f"now: {text}" if level == "warning" else text)])


def test_health_rules_see_the_first_and_the_latest_rows(tmp_path: Path) -> None:
    """The entropy of the first 10 rows is compared with that of the last, over 2,000 rows in between."""
    metrics = metric_rows(2000)
    for row in metrics:
        row["policy/entropy"] = 2.0 if row["step"] <= 10 else 0.1
    found = findings_of(tmp_path, metrics=metrics)
    text = "now: the policy's entropy has fallen from 2 to 0.1 nats, so that it explores little (entropy_collapse)"
    assert ("warning", text) in found


def test_health_memory_is_that_of_the_latest_measurement(tmp_path: Path) -> None:
    events = [
        {"event": "memory", "at": at, "step": 2, "measured": {"host_used_share": share}}
        for at, share in ((1.0, 0.99), (2.0, 0.5))
    ]
    assert ("ok", "50 % of the memory is in use (memory)") in findings_of(tmp_path, events=events)


def test_health_rules_within_their_thresholds_are_folded(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    findings = health_findings(read_run(str(folder.local)))
    assert {finding.is_folded for finding in findings if finding.text.endswith("(sync_gap)")} == {True}
    assert not any(finding.is_folded for finding in findings if finding.level != "ok")


@pytest.mark.parametrize(
    ("sections", "advises"),
    [
        ({"cluster": {"use_gpu": True}}, True),
        ({"cluster": {"use_gpu": False}}, False),
        ({"cluster": {"use_gpu": True}, "engine": {"placement": "dedicated"}}, False),
        ({"cluster": {"use_gpu": True}, "rollout": {"max_staleness": 1}}, False),
    ],
)
def test_health_advises_dedicated_engines_where_generating_dominates(
    tmp_path: Path, sections: dict[str, Any], advises: bool
) -> None:
    metrics = metric_rows(3)
    for row in metrics:
        row |= {"phase/generate": 1.0, "phase/wait_workers": 0.4, "completion/length_max": 80.0}
        row["phase/wait"] = 0.0  # 1.4 of 2.1 s; the longest have 4 times the mean of 20 tokens
    grpo = {**CONFIG["grpo"], "max_completion_length": 600}
    found = [
        text
        for level, text in findings_of(tmp_path, metrics=metrics, config={**CONFIG, "grpo": grpo, **sections})
        if "dedicated" in text and level == "ok"
    ]
    assert [text[:60] for text in found] == (
        ["generation takes 67 % of the time, and the longest completio"] if advises else []
    )
    assert all("rollout.max_staleness=2" in text for text in found)  # segments of 150 tokens would be too short
