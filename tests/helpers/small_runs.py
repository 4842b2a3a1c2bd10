"""Settings of small runs, and readers of their files that use nothing of the package."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMING_METRICS = re.compile("phase/|step/.|.*/tokens_per_second|.*/idle_share|engine/(round_seconds|count|replaced)")
"""Matches the names of metrics that are timings, or count engines, and differ between equal runs."""


def short_warm_up(name: str, folder: Path, steps: int) -> Path:
    """Return an embedded policy after a few steps of warm-up: quick to build, and random enough for samples to differ.

    Args:
        folder: of the policy; it is returned.
    """
    from grpo_ray.models.demonstrations import POLICIES
    from grpo_ray.models.warm_up import build_tokenizer, warm_up

    recipe, tokenizer = POLICIES[name].recipe, build_tokenizer(name)
    usual, recipe["steps"] = recipe["steps"], steps
    try:
        warm_up(tokenizer, name).save_pretrained(folder)
    finally:
        recipe["steps"] = usual
    tokenizer.save_pretrained(folder)
    return folder


def small_settings(name: str, storage_path: Any, policy: Path) -> list[str]:
    """Return the overrides of a run whose steps take a fraction of a second.

    Its workers have one thread, wherever they run, so that equal runs add in the same order, and a cluster that was
    started for such workers forks them from its warm server.
    """
    return [
        f"run.name={name}",
        f"run.storage_path={storage_path}",
        "run.max_failures=0",
        "cluster.threads_per_worker=1",
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
    # 10 problems in steps of 4: epochs end inside steps 3 and 5; the checkpoints of steps 2 and 4 are in mid-epoch.
    "data.limit=10",
    "grpo.max_steps=5",
    "grpo.save_steps=2",
    "grpo.micro_batch_size=16",
    # A learning rate that suits a run of this size. Adam normalises the gradient, so with its usual epsilon a step
    # moves each weight by about the learning rate, even where the gradient is near zero and consists of rounding
    # errors.
    "grpo.learning_rate=1e-4",
    "grpo.adam_epsilon=1e-6",
    # A reward that depends on every token, so that equal rewards imply equal completions.
    "rewards.functions=[correctness, 'reward_spies:vary']",
    "run.trace=true",
    "run.max_failures=9",
]
"""Settings of the run that many tests inspect, or compare with their own run."""


@dataclass(frozen=True)
class FinishedRun:
    """Summary and folder of a run that has taken its last step."""

    summary: Any
    folder: Path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_timings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without timings and names of checkpoints, since a step's second checkpoint gets another name."""
    return [
        {name: value for name, value in row.items() if name != "checkpoint" and not TIMING_METRICS.match(name)}
        for row in rows
    ]


def weights_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return the weights of a checkpoint of a whole policy, also a sharded one, by name."""
    from safetensors.torch import load_file

    shards = Path(checkpoint, "shards", "policy")
    return join_shards(shards) if shards.exists() else load_file(Path(checkpoint, "model.safetensors"))


def join_shards(folder: Path) -> dict[str, Any]:
    """Join the parts of tensors in the files of all workers."""
    import torch
    from safetensors import safe_open

    parts: dict[str, list[tuple[list[int], Any]]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name, part in json.loads(file.metadata()["DCP_SHARDING_INFO"]).items():
                parts.setdefault(name, []).append((part["saved_offsets"], file.get_tensor(name)))
    return {name: torch.cat([part for _, part in sorted(each, key=lambda at: at[0])]) for name, each in parts.items()}


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return True if all weights are equal, bit for bit."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_near(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that weights agree up to the summation order of gradients."""
    import torch

    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5, msg=name)


def sorted_groups(folder: Path) -> list[dict[str, Any]]:
    """Return the groups of a run in an order that does not depend on the number of workers.

    Without the log-probabilities of tokens: those of weights that differ by rounding are rounded differently.
    """
    groups = sorted(groups_of(folder), key=lambda group: (group["step"], group["problem"]))
    for group in groups:
        for tokens in group["tokens"] or ():
            del tokens["engine_logps"], tokens["learner_logps"]
    return groups


def groups_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all files of `rollouts/` without timings, read with pyarrow alone."""
    import pyarrow.parquet as pq

    files = sorted((folder / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [{name: value for name, value in row.items() if name != "tool_seconds"} for row in rows]


def count_uses(groups: Sequence[dict[str, Any]]) -> dict[int, Counter]:
    """Count for each epoch how often each problem was used."""
    counted: dict[int, Counter] = {}
    for group in groups:
        counted.setdefault(group["epoch"], Counter())[group["problem"]] += 1
    return counted


def events_of(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of `events.jsonl` of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]
