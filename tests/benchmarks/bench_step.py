"""Completions per second of grpo_ray, stock TRL and Ray's tutorial: `python tests/benchmarks/bench_step.py`

A Llama with 20 million random weights and realistic completion lengths (`length_model.py`); 4 groups of 8 completions
of up to 256 tokens per step, on 2 processes that share the cores. Each peer (`peers.py`) runs once, alone.
Within the run the rewards follow three patterns: every group has signal (unequal rewards), half of them have, and the
rewards of 50 groups of real completions, of which 86 % have none: 13 steps of ours use all 50. The peers take fewer
steps, because they do the same work for all rewards, as their own rates show. The rate counts all steps of a pattern
from start to end: generation, scoring and learning, without checkpoints.

`--tune` runs each peer with 1, 2, 4 and 8 micro-batches for a few steps of each pattern; `BEST` has its result.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from length_model import describe, make_files
from peers import MEASURED, Record, Task, run, versions

GOALS = {"every": 1.4, "half": 2.0, "86 % none": 3.0}
"""Pattern -> target speed-up over the peers."""
BEST = {"ours": 4, "trl-vllm": 4, "trl": 4, "ray": 4}
"""Peer -> its best number of micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=list(BEST), choices=list(BEST))
    parser.add_argument("--warm", type=int, default=3, help="warm-up steps, not counted")
    parser.add_argument("--steps", type=int, nargs=3, default=(6, 6, 13), help="steps of each pattern of our run")
    parser.add_argument("--peer-steps", type=int, nargs=3, default=(4, 4, 4), help="steps of each pattern of others")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, help="threads of each worker (default: as many as the cores allow)")
    parser.add_argument("--micro", type=int, help="micro-batches of all peers (default: the best of each)")
    parser.add_argument("--tune", action="store_true", help="measure several numbers of micro-batches instead")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with short completions, to try the script")
    parser.add_argument("--keep", type=Path, help="folder for all files, kept afterwards")
    arguments = parser.parse_args()
    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.workers)
    print(f"{versions()}; {arguments.workers} workers of {threads} threads", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        lengths = make_files(root, arguments.tiny)

        def plan_of(peer: str) -> list[tuple[str, int]]:
            steps = arguments.steps if peer == "ours" else arguments.peer_steps
            plan = [("every", arguments.warm), *zip(MEASURED, steps, strict=True)]
            plan[-1] = (plan[-1][0], plan[-1][1] + 1)  # the last step has no successor to end its period
            return plan

        def measure(peer: str, micro: int, plan: list[tuple[str, int]]) -> Record:
            folder = root / f"{peer}-{micro}"
            started = time.perf_counter()
            record = run(
                peer,
                Task(
                    str(root / "model"), str(root / "problems.jsonl"), str(folder), plan=plan,
                    workers=arguments.workers, threads=threads, micro_batches=micro, longest=lengths.longest,
                ),
                in_this_process=arguments.tiny,
            )  # fmt: skip
            seconds = time.perf_counter() - started
            rates = {name: round(record.rate(name), 3) for name, _ in plan[1:]}
            print(f"{peer}, {micro} micro-batches: {json.dumps(rates)} completions/s; {seconds:.0f} s with start-up")
            for name in dict(plan[1:]):
                print(f"    {name}: {record.profile(name)} s per step")
            print(f"    lengths: {describe(record.lengths, lengths.longest)}", flush=True)
            (folder / "periods.json").write_text(json.dumps(record.periods))
            return record

        if arguments.tune:
            for peer in arguments.peers:
                for micro in (1, 2, 4, 8):
                    measure(peer, micro, [("every", 2), ("every", 3), ("half", 3), ("86 % none", 5)])
            return
        records = {peer: measure(peer, arguments.micro or BEST[peer], plan_of(peer)) for peer in arguments.peers}
    if "ours" in records:
        print(f"{'signal':12} {'ours':>12} " + " ".join(f"{'x ' + p:>10}" for p in records if p != "ours") + "   goal")
        for pattern, goal in GOALS.items():
            own = records["ours"].rate(pattern)
            times = [own / record.rate(pattern) for peer, record in records.items() if peer != "ours"]
            print(f"{pattern:12} {own:8.2f} c/s " + " ".join(f"{value:9.2f}x" for value in times) + f"  {goal:.1f}x")


if __name__ == "__main__":
    main()
