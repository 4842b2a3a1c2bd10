"""Tests of real runs with dedicated engines: engines, workers, the driver and nodes are killed."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome, outcome_of, same, start
from process_watch import descendants, is_running
from several_nodes import several_nodes
from small_runs import count_uses, events_of, groups_of, rows_of, small_settings

from grpo_ray.resilience.chaos import Fault

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""
DEDICATED = [*SETTINGS, "engine.placement=dedicated", "engine.replicas=2", "cluster.cpus_per_worker=1"]
FAULTS = {
    "generation": [Fault("kill-engine", 2, 0), Fault("kill-generation", 4, 1), Fault("hang-engine", 8, 1)],
    "learning": [Fault("kill-backward", 2, 1), Fault("exception", 5, 0), Fault("kill-engine", 7, 1)],
    "checkpoint": [Fault("kill-upload", 3, 0), Fault("kill-commit", 6, 0), Fault("kill-engine", 7, 0)],
}
"""Phase -> faults of engines and workers in it. Checkpoints are at steps 3, 6, 9 and 10."""


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a run has taken a step."""

    def is_taken() -> bool:
        rows = rows_of(folder) if (folder / "metrics.jsonl").exists() else []
        return bool(rows) and rows[-1]["step"] >= step

    wait_for(is_taken, f"step {step}", LONG)


def staleness(steps: int) -> list[str]:
    return [f"rollout.max_staleness={steps}", "grpo.max_completion_length=24"] if steps else []


def test_run_goes_on_after_a_killed_engine(small_run: Callable[..., Any]) -> None:
    faults = [Fault("kill-engine", 2, 0)]
    settings = ["engine.placement=dedicated", "engine.replicas=2", "cluster.cpus_per_worker=1", "cluster.num_workers=1"]
    summary, folder = small_run("killed", *settings, "rollout.max_staleness=2", faults=faults)
    assert (folder / "chaos" / faults[0].marker).exists()
    rows, groups = rows_of(folder), groups_of(folder)
    assert summary.steps == 4 and len(events_of(folder, "began")) == 1  # the worker was not restarted
    assert rows[-1]["engine/replaced"] == 1
    assert 0 < rows[-1]["rollout/staleness_2"] + rows[-1]["rollout/staleness_1"] <= 1
    assert max(row["engine/logprob_gap_mean"] for row in rows[:-1]) < 1e-4
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 5), 4)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_run_with_killed_engines_and_workers_equals_undisturbed(small_run: Callable[..., Any], steps: int) -> None:
    settings = [*DEDICATED, *staleness(steps), "cluster.num_workers=2"]
    whole = outcome(small_run, "whole", [], *settings)
    for phase, faults in FAULTS.items():
        killed = outcome(small_run, phase, faults, *settings)
        same(killed, whole)
    groups = whole["groups"]
    assert Counter(group["step"] for group in groups) == dict.fromkeys(range(1, 11), 4)
    assert all(set(epoch.values()) == {1} for epoch in count_uses(groups).values())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_sharded_run_with_killed_engine_and_workers_equals_undisturbed(
    small_run: Callable[..., Any], steps: int
) -> None:
    settings = [*DEDICATED, *staleness(steps), "cluster.num_workers=2", "cluster.shard_learner=true"]
    faults = [Fault("kill-engine", 2, 0), Fault("kill-backward", 4, 1), Fault("kill-generation", 8, 0)]
    whole, killed = (
        outcome(small_run, name, struck, *settings) for name, struck in (("whole", []), ("killed", faults))
    )
    same(killed, whole)
    assert (whole["folder"] / "checkpoint-000010" / "shards" / "policy").exists()
    if steps:
        assert all(row["rollout/staleness_1"] > 0 for row in whole["rows"][steps:])
    assert Counter(group["step"] for group in whole["groups"]) == dict.fromkeys(range(1, 11), 4)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_run_after_a_killed_driver_equals_undisturbed(policy: Path, tmp_path: Path, steps: int) -> None:
    def run(name: str) -> list[str]:
        return [*small_settings(name, tmp_path, policy), *DEDICATED, *staleness(steps), "cluster.num_workers=1"]

    def finish(name: str) -> None:
        driver = start(run(name))
        output, _ = driver.communicate(timeout=LONG)
        assert driver.returncode == 0, output

    finish("whole")
    driver, folder = start(run("killed")), tmp_path / "killed"
    wait_for_step(folder, 4)
    driver.kill()
    driver.communicate(timeout=LONG)
    assert driver.returncode == -signal.SIGKILL  # it had not ended before
    finish("killed")
    assert len(events_of(folder, "launched")) == 2
    same(outcome_of(folder), outcome_of(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_completions_do_not_depend_on_workers_and_engines(small_run: Callable[..., Any], steps: int) -> None:
    """The engines get the same shards from one worker and from two, with one engine and with two."""
    completions: list[dict[Any, Any]] = []
    for workers, replicas in (1, "2"), (2, "2"), (1, "[1, 2]"):
        settings = [f"cluster.num_workers={workers}", f"engine.replicas={replicas}", "grpo.learning_rate=0"]
        _, folder = small_run(f"run-{len(completions)}", *DEDICATED, *staleness(steps), *settings)
        completions.append({
            (group["step"], group["problem"]): group["completions"] for group in groups_of(folder)
        })  # fmt: skip
    assert completions[1] == completions[0]
    assert completions[2] == completions[0]


@pytest.mark.slow
def test_dedicated_run_equals_colocated_bit_for_bit(small_run: Callable[..., Any]) -> None:
    runs = [
        outcome(small_run, name, [], "cluster.num_workers=1", *settings)
        for name, settings in {
            "colocated": [],
            "dedicated": ["engine.placement=dedicated", "cluster.cpus_per_worker=1"],
        }.items()
    ]
    same(*runs)


@pytest.mark.slow
def test_engine_of_a_lost_node_moves_to_another(policy: Path, tmp_path: Path) -> None:
    folder, found = tmp_path / "moved", tmp_path / "node"
    overrides = [*small_settings("moved", tmp_path, policy), *DEDICATED, "cluster.num_workers=1", "engine.replicas=1",
                 "cluster.cpus_per_worker=2", "grpo.max_steps=60", "run.max_failures=9",
                 "rewards.functions=[correctness, 'reward_spies:wait']",
                 "rewards.settings={'reward_spies:wait': {seconds: 1}}"]  # fmt: skip
    # No node has room for engine and worker. The core that is left on each of the two nodes after the loss reads data.
    with several_nodes(3, 3, 3) as nodes:
        run = start(overrides, RAY_ADDRESS=nodes.address)
        wait_for_step(folder, 2)
        assert nodes.drive(write_node_of_engine, path=str(found)).wait(LONG) == 0
        nodes.kill_node(found.read_text())
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert "engine 0 was lost and is started again" in output
    assert rows_of(folder)[-1]["engine/replaced"] == 1
    assert len(events_of(folder, "began")) == 1  # the workers went on


def write_node_of_engine(path: str) -> None:
    """Write the id of the node that has the only engine."""
    import ray
    from ray.util import placement_group_table

    ray.init(logging_level="ERROR")
    [engine] = [each for each in placement_group_table().values() if each["strategy"] == "STRICT_PACK"]
    Path(path).write_text(engine["bundles_to_node_id"][0])


@pytest.mark.slow
def test_stopped_run_saves_its_step_and_ends_the_engines(policy: Path, tmp_path: Path) -> None:
    overrides = [*small_settings("stopped", tmp_path, policy), *DEDICATED, "cluster.num_workers=1"]
    run, folder = start([*overrides, "grpo.max_steps=5000", "grpo.save_steps=5000"]), tmp_path / "stopped"
    wait_for_step(folder, 2)
    engines = [process for process, command in descendants(run.pid) if "EngineProcess" in command]
    assert len(engines) == 2
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 128 + signal.SIGINT, output
    wait_for(lambda: not any(map(is_running, engines)), "the end of the engines", LONG)
    step = rows_of(folder)[-1]["step"]
    again = start([*overrides, f"grpo.max_steps={step + 1}"])
    output, _ = again.communicate(timeout=LONG)
    assert again.returncode == 0 and f"resuming from checkpoint-{step:06d}" in output, output
