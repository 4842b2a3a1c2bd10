"""Completions per second, ours against stock TRL and Ray's tutorial: `python tests/benchmarks/bench_step.py`

A Llama of 20 million random weights whose completions end as a real model's do (`endings.py`), 4 groups of 8
completions of up to 256 tokens a step, on 2 processes of 2 threads. Each peer (`peers.py`) runs once, alone on the
machine, and within the run the rewards go through three patterns: every group has signal, half have, and that of 50
groups of real completions, 86 % of which have none: 13 steps of ours go through all 50. The peers take fewer steps:
they do the same work whatever the rewards, as their own rates show. The rate counts all steps of a pattern,
generation, scoring and learning, from start to end; checkpoints are left out.

`--tune` runs each peer with 1, 2, 4 and 8 micro-batches for a few steps of each pattern, which is where `BEST` comes
from.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from endings import describe, make_model, write_problems
from peers import PATTERNS, Record, Task, run, versions

GOALS = {"every": 1.4, "half": 2.0, "86 % none": 3.0}
BEST = {"ours": 4, "trl-vllm": 4, "trl": 4, "ray": 4}
"""Peer -> its best number of micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=list(BEST), choices=list(BEST))
    parser.add_argument("--warm", type=int, default=3, help="first steps, which do not count")
    parser.add_argument("--steps", type=int, nargs=3, default=(6, 6, 13), help="our steps of each pattern")
    parser.add_argument("--peer-steps", type=int, nargs=3, default=(4, 4, 4), help="the peers'")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--micro", type=int, help="micro-batches of all peers; else the best of each")
    parser.add_argument("--tune", action="store_true", help="try numbers of micro-batches instead")
    parser.add_argument("--keep", type=Path, help="where to work and leave what the peers wrote")
    arguments = parser.parse_args()
    print(versions(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        make_model(root / "model")
        write_problems(root / "problems.jsonl", 2000)

        def plan_of(peer: str) -> list[tuple[str, int]]:
            steps = arguments.steps if peer == "ours" else arguments.peer_steps
            plan = [("every", arguments.warm), *zip(PATTERNS, steps, strict=True)]
            plan[-1] = (plan[-1][0], plan[-1][1] + 1)  # the last step has no end
            return plan

        def measure(peer: str, micro: int, plan: list[tuple[str, int]]) -> Record:
            folder = root / f"{peer}-{micro}"
            began = time.perf_counter()
            record = run(
                peer,
                Task(
                    str(root / "model"), str(root / "problems.jsonl"), str(folder), plan=plan,
                    workers=arguments.workers, threads=arguments.threads, micro_batches=micro,
                ),
            )  # fmt: skip
            seconds = time.perf_counter() - began
            rates = {name: round(record.rate(name), 3) for name, _ in plan[1:]}
            print(f"{peer}, {micro} micro-batches: {json.dumps(rates)} completions/s; {seconds:.0f} s with start-up")
            for name in dict(plan[1:]):
                print(f"    {name}: {record.profile(name)} s a step")
            print(f"    lengths: {describe(record.lengths)}", flush=True)
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
