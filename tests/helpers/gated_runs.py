"""Runs on several nodes whose workers wait for the test inside some steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_runs import SETTINGS, outcome_of
from network_namespaces import address
from small_runs import events_of, small_settings


@dataclass(frozen=True)
class Gates:
    """Points at which the workers of a run wait for the test: inside some steps, separately on each node."""

    folder: Path
    steps: list[int]
    upload: str = ""
    """Name of a checkpoint; the workers also wait before they commit it."""

    def settings(self) -> list[str]:
        self.folder.mkdir()
        name, gates = "reward_spies:hold", {"steps": self.steps, "uploads": self.upload, "gates": str(self.folder)}
        return [f"rewards.functions=['correctness', '{name}']", f"rewards.settings={ {name: gates} }"]

    def reached(self, step: int | str, workers: int = 1, node: int | None = None) -> bool:
        """Return True once this many workers have reached the gate of a step, on any node or on one of a `Network`."""
        where = "*" if node is None else address(node)
        return len(list(self.folder.glob(f"{step}-{where}-*-reached"))) >= workers

    def open(self, step: int | str, node: int | None = None) -> None:
        """Open a gate for good, for the workers of all nodes or of one."""
        (self.folder / (f"{step}-open" if node is None else f"{step}-{address(node)}-open")).touch()


def attempts(folder: Path) -> list[tuple[int, int]]:
    """Return the first step and the number of workers of each attempt."""
    return [(event["step"], event["workers"]) for event in events_of(folder, "began")]


def gated_settings(name: str, storage: Path, policy: Path, gates: Gates) -> list[str]:
    """Return the overrides of a run of SETTINGS with one worker per node of three CPUs, and with gates."""
    return [
        *small_settings(name, storage, policy),
        *SETTINGS,
        *gates.settings(),
        "cluster.cpus_per_worker=2",
        "run.hang_seconds=600",
    ]


def outcome_without_gates(folder: Path) -> dict[str, Any]:
    """Read the outcome of a run without the metrics of the reward that holds the gates."""
    outcome = outcome_of(folder)
    rows = [{name: value for name, value in row.items() if "hold" not in name} for row in outcome["rows"]]
    return outcome | {"rows": rows}
