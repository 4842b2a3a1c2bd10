"""CPU milliseconds of drawing a step's tokens, vLLM's way and ours: python tests/benchmarks/bench_sampling.py

From the logits of one decode step to its tokens and the log-probabilities of all words; each row has its own seed. The
ways take turns in one process, on the same logits, and the medians are compared; each number of threads has a
process of its own. CPU time counts all threads.

for the CPU  vLLM's sampler for the CPU: noise for the whole batch, then again for each row with a seed
common       vLLM's common sampler: noise for each row with a seed
search       one number for each row, and a search in its cumulated probabilities (rejected: see cpu_sampler.py)
ours         noise for the blocks of the vocabulary, then for the words of one block
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def measure(words: int, rows: int, rounds: int) -> None:
    """Print one line: each way's CPU milliseconds, and its wall-clock ones."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from grpo_ray.inference.cpu_sampler import sampler_forward

    theirs = TopKTopPSampler("processed_logprobs")

    def ours(logits: torch.Tensor, generators: dict[int, torch.Generator], k: None, p: None) -> Any:
        return sampler_forward(logits, generators, k, p, logprobs_mode="processed_logprobs")

    def search(logits: torch.Tensor, generators: dict[int, torch.Generator], k: None, p: None) -> Any:
        logprobs = logits.log_softmax(-1)
        cumulated = torch.exp(logprobs, out=logits).cumsum(-1, dtype=torch.float64)
        uniform = torch.empty(len(logits), 1, dtype=torch.float64)
        for row, generator in generators.items():
            uniform[row].uniform_(generator=generator)
        return torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True), logprobs

    ways: dict[str, Callable[..., Any]] = {
        "for the CPU": theirs.forward_cpu,
        "common": theirs.forward_native,
        "search": search,
        "ours": ours,
    }
    generators = {row: torch.Generator().manual_seed(row) for row in range(rows)}
    logits = torch.randn(rows, words, generator=torch.Generator().manual_seed(0)) * 2
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            overwritten = logits.clone()
            begun = time.process_time(), time.perf_counter()
            run(overwritten, generators, None, None)
            spent[way].append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
    cpu, wall = ({way: 1e3 * statistics.median(e[i] for e in each) for way, each in spent.items()} for i in (0, 1))
    shown = ", ".join(f"{way} {cpu[way]:.2f} ms (wall {wall[way]:.2f})" for way in ways)
    head = f"{words:,} words, {rows} rows, {torch.get_num_threads()} threads"
    print(f"{head}: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, nargs="*", default=[8192, 151_936])
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.here:
        for words in arguments.words:
            for rows in arguments.rows:
                measure(words, rows, arguments.rounds)
        return
    for threads in arguments.threads:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--here"], env=environment, check=True)


if __name__ == "__main__":
    main()
