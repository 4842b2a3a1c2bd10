"""Tests of whole runs on a real Ray cluster whose network is cut, and whose nodes join and leave."""

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome_of, same, start, undisturbed
from gated_runs import Gates, attempts, gated_settings, outcome_without_gates
from network_namespaces import Network, address, separate_nodes, unsupported_reason
from several_nodes import several_nodes
from small_runs import groups_of

from grpo_ray.resilience.elastic import MIN_SECONDS_BETWEEN_RESIZES
from grpo_ray.resilience.error_triage import RepeatedErrorDetector, annotate_step

LONG = 300.0
"""Time limit for an event on a busy machine, seconds."""
CUT = 20.0
"""Duration of a network cut, seconds."""


def wait_in_run(run: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition in a run, which must not end before."""
    wait_for(lambda: condition() or run.poll() is not None, what, LONG)
    assert run.poll() is None, run.communicate()[0]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "no cut"])
def test_network_cut_with_new_and_lost_node_costs_nothing(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, cut: bool
) -> None:
    if not cut and unsupported_reason() is None:
        pytest.skip("the same test runs with the cut")
    folder, gates = tmp_path / "network", Gates(tmp_path / "gates", [5, 8])
    with separate_nodes(3, 3) if cut else several_nodes(3, 3) as nodes:
        train = nodes.train if isinstance(nodes, Network) else partial(start, RAY_ADDRESS=nodes.address)
        run = train(gated_settings("network", tmp_path, policy, gates))
        wait_in_run(run, lambda: gates.reached(5, workers=2), "step 5")
        if isinstance(nodes, Network):
            nodes.cut_node(nodes.workers[1])
        gates.open(5)
        if isinstance(nodes, Network):
            time.sleep(CUT)
            nodes.reconnect_node(nodes.workers[1])
        # After the cut the step continued, or Ray, which closes a silent connection after 20 to 30 s, restarted it.
        wait_in_run(run, lambda: gates.reached(8, workers=2), "step 8")
        wait_in_run(run, lambda: any(folder.glob("checkpoint-000006*/manifest.json")), "the checkpoint of step 6")
        nodes.add_node(3)
        nodes.kill_node(nodes.workers[1])  # type: ignore[arg-type]  # a node's own kind of number
        gates.open(8)
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    print("first step and workers of each attempt:", attempts(folder))
    assert attempts(folder)[0] == (0, 2) and attempts(folder)[-1] == (6, 2)
    same(outcome_without_gates(folder), undisturbed(small_run))


@pytest.mark.slow
def test_elastic_run_grows_and_shrinks_with_nodes(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    folder, gates = tmp_path / "grows", Gates(tmp_path / "gates", [5, 8])
    with separate_nodes(3) as network:
        run = network.train([*gated_settings("grows", tmp_path, policy, gates), "cluster.num_workers=[1, 2]"])
        wait_in_run(run, lambda: gates.reached(5), "step 5")
        new = network.add_node(3)
        time.sleep(MIN_SECONDS_BETWEEN_RESIZES)  # younger groups are not resized
        gates.open(5)
        wait_in_run(run, lambda: gates.reached(8, workers=2), "step 8 of two workers")
        network.kill_node(new)
        gates.open(8)
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert attempts(folder) == [(0, 1), (6, 2), (6, 1)]

    def steps_and_problems(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(group["step"], group["epoch"], group["problem"]) for group in groups]

    assert steps_and_problems(groups_of(folder)) == steps_and_problems(undisturbed(small_run)["groups"])


@pytest.mark.slow
def test_fence_stops_worker_that_was_cut_off(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "lost", "checkpoint-000006"
    one, gates = ["cluster.num_workers=1"], Gates(tmp_path / "gates", [], upload=name)
    with separate_nodes(3, 3) as network:
        run = network.train([*gated_settings("lost", tmp_path, policy, gates), *one])
        wait_in_run(run, lambda: gates.reached(name), "the upload of step 6")
        old, new = network.workers if gates.reached(name, node=network.workers[0]) else network.workers[::-1]
        network.cut_node(old)
        cut = time.monotonic()
        wait_in_run(run, lambda: len(attempts(folder)) == 2, "another worker in its place")
        print(f"another worker began {time.monotonic() - cut:.0f} s after the cut")
        wait_in_run(run, lambda: gates.reached(name, node=new), "its own upload of step 6")
        # The disconnected worker can still write to the storage, and would commit the checkpoint now.
        gates.open(name, node=old)
        wait_in_run(run, (gates.folder / f"{name}-{address(old)}-ended").exists, "the end of the old upload")
        assert not (folder / name).exists()
        gates.open(name, node=new)
        output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert attempts(folder) == [(0, 1), (3, 1)]
    _, whole = small_run("whole", *SETTINGS, *one)
    same(outcome_without_gates(folder), outcome_of(whole))


def test_repeated_network_error_is_not_a_bug() -> None:
    # A message of gloo.
    message = "[pair.cc:537] Read error [10.77.0.2]:2211: Connection timed out. This is typically caused by ..."
    detector = RepeatedErrorDetector()
    for _ in range(3):
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            annotate_step(error, 5)
            detector.check({0: error})
