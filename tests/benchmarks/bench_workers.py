"""Scaling of a step over 1, 2 and 4 workers of one thread each: `python tests/benchmarks/bench_workers.py`

The step is that of `bench_step.py` with signal in every group: first the same step for every number of workers (strong
scaling), then a step with proportionally more groups (weak scaling). In the same step a worker's share shrinks with the
number of workers, but the length of its longest completion, which is generated token by token, does not. Efficiency is
the rate of completions divided by that of one worker times the number of workers. On a machine with no more cores than
workers, the CPU time of Ray and its dashboard reduces it too.
"""

import argparse
import tempfile
from pathlib import Path

from length_model import make_files
from peers import PROMPTS, Task, run, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--warm", type=int, default=2, help="warm-up steps, not counted")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a tiny model with short completions, to try the script")
    arguments = parser.parse_args()
    print(versions(), flush=True)
    print(f"{'workers':>7} {'groups':>6} {'step':>8} {'rate':>12} {'speed-up':>9} {'efficiency':>11}")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        lengths = make_files(root, arguments.tiny)
        rates: dict[tuple[int, int], float] = {}
        one, *more = arguments.workers
        for workers, factor in [(one, 1), *((each, 1) for each in more), *((each, each // one) for each in more)]:
            plan = [("every", arguments.warm), ("every", arguments.steps + 1)]
            task = Task(
                str(root / "model"), str(root / "problems.jsonl"), str(root / f"{workers}-{factor}"), plan=plan,
                workers=workers, threads=arguments.threads, micro_batches=4 * factor, prompts=PROMPTS * factor,
                longest=lengths.longest,
            )  # fmt: skip
            rate = rates[workers, factor] = run("ours", task, in_this_process=arguments.tiny).rate("every")
            speed_up = rate / rates[one, 1]
            print(
                f"{workers:7} {task.prompts:6} {task.completions / rate:6.2f} s {rate:8.2f} c/s {speed_up:8.2f}x "
                f"{speed_up * one / workers:10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
