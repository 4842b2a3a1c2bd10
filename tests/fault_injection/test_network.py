"""Whole runs on a real Ray cluster of several machines whose network is cut, and which come and go."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_storage import wait_for
from faulty_runs import SETTINGS, outcome_of, same, start, undisturbed
from network_namespaces import Network, address, separate_nodes, why_not
from several_nodes import several_nodes
from small_runs import events_of, groups_of, small_settings

from grpo_ray.resilience.elastic import SETTLE_SECONDS
from grpo_ray.resilience.error_triage import RepeatedErrorDetector, annotate_step

LONG = 300.0
"""Seconds that a test waits for what a busy machine may take long for."""
CUT = 20.0
"""Seconds that a network is cut for."""
THREADS = f"cluster.threads_per_worker={max(1, (os.cpu_count() or 1) // 2)}"
"""As many as the workers of the undisturbed run have."""


@dataclass(frozen=True)
class Gates:
    """Where the workers of a run wait for the test: in the middle of some steps, on each machine."""

    folder: Path
    steps: list[int]
    upload: str = ""
    """A checkpoint; the workers also wait before they give it its name."""

    def settings(self) -> list[str]:
        self.folder.mkdir()
        name, gates = "reward_spies:hold", {"steps": self.steps, "uploads": self.upload, "gates": str(self.folder)}
        return [f"rewards.functions=['correctness', '{name}']", f"rewards.settings={ {name: gates} }"]

    def reached(self, step: int | str, workers: int = 1, node: int | None = None) -> bool:
        """Whether so many workers wait in a step, or did: of any machine, or of a node of `netns`."""
        where = "*" if node is None else address(node)
        return len(list(self.folder.glob(f"{step}-{where}-*-reached"))) >= workers

    def open(self, step: int | str, node: int | None = None) -> None:
        """Let the workers of all machines, or of one node, go on, now and whenever they come by again."""
        (self.folder / (f"{step}-open" if node is None else f"{step}-{address(node)}-open")).touch()


def attend(run: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    """Wait until something is so in a run, which must not end meanwhile."""
    wait_for(lambda: condition() or run.poll() is not None, what, LONG)
    assert run.poll() is None, run.communicate()[0]


def happened(folder: Path) -> list[tuple[int, int]]:
    """The step that each attempt began with, and its number of workers."""
    return [(event["step"], event["workers"]) for event in events_of(folder, "began")]


def settings(name: str, storage: Path, policy: Path, gates: Gates) -> list[str]:
    """A run of SETTINGS with a worker on each node of three CPUs, and with gates."""
    return [
        *small_settings(name, storage, policy),
        *SETTINGS,
        *gates.settings(),
        "cluster.cpus_per_worker=2",
        THREADS,
        "run.hang_seconds=600",
    ]


def comes_to(folder: Path) -> dict[str, Any]:
    """What a run comes to, without what the reward that waits says of itself."""
    outcome = outcome_of(folder)
    rows = [{name: value for name, value in row.items() if "hold" not in name} for row in outcome["rows"]]
    return outcome | {"rows": rows}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "no cut"])
def test_network_cut_new_and_lost_machine_cost_nothing(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path, cut: bool
) -> None:
    if not cut and why_not() is None:
        pytest.skip("the same story is told with the cut")
    folder, gates = tmp_path / "network", Gates(tmp_path / "gates", [5, 8])
    with separate_nodes(3, 3) if cut else several_nodes(3, 3) as nodes:
        train = nodes.train if isinstance(nodes, Network) else partial(start, RAY_ADDRESS=nodes.address)
        run = train(settings("network", tmp_path, policy, gates))
        attend(run, lambda: gates.reached(5, workers=2), "step 5")
        if isinstance(nodes, Network):
            nodes.cut_node(nodes.workers[1])
        gates.open(5)
        if isinstance(nodes, Network):
            time.sleep(CUT)
            nodes.mend_node(nodes.workers[1])
        # After the cut the step went on; or Ray, which gives up a silent connection after 20 to 30 s, began again.
        attend(run, lambda: gates.reached(8, workers=2), "step 8")
        attend(run, lambda: any(folder.glob("checkpoint-000006*/manifest.json")), "the checkpoint of step 6")
        nodes.add_node(3)
        nodes.kill_node(nodes.workers[1])
        gates.open(8)
        said, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, said
    print("attempts began with step and workers", happened(folder))
    assert happened(folder)[0] == (0, 2) and happened(folder)[-1] == (6, 2)
    same(comes_to(folder), undisturbed(small_run))


@pytest.mark.slow
def test_elastic_run_grows_and_shrinks_with_machines(
    small_run: Callable[..., Any], policy: Path, tmp_path: Path
) -> None:
    folder, gates = tmp_path / "grows", Gates(tmp_path / "gates", [5, 8])
    with separate_nodes(3) as network:
        run = network.train([*settings("grows", tmp_path, policy, gates), "cluster.num_workers=[1, 2]"])
        attend(run, lambda: gates.reached(5), "step 5")
        new = network.add_node(3)
        time.sleep(SETTLE_SECONDS)  # a group is not resized sooner
        gates.open(5)
        attend(run, lambda: gates.reached(8, workers=2), "step 8 of two workers")
        network.kill_node(new)
        gates.open(8)
        said, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, said
    assert happened(folder) == [(0, 1), (6, 2), (6, 1)]

    def dealt(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(group["step"], group["epoch"], group["problem"]) for group in groups]

    assert dealt(groups_of(folder)) == dealt(undisturbed(small_run)["groups"])


@pytest.mark.slow
def test_fence_keeps_out_a_worker_cut_off_for_good(small_run: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "lost", "checkpoint-000006"
    one, gates = ["cluster.num_workers=1"], Gates(tmp_path / "gates", [], upload=name)
    with separate_nodes(3, 3) as network:
        run = network.train([*settings("lost", tmp_path, policy, gates), *one])
        attend(run, lambda: gates.reached(name), "the upload of step 6")
        old, new = network.workers if gates.reached(name, node=network.workers[0]) else network.workers[::-1]
        network.cut_node(old)
        cut = time.monotonic()
        attend(run, lambda: len(happened(folder)) == 2, "another worker in its place")
        print(f"another worker began {time.monotonic() - cut:.0f} s after the cut")
        attend(run, lambda: gates.reached(name, node=new), "its own upload of step 6")
        # The worker that is cut off still sees the storage, and would name the checkpoint now.
        gates.open(name, node=old)
        attend(run, (gates.folder / f"{name}-{address(old)}-ended").exists, "the end of the old upload")
        assert not (folder / name).exists()
        gates.open(name, node=new)
        said, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, said
    assert happened(folder) == [(0, 1), (3, 1)]
    _, whole = small_run("whole", *SETTINGS, *one, THREADS)
    same(comes_to(folder), outcome_of(whole))


def test_network_error_repeated_is_not_a_bug() -> None:
    said = "[pair.cc:537] Read error [10.77.0.2]:2211: Connection timed out. This is typically caused by ..."  # gloo's
    same_bug = RepeatedErrorDetector()
    for _ in range(3):
        try:
            raise RuntimeError(said)
        except RuntimeError as error:
            annotate_step(error, 5)
            same_bug.after_exception({0: error})
