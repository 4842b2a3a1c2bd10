"""The same step on 1, 2 and 4 workers of one thread each: `python tests/benchmarks/bench_workers.py`

The step is that of `bench_step.py`, with signal in every group: first the same step for any number of workers, then one
that has as many more groups. A worker's share of the same step shrinks, but not the number of tokens after each other
in its longest completion. Efficiency is the rate of completions against that many times the rate of one worker. On a
machine with no more cores than workers, what Ray and its dashboard take comes off too.
"""

import argparse
import tempfile
from pathlib import Path

from endings import make_model, write_problems
from peers import PROMPTS, Task, run, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--warm", type=int, default=2, help="first steps, which do not count")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    print(versions(), flush=True)
    print(f"{'workers':>7} {'groups':>6} {'step':>8} {'rate':>12} {'speed-up':>9} {'efficiency':>11}")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make_model(root / "model")
        write_problems(root / "problems.jsonl", 2000)
        rates: dict[tuple[int, int], float] = {}
        one, *more = arguments.workers
        for workers, times in [(one, 1), *((each, 1) for each in more), *((each, each // one) for each in more)]:
            plan = [("every", arguments.warm), ("every", arguments.steps + 1)]
            task = Task(
                str(root / "model"), str(root / "problems.jsonl"), str(root / f"{workers}-{times}"), plan=plan,
                workers=workers, threads=arguments.threads, micro_batches=4 * times, prompts=PROMPTS * times,
            )  # fmt: skip
            rate = rates[workers, times] = run("ours", task).rate("every")
            gain = rate / rates[one, 1]
            print(
                f"{workers:7} {task.prompts:6} {task.completions / rate:6.2f} s {rate:8.2f} c/s {gain:8.2f}x "
                f"{gain * one / workers:10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
