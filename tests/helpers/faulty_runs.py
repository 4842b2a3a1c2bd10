"""What a run in which something breaks is held against: the same run, in which nothing does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from small_runs import groups_of, rows_of, same_weights, timeless, weights_of

from grpo_ray.data.ledger import Ledger
from grpo_ray.resilience.chaos import Fault

SETTINGS = [
    "grpo.max_steps=10", "grpo.save_steps=3", "data.limit=18", "run.max_failures=9", "run.hang_seconds=30",
    "run.hang_factor=100",
]  # fmt: skip
"""18 problems in steps of 4: epochs end inside steps 5 and 10, and the last checkpoint stands inside an epoch."""

UNDISTURBED: dict[str, Any] = {}
"""What a run of SETTINGS comes to when nothing happens; made once."""


def undisturbed(small_run: Callable[..., Any]) -> dict[str, Any]:
    if not UNDISTURBED:
        UNDISTURBED.update(outcome(small_run, "whole", []))
    return UNDISTURBED


def outcome(small_run: Callable[..., Any], name: str, faults: list[Fault], *overrides: str) -> dict[str, Any]:
    """What a run of SETTINGS with these faults comes to."""
    _, folder = small_run(name, *SETTINGS, *overrides, faults=faults)
    assert all((folder / "chaos" / fault.mark).exists() for fault in faults), "a fault did not strike"
    return outcome_of(folder)


def outcome_of(folder: Path) -> dict[str, Any]:
    """What a run comes to."""
    latest = json.loads((folder / "summary.json").read_text())["latest_checkpoint"].partition("?")[0].rpartition("/")[2]
    return {
        "folder": folder,
        "weights": weights_of(folder / latest),
        "rows": timeless(rows_of(folder)),
        "ledger": Ledger.load(folder / latest),
        "groups": groups_of(folder),
    }


def same(disturbed: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """Nothing was lost: weights, metrics of each step, ledger and rollouts are equal bit for bit."""
    assert same_weights(disturbed["weights"], undisturbed["weights"])
    assert disturbed["rows"] == undisturbed["rows"]
    assert disturbed["ledger"] == undisturbed["ledger"]
    assert disturbed["groups"] == undisturbed["groups"]


def start(overrides: Sequence[str], faults: Sequence[Fault] = (), **environment: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own, on the cluster of `RAY_ADDRESS` or on one of its own."""
    code = (
        "import functools, json, sys\n"
        "from grpo_ray import chaos, cli, launch\n"
        "overrides, faults = json.loads(sys.argv[1])\n"
        "launch.train = functools.partial(launch.train, faults=[chaos.Fault(*fault) for fault in faults])\n"
        "sys.exit(cli.main(['train', *overrides]))\n"
    )
    struck = [(fault.kind, fault.step, fault.rank) for fault in faults]
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([list(overrides), struck])],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
