"""CPU time of sampling tokens with vLLM's samplers and with ours: python tests/benchmarks/bench_sampling.py

Times the computation from the logits of one decode step to its tokens and the log-probabilities of the whole
vocabulary; each row has its own seed. The samplers alternate in one process, on the same logits, and the medians are
compared. Each number of threads has its own process. CPU time counts all threads.

for the CPU  vLLM's CPU sampler: noise for the whole batch, then again for each row with a seed
common       vLLM's common sampler: noise for each row with a seed
search       one random number per row, and a search in its cumulative probabilities (rejected: see cpu_sampler.py)
ours         noise for the blocks of the vocabulary, then for the tokens of one block
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def measure(vocab_size: int, rows: int, rounds: int) -> None:
    """Print one line: CPU and wall-clock milliseconds of each sampler."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from grpo_ray.inference.cpu_sampler import sampler_forward

    vllm_sampler = TopKTopPSampler("processed_logprobs")

    def ours(logits: torch.Tensor, generators: dict[int, torch.Generator], k: None, p: None) -> Any:
        return sampler_forward(logits, generators, k, p, logprobs_mode="processed_logprobs")

    def search(logits: torch.Tensor, generators: dict[int, torch.Generator], k: None, p: None) -> Any:
        logprobs = logits.log_softmax(-1)
        cumulative = torch.exp(logprobs, out=logits).cumsum(-1, dtype=torch.float64)
        uniform = torch.empty(len(logits), 1, dtype=torch.float64)
        for row, generator in generators.items():
            uniform[row].uniform_(generator=generator)
        return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True), logprobs

    samplers: dict[str, Callable[..., Any]] = {
        "for the CPU": vllm_sampler.forward_cpu,
        "common": vllm_sampler.forward_native,
        "search": search,
        "ours": ours,
    }
    generators = {row: torch.Generator().manual_seed(row) for row in range(rows)}
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, run in samplers.items():
            own_logits = logits.clone()
            started = time.process_time(), time.perf_counter()
            run(own_logits, generators, None, None)
            seconds[name].append((time.process_time() - started[0], time.perf_counter() - started[1]))
    cpu, wall = ({name: 1e3 * statistics.median(e[i] for e in each) for name, each in seconds.items()} for i in (0, 1))
    report = ", ".join(f"{name} {cpu[name]:.2f} ms (wall {wall[name]:.2f})" for name in samplers)
    head = f"vocabulary of {vocab_size:,}, {rows} rows, {torch.get_num_threads()} threads"
    print(f"{head}: {report}; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-sizes", type=int, nargs="*", default=[8192, 151_936])
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.here:
        for vocab_size in arguments.vocab_sizes:
            for rows in arguments.rows:
                measure(vocab_size, rows, arguments.rounds)
        return
    for threads in arguments.threads:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--here"], env=environment, check=True)


if __name__ == "__main__":
    main()
