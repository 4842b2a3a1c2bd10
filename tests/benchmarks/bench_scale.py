"""Growth of a run with its problems and its workers: `python tests/benchmarks/bench_scale.py`, about ten minutes.

`--problems N` and `--workers N` set the largest sizes measured (10,000,000 and 8). Every line is measured in processes
of its own, so that its peak memory is its own (with `--tiny`, all in one): a Ray cluster of this machine, and on it
Ray Train workers without engine and without model (`scale_workload.py`). They draw problems through `ProblemLoader`,
sleep where a step would compute, and report through `ReportCallback`.

Memory is anonymous memory, of which a process counts its share where others have the same pages (`Pss_Anon`): the
maximum over each kind of process, sampled twice a second. Memory shared in the object store is listed separately.
Problems are read from N rows of Parquet in row groups of 1,000.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scale_model import MB, PROMPTS_PER_STEP, ROW_GROUP, model, table

HELPERS = Path(__file__).parents[1] / "helpers"
sys.path.insert(0, str(HELPERS))

from scale_workload import GENERATIONS, SLOW_STEPS, MemorySampler, draw_problems, write_problems  # noqa: E402


def measure_data(
    problems: int,
    workers: int,
    per_step: int,
    used: float,
    step_seconds: float,
    bare_steps: int,
    only_drawn: int,
    source: str,
) -> dict[str, Any]:
    """Measure indexing, first problem, waits and rates of a run without engine and model."""
    import ray
    import ray.train

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.ledger import DatasetFingerprint, ids_to_uint64, uint64_to_ids
    from grpo_ray.data.split import StepDataConfig
    from grpo_ray.data.stream import build_index, make_epoch_reader, open_splits, training_stream
    from grpo_ray.driver.cluster.connection import connect
    from grpo_ray.evaluation.evaluate import worker_environment
    from grpo_ray.resilience.controller_callback import CoordinatorCallback
    from grpo_ray.resilience.elastic import PreemptibleTrainer, scaling_config
    from grpo_ray.storage.run_folder import RunFolder
    from grpo_ray.telemetry.coordinator import RunCoordinator

    storage = tempfile.mkdtemp(dir=Path(source).parent)
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
    memory = MemorySampler()
    memory.start()
    ray.get(ray.remote(lambda: None).remote())
    began = time.perf_counter()
    split = open_splits(config)[0][""]
    opened = time.perf_counter() - began
    index = build_index(split)
    index_seconds = time.perf_counter() - began - opened
    driver = _peak()
    reader, used_ids = make_epoch_reader(index.split, config.run.seed), None
    if used:
        windows = range(int(reader.num_windows * used))
        used_ids = ray.put(np.sort(ids_to_uint64(p.id for w in windows for p in reader.read_window(0, w))))
    numbers = ray.put(index.ids)  # as the driver does
    alone = _timed(lambda: DatasetFingerprint.of(uint64_to_ids(index.ids)))
    coordinator = ray.remote(num_cpus=0)(RunCoordinator).remote()
    trainer = PreemptibleTrainer(
        draw_problems,
        worker_counts=config.sizes.worker_counts,
        train_loop_config={
            "config": config,
            "contents": index.fingerprint,
            "used": used_ids,
            "coordinator": coordinator,
            "folder": RunFolder(storage, "scale"),
            "step_seconds": step_seconds,
            "bare_steps": bare_steps,
            "only_drawn": only_drawn,
        },
        scaling_config=scaling_config(config),
        run_config=ray.train.RunConfig(
            name="scale",
            storage_path=storage,
            callbacks=[CoordinatorCallback(coordinator)],
            worker_runtime_env={"env_vars": worker_environment(config, threads=1)},
        ),
        datasets={"train": partial(training_stream, index.split, config.run.seed, coordinator, with_preferred=False)},
        dataset_config=StepDataConfig(per_step),
    )
    trainer.fit()
    memory.stop()
    entries = ray.get(coordinator.read.remote(0))[1]
    measured = [entry for entry in entries if entry["event"] == "measured"]
    assert len(measured) == workers
    worst = {name: max(entry[name] for entry in measured) for name in measured[0] if name not in ("event", "at")}
    return {
        "problems": problems,
        "workers": workers,
        "per_step": per_step,
        "used": used,
        "open": opened,
        "index": index_seconds,
        "driver_seconds": alone,
        "driver": driver,
        "numbers": 8 * len(ray.get(numbers)),
        "read_tasks": reader.num_read_tasks,
        **worst,
        "report": _between([e["at"] for e in entries if e["event"] == "step" and e["row"]["step"] > SLOW_STEPS]),
        **memory.peaks,
        "store": memory.store_peak,
    }


def measure_ledger(count: int) -> dict[str, Any]:
    """Measure a ledger of `count` problems, half of them used: marking, saving, loading, and a read task's look-up."""
    from grpo_ray.data.ledger import _EMPTY_EPOCH, FILE_NAME, DatasetFingerprint, Ledger, _read_only, uint64_to_ids
    from grpo_ray.data.problem import Problem
    from grpo_ray.data.stream import SHARDS_PER_WINDOW, EpochPlan, Split, make_epoch_reader

    random = np.random.default_rng(0)
    used, new = (np.unique(random.integers(2**64, size=n, dtype=np.uint64)) for n in (count // 2, 3_200))
    ledger = Ledger(DatasetFingerprint(count, "0" * 32))
    # The state after marking, set directly to avoid building millions of strings.
    ledger._set_record(0, _EMPTY_EPOCH._replace(used=_read_only(used)))
    ids = uint64_to_ids(new)  # almost surely unused: drawn from 2**64 numbers
    mark = _timed(lambda: ledger.mark(0, ids))
    none = np.empty(0, dtype=np.uint64)
    rows = [Problem(id=name, prompt=[{"role": "user", "content": "?"}], solution="1") for name in uint64_to_ids(new)]

    class MemoryShard:
        num_rows = len(new) // SHARDS_PER_WINDOW

        def __init__(self, number: int):
            self.number = number

        def read(self) -> Any:
            return iter(rows[self.number :: SHARDS_PER_WINDOW])

    reader = make_epoch_reader(Split("memory", [MemoryShard(n) for n in range(SHARDS_PER_WINDOW)]), seed=0)

    def read_all(ids: Any) -> None:
        list(reader.run_read_task(reader.num_read_tasks - 1, EpochPlan(0, ids, none)))

    fresh, half = (_timed(partial(read_all, ids)) for ids in (none, ledger.used(0)))
    with tempfile.TemporaryDirectory() as folder:
        save = _timed(lambda: ledger.save(Path(folder)))
        size = Path(folder, FILE_NAME).stat().st_size
        load_config = _timed(lambda: Ledger.load(Path(folder)))
    peak = _peak()
    result = {
        "problems": count,
        "marked": len(ledger.used(0)),
        "bytes": size,
        "mark": mark,
        "save": save,
        "load": load_config,
    }
    return result | {"look_up": half - fresh, "peak": peak}


def measure_rollouts(count: int) -> dict[str, Any]:
    """Measure writing `count` groups of 8 completions, 3,200 per checkpoint, and reading them for a curriculum."""
    from grpo_ray.data.curriculum import plan_curriculum
    from grpo_ray.storage.records.groups import GroupRecord, attach_texts
    from grpo_ray.storage.records.rollout_files import read_rollouts, write_rollouts
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
            for i in range(0, 3_200, PROMPTS_PER_STEP):  # one group of each step with texts
                texts = [random.bytes(2_000).hex() for _ in range(GENERATIONS)]
                groups[i] = attach_texts(groups[i], [{"role": "user", "content": "What is 1 + 1?"}], texts)
            written += _timed(partial(write_rollouts, folder, groups))
        size = sum(path.stat().st_size for path in Path(storage, "scale", "rollouts").iterdir())
        without_texts = _peak()
        read = _timed(lambda: plan_curriculum(read_rollouts(folder), 1, 2, True))
    written_groups = -(-count // 3_200) * 3_200
    return {
        "groups": written_groups,
        "bytes": size / written_groups,
        "write": written,
        "read": read,
        "peak": _peak() - without_texts,
    }


def measure_checkpoint(megabytes: int, workers: int) -> dict[str, Any]:
    """Measure rank 0's upload of a checkpoint to the local disk, with the small files of all other workers."""
    import ray.train

    from grpo_ray.storage.checkpoint_integrity import find_faults
    from grpo_ray.storage.checkpoint_upload import CheckpointUploader
    from grpo_ray.storage.checkpoints import list_checkpoints
    from grpo_ray.storage.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as storage:
        folder = RunFolder(storage, "scale")

        def upload(rank: int, sizes: dict[str, int]) -> float:
            local = Path(tempfile.mkdtemp(dir=storage))
            for name, size in sizes.items():
                (local / name).write_bytes(os.urandom(size))
            writes = CheckpointUploader(folder, rank, workers, {"step": 1}, 1, 0.0, on_progress=print)
            return _timed(lambda: writes(ray.train.Checkpoint(str(local)), "checkpoint-000001"))

        for rank in range(1, workers):
            upload(rank, {f"rng_state_{rank}.pth": 15_000})
        seconds = upload(0, {"model.safetensors": megabytes << 20})
        (stored,) = list_checkpoints(folder)
        verify = _timed(lambda: find_faults(stored))
    return {"bytes": megabytes << 20, "workers": workers, "upload": seconds, "verify": verify}


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _between(times: list[float]) -> float:
    """Return the median seconds between reports: the controller's speed when reports wait for it."""
    return float(np.median(np.diff(times)))


def _peak() -> int:
    """Return the peak memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "data": measure_data,
    "ledger": measure_ledger,
    "rollouts": measure_rollouts,
    "checkpoint": measure_checkpoint,
}


Part = tuple[str, dict[str, Any]]
"""Name of a part, and its settings."""


def run_parts(parts: Sequence[Part], in_processes: bool) -> list[dict[str, Any]]:
    """Run parts in processes of their own, or all in this one; return the measurements of each."""
    return [run_process(part) if in_processes else measure(*part) for part in parts]


def run_process(part: Part) -> dict[str, Any]:
    """Run a part in a process of its own; return its measurements."""
    with tempfile.NamedTemporaryFile(mode="r") as file:
        command = [sys.executable, __file__, "--measure", json.dumps(part), "--into", file.name]
        subprocess.run(command, check=True)
        return dict(json.load(file))


def measure(part: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a part in this process; return its measurements."""
    began = time.perf_counter()
    measurements = PARTS[part](**settings)
    print(f"{part} in {time.perf_counter() - began:.0f} s: {json.dumps(measurements)}", file=sys.stderr, flush=True)
    return measurements


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts, except for the numbers of problems and workers of the data part."""

    step_seconds: float
    """Time that a slow step sleeps."""
    bare_steps: int
    """Steps that do not sleep."""
    only_drawn: int
    """Steps that only draw problems."""
    ledgers: tuple[int, ...]
    """Problems of each ledger."""
    groups: tuple[int, ...]
    megabytes: int
    """Size of the checkpoint."""
    small_files: int
    """Workers of the checkpoint that consists of small files."""


FULL = Sizes(
    step_seconds=1.0, bare_steps=40, only_drawn=200, ledgers=(10**5, 10**6, 10**7, 10**8), groups=(32_000, 128_000),
    megabytes=512, small_files=1_000,
)  # fmt: skip
TINY = Sizes(
    step_seconds=0.01, bare_steps=5, only_drawn=10, ledgers=(10**4,), groups=(3_200, 6_400), megabytes=1, small_files=10
)  # fmt: skip

DATA_COLUMNS = {
    "problems": ("problems", 1, "{:,}"),
    "workers": ("workers", 1, "{}"),
    "a step": ("per_step", 1, "{}"),
    "used": ("used", 1, "{:.0%}"),
    "open s": ("open", 1, "{:.1f}"),
    "index s": ("index", 1, "{:.1f}"),
    "driver part s": ("driver_seconds", 1, "{:.1f}"),
    "read tasks": ("read_tasks", 1, "{}"),
    "first s": ("first", 1, "{:.1f}"),
    "later wait s": ("later_wait", 1, "{:.3f}"),
    "draw s/step": ("drawn_step", 1, "{:.3f}"),
    "control s/step": ("slow_control", 1, "{:.3f}"),
    "bare step s": ("bare_step", 1, "{:.3f}"),
    "a report s": ("report", 1, "{:.3f}"),
    "driver MB": ("driver", MB, "{:.0f}"),
    "reader": ("reader", MB, "{:.0f}"),
    "split coordinator": ("split_coordinator", MB, "{:.0f}"),
    "controller": ("controller", MB, "{:.0f}"),
    "run coordinator": ("run_coordinator", MB, "{:.0f}"),
    "store": ("store", MB, "{:.0f}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10_000_000, help="largest number of problems")
    parser.add_argument("--workers", type=int, default=8, help="largest number of workers; a divisor of 64")
    parser.add_argument("--tiny", action="store_true", help="small other sizes in one process, to try the script")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # The workers import the workload from there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    if arguments.measure:
        arguments.into.write_text(json.dumps(measure(*arguments.measure)))
        return
    rest = TINY if arguments.tiny else FULL
    sizes = [n for n in (10**5, 10**6, 10**7) if n < arguments.problems] + [arguments.problems]
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n < arguments.workers] + [arguments.workers]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    folder = Path(tempfile.mkdtemp(prefix="grpo_ray-scale-"))
    try:
        runs = []
        for size in sizes:
            source = folder / f"{size}"
            source.mkdir()
            write_problems(source, size, ROW_GROUP)
            settings: dict[str, Any] = dict(
                problems=size, source=str(source), step_seconds=rest.step_seconds, bare_steps=rest.bare_steps,
                only_drawn=rest.only_drawn,
            )  # fmt: skip
            data = [settings | dict(workers=2, per_step=PROMPTS_PER_STEP, used=0.0)]
            if size == sizes[0]:
                others = [n for n in counts if n != 2]
                data += [settings | dict(workers=n, per_step=PROMPTS_PER_STEP, used=0.0) for n in others]
                data.append(settings | dict(workers=counts[-1], per_step=counts[-1], used=0.0))
            if size == sizes[min(1, len(sizes) - 1)]:
                data.append(settings | dict(workers=2, per_step=PROMPTS_PER_STEP, used=0.5))
            first, *more = run_parts([("data", each) for each in data], in_processes=not arguments.tiny)
            runs.append(first)
            if size == sizes[0]:
                several = sorted([first, *more[: len(others)]], key=lambda row: row["workers"])
                single = more[len(others)]
            if size == sizes[min(1, len(sizes) - 1)]:
                half = more[-1]
            shutil.rmtree(source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counted = [n for n in rest.ledgers if n <= max(arguments.problems, 10**6)]
    parts: list[Part] = [
        *(("ledger", {"count": n}) for n in counted),
        *(("rollouts", {"count": n}) for n in rest.groups),
        ("checkpoint", {"megabytes": rest.megabytes, "workers": 8}),
        ("checkpoint", {"megabytes": 1, "workers": rest.small_files}),
    ]
    *measured, saved, many = run_parts(parts, in_processes=not arguments.tiny)
    ledgers, groups = measured[: len(counted)], measured[len(counted) :]

    table("Data and control, measured", DATA_COLUMNS, [*runs, half, *(r for r in several if r["workers"] != 2), single])
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
