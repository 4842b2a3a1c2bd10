"""Throughput of the verifier pool compared with Math-Verify called inline.

    PYTHONPATH=. python tests/benchmarks/bench_rewards.py --data completions.jsonl

Reads rows of real completions (`completions`, a list of texts, and their `solution`) and repeats them with different
text in front, so that no verdict comes from a cache. Prints verifications per second and the ratio to inline
verification, for one and for several processes. About a minute on 4 cores for 400 completions.
"""

import argparse
import json
import time
from pathlib import Path

from grpo_ray.rewards.math.verify import correctness
from grpo_ray.rewards.sandbox.pool import VerifierPool, available_cores
from grpo_ray.rewards.sandbox.worker import warm_up

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "scored_completions.jsonl"
"""Default file of real completions, beside the checkout; not part of the repository."""


def make_items(data: Path, repeats: int) -> list[tuple[str, str]]:
    """Repeat each completion `repeats` times with a different text, in an order that mixes the problems."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    pairs = [(completion, row["solution"]) for row in rows for completion in row["completions"]]
    return [(f"Attempt {turn}. {completion}", solution) for turn in range(repeats) for completion, solution in pairs]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, default=DATA, help="jsonl with columns `completions` and `solution`")
    arguments.add_argument("--repeats", type=int, default=50, help="verifications of each completion")
    arguments.add_argument(
        "--inline-repeats", type=int, default=5, help="verifications of each completion inline, which is slow"
    )
    arguments.add_argument("--processes", type=int, nargs="*", default=[1, available_cores()])
    options = arguments.parse_args()

    warm_up()
    inline_items = make_items(options.data, options.inline_repeats)
    started = time.perf_counter()
    for completion, solution in inline_items:
        correctness(completion, solution, strict=False)
    inline = len(inline_items) / (time.perf_counter() - started)
    print(f"inline Math-Verify        {inline:8.0f} /s")

    items = make_items(options.data, options.repeats)
    for strict in (True, False):
        for processes in options.processes:
            with VerifierPool(processes=processes, strict=strict) as pool:
                pool.grade(items[:40])
                chosen = items if strict else items[: len(inline_items)]
                started = time.perf_counter()
                pool.grade(chosen)
                rate = len(chosen) / (time.perf_counter() - started)
            name = f"pool of {processes}, strict={strict}"
            print(f"{name:24}  {rate:8.0f} /s   {rate / inline:5.2f} x inline   {dict(pool.counts)}")


if __name__ == "__main__":
    main()
