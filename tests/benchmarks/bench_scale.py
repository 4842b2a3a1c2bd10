"""How a run grows with its problems and its workers: `python tests/benchmarks/bench_scale.py`, about ten minutes.

`--problems N` and `--workers N` say how far is measured (10,000,000 and 8). Every line is measured in processes of its
own, so that its peak memory is its own: a Ray cluster of this machine, and on it Ray Train workers without engine and
without model (`drawing.py`), which draw problems through `Course`, sleep where a step would compute, and report through
`ReportCallback`.

Memory is private memory (`RssAnon`), the largest of each kind of process at two looks a second; what processes share
of the object store is told as such. The drawing of N problems goes through N rows of Parquet in row groups of 1,000.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from drawing import GENERATIONS, SLOW_STEPS, Memory, draw, write_problems
from growth import MB, PROMPTS_PER_STEP, ROW_GROUP, model, table


def data(problems: int, workers: int, per_step: int, used: float, only_drawn: int, source: Path) -> dict[str, Any]:
    """Survey, first problem, waits and rates of a run without engine and model."""
    import ray
    import ray.train

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.ledger import DatasetFingerprint, to_ids, to_numbers
    from grpo_ray.data.split import StepDataConfig
    from grpo_ray.data.stream import build_index, epoch_reader, open_splits, training_stream
    from grpo_ray.driver.progress import CoordinatorCallback
    from grpo_ray.driver.run import connect
    from grpo_ray.resilience.elastic import PreemptibleTrainer, scaling_config
    from grpo_ray.storage.run_folder import RunFolder
    from grpo_ray.telemetry.coordinator import RunCoordinator

    storage = tempfile.mkdtemp(dir=source.parent)
    config = load_config(
        None,
        [
            "run.name=scale",
            f"run.storage_path={storage}",
            f"cluster.num_workers={workers}",
            f"data.train={source}",
            f"grpo.prompts_per_step={per_step}",
            f"grpo.num_generations={GENERATIONS}",
        ],
    )
    connect(config)
    memory = Memory()
    memory.start()
    ray.get(ray.remote(lambda: None).remote())
    began = time.perf_counter()
    split, _ = open_splits(config)
    opened = time.perf_counter() - began
    surveyed = build_index(split)
    seconds = time.perf_counter() - began - opened
    driver = _peak()
    order, gone = epoch_reader(surveyed.split, config.run.seed), None
    if used:
        windows = range(int(order.windows * used))
        gone = ray.put(np.sort(to_numbers(p.id for w in windows for p in order.window(0, w))))
    numbers = ray.put(surveyed.numbers)  # as the driver does
    alone = _timed(lambda: DatasetFingerprint.of(to_ids(surveyed.numbers)))
    board = ray.remote(num_cpus=0)(RunCoordinator).remote()
    trainer = PreemptibleTrainer(
        draw,
        worker_counts=config.worker_counts,
        train_loop_config={
            "config": config,
            "contents": surveyed.contents,
            "used": gone,
            "board": board,
            "folder": RunFolder(storage, "scale"),
            "step_seconds": 1.0,
            "only_drawn": only_drawn,
        },
        scaling_config=scaling_config(config),
        run_config=ray.train.RunConfig(
            name="scale",
            storage_path=storage,
            callbacks=[CoordinatorCallback(board)],
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        ),
        datasets={"train": partial(training_stream, surveyed.split, config.run.seed, board, prefers=False)},
        dataset_config=StepDataConfig(per_step),
    )
    trainer.fit()
    entries = ray.get(board.read.remote(0))[1]
    measured = [entry for entry in entries if entry["event"] == "measured"]
    assert len(measured) == workers
    worst = {name: max(entry[name] for entry in measured) for name in measured[0] if name not in ("event", "at")}
    return {
        "problems": problems,
        "workers": workers,
        "per_step": per_step,
        "used": used,
        "open": opened,
        "survey": seconds,
        "driver_seconds": alone,
        "driver": driver,
        "numbers": 8 * len(ray.get(numbers)),
        "pieces": order.pieces,
        **worst,
        "report": _between([e["at"] for e in entries if e["event"] == "step" and e["row"]["step"] > SLOW_STEPS]),
        **memory.most,
        "store": memory.store,
    }


def ledger(count: int) -> dict[str, Any]:
    """An epoch of `count` problems, half used: a checkpoint's mark, save and load, and what a reading task looks up."""
    from grpo_ray.data.ledger import _EMPTY, FILE_NAME, DatasetFingerprint, Ledger, _frozen, to_ids
    from grpo_ray.data.problem import Problem
    from grpo_ray.data.stream import SHARDS_PER_WINDOW, EpochPlan, Split, epoch_reader

    random = np.random.default_rng(0)
    used, new = (np.unique(random.integers(2**64, size=n, dtype=np.uint64)) for n in (count // 2, 3_200))
    kept = Ledger(DatasetFingerprint(count, "0" * 32))
    kept._put(0, _EMPTY._replace(used=_frozen(used)))  # as marking does, without so many strings
    ids = to_ids(new)  # none of them is used: of 2**64 numbers
    mark = _timed(lambda: kept.mark(0, ids))
    none = np.empty(0, dtype=np.uint64)
    rows = [Problem(id=name, prompt=[{"role": "user", "content": "?"}], solution="1") for name in to_ids(new)]

    class Shelf:
        rows = len(new) // SHARDS_PER_WINDOW

        def __init__(self, number: int):
            self.number = number

        def read(self) -> Any:
            return iter(rows[self.number :: SHARDS_PER_WINDOW])

    order = epoch_reader(Split("shelves", [Shelf(n) for n in range(SHARDS_PER_WINDOW)]), seed=0)
    fresh, half = (
        _timed(lambda gone=gone: list(order.read(order.pieces - 1, EpochPlan(0, gone, none))))
        for gone in (none, kept.used(0))
    )
    with tempfile.TemporaryDirectory() as folder:
        save = _timed(lambda: kept.save(Path(folder)))
        size = Path(folder, FILE_NAME).stat().st_size
        load_config = _timed(lambda: Ledger.load(Path(folder)))
    peak = _peak()
    result = {
        "problems": count,
        "marked": len(kept.used(0)),
        "bytes": size,
        "mark": mark,
        "save": save,
        "load": load_config,
    }
    return result | {"look_up": half - fresh, "peak": peak}


def rollouts(count: int) -> dict[str, Any]:
    """So many groups of 8 completions written, 3,200 to a checkpoint, and read by a curriculum."""
    from grpo_ray.storage.rollouts import GroupRecord, attach_texts, plan_curriculum, read_rollouts, write_rollouts
    from grpo_ray.storage.run_folder import RunFolder

    random, written = np.random.default_rng(0), 0.0
    with tempfile.TemporaryDirectory() as storage:
        folder = RunFolder(storage, "scale")
        for first in range(0, count, 3_200):
            rewards = random.integers(2, size=(3_200, GENERATIONS)).astype(float).tolist()
            lengths = random.integers(64, 4096, size=(3_200, GENERATIONS)).tolist()
            groups = [
                GroupRecord(
                    step=(first + i) // PROMPTS_PER_STEP + 1,
                    epoch=0,
                    problem=f"{random.integers(2**63):016x}",
                    rewards=tuple(rewards[i]),
                    correct=tuple(rewards[i]),
                    lengths=tuple(lengths[i]),
                    truncated=(False,) * GENERATIONS,
                )
                for i in range(3_200)
            ]
            for i in range(0, 3_200, PROMPTS_PER_STEP):  # one of each step with texts
                texts = [random.bytes(2_000).hex() for _ in range(GENERATIONS)]
                groups[i] = attach_texts(groups[i], [{"role": "user", "content": "What is 1 + 1?"}], texts)
            written += _timed(lambda groups=groups: write_rollouts(folder, groups))
        size = sum(path.stat().st_size for path in Path(storage, "scale", "rollouts").iterdir())
        without_texts = _peak()
        read = _timed(lambda: plan_curriculum(read_rollouts(folder), 1, 2, True))
    groups = -(-count // 3_200) * 3_200
    return {"groups": groups, "bytes": size / groups, "write": written, "read": read, "peak": _peak() - without_texts}


def checkpoint(megabytes: int, workers: int) -> dict[str, Any]:
    """Rank 0's upload of so many megabytes to this machine's disk, with the small files of all other workers."""
    import ray.train

    from grpo_ray.storage.checkpoints import CheckpointUploader, find_faults, stored_checkpoints
    from grpo_ray.storage.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as storage:
        folder = RunFolder(storage, "scale")

        def upload(rank: int, sizes: dict[str, int]) -> float:
            local = Path(tempfile.mkdtemp(dir=storage))
            for name, size in sizes.items():
                (local / name).write_bytes(os.urandom(size))
            writes = CheckpointUploader(folder, rank, workers, {"step": 1}, 1, 0.0, say=print)
            return _timed(lambda: writes(ray.train.Checkpoint(str(local)), "checkpoint-000001"))

        for rank in range(1, workers):
            upload(rank, {f"rng_state_{rank}.pth": 15_000})
        seconds = upload(0, {"model.safetensors": megabytes << 20})
        (stored,) = stored_checkpoints(folder)
        verify = _timed(lambda: find_faults(stored))
    return {"bytes": megabytes << 20, "workers": workers, "upload": seconds, "verify": verify}


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _between(times: list[float]) -> float:
    """Median seconds from one arrival to the next: how fast the controller takes reports when they wait for it."""
    return float(np.median(np.diff(times)))


def _peak() -> int:
    """Most memory that this process has held so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "data": data,
    "ledger": ledger,
    "rollouts": rollouts,
    "checkpoint": checkpoint,
}


def measured(part: str, **settings: Any) -> dict[str, Any]:
    """What a part gives, run in a process of its own."""
    with tempfile.NamedTemporaryFile(mode="r") as file:
        command = [sys.executable, __file__, "--part", part, "--settings", json.dumps(settings), "--into", file.name]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        said = json.load(file)
    print(f"{part} in {time.perf_counter() - began:.0f} s: {json.dumps(said)}", file=sys.stderr, flush=True)
    return said


DATA = {
    "problems": ("problems", 1, "{:,}"),
    "workers": ("workers", 1, "{}"),
    "a step": ("per_step", 1, "{}"),
    "used": ("used", 1, "{:.0%}"),
    "open s": ("open", 1, "{:.1f}"),
    "survey s": ("survey", 1, "{:.1f}"),
    "of it driver s": ("driver_seconds", 1, "{:.1f}"),
    "pieces": ("pieces", 1, "{}"),
    "first s": ("first", 1, "{:.1f}"),
    "later wait s": ("later_wait", 1, "{:.3f}"),
    "draw s/step": ("drawn_step", 1, "{:.3f}"),
    "control s/step": ("slow_control", 1, "{:.3f}"),
    "bare step s": ("bare_step", 1, "{:.3f}"),
    "a report s": ("report", 1, "{:.3f}"),
    "driver MB": ("driver", MB, "{:.0f}"),
    "reader": ("reader", MB, "{:.0f}"),
    "coordinator": ("coordinator", MB, "{:.0f}"),
    "controller": ("controller", MB, "{:.0f}"),
    "board": ("board", MB, "{:.0f}"),
    "store": ("store", MB, "{:.0f}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10_000_000, help="most problems that are read")
    parser.add_argument("--workers", type=int, default=8, help="most workers; a divisor of 64")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        settings = asked.settings
        if "source" in settings:
            settings["source"] = Path(settings["source"])
        asked.into.write_text(json.dumps(PARTS[asked.part](**settings)))
        return
    sizes = [n for n in (10**5, 10**6, 10**7) if n < asked.problems] + [asked.problems]
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n < asked.workers] + [asked.workers]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    folder = Path(tempfile.mkdtemp(prefix="grpo_ray-scale-"))
    try:
        runs = []
        for size in sizes:
            source = folder / f"{size}"
            source.mkdir()
            write_problems(source, size, ROW_GROUP)
            run = partial(measured, "data", problems=size, source=str(source), only_drawn=200)
            runs.append(run(workers=2, per_step=PROMPTS_PER_STEP, used=0.0))
            if size == sizes[0]:
                some = [run(workers=n, per_step=PROMPTS_PER_STEP, used=0.0) for n in counts if n != 2]
                several = sorted([*runs, *some], key=lambda row: row["workers"])
                single = run(workers=counts[-1], per_step=counts[-1], used=0.0)
            if size == sizes[min(1, len(sizes) - 1)]:
                half = run(workers=2, per_step=PROMPTS_PER_STEP, used=0.5)
            shutil.rmtree(source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ledgers = [measured("ledger", count=n) for n in (10**5, 10**6, 10**7, 10**8) if n <= max(asked.problems, 10**6)]
    groups = [measured("rollouts", count=n) for n in (32_000, 128_000)]
    saved = measured("checkpoint", megabytes=512, workers=8)
    many = measured("checkpoint", megabytes=1, workers=1_000)

    table("Data and control, measured", DATA, [*runs, half, *(r for r in several if r["workers"] != 2), single])
    table(
        "Ledger, half of an epoch used, measured",
        {
            "problems": ("problems", 1, "{:,}"),
            "bytes": ("bytes", 1, "{:,}"),
            "mark s": ("mark", 1, "{:.3f}"),
            "save s": ("save", 1, "{:.3f}"),
            "load s": ("load", 1, "{:.3f}"),
            "a task's look-up s": ("look_up", 1, "{:.3f}"),
            "peak MB": ("peak", MB, "{:.0f}"),
        },
        ledgers,
    )
    table(
        "Rollouts, measured",
        {
            "groups": ("groups", 1, "{:,}"),
            "bytes a group": ("bytes", 1, "{:.0f}"),
            "write s": ("write", 1, "{:.1f}"),
            "curriculum s": ("read", 1, "{:.1f}"),
            "its memory MB": ("peak", MB, "{:.0f}"),
        },
        groups,
    )
    model(runs, half, several, single, ledgers, groups, saved, many)


if __name__ == "__main__":
    main()
