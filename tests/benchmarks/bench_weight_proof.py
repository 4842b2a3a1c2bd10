"""Time and memory of the checksums of one weight sync: python tests/benchmarks/bench_weight_proof.py

A learner's weights in float32 and an engine's in bfloat16, of the shapes of real policies, with random values on the
CPU, and the engine's copies in fused matrices as vLLM keeps them. One proof reads all of them. For a GPU the time is
estimated from the bytes that its kernels read and write, at three quarters of the H100's memory bandwidth, and its
memory from the two arrays of 8-byte numbers that a chunk needs.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_ray.inference.weight_proof import WeightProof
from grpo_ray.inference.weight_sums import CHUNK

GPU_BYTES_PER_SECOND = 0.75 * 3.35e12
TOUCHED = {4: 4 + 2 + 2 + 8 + 8, 2: 2 + 8 + 8}
"""Bytes of an element -> bytes read and written for its checksum: rounding (a learner's 4 bytes only), the product in
8 bytes, and its sum."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Policy:
    """Sizes of a Qwen2."""

    hidden: int
    inner: int
    layers: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool

    def weights(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield each weight's name, the engine's parameter that holds it, and its shape."""
        yield "embed_tokens.weight", "embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"layers.{layer}."
            for name, rows in {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys}.items():
                yield f"{at}{name}.weight", f"{at}qkv_proj.weight", (rows, self.hidden)
                yield f"{at}{name}.bias", f"{at}qkv_proj.bias", (rows,)
            yield f"{at}o_proj.weight", f"{at}o_proj.weight", (self.hidden, self.queries)
            for name in ("gate_proj", "up_proj"):
                yield f"{at}{name}.weight", f"{at}gate_up_proj.weight", (self.inner, self.hidden)
            yield f"{at}down_proj.weight", f"{at}down_proj.weight", (self.hidden, self.inner)
            for norm in ("input_norm", "post_norm"):
                yield f"{at}{norm}.weight", f"{at}{norm}.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", "lm_head.weight", (self.vocabulary, self.hidden)

    def numel(self) -> int:
        """Return the number of weights."""
        return sum(torch.Size(shape).numel() for _, _, shape in self.weights())


POLICIES = {
    "embedded": Policy(128, 384, 3, 128, 64, 64, True),
    "20M": Policy(384, 1024, 8, 384, 384, 8192, True),
    "Qwen2.5-0.5B": Policy(896, 4864, 24, 896, 128, 151936, True),
    "Qwen2.5-7B": Policy(3584, 18944, 28, 3584, 512, 152064, False),
}
MEASURED = ("embedded", "20M", "Qwen2.5-0.5B")


def resident_mib(peak: bool) -> float:
    """Return this process's resident memory, now or at its peak since `forget_peak`, MiB."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak() -> None:
    """Begin a new peak of resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(policy: Policy, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a proof, and the memory that it takes besides the weights, MiB."""
    learner = {name: torch.randn(shape) for name, _, shape in policy.weights()}
    rows: dict[str, int] = {}
    for _, parameter, shape in policy.weights():
        rows[parameter] = rows.get(parameter, 0) + shape[0]
    engine = {
        parameter: torch.empty(rows[parameter], *shape[1:], dtype=torch.bfloat16)
        for _, parameter, shape in policy.weights()
    }
    proof = WeightProof(print, lambda own: [own])
    parameters = {name: parameter for name, parameter, _ in policy.weights()}
    with proof.recorder(engine) as recorder:
        filled = dict.fromkeys(engine, 0)
        for name, weight in recorder.watch(learner.items()):
            parameter = parameters[name]
            engine[parameter].narrow(0, filled[parameter], len(weight)).copy_(weight)
            filled[parameter] += len(weight)
    proof.set_layout(recorder.recorded())
    proof.note_precision(engine)
    proof.compare(learner.items(), engine, list)  # the powers of the checksums are computed once, and kept
    forget_peak()
    before, seconds = resident_mib(peak=False), []
    for _ in range(repeats):
        began = time.perf_counter()
        proof.compare(learner.items(), engine, list)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), resident_mib(peak=True) - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASURED, nargs="+", default=MEASURED, help="policies to measure")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| policy | where | million weights | seconds of a proof | its memory, MiB |\n|---|---|---|---|---|")
    for name in options.only:
        seconds, memory = measure(POLICIES[name], options.repeats)
        print(f"| {name} | CPU, measured | {POLICIES[name].numel() / 1e6:,.1f} | {seconds:.4f} | {memory:.1f} |")
    for name in ("Qwen2.5-0.5B", "Qwen2.5-7B"):
        numel = POLICIES[name].numel()
        seconds = numel * sum(TOUCHED.values()) / GPU_BYTES_PER_SECOND
        memory = 2 * 8 * CHUNK["cuda"] / 2**20
        print(f"| {name} | GPU, estimated | {numel / 1e6:,.1f} | {seconds:.4f} | {memory:.1f} |")


if __name__ == "__main__":
    main()
