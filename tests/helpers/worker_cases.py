"""Functions that tests run on each worker of a group, or in a process of its own; see `worker_group.py`."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any


def savings_on_gpu(learner: Any) -> Any:
    """Return the savings made on a GPU with packed rows. The attention used here is slower and equally exact."""
    from grpo_ray.learner.learner import Learner

    savings = Learner.savings.func(learner)  # type: ignore[attr-defined]
    return replace(savings, pack=True)


def compare_savings(
    rank: int, folder: str, cases: Sequence[tuple[str, int]], rewards: dict[int, Sequence[Any]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Train with and without the savings, for each loss type and accumulation; the savings of a GPU if accumulated."""
    from stock_trl import ScriptedLearner, accumulated, largest_difference, train_steps
    from trl import GRPOTrainer

    from grpo_ray.learner.passes import PASS_COST

    PASS_COST["cpu"] = 0  # as in test_exact_savings.py

    class GpuLearner(ScriptedLearner):
        savings = cached_property(savings_on_gpu)

    results = {}
    for loss_type, accumulation in cases:
        ours, stock = (
            train_steps(
                kind, Path(folder), rewards=rewards[accumulation], rank=rank, loss_type=loss_type, ddp_backend="gloo",
                **accumulated(accumulation),
            )[0]
            for kind in (GpuLearner if accumulation > 1 else ScriptedLearner, GRPOTrainer)
        )  # fmt: skip
        clipped = "clip_ratio/region_mean"
        results[loss_type, accumulation] = {
            "difference": largest_difference(ours, stock),
            "completions_share": [log["learner/completions_share"] for log in ours.logs],
            "clipped": [log.get(clipped) for log in ours.logs],
            "clipped by TRL": [log.get(clipped) for log in stock.logs],
        }
    return results


def train_stale(rank: int, folder: str, rewards: Sequence[Any]) -> None:
    """Compare training on tokens of older weights with TRL."""
    from stale_learners import OlderLearner, compare_stale
    from stock_trl import accumulated

    mode = {"vllm_importance_sampling_mode": "token_truncate"}
    compare_stale(OlderLearner, Path(folder), rewards=rewards, rank=rank, ddp_backend="gloo", **mode, **accumulated(2))


def train_dynamic_sampling(rank: int, folder: str, accumulation: int) -> dict[str, Any]:
    """Train on the stream of `problem_stream.py` in steps of four groups over all workers."""
    import os

    from problem_stream import DynamicSamplingLearner, train_on_stream, whole_stream
    from stock_trl import GROUP, accumulated

    size = 4 * GROUP // int(os.environ["WORLD_SIZE"]) // accumulation
    record, trainer = train_on_stream(
        DynamicSamplingLearner, Path(folder), whole_stream(), ddp_backend="gloo", per_device_train_batch_size=size,
        **accumulated(accumulation),
    )  # fmt: skip
    return {
        "gradients": [{name: each.numpy() for name, each in step.items()} for step in record.gradients],
        "logs": record.logs,
        "trained_on": trainer.trained_on,
        "drawn": trainer.drawn,
        "trained": trainer.trained,
        "groups": trainer.groups,
        "tokens": trainer.tokens,
    }


def skip_together(rank: int) -> tuple[bool, str, list[Any]]:
    """Check two steps: worker 1 has a NaN loss, then worker 0 an infinite gradient.

    Returns whether the first step was skipped, the error of the second, and the groups that this worker saved.
    """
    import torch.distributed as dist
    from bad_steps import check_step

    from grpo_ray.errors import NonFiniteError
    from grpo_ray.resilience.nonfinite import NonFiniteMonitor

    dist.init_process_group("gloo")
    groups = [{"problem": f"of worker {rank}", "finite": rank == 0}]
    saved: list[Any] = []

    def save(chosen: list[Any], step: int) -> str:
        saved.append(chosen)
        return f"bad/{rank}"

    monitor = NonFiniteMonitor(1, lambda: groups, save)
    skipped = check_step(monitor, [1.0, math.nan][rank], [1.0, 1.0]).grad is None
    try:
        check_step(monitor, 1.0, [[math.inf, 1.0], [1.0, 1.0]][rank])
        error = "none"
    except NonFiniteError as raised:
        error = str(raised)
    return skipped, error, saved


def wait_in_background() -> None:
    """Start background work that never ends, and return."""
    from grpo_ray.learner.rollouts.bounded_staleness import run_in_thread

    run_in_thread(threading.Event().wait)


def draw_epoch(rank: int, folder: str, cluster: str, coordinator: str, rows: Sequence[list[dict[str, Any]]]) -> Any:
    """Draw the problems of a step and one more; each of two workers has its own rows of the epoch.

    Args:
        cluster: address of the Ray cluster.
        coordinator: name of the `RunCoordinator` actor.
        rows: rows of each worker's stream.

    Returns:
        Ids of the problems drawn, and on rank 0 the plans that were published after the step and after the last draw.
    """
    import itertools
    from functools import partial

    import ray
    import torch.distributed as dist

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.ledger import DatasetFingerprint, Ledger
    from grpo_ray.data.mixture_ledger import MixtureLedger
    from grpo_ray.storage.run_folder import RunFolder
    from grpo_ray.training.problem_loader import ProblemLoader
    from grpo_ray.training.worker import publish_plan

    dist.init_process_group("gloo")
    if rank == 0:
        ray.init(cluster, namespace="draw_epoch", log_to_driver=False)
    config = load_config(None, ["grpo.prompts_per_step=4", "cluster.num_workers=2"])
    ledger = Ledger(DatasetFingerprint.of([row["id"] for each in rows for row in each]))
    actor = ray.get_actor(coordinator) if rank == 0 else None
    publish = partial(publish_plan, actor)
    loader = ProblemLoader(
        config, MixtureLedger.single(ledger), RunFolder(folder, "run"), publish, rows=lambda: iter(rows[rank])
    )
    problems = loader.problems()
    plans = []
    drawn = []
    for count in (config.sizes.prompts_per_worker, 1):
        drawn += [problem.id for problem, _ in itertools.islice(problems, count)]
        if actor is not None:
            plans += ray.get(ray.get(actor.epoch_plan.remote()))
    return drawn, plans


def micro_batches(size: int, count: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of steps in `count` micro-batches of `size` completions on each worker.

    settings: replace the defaults. `parts` is the number of optimizer steps from one generation batch.
    """
    further = dict(settings)
    generation = count * further.pop("parts", 1)
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count}
    return {"max_steps": 2, **sizes, "steps_per_generation": generation, **further}


def gradients_on_stream(rank: int, folder: str, cases: Sequence[tuple[dict[str, Any], int, int]]) -> list[Any]:
    """Take two steps for each case (settings, size and number of micro-batches); return the gradients of the steps."""
    from problem_stream import STREAM, StreamLearner, train_on_stream
    from torch.distributed.tensor import DTensor

    from grpo_ray.learner.passes import PASS_COST

    PASS_COST["cpu"] = 0  # as in test_worker_count_invariance.py
    records = []
    for settings, size, count in cases:
        record, trainer = train_on_stream(
            StreamLearner, Path(folder), range(len(STREAM)), ddp_backend="gloo", **micro_batches(size, count, settings)
        )
        assert any(isinstance(p, DTensor) for p in trainer.model.parameters()) == ("fsdp" in settings)
        records.append([{name: each.numpy() for name, each in step.items()} for step in record.gradients])
    return records


def drain_collectives(rank: int, folder: str) -> bool:
    """Have the first worker of a shared engine arrive late at a generation; return whether this worker waited."""
    import time

    from accelerate import Accelerator

    from grpo_ray.inference.engine import Engine

    engine = object.__new__(Engine)
    engine.device = Accelerator(cpu=True).device
    waiting, late = Path(folder, "waiting"), Path(folder, "late")
    if rank == 0:
        while not waiting.exists():
            time.sleep(0.01)
        late.touch()
    else:
        waiting.touch()
    engine._drain_collectives()
    return late.exists()


def sum_shards(rank: int) -> tuple[list[int], list[int]]:
    """Return checksums in bfloat16 of tensors that two workers hold, added up over them, and those of the whole ones.

    The tensors are sharded by rows (evenly, unevenly, with a worker that has none) and by columns, and replicated.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from grpo_ray.distributed import all_gather_object
    from grpo_ray.inference.weight_sums import add_sums, shard_sum

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    parts, whole = [], []
    for shape, placement in [
        ((6, 5), Shard(0)), ((7, 5), Shard(0)), ((1, 5), Shard(0)), ((5, 7), Shard(1)), ((4, 3), Replicate()),
    ]:  # fmt: skip
        values = torch.randn(shape)
        own = shard_sum(distribute_tensor(values, mesh, [placement]), torch.bfloat16).item()
        parts.append(add_sums(all_gather_object(own)))
        whole.append(add_sums([shard_sum(values.bfloat16()).item()]))
    return parts, whole
