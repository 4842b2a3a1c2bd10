"""Small runs of tests, and what they left behind, read without a word of the package."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLOCK = re.compile("phase/|step/.|.*/tokens_per_second")
"""Metrics that no two runs have in common begin so."""


def small_settings(name: str, storage_path: Any, policy: Path) -> list[str]:
    """A run of seconds."""
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


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what the clock says, and without the names of checkpoints: one written again has another."""
    return [
        {name: value for name, value in row.items() if name != "checkpoint" and not CLOCK.match(name)} for row in rows
    ]


def weights_of(checkpoint: str | Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(checkpoint, "model.safetensors"))


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether all weights are equal, bit for bit."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]
