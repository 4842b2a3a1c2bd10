"""What `bench_scale.py` measured, as tables, and what is modelled from it.

The model, with N problems, U of them used, W workers, B prompts a step, C cores that read,
and constants from the measurement:

    survey                  N * row_seconds / min(C, 256)  +  N * survey_seconds (the driver alone)
    driver's memory         N * driver_bytes
    first problem           start + pieces * piece_seconds, pieces = 1 + 2 * N / 8,000
    going on                that + U * (used_seconds + U / 8,000 * look_up_seconds / C)
    round's numbers         8 * U bytes, once in the object store of each machine that reads
    ledger                  8 * U bytes in each checkpoint; in memory three times while it is written or read
    dealing, a step         B * dealt_row_seconds + W * block_seconds (one block a worker and step, one coordinator)
    a report of a step      report_seconds + W * report_worker_seconds (one controller looks at each worker)
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
    """Start and growth of a straight line through what was measured; no growth is less than none."""
    x, y = (np.array([row[name] for row in rows], dtype=float) for name in (over, of))
    if len(set(x)) < 2:
        return float(y.max()), 0.0
    growth, start = np.polyfit(x, y, 1)
    return max(float(start), 0.0), max(float(growth), 0.0)


def table(title: str, columns: dict[str, tuple[str, float, str]], rows: list[dict[str, Any]]) -> None:
    """columns: heading -> name in a row, factor, format."""
    print(f"\n{title}")
    cells = [[*columns], *([form.format(row.get(name, 0) * by) for name, by, form in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def first_above(grows: Callable[[float], float], limit: float) -> float:
    """The least number of problems, of some, at which something is above a limit; infinity if at none."""
    return next((n for n in np.logspace(4, 12, 161).tolist() if grows(n) > limit), float("inf"))


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
    """Fit the constants, extend the tables, and name what bites first."""
    cores = os.cpu_count() or 1
    _, survey = slope(runs, "problems", "survey")
    _, alone = slope(runs, "problems", "driver_seconds")
    row = max(survey - alone, 0.0) * cores  # seconds of one core for one row
    base, driver = slope(runs, "problems", "driver")
    start, piece = slope(runs, "pieces", "first")
    pieces_per_problem = runs[-1]["pieces"] / runs[-1]["problems"]
    again = max(half["first"] - next(r for r in runs if r["problems"] == half["problems"])["first"], 0.0)
    _, look = slope(ledgers, "marked", "look_up")
    used = half["problems"] / 2
    skipped = max(again / used - look * used / (8 * ROW_GROUP) / cores, 0.0)  # seconds for a used problem that is read
    per_block = max(single["drawn_step"] / single["workers"], 1e-9)
    draw0, draw_w = slope(several, "workers", "drawn_step")
    control0, control_w = slope(several, "workers", "report")
    _, ledger_peak = slope(ledgers, "marked", "peak")
    curriculum_bytes = (groups[-1]["peak"]) / groups[-1]["groups"]
    written, read_back = (saved["bytes"] / saved[name] / 1e6 for name in ("upload", "verify"))
    constants = {
        "a row read and checked": f"{row * 1e6:.1f} us of one core, and {alone * 1e6:.2f} us of the driver",
        "driver's memory": f"{driver:.0f} bytes a problem above {base * MB:.0f} MB",
        "first problem": f"{start:.1f} s + {piece * 1e3:.2f} ms a piece + {skipped * 1e6:.1f} us a used problem",
        "a block of one problem, dealt": f"{per_block * 1e3:.2f} ms",
        f"{PROMPTS_PER_STEP} problems, dealt": f"{draw0:.3f} s + {draw_w * 1e3:.2f} ms a worker",
        "a report of all workers": f"{control0:.3f} s + {control_w * 1e3:.2f} ms a worker",
        "a task's look-up": f"{look * 1e9:.1f} ns a used problem",
        "ledger's peak": f"{ledger_peak:.0f} bytes a used problem",
        "curriculum": f"{curriculum_bytes:.0f} bytes of rank 0's memory a group",
        "checkpoint": f"{written:.0f} MB/s written, hashed and read back; {read_back:.0f} MB/s verified",
        "word of a worker": f"{many['upload'] / many['workers'] * 1e3:.2f} ms, local disk",
    }
    print("\nConstants fitted")
    for name, value in constants.items():
        print(f"  {name:30}{value}")
    gib = 1 / 2**30

    def pieces(n: float) -> float:
        return pieces_per_problem * n

    grows: dict[str, Callable[[float], float]] = {
        "survey": lambda n: n * (row / cores + alone),
        "survey256": lambda n: n * (row / 256 + alone),
        "driver": lambda n: base + driver * n,
        "first": lambda n: start + piece * pieces(n),
        # Half of the epoch's windows are gone through before the first problem, each looked up in all that is used.
        "resume": lambda n: start + piece * pieces(n) + n / 2 * (skipped + look * n / 2 / (8 * ROW_GROUP) / cores),
        "round": lambda n: 8 * n / 2,
        "ledger": lambda n: 8 * n / 2,
        "ledger_peak": lambda n: ledger_peak * n / 2,
        "curriculum": lambda n: curriculum_bytes * n,
    }
    grown = [{"problems": 10**e} | {name: of(10**e) for name, of in grows.items()} for e in range(5, 10)]
    table(
        f"Problems, modelled: row groups of {ROW_GROUP}, one epoch, {cores} cores; resumed with half of it used",
        {
            "problems": ("problems", 1, "{:.0e}"),
            "survey s": ("survey", 1, "{:,.0f}"),
            "256 cores": ("survey256", 1, "{:,.0f}"),
            "driver GiB": ("driver", gib, "{:,.1f}"),
            "first s": ("first", 1, "{:,.1f}"),
            "first, resumed s": ("resume", 1, "{:,.0f}"),
            "round GiB": ("round", gib, "{:,.3f}"),
            "ledger GiB": ("ledger", gib, "{:,.3f}"),
            "its peak": ("ledger_peak", gib, "{:,.1f}"),
            "curriculum GiB": ("curriculum", gib, "{:,.1f}"),
        },
        grown,
    )
    print("\nWith more problems, in the order in which it bites (half of an epoch used, 8 workers on a machine)")
    limits = {
        f"survey takes more than 10 minutes on {cores} cores": ("survey", 600),
        "survey takes more than 10 minutes on 256 cores": ("survey256", 600),
        "the driver holds more than 64 GiB": ("driver", 64 / gib),
        "the first problem of an epoch takes more than a minute": ("first", 60),
        f"the first problem after going on takes more than 10 minutes on {cores} cores": ("resume", 600),
        "a round takes more than 64 GiB of the object store": ("round", 64 / gib),
        "the ledger is more than 64 GiB of a machine while 8 workers read it": ("ledger_peak", 8 / gib),
        "the curriculum takes more than 64 GiB of rank 0": ("curriculum", 64 / gib),
    }
    found = {said: first_above(grows[name], limit) for said, (name, limit) in limits.items()}
    for said, n in sorted(found.items(), key=lambda pair: pair[1]):
        print(f"  {n:.0e} problems: {said}")
    print("\nWith more workers, of a step of 10 s, a tenth is")
    print(f"  {1 / per_block:,.0f} workers: dealt one problem each by one coordinator")
    print(f"  {max(1 - control0, 0) / max(control_w, 1e-9):,.0f} workers: control beside it")
    table(
        "Workers, modelled: one problem a worker and step; control beside it",
        {
            "workers": ("workers", 1, "{}"),
            "dealing s/step": ("deal", 1, "{:.2f}"),
            "control s/step": ("control", 1, "{:.2f}"),
        },
        [{"workers": w, "deal": w * per_block, "control": control0 + control_w * w} for w in (1, 8, 64, 256, 1000)],
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
