"""Test of a run's metrics in the text that Prometheus collects from Ray's agent, on a real cluster."""

import time
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from grpo_ray.config.loader import load_config
from grpo_ray.observers.monitoring.exported_metrics import EXPORTED, RAY_PREFIX
from grpo_ray.observers.monitoring.ray_metrics import RayMetrics

LIMIT_SECONDS = 120.0
"""Ray's processes send their metrics to the agent every ten seconds."""

Samples = dict[tuple[str, str], float]
"""(name in Prometheus, value of the label besides `run`) -> value."""


def exported(run: str) -> Samples:
    """Return the samples of a run that the nodes of this machine export now."""
    found: Samples = {}
    own_labels = {metric.label for metric in EXPORTED.values() if metric.label}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("run") == run and sample.name.startswith(f"{RAY_PREFIX}grpo_ray_"):
                    label = next((value for name, value in sample.labels.items() if name in own_labels), "")
                    assert "SessionName" in sample.labels  # the dashboard filters by it
                    found[sample.name, label] = sample.value
    return found


def wait_for(run: str, condition: Callable[[Samples], bool]) -> Samples:
    """Return the run's samples once a condition holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition(samples := exported(run)):
        assert time.monotonic() < deadline, samples
        time.sleep(1)
    return samples


def test_ray_metrics_appear_in_prometheus_text(cluster: None) -> None:
    run = f"metrics-{uuid.uuid4().hex}"
    metrics = RayMetrics(load_config(None, [f"run.name={run}", "grpo.max_steps=7"]))
    metrics.event({"event": "launched", "at": 100.0})
    metrics.event({"event": "baseline", "at": 101.0, "metrics": {"heldout/accuracy": 0.25}})
    metrics.event({"event": "training", "at": 102.0, "step": 0})
    for step in (1, 2):
        row: dict[str, Any] = {"step": step, "reward/mean": step / 4, "group/equal_share": 0.25, "step/seconds": 5.0}
        row |= {"phase/generate": 1.5, "phase/sync": 0.25, "reward/correctness_mean": 0.5, "checkpoint": "none"}
        metrics.step(row, 120.0)
    metrics.event({"event": "failed", "at": 121.0, "rank": 0, "what": "killed"})
    metrics.event({"event": "began", "at": 122.0, "step": 1, "workers": 1})
    metrics.event({"event": "training", "at": 123.0, "step": 1})
    metrics.resumed(1, [])
    metrics.step({"step": 2, "reward/mean": 0.75, "step/seconds": 5.0}, 140.0)
    metrics.event({"event": "warning", "at": 140.0, "step": 2, "name": "no_signal", "what": "no group has signal"})
    metrics.measured(2, {"heldout/accuracy": 0.5, "heldout/low": 0.375})

    expected = {
        ("ray_grpo_ray_step", ""): 2.0,
        ("ray_grpo_ray_max_steps", ""): 7.0,
        ("ray_grpo_ray_reward_mean", ""): 0.75,
        ("ray_grpo_ray_reward_function_mean", "correctness"): 0.5,
        ("ray_grpo_ray_group_equal_share", ""): 0.25,
        ("ray_grpo_ray_group_signal_share", ""): 0.75,
        ("ray_grpo_ray_step_seconds", ""): 5.0,
        ("ray_grpo_ray_phase_seconds", "generate"): 1.5,
        ("ray_grpo_ray_phase_seconds", "sync"): 0.25,
        ("ray_grpo_ray_heldout_accuracy", ""): 0.5,
        ("ray_grpo_ray_heldout_low", ""): 0.375,
        ("ray_grpo_ray_goodput", ""): 0.25,  # 10 of 40 s: step 2 was taken twice
        ("ray_grpo_ray_training", ""): 1.0,
        ("ray_grpo_ray_failures_total", ""): 1.0,
        ("ray_grpo_ray_redone_steps_total", ""): 1.0,
        ("ray_grpo_ray_warnings_total", "no_signal"): 1.0,
    }
    assert wait_for(run, lambda samples: expected.keys() <= samples.keys()) == expected

    metrics.close()


@pytest.mark.slow
def test_ray_metrics_last_through_a_long_step_and_end_with_the_run(cluster: None) -> None:
    run = f"metrics-{uuid.uuid4().hex}"
    reward = ("ray_grpo_ray_reward_mean", "")
    metrics = RayMetrics(load_config(None, [f"run.name={run}"]))
    metrics.step({"step": 1, "reward/mean": 0.5}, 0.0)
    wait_for(run, lambda samples: reward in samples)
    for _ in range(40):  # Ray forgets a gauge 20 s after it was set
        time.sleep(1)
        assert exported(run)[reward] == 0.5
    metrics.close()
    wait_for(run, lambda samples: reward not in samples)
