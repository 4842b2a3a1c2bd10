"""Cost of confining the policy's code: one call of the Python tool, and a batch of completions with calls.

    python tests/benchmarks/bench_confinement.py

Each pair measures `rollout.isolation: none` and `required` one after the other, in alternating order, so that other
load on the machine meets both. Both have the limits of memory, processes, disk and time. Medians are reported.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from grpo_ray.config.schema import RolloutConfig  # noqa: E402
from grpo_ray.tools.definitions import load_definition  # noqa: E402
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits  # noqa: E402

SETTINGS: dict[str, Any] = {"tools": ("grpo_ray.tools.python_tool:python",), "time_limit": 600.0}
LEVELS = ("none", "required")
CODE = "total = 0\nfor number in range(1000):\n    total += number\nprint(total)\n2 ** 10"


def open_pool(isolation: str, folder: str) -> EpisodePool:
    config = RolloutConfig(**{**SETTINGS, "isolation": isolation})
    pool = EpisodePool(load_definition(config), SandboxLimits.of(config), folder)
    seconds_of_batch(pool, 1, 1)  # the supervisor starts
    return pool


def seconds_of_call(pool: EpisodePool, calls: int) -> float:
    """Return the median seconds of one call, of several one after another."""
    episode = pool.open(None, seed=0, columns={}, call_seed=0)
    episode.call("python", {"code": CODE}).result()  # the process starts
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        assert episode.call("python", {"code": CODE}).result().text == "499500\n1024\n"
        seconds.append(time.perf_counter() - start)
    episode.close()
    return statistics.median(seconds)


def seconds_of_batch(pool: EpisodePool, completions: int, calls: int) -> float:
    """Return the seconds of completions that make their calls in rounds, as in a batch of training."""
    start = time.perf_counter()
    episodes = [pool.open(None, seed=0, columns={}, call_seed=number) for number in range(completions)]
    for _ in range(calls):
        results = [each.call("python", {"code": CODE}) for each in episodes]
        assert {each.result().text for each in results} == {"499500\n1024\n"}
    for each in episodes:
        each.close()
    return time.perf_counter() - start


def cpu_seconds_of_batch(pool: EpisodePool, completions: int, calls: int) -> float:
    """Return the CPU seconds of the same by all processes, which hardly depend on other load of the machine."""
    before = _cpu_seconds(pool)
    seconds_of_batch(pool, completions, calls)
    while psutil.Process(pool.pid).children():  # until all have been reaped, and are counted
        time.sleep(0.01)
    return _cpu_seconds(pool) - before


def _cpu_seconds(pool: EpisodePool) -> float:
    return sum(psutil.Process(pool.pid).cpu_times()[:4])


def measure(pools: dict[str, EpisodePool], pairs: int, seconds: Callable[[EpisodePool], float]) -> dict[str, float]:
    """Return the median seconds of each level, and of the ratio of a pair."""
    found: dict[str, list[float]] = {level: [] for level in LEVELS}
    for number in range(pairs):
        for level in LEVELS if number % 2 else LEVELS[::-1]:
            found[level].append(seconds(pools[level]))
    ratios = [confined / free for free, confined in zip(*found.values(), strict=True)]
    return {level: statistics.median(each) for level, each in found.items()} | {"ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--calls", type=int, default=2, help="calls of each completion")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pools = {level: open_pool(level, folder) for level in LEVELS}
        print(f"{pools['required'].isolation}; median of {options.pairs} pairs; {os.cpu_count()} cores\n")
        print("| | isolation: none | required | ratio |\n|---|---|---|---|", flush=True)
        call = measure(pools, options.pairs, lambda pool: seconds_of_call(pool, 20))
        print(f"| one call, ms | {1000 * call['none']:.1f} | {1000 * call['required']:.1f} | {call['ratio']:.3f} |")
        batch = measure(pools, options.pairs, lambda pool: seconds_of_batch(pool, options.completions, options.calls))
        name = f"{options.completions} completions with {options.calls} calls each, s"
        print(f"| {name} | {batch['none']:.2f} | {batch['required']:.2f} | {batch['ratio']:.3f} |", flush=True)
        cpu = measure(pools, options.pairs, lambda pool: cpu_seconds_of_batch(pool, options.completions, options.calls))
        print(f"| the same, CPU s | {cpu['none']:.2f} | {cpu['required']:.2f} | {cpu['ratio']:.3f} |", flush=True)
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()
