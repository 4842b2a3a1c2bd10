"""Tables of the measurements of `bench_scale.py`, and a model that extrapolates them.

The model, with N problems, U of them used, W workers, B prompts per step, C cores that read,
and constants from the measurement:

    dataset index           N * row_seconds / min(C, 256)  +  N * index_seconds (the driver alone)
    driver's memory         N * driver_bytes
    first problem           start + read_tasks * task_seconds, read_tasks = 1 + 2 * N / 8,000
    first after a resume    that + U * (used_seconds + U / 8,000 * look_up_seconds / C)
    used ids                8 * U bytes, once in the object store of each machine that reads
    ledger                  8 * U bytes in each checkpoint; in memory three times while it is written or read
    distribution, a step    B * distributed_row_seconds + W * block_seconds (one block per worker and step)
    a report of a step      report_seconds + W * report_worker_seconds (one controller polls each worker)
    checkpoint              parameters * 12 bytes (weights and Adam in float32), rank 0 alone writes and reads them back
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

ROW_GROUP = 1_000
PROMPTS_PER_STEP = 64
MODELS = {"0.5B": 494e6, "7B": 7.62e9, "72B": 72.7e9}
MB = 1 / 2**20


def slope(rows: list[dict[str, Any]], over: str, of: str) -> tuple[float, float]:
    """Fit a straight line; return its value at 0 and its slope, neither of them negative."""
    x, y = (np.array([row[name] for row in rows], dtype=float) for name in (over, of))
    if len(set(x)) < 2:
        return float(y.max()), 0.0
    growth, start = np.polyfit(x, y, 1)
    return max(float(start), 0.0), max(float(growth), 0.0)


def table(title: str, columns: dict[str, tuple[str, float, str]], rows: list[dict[str, Any]]) -> None:
    """Print a table.

    Args:
        title: Heading.
        columns: Column heading -> name in a row, factor, format.
        rows: Measurements.
    """
    print(f"\n{title}")
    cells = [[*columns], *([form.format(row.get(name, 0) * by) for name, by, form in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def first_above(quantity: Callable[[float], float], limit: float) -> float:
    """Return the smallest number of problems, of a grid, at which a quantity exceeds a limit; infinity if none does."""
    return next((n for n in np.logspace(4, 12, 161).tolist() if quantity(n) > limit), float("inf"))


def model(
    runs: list[dict[str, Any]],
    half: dict[str, Any],
    several: list[dict[str, Any]],
    single: dict[str, Any],
    ledgers: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    saved: dict[str, Any],
    many: dict[str, Any],
) -> None:
    """Fit the constants, extrapolate the tables, and list the limits in the order in which they are reached."""
    cores = os.cpu_count() or 1
    _, index = slope(runs, "problems", "index")
    _, alone = slope(runs, "problems", "driver_seconds")
    row = max(index - alone, 0.0) * cores  # seconds of one core for one row
    base, driver = slope(runs, "problems", "driver")
    start, task = slope(runs, "read_tasks", "first")
    tasks_per_problem = runs[-1]["read_tasks"] / runs[-1]["problems"]
    resume_seconds = max(half["first"] - next(r for r in runs if r["problems"] == half["problems"])["first"], 0.0)
    _, look = slope(ledgers, "marked", "look_up")
    used = half["problems"] / 2
    # Seconds for reading and skipping one used problem.
    per_used = max(resume_seconds / used - look * used / (8 * ROW_GROUP) / cores, 0.0)
    per_block = max(single["drawn_step"] / single["workers"], 1e-9)
    draw0, draw_w = slope(several, "workers", "drawn_step")
    control0, control_w = slope(several, "workers", "report")
    _, ledger_peak = slope(ledgers, "marked", "peak")
    curriculum_bytes = (groups[-1]["peak"]) / groups[-1]["groups"]
    written, read_back = (saved["bytes"] / saved[name] / 1e6 for name in ("upload", "verify"))
    constants = {
        "a row read and checked": f"{row * 1e6:.1f} us of one core, and {alone * 1e6:.2f} us of the driver",
        "driver's memory": f"{driver:.0f} bytes a problem above {base * MB:.0f} MB",
        "first problem": f"{start:.1f} s + {task * 1e3:.2f} ms a task + {per_used * 1e6:.1f} us a used problem",
        "distributing a block of one problem": f"{per_block * 1e3:.2f} ms",
        f"distributing {PROMPTS_PER_STEP} problems": f"{draw0:.3f} s + {draw_w * 1e3:.2f} ms a worker",
        "a report of all workers": f"{control0:.3f} s + {control_w * 1e3:.2f} ms a worker",
        "a task's look-up": f"{look * 1e9:.1f} ns a used problem",
        "ledger's peak": f"{ledger_peak:.0f} bytes a used problem",
        "curriculum": f"{curriculum_bytes:.0f} bytes of rank 0's memory a group",
        "checkpoint": f"{written:.0f} MB/s written, hashed and read back; {read_back:.0f} MB/s verified",
        "small files of a worker": f"{many['upload'] / many['workers'] * 1e3:.2f} ms, local disk",
    }
    print("\nConstants fitted")
    for name, value in constants.items():
        print(f"  {name:30}{value}")
    gib = 1 / 2**30

    def read_tasks(n: float) -> float:
        return tasks_per_problem * n

    quantities: dict[str, Callable[[float], float]] = {
        "index": lambda n: n * (row / cores + alone),
        "index256": lambda n: n * (row / 256 + alone),
        "driver": lambda n: base + driver * n,
        "first": lambda n: start + task * read_tasks(n),
        # Half of the epoch's windows are read before the first problem, each id looked up among the used ones.
        "resume": lambda n: start + task * read_tasks(n) + n / 2 * (per_used + look * n / 2 / (8 * ROW_GROUP) / cores),
        "used_ids": lambda n: 8 * n / 2,
        "ledger": lambda n: 8 * n / 2,
        "ledger_peak": lambda n: ledger_peak * n / 2,
        "curriculum": lambda n: curriculum_bytes * n,
    }
    extrapolated = [{"problems": 10**e} | {name: of(10**e) for name, of in quantities.items()} for e in range(5, 10)]
    table(
        f"Problems, modelled: row groups of {ROW_GROUP}, one epoch, {cores} cores; resumed with half of it used",
        {
            "problems": ("problems", 1, "{:.0e}"),
            "index s": ("index", 1, "{:,.0f}"),
            "256 cores": ("index256", 1, "{:,.0f}"),
            "driver GiB": ("driver", gib, "{:,.1f}"),
            "first s": ("first", 1, "{:,.1f}"),
            "first, resumed s": ("resume", 1, "{:,.0f}"),
            "used ids GiB": ("used_ids", gib, "{:,.3f}"),
            "ledger GiB": ("ledger", gib, "{:,.3f}"),
            "ledger peak GiB": ("ledger_peak", gib, "{:,.1f}"),
            "curriculum GiB": ("curriculum", gib, "{:,.1f}"),
        },
        extrapolated,
    )
    print("\nLimits by number of problems (half of an epoch used, 8 workers on a machine)")
    limits = {
        f"indexing takes more than 10 minutes on {cores} cores": ("index", 600),
        "indexing takes more than 10 minutes on 256 cores": ("index256", 600),
        "the driver holds more than 64 GiB": ("driver", 64 / gib),
        "the first problem of an epoch takes more than a minute": ("first", 60),
        f"the first problem after a resume takes more than 10 minutes on {cores} cores": ("resume", 600),
        "the used ids take more than 64 GiB of the object store": ("used_ids", 64 / gib),
        "the ledger is more than 64 GiB of a machine while 8 workers read it": ("ledger_peak", 8 / gib),
        "the curriculum takes more than 64 GiB of rank 0": ("curriculum", 64 / gib),
    }
    found = {text: first_above(quantities[name], limit) for text, (name, limit) in limits.items()}
    for text, n in sorted(found.items(), key=lambda pair: pair[1]):
        print(f"  {n:.0e} problems: {text}")
    print("\nNumber of workers at which a part takes a tenth of a step of 10 s")
    print(f"  {1 / per_block:,.0f} workers: distribution of one problem each by one coordinator")
    print(f"  {max(1 - control0, 0) / max(control_w, 1e-9):,.0f} workers: control")
    table(
        "Workers, modelled: one problem per worker and step",
        {
            "workers": ("workers", 1, "{}"),
            "distribution s/step": ("distribution", 1, "{:.2f}"),
            "control s/step": ("control", 1, "{:.2f}"),
        },
        [
            {"workers": w, "distribution": w * per_block, "control": control0 + control_w * w}
            for w in (1, 8, 64, 256, 1000)
        ],
    )
    rate = saved["bytes"] / saved["upload"]
    table(
        "Checkpoints, modelled: float32 weights and Adam, rank 0 alone; written and read back",
        {
            "model": ("name", 1, "{}"),
            "GB": ("bytes", 1e-9, "{:,.1f}"),
            "traffic GB": ("bytes", 2e-9, "{:,.1f}"),
            "min at 1 GB/s": ("slow", 1 / 60, "{:.1f}"),
            "at 10 GB/s": ("fast", 1 / 60, "{:.1f}"),
            "as fast as measured": ("here", 1 / 60, "{:.1f}"),
        },
        [
            {"name": name, "bytes": 12 * n, "slow": 24 * n / 1e9, "fast": 24 * n / 1e10, "here": 12 * n / rate}
            for name, n in MODELS.items()
        ],
    )
