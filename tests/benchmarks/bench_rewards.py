"""The pool against Math-Verify called inline, in one run.

    PYTHONPATH=. python tests/benchmarks/bench_rewards.py --data completions.jsonl

Takes rows of real completions (`completions`, a list of texts, and their `solution`), repeats them with fresh text in
front, and prints verifications a second and the ratio to inline for one and for several processes. About a minute on
4 cores for 400 completions.
"""

import argparse
import json
import time
from pathlib import Path

from grpo_ray.rewards.math.verify import correctness
from grpo_ray.rewards.sandbox.pool import VerifierPool, available_cores
from grpo_ray.rewards.sandbox.worker import preload

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "scored_completions.jsonl"
"""Real completions that lie beside the checkout in some places."""


def fresh_items(data: Path, repeats: int) -> list[tuple[str, str]]:
    """Each completion `repeats` times, never the same text twice, in an order that mixes the problems."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    pairs = [(completion, row["solution"]) for row in rows for completion in row["completions"]]
    return [(f"Attempt {turn}. {completion}", solution) for turn in range(repeats) for completion, solution in pairs]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, default=DATA, help="jsonl with columns `completions` and `solution`")
    arguments.add_argument("--repeats", type=int, default=50, help="times each of the 400 completions is judged")
    arguments.add_argument(
        "--inline-repeats", type=int, default=5, help="the same for inline Math-Verify, which is slow"
    )
    arguments.add_argument("--processes", type=int, nargs="*", default=[1, available_cores()])
    options = arguments.parse_args()

    preload()
    inline_items = fresh_items(options.data, options.inline_repeats)
    started = time.perf_counter()
    for completion, solution in inline_items:
        correctness(completion, solution, strict=False)
    inline = len(inline_items) / (time.perf_counter() - started)
    print(f"inline Math-Verify        {inline:8.0f} /s")

    items = fresh_items(options.data, options.repeats)
    for strict in (True, False):
        for processes in options.processes:
            with VerifierPool(processes=processes, strict=strict) as pool:
                pool.score(items[:40])
                chosen = items if strict else items[: len(inline_items)]
                started = time.perf_counter()
                pool.score(chosen)
                rate = len(chosen) / (time.perf_counter() - started)
            name = f"pool of {processes}, strict={strict}"
            print(f"{name:24}  {rate:8.0f} /s   {rate / inline:5.2f} x inline   {dict(pool.counts)}")


if __name__ == "__main__":
    main()
