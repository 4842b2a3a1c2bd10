"""Generator of grpo_ray/observers/monitoring/grafana.json, the dashboard of the metrics that a run exports through Ray.

It has the variables of Ray's own dashboards: the Prometheus data source and `SessionName`, one start of a Ray cluster.
Run `python scripts/grafana_dashboard.py` after a change of the panels or the metrics; a unit test compares the file.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from generated_file import ROOT, output_parser, write_file

from grpo_ray.observers.monitoring.exported_metrics import (
    EXPORTED,
    FAILURES,
    GOODPUT,
    MAX_STEPS,
    PHASE_SECONDS,
    REDONE_STEPS,
    REWARD_OF_FUNCTION,
    SIGNAL_SHARE,
    TRAINING,
    WARNINGS,
    exported_name,
)
from grpo_ray.telemetry.measures import ACCURACY_MEASURES

FILE = ROOT / "grpo_ray" / "observers" / "monitoring" / "grafana.json"
WIDTH, COLUMNS, HEIGHT = 24, 3, 8
"""Grid of a dashboard: its columns, panels side by side, and rows of the grid per panel."""
SELECTED = 'SessionName=~"$SessionName", run=~"$run"'
"""Filter of every query: the runs chosen at the top of the dashboard."""


@dataclass(frozen=True)
class Panel:
    """Chart of one or several metrics."""

    title: str
    metrics: tuple[str, ...]
    """Exported names."""
    unit: str
    """Unit in Grafana's words: `short`, `s`, `percentunit` (a share, 0 to 1)."""
    is_stacked: bool = False


SHARE, SECONDS, NUMBER = "percentunit", "s", "short"

PANELS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", (exported_name("reward/mean"), exported_name("reward/std")), NUMBER),
        Panel("Reward of each function", (REWARD_OF_FUNCTION,), NUMBER),
        Panel(
            "Held-out accuracy with its 95 % interval",
            tuple(exported_name(f"heldout/{measure}") for measure in ACCURACY_MEASURES),
            SHARE,
        ),
        Panel(
            "Groups with signal, groups with equal rewards", (SIGNAL_SHARE, exported_name("group/equal_share")), SHARE
        ),
        Panel("Completion length, tokens", (exported_name("completion/length_mean"),), NUMBER),
        Panel(
            "Truncated and unscorable completions",
            (exported_name("completion/truncated_share"), exported_name("reward/unscorable_share")),
            SHARE,
        ),
    ),
    "Progress": (
        Panel("Step, and last step", (exported_name("step"), MAX_STEPS), NUMBER),
        Panel("Workers take steps (1) or not (0)", (TRAINING,), NUMBER),
        Panel("Goodput of this launch", (GOODPUT,), SHARE),
        Panel(
            "Failures, steps taken again, skipped steps",
            (FAILURES, REDONE_STEPS, exported_name("learner/skipped_steps")),
            NUMBER,
        ),
        Panel("Warnings", (WARNINGS,), NUMBER),
        Panel("Verifier timeouts per call", (exported_name("reward/verifier_timeouts"),), NUMBER),
    ),
    "Throughput": (
        Panel("Completions per second", (exported_name("step/completions_per_second"),), NUMBER),
        Panel(
            "Tokens per second and worker",
            (exported_name("engine/tokens_per_second"), exported_name("learner/tokens_per_second")),
            NUMBER,
        ),
        Panel("Phases of a step", (PHASE_SECONDS,), SECONDS, is_stacked=True),
        Panel("Duration of a step", (exported_name("step/seconds"),), SECONDS),
        Panel("Overhead of a step", (exported_name("step/overhead_share"),), SHARE),
    ),
    "Stability": (
        Panel("Entropy, nats", (exported_name("policy/entropy"),), NUMBER),
        Panel("Divergence from the reference, nats", (exported_name("policy/kl"),), NUMBER),
        Panel("Clipped tokens", (exported_name("policy/clipped_share"),), SHARE),
        Panel("Gradient norm before clipping", (exported_name("learner/gradient_norm"),), NUMBER),
        Panel("Gap of log-probabilities, engine to learner, nats", (exported_name("engine/logprob_gap_mean"),), NUMBER),
        Panel("Importance ratio of learner to engine", (exported_name("engine/ratio_mean"),), NUMBER),
    ),
}
"""Row of the dashboard -> its panels."""


def build_dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in PANELS.items():
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        top += 1
        for position, panel in enumerate(row):
            y, x = divmod(position, COLUMNS)
            grid = {"h": HEIGHT, "w": WIDTH // COLUMNS, "x": x * WIDTH // COLUMNS, "y": top + y * HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, grid))
        top += -(-len(row) // COLUMNS) * HEIGHT
    return {
        "title": "grpo_ray",
        "uid": "grpoRayDashboard",
        "tags": ["ray", "grpo_ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def query(metric: str) -> str:
    """Return the query of an exported metric: one series per run and label.

    `max` joins the series of launches of the same run that are still collected.
    """
    exported = EXPORTED[metric]
    return f"max by ({', '.join(exported.labels)}) ({exported.prometheus_name}{{{SELECTED}}})"


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {EXPORTED[name].description}" for name in panel.metrics),
        "id": number,
        "gridPos": grid,
        "datasource": datasource,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 40 if panel.is_stacked else 0,
                    "spanNulls": True,
                    "showPoints": "never",
                    "stacking": {"mode": "normal" if panel.is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": datasource,
                "expr": query(name),
                "legendFormat": _legend(name, len(panel.metrics) > 1),
            }
            for position, name in enumerate(panel.metrics)
        ],
    }


def _legend(metric: str, has_siblings: bool) -> str:
    """Return the name of a series: the run, its label, and the metric where a panel has several."""
    parts = ["{{run}}"]
    parts += [f"{{{{{label}}}}}" for label in EXPORTED[metric].labels[1:]]
    parts += [metric.removeprefix("grpo_ray_").replace("_", " ")] if has_siblings else []
    return " ".join(parts)


def _variables() -> list[dict[str, Any]]:
    """Return the choices at the top: data source, Ray session, runs."""
    source = EXPORTED[exported_name("step")].prometheus_name
    everything = {"text": ["All"], "value": ["$__all"]}

    def values_of(name: str, label: str, description: str, selector: str = "") -> dict[str, Any]:
        text = f"label_values({source}{selector}, {label})"
        return {
            "name": name,
            "type": "query",
            "description": description,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "definition": text,
            "query": {"query": text, "refId": "StandardVariableQuery"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "sort": 2,
            "current": everything,
        }

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "refresh": 1},
        values_of("SessionName", "SessionName", "Start of a Ray cluster, as in Ray's own dashboards."),
        values_of("run", "run", "Name of the run, `run.name`.", '{SessionName=~"$SessionName"}'),
    ]


def render() -> str:
    """Render the dashboard's file."""
    return json.dumps(build_dashboard(), indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the dashboard."""
    options = output_parser("the Grafana dashboard of the metrics that a run exports", FILE).parse_args(arguments)
    return write_file(options.output, render())


if __name__ == "__main__":
    sys.exit(main())
