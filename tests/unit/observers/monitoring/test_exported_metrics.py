"""Tests of the metrics that a run exports through Ray: their samples, their goodput, and the Grafana dashboard."""

import json
import math
import re
from pathlib import Path

import grafana_dashboard
import pytest

from grpo_ray.observers.monitoring.exported_metrics import (
    EXPORTED,
    ROW_METRICS,
    LaunchGoodput,
    Sample,
    exported_name,
    samples_of_row,
)
from grpo_ray.training.metric_names import METRICS, OWN_METRICS

DASHBOARD = json.loads(grafana_dashboard.FILE.read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
NAMES = {metric.prometheus_name: metric for metric in EXPORTED.values()}


def test_samples_metric_keeps_its_name() -> None:
    assert list(samples_of_row({"step": 3, "reward/mean": 0.5}, [])) == [
        Sample("grpo_ray_step", 3.0),
        Sample("grpo_ray_reward_mean", 0.5),
    ]


def test_samples_families_get_a_label() -> None:
    row = {"phase/generate": 1.5, "reward/correctness_mean": 0.25, "heldout/accuracy": 0.5, "heldout/math/low": 0.4}
    assert list(samples_of_row(row, ["correctness"])) == [
        Sample("grpo_ray_reward_function_mean", 0.25, "correctness"),
        Sample("grpo_ray_phase_seconds", 1.5, "generate"),
        Sample("grpo_ray_heldout_accuracy", 0.5, ""),
        Sample("grpo_ray_heldout_low", 0.4, "math"),
    ]


@pytest.mark.parametrize(
    ("row", "share"),
    [({"group/equal_share": 0.25}, 0.75), ({"group/equal_share": 0.25, "group/signal_share": 1.0}, 1.0)],
    ids=["one round", "dynamic sampling"],
)
def test_samples_signal_share_is_that_of_trained_groups(row: dict[str, float], share: float) -> None:
    assert Sample("grpo_ray_group_signal_share", share) in list(samples_of_row(row, []))


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True])
def test_samples_other_than_finite_numbers_are_left_out(value: object) -> None:
    assert list(samples_of_row({"reward/mean": value, "phase/sync": value, "heldout/low": value}, [])) == []


def test_samples_are_all_described() -> None:
    documented = {*OWN_METRICS, *METRICS}
    assert set(ROW_METRICS) <= documented
    row = dict.fromkeys(documented | {"reward/own_mean"}, 0.5)
    for sample in samples_of_row(row, ["own"]):
        assert (sample.label is None) == (EXPORTED[sample.name].label is None)


def test_goodput_counts_steps_of_the_result_only() -> None:
    goodput = LaunchGoodput(launched_at=100.0)
    for step in (1, 2, 3, 4):
        goodput.add(step, 5.0)
    assert goodput.share(140.0) == 0.5  # 20 of 40 s
    assert goodput.discard_after(2) == 2  # steps 3 and 4 are taken again
    assert goodput.share(140.0) == 0.25
    goodput.add(3, 5.0)
    assert goodput.share(200.0) == 0.15


def test_goodput_other_clock_stays_within_0_and_1() -> None:
    goodput = LaunchGoodput(launched_at=100.0)
    goodput.add(1, 50.0)
    assert goodput.share(99.0) == 0.0 and goodput.share(110.0) == 1.0
    assert LaunchGoodput(0.0).discard_after(5) == 0


def test_grafana_file_is_generated_from_the_code(tmp_path: Path) -> None:
    assert grafana_dashboard.main(["--output", str(tmp_path / "new.json")]) == 0
    assert (tmp_path / "new.json").read_text() == grafana_dashboard.FILE.read_text(), (
        "run python scripts/grafana_dashboard.py"
    )


def test_grafana_queries_name_exported_metrics_and_labels() -> None:
    for text in QUERIES:
        labels, name = re.fullmatch(r"max by \(([\w, ]+)\) \((\w+)\{.*\}\)", text).groups()  # type: ignore[union-attr]
        assert name in NAMES and labels.split(", ") == list(NAMES[name].labels)
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert any(name in target["expr"] and used == set(metric.labels) for name, metric in NAMES.items())


def test_grafana_has_every_exported_metric_once() -> None:
    drawn = [name for text in QUERIES for name in re.findall(r"\((ray_\w+)\{", text)]
    assert sorted(drawn) == sorted(NAMES)


def test_grafana_variables_are_defined_and_used() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) == defined == {"datasource", "SessionName", "run"}


def test_grafana_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_docs_name_every_exported_metric() -> None:
    page = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    assert [name for name in EXPORTED if f"`{name}`" not in page] == []
    assert exported_name("reward/mean") == "grpo_ray_reward_mean"
