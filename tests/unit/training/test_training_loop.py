"""Progress of a worker as the hang watchdog reads it."""

from pathlib import Path
from types import SimpleNamespace

from grpo_ray.training.attempt import GroupProgress
from grpo_ray.training.training_loop import checkpoint_bytes


def test_checkpoint_bytes_grow_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert checkpoint_bytes(str(tmp_path)) == 0
    (tmp_path / "stacks-worker-0.txt").write_text("not of a checkpoint")
    (tmp_path / "checkpoint-3" / "optimizer").mkdir(parents=True)
    (tmp_path / "checkpoint-3" / "weights").write_bytes(bytes(10))
    assert checkpoint_bytes(str(tmp_path)) == 10
    (tmp_path / "checkpoint-3" / "optimizer" / "shard").write_bytes(bytes(7))
    assert checkpoint_bytes(str(tmp_path)) == 17


def test_group_progress_of_one_worker_asks_nobody() -> None:
    attempt = SimpleNamespace(workers=1, rank=0)  # without a coordinator
    assert GroupProgress(attempt, lambda: 5)() == {0: 5}  # type: ignore[arg-type]
