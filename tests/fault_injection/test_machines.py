"""Tests of whole runs on a real Ray cluster: it stops, and nodes fail, are drained, and are added."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome_of, same, start, undisturbed
from several_nodes import several_nodes
from small_runs import count_uses, events_of, groups_of, rows_of, small_settings

from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.gpu_driver import cuda_of_torch

LONG = 600.0
"""Time limit for an event on a busy machine, seconds."""


def _step(folder: Path) -> int:
    """Return the latest step of a run; 0 before the first."""
    return rows_of(folder)[-1]["step"] if (folder / "metrics.jsonl").exists() and rows_of(folder) else 0


@pytest.mark.slow
def test_run_after_cluster_stop_resumes(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    whole = undisturbed(small_run)
    overrides = [*small_settings("stopped", tmp_path, policy), *SETTINGS]
    folder = tmp_path / "stopped"
    with several_nodes(5) as nodes:
        run = start(overrides, [Fault("hang", step=5)], RAY_ADDRESS=nodes.address)
        wait_for((folder / "chaos" / Fault("hang", 5).marker).exists, "step 5", LONG)
        wait_for((folder / "checkpoint-000003" / "manifest.json").exists, "the checkpoint of step 3", LONG)
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 1, output
    assert (
        "the Ray cluster was lost" in output and "run the same command again to resume from checkpoint-000003" in output
    )
    assert "Traceback" not in output
    with several_nodes(5) as nodes:
        output, _ = start(overrides, RAY_ADDRESS=nodes.address).communicate(timeout=LONG)
    assert "resuming from checkpoint-000003" in output
    same(outcome_of(folder), whole)


@pytest.mark.slow
@pytest.mark.skipif(cuda_of_torch() is not None, reason="the installed torch computes on real GPUs")
def test_elastic_run_on_gpus_shrinks_and_grows(policy: Path, tmp_path: Path) -> None:
    """Nodes with GPUs are lost and added while checkpoints are measured beside training; the nodes have CPUs to spare,
    so that GPUs alone limit the workers."""
    steps, folder, seconds = 60, tmp_path / "gpus", tmp_path / "seconds"
    overrides = [
        *small_settings("gpus", tmp_path, policy),
        *["cluster.use_gpu=true", "model.dtype=float32", "run.measure=background"],
        *["cluster.num_workers=[1, 2]", f"grpo.max_steps={steps}", "grpo.save_steps=10", "data.heldout_limit=8"],
        *[
            "rewards.functions=['correctness', 'reward_spies:wait', 'reward_spies:on_a_gpu']",
            f"rewards.settings={{'reward_spies:wait': {{seconds: '{seconds}'}}}}",
        ],
        "run.max_failures=5",
    ]

    def workers() -> list[int]:
        return [event["workers"] for event in events_of(folder, "began")]

    def wait_in_each_step(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(seconds)  # a worker reads the old or the new number

    wait_in_each_step("1")
    with several_nodes() as nodes:
        nodes.add_node(8, gpus=2)
        other = nodes.add_node(8, gpus=1)
        run = start(overrides, RAY_ADDRESS=nodes.address, GRPO_RAY_LOGICAL_GPUS="1")
        wait_for(lambda: _step(folder) >= 12 or run.poll() is not None, "step 12", LONG)
        assert run.poll() is None, run.communicate()[0]
        assert workers() == [2]  # of three GPUs, one is for the engine that measures
        wait_in_each_step("8")  # so that the run does not end before a busy machine has started another node
        nodes.kill_node(other)
        wait_for(lambda: workers()[-1] == 1 or run.poll() is not None, "one worker", LONG)
        nodes.add_node(8, gpus=1)
        wait_for(lambda: workers()[-1] == 2 or run.poll() is not None, "two workers", LONG)
        wait_in_each_step("0.5")
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert workers()[0] == workers()[-1] == 2 and 1 in workers()
    assert {event["step"] for event in events_of(folder, "measured")} == set(range(10, steps + 1, 10))
    assert len(rows_of(folder)) == steps


@pytest.mark.slow
def test_elastic_run_survives_lost_nodes_and_grows(policy: Path, tmp_path: Path) -> None:
    steps, folder = 150, tmp_path / "elastic"
    overrides = [
        *small_settings("elastic", tmp_path, policy),
        *["cluster.num_workers=[2, 4]", f"grpo.max_steps={steps}", "grpo.save_steps=10", "data.limit=90"],
        *["run.max_failures=5", "data.heldout_limit=8"],
        *[
            "rewards.functions=['correctness', 'reward_spies:wait']",
            "rewards.settings={'reward_spies:wait': {seconds: 1}}",
        ],
    ]

    def step() -> int:
        return _step(folder)

    def workers() -> int:
        return events_of(folder, "began")[-1]["workers"]

    with several_nodes(3, 3) as nodes:
        run = start(overrides, RAY_ADDRESS=nodes.address)
        wait_for(lambda: step() >= 12 or run.poll() is not None, "step 12", LONG)
        assert run.poll() is None, run.communicate()[0]
        assert workers() == 4
        nodes.kill_node(nodes.workers[1])
        wait_for(lambda: (workers() == 2 and step() >= 20) or run.poll() is not None, "two workers", LONG)
        third = nodes.add_node(3)
        wait_for(lambda: workers() == 4 or run.poll() is not None, "four workers", LONG)
        began = events_of(folder, "began")[-1]
        assert began["step"] % 10 == 0  # at a checkpoint
        wait_for(lambda: step() > began["step"] + 2 or run.poll() is not None, "steps of four workers", LONG)
        nodes.drain_node(third, deadline_s=60)
        wait_for(lambda: workers() == 2 or run.poll() is not None, "two workers again", LONG)
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert "the run uses 2 or 4 workers; 3 does not divide grpo.prompts_per_step=4" in output
    assert [event["workers"] for event in events_of(folder, "began")] == [4, 2, 4, 2]
    groups = groups_of(folder)
    assert len(groups) == steps * 4
    assert all(count == 1 for epoch in count_uses(groups).values() for count in epoch.values())
    # The drained node cost no step: the group restarted at the step that it had reached.
    last = events_of(folder, "began")[-1]["step"]
    seen = [event["step"] for event in events_of(folder, "step")]
    assert seen.count(last) == seen.count(last + 1) == 1
