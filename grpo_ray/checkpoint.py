"""What a checkpoint holds, and which one a run goes on from.

A checkpoint is a plain Hugging Face folder (`config.json`, safetensors, tokenizer), so `from_pretrained` and
`vllm serve` take it as it is. Beside the weights lie the optimizer, the scheduler, the trainer's state, the random
states of every worker and the ledger.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train

from grpo_ray.errors import CheckpointError
from grpo_ray.ledger import Ledger
from grpo_ray.storage import RunFolder

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's own record of a run's checkpoints."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint in a run folder, with what was measured when it was taken."""

    path: str
    """As the run folder's filesystem wants it."""
    metrics: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.metrics["step"])

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


def stored_checkpoints(folder: RunFolder) -> list[Stored]:
    """All checkpoints that Ray Train keeps of a run, the latest last."""
    if not folder.exists(SNAPSHOT):
        return []
    result = ray.train.Result.from_path(folder.path(), storage_filesystem=folder.filesystem)
    kept = [Stored(checkpoint.path, metrics) for checkpoint, metrics in result.best_checkpoints or []]
    latest = result.checkpoint.path if result.checkpoint else None
    return sorted(kept, key=lambda stored: (stored.path == latest, stored.step))


def best_of(checkpoints: list[Stored], metric: str) -> Stored | None:
    """The checkpoint with the highest value of a metric; of equals the earliest."""
    ranked = [stored for stored in checkpoints if stored.metrics.get(metric) is not None]
    return max(ranked, key=lambda stored: (stored.metrics[metric], -stored.step), default=None)


def start_of(folder: RunFolder, resume: str, metric: str) -> Stored | None:
    """The checkpoint that a new launch of a run goes on from: the latest, or the best."""
    checkpoints = stored_checkpoints(folder)
    if not checkpoints:
        return None
    return checkpoints[-1] if resume == "latest" else best_of(checkpoints, metric) or checkpoints[-1]


def checkpoint_name(folder: RunFolder, step: int) -> str:
    """Folder name of a step's checkpoint; a step taken again after going back gets a number of its own."""
    name, number = f"checkpoint-{step:06d}", 1
    while folder.exists(name):
        number += 1
        name = f"checkpoint-{step:06d}.{number}"
    return name


def save_reward_states(folder: Path, rank: int, states: dict[str, Any]) -> None:
    """Write the states of one worker's rewards into a checkpoint's folder; nothing where no reward has one."""
    if states:
        (folder / f"rewards_{rank}.json").write_text(json.dumps(states) + "\n", encoding="utf-8")


def load_reward_states(folder: Path, rank: int) -> dict[str, Any]:
    """The states of one worker's rewards; rank 0's for a worker that the run did not have before."""
    for name in (f"rewards_{rank}.json", "rewards_0.json"):
        if (folder / name).exists():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    return {}


@contextmanager
def opened(checkpoint: ray.train.Checkpoint | None) -> Iterator[tuple[str | None, Ledger]]:
    """A local folder with the checkpoint, and its ledger; (None, an empty ledger) for a run that begins.

    Raises CheckpointError if the folder is not a checkpoint of ours.
    """
    if checkpoint is None:
        yield None, Ledger()
        return
    with checkpoint.as_directory() as local:
        try:
            ledger = Ledger.load(Path(local))
        except FileNotFoundError:
            raise CheckpointError(f"{checkpoint.path}: has no ledger; it is not a whole checkpoint of ours") from None
        yield local, ledger
