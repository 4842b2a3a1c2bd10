"""Runs in which everything breaks that can, held against runs in which nothing does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import events_of, groups_of, rows_of, same_weights, timeless, weights_of

from grpo_ray.chaos import KINDS, Fault, plan
from grpo_ray.errors import ConfigError
from grpo_ray.ledger import Ledger

SETTINGS = ["grpo.max_steps=10", "grpo.save_steps=3", "data.limit=18", "run.max_failures=9", "run.hang_seconds=60"]
"""18 problems in steps of 4: epochs end inside steps 5 and 10, and the last checkpoint stands inside an epoch."""


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a run of SETTINGS comes to when nothing happens; made once."""
    return {}


def outcome(small_run: Callable[..., Any], name: str, faults: list[Fault], *overrides: str) -> dict[str, Any]:
    summary, folder = small_run(name, *SETTINGS, *overrides, faults=faults)
    assert all((folder / "chaos" / fault.mark).exists() for fault in faults), "a fault did not strike"
    return {
        "folder": folder,
        "weights": weights_of(summary.latest_checkpoint),
        "rows": timeless(rows_of(folder)),
        "ledger": Ledger.load(Path(summary.latest_checkpoint)),
        "groups": groups_of(folder),
        "summary": summary,
    }


def same(disturbed: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """Nothing was lost: weights, metrics of each step, ledger and rollouts are equal bit for bit."""
    assert same_weights(disturbed["weights"], undisturbed["weights"])
    assert disturbed["rows"] == undisturbed["rows"]
    assert disturbed["ledger"] == undisturbed["ledger"]
    assert disturbed["groups"] == undisturbed["groups"]


def test_a_worker_killed_anywhere_loses_nothing(small_run: Callable[..., Any]) -> None:
    whole = outcome(small_run, "whole", [])
    faults = [
        Fault("kill-generation", step=2, rank=1),  # before there is a checkpoint
        Fault("kill-backward", step=5, rank=0),  # in the step in which an epoch ends
        Fault("kill-upload", step=6, rank=1),
        Fault("kill-commit", step=9, rank=0),
    ]
    killed = outcome(small_run, "killed", faults)
    same(killed, whole)
    assert len(events_of(killed["folder"], "failed")) == 4
    starts = [event["step"] for event in events_of(killed["folder"], "began")]
    assert starts == [0, 0, 3, 3, 9]  # the checkpoint of step 9 was whole, though Ray Train had not heard of it
    assert not list(killed["folder"].glob("*.part"))


def test_a_plan_is_drawn_from_its_seed() -> None:
    first = plan(7, list(KINDS), max_steps=30, save_steps=10, workers=2)
    assert first == plan(7, list(KINDS), max_steps=30, save_steps=10, workers=2)
    assert first != plan(8, list(KINDS), max_steps=30, save_steps=10, workers=2)
    assert {fault.kind for fault in first} == set(KINDS)
    for fault in first:
        assert 1 <= fault.step <= 30 and fault.rank in (0, 1)
    with pytest.raises(ConfigError, match="no such fault: earthquake"):
        plan(0, ["earthquake"], 10, 5, 2)
