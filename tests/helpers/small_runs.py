"""Settings of small runs, and readers of what a run leaves behind that use nothing of the package."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOCK = re.compile("phase/|step/.|.*/tokens_per_second")
"""Matches the metrics that are timings, which no two runs have in common."""


def small_settings(name: str, storage_path: Any, policy: Path) -> list[str]:
    """Overrides for a run whose steps take a fraction of a second."""
    return [
        f"run.name={name}",
        f"run.storage_path={storage_path}",
        "run.max_failures=0",
        f"model.path={policy}",
        "data.heldout_limit=24",
        "grpo.prompts_per_step=4",
        "grpo.num_generations=4",
        "grpo.max_steps=4",
        "grpo.save_steps=2",
        "grpo.learning_rate=1e-3",
        "grpo.max_completion_length=24",
    ]


REFERENCE = [
    # 10 problems in steps of 4: epochs end inside steps 3 and 5, and the checkpoints of steps 2 and 4 lie inside one.
    "data.limit=10",
    "grpo.max_steps=5",
    "grpo.save_steps=2",
    "grpo.micro_batch_size=16",
    # A learning rate as a run of this size would use. Adam divides by the gradient's own size, so a step moves each
    # weight by about the learning rate, and so does a rounding error of a gradient near zero.
    "grpo.learning_rate=1e-4",
    # A reward that depends on every token, so that equal rewards mean equal completions.
    "rewards.functions=[correctness, 'reward_spies:vary']",
    "run.trace=true",
    "run.max_failures=9",
]
"""Settings of the run that many tests look at, or compare their own run with."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has taken its last step."""

    summary: Any
    folder: Path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without timings, and without names of checkpoints: one that is written again gets another name."""
    return [
        {name: value for name, value in row.items() if name != "checkpoint" and not CLOCK.match(name)} for row in rows
    ]


def weights_of(checkpoint: str | Path) -> dict[str, Any]:
    """The weights of a checkpoint of a whole policy, by name."""
    from safetensors.torch import load_file

    return load_file(Path(checkpoint, "model.safetensors"))


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether all weights are equal, bit for bit."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_near(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that weights agree up to the order in which gradients were summed."""
    import torch

    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5, msg=name)


def sampled(folder: Path) -> list[dict[str, Any]]:
    """The groups of a run in an order that does not depend on the number of workers."""
    return sorted(groups_of(folder), key=lambda group: (group["step"], group["problem"]))


def groups_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files of `rollouts/`, read with pyarrow alone."""
    import pyarrow.parquet as pq

    return [row for file in sorted((folder / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def used(groups: Sequence[dict[str, Any]]) -> dict[int, Counter]:
    """Epoch -> how often each of its problems was used."""
    counted: dict[int, Counter] = {}
    for group in groups:
        counted.setdefault(group["epoch"], Counter())[group["problem"]] += 1
    return counted


def events_of(folder: Path, event: str) -> list[dict[str, Any]]:
    """The entries of `events.jsonl` of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]
