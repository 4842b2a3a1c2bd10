"""Runs with injected faults, and their comparison with the same run without faults."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from small_runs import groups_of, rows_of, same_weights, weights_of, without_timings

from grpo_ray.data.ledger import Ledger
from grpo_ray.resilience.chaos import Fault

HELPERS = Path(__file__).parent

SETTINGS = [
    "grpo.max_steps=10", "grpo.save_steps=3", "data.limit=18", "run.max_failures=9", "run.hang_seconds=30",
    "run.hang_factor=100",
]  # fmt: skip
"""18 problems in steps of 4: epochs end inside steps 5 and 10, and the last checkpoint lies inside an epoch."""

UNDISTURBED: dict[str, Any] = {}
"""Cached outcome of a run of SETTINGS without faults."""

TRAIN_WITH_FAULTS = """
import functools, json, sys
from grpo_ray import cli
from grpo_ray.driver import run
from grpo_ray.resilience.chaos import Fault

overrides, faults = json.loads(sys.argv[1])
run.train = functools.partial(run.train, faults=[Fault(*fault) for fault in faults])
sys.exit(cli.main(["train", *overrides]))
"""
"""Program equal to `grpo-ray train`, with faults. The CLI imports `train` when it is called, so it gets this one."""


def undisturbed(small_run: Callable[..., Any]) -> dict[str, Any]:
    """Return the outcome of a run of SETTINGS without faults."""
    if not UNDISTURBED:
        UNDISTURBED.update(outcome(small_run, "whole", []))
    return UNDISTURBED


def outcome(small_run: Callable[..., Any], name: str, faults: list[Fault], *overrides: str) -> dict[str, Any]:
    """Return the outcome of a run of SETTINGS with faults, all of which must have been injected."""
    _, folder = small_run(name, *SETTINGS, *overrides, faults=faults)
    assert all((folder / "chaos" / fault.marker).exists() for fault in faults), "a fault was not injected"
    return outcome_of(folder)


def outcome_of(folder: Path) -> dict[str, Any]:
    """Read a run's latest weights and ledger, its metrics without timings, and its groups."""
    latest = json.loads((folder / "summary.json").read_text())["latest_checkpoint"].partition("?")[0].rpartition("/")[2]
    return {
        "folder": folder,
        "weights": weights_of(folder / latest),
        "rows": without_timings(rows_of(folder)),
        "ledger": Ledger.load(folder / latest),
        "groups": groups_of(folder),
    }


def same(disturbed: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """Assert that nothing was lost: weights, metrics of each step, ledger and rollouts are equal bit for bit."""
    assert same_weights(disturbed["weights"], undisturbed["weights"])
    assert disturbed["rows"] == undisturbed["rows"]
    assert disturbed["ledger"] == undisturbed["ledger"]
    assert disturbed["groups"] == undisturbed["groups"]


def start(
    overrides: Sequence[str], faults: Sequence[Fault] = (), own_group: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start a run in a separate process, on the cluster of `RAY_ADDRESS` or on one of its own.

    own_group: in a process group of its own, as `timeout` and batch systems start it.
    """
    planned = [(fault.kind, fault.step, fault.rank) for fault in faults]
    inherited = os.environ | {"RAY_ADDRESS": "local"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), inherited.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN_WITH_FAULTS, json.dumps([list(overrides), planned])],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0 if own_group else None,
    )
