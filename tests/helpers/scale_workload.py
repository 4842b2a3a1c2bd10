"""Workload of `bench_scale.py`: files of problems, a worker without engine and model, and a memory sampler."""

import os
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

FILE_ROWS = 100_000
GENERATIONS = 8
SLOW_STEPS = 10
ROLES = {
    "SplitCoordinator": "split_coordinator",
    "TrainController": "controller",
    "RayTrainWorker": "worker",
    "RunCoordinator": "run_coordinator",
    "Map(": "reader",
    "MapBatches": "reader",
    "Repartition": "reader",
}
"""Part of a Ray process's title -> its role in the tables."""


def write_problems(folder: Path, count: int, row_group: int) -> None:
    """Write Parquet files in DeepMath's format: prompt messages and a solution."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for first in range(0, count, FILE_ROWS):
        numbers = np.arange(first, min(first + FILE_ROWS, count))
        texts = pa.array([f"What is {n} + {n % 97}? Put the answer into \\boxed{{}}." for n in numbers.tolist()])
        messages = pa.StructArray.from_arrays([texts, pa.array(["user"] * len(numbers))], ["content", "role"])
        prompts = pa.ListArray.from_arrays(pa.array(range(len(numbers) + 1), pa.int32()), messages)
        solutions = pa.array([f"${n}$" for n in (numbers + numbers % 97).tolist()])
        table = pa.table({"prompt": prompts, "solution": solutions})
        pq.write_table(table, folder / f"{first:012d}.parquet", row_group_size=row_group)


class MemorySampler(threading.Thread):
    """Sampler of the anonymous memory of this process's descendants, twice a second, until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = defaultdict(int)
        """Role -> largest memory of one process, bytes; of shared pages, its share."""
        self.store_peak = 0
        """Largest use of the object store, bytes."""
        self._end = threading.Event()

    def stop(self) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        import ray

        while not self._end.wait(0.5):
            for role, private in self._sample():
                self.peaks[role] = max(self.peaks[role], private)
            if ray.is_initialized():
                total, free = ray.cluster_resources(), ray.available_resources()
                used = total.get("object_store_memory", 0) - free.get("object_store_memory", 0)
                self.store_peak = max(self.store_peak, int(used))

    def _sample(self) -> list[tuple[str, int]]:
        parents, samples = {}, []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                status = Path(entry.path, "status").read_text()
                title = Path(entry.path, "cmdline").read_text()
                role = next((role for part, role in ROLES.items() if title.startswith("ray::") and part in title), None)
                memory = Path(entry.path, "smaps_rollup").read_text() if role else ""
            except OSError:  # the process has just ended
                continue
            fields = dict(line.split(":", 1) for line in f"{status}\n{memory}".splitlines() if ":" in line)
            parents[int(entry.name)] = int(fields["PPid"])
            if role and "Pss_Anon" in fields:
                samples.append((int(entry.name), role, int(fields["Pss_Anon"].split()[0]) << 10))
        return [(role, private) for pid, role, private in samples if self._is_below(pid, parents)]

    def _is_below(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()


def draw_problems(settings: dict[str, Any]) -> None:
    """Run a worker without engine and model: steps that sleep, steps that do not, then only drawing of problems."""
    import ray
    import ray.train
    from transformers import TrainerControl, TrainerState

    from grpo_ray.data.ledger import Ledger, uint64_to_ids
    from grpo_ray.data.mixture_ledger import MixtureLedger
    from grpo_ray.distributed import is_rank_zero
    from grpo_ray.resilience.elastic import PreemptionNotice
    from grpo_ray.resilience.signals import StopRequest
    from grpo_ray.storage.records.groups import GroupRecord
    from grpo_ray.training.metric_names import METRICS
    from grpo_ray.training.problem_loader import ProblemLoader
    from grpo_ray.training.report_callback import EndSignals, ReportCallback, ReportInputs, ReportTarget
    from grpo_ray.training.worker import publish_plan

    context, coordinator, folder = ray.train.get_context(), settings["coordinator"], settings["folder"]
    config = settings["config"].with_workers(context.get_world_size())
    ledger = Ledger(settings["contents"])
    if is_rank_zero() and settings["used"] is not None:
        ledger.mark(0, uint64_to_ids(ray.get(settings["used"])))
    shard = ray.train.get_dataset_shard("train")
    loader = ProblemLoader(
        config,
        MixtureLedger.single(ledger),
        folder,
        partial(publish_plan, coordinator),
        rows=lambda: iter(shard.iter_rows()),
    )
    report = ReportCallback(
        config,
        ReportTarget(folder=folder, coordinator=coordinator),
        ReportInputs(
            settle=loader.settle,
            measure_heldout=dict,  # no step is saved
            heldout_conditions={},
        ),
        EndSignals(preemption=PreemptionNotice(), stop_requested=StopRequest(coordinator)),
    )
    problems, state, control = loader.problems(), TrainerState(), TrainerControl()
    logs = {trl_name: 0.5 for trl_name, _ in METRICS.values()}
    report.on_train_begin(None, state, control)
    waits, controls, since = [], [], time.perf_counter()

    def step(seconds: float, reports: bool = True) -> None:
        nonlocal since
        since = time.perf_counter()
        drawn = [next(problems) for _ in range(config.sizes.prompts_per_worker)]
        waits.append(time.perf_counter() - since)
        time.sleep(seconds)
        state.global_step += 1
        zeros: dict[str, Any] = dict(
            rewards=(0.0,) * GENERATIONS, correct=None, lengths=(0,) * GENERATIONS, truncated=()
        )
        loader.record([GroupRecord(step=state.global_step, epoch=e, problem=p.id, **zeros) for p, e in drawn])
        since = time.perf_counter()
        if reports:
            report.on_step_end(None, state, control)
            report.on_log(None, state, control, dict(logs))
        controls.append(time.perf_counter() - since)

    for _ in range(SLOW_STEPS):
        step(settings["step_seconds"])
    began = time.perf_counter()
    for _ in range(settings["bare_steps"]):
        step(0.0)
    bare = (time.perf_counter() - began) / settings["bare_steps"]
    began = time.perf_counter()
    for _ in range(settings["only_drawn"]):
        step(0.0, reports=False)
    drawing = (time.perf_counter() - began) / settings["only_drawn"]
    ray.get(
        coordinator.record_event.remote(
            "measured",
            first=waits[0],
            later_wait=max(waits[1:SLOW_STEPS]),
            slow_control=sum(controls[1:SLOW_STEPS]) / (SLOW_STEPS - 1),
            bare_step=bare,
            drawn_step=drawing,
        )
    )
