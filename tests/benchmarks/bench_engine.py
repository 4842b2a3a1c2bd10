"""Generation time of a step on the CPU with packed and unpacked weights: python tests/benchmarks/bench_engine.py

Each round syncs the learner's weights to the engine and generates one step; both are timed. The variants alternate in
one process, on the same weights and seeds, and the medians are compared. Each number of threads has its own process.

as vLLM   unpacked, vLLM's CPU sampler, and the completions detokenised
noise     ours, but with vLLM's common sampler, which draws noise for every token of the vocabulary once (vLLM's CPU
          sampler: twice)
unpacked  torch's matrix product with the weights as they are; the next two differ from it only in the packing
packed    every layer is packed again after each sync
ours      packed where it pays (`is_faster_packed`)

The first two sample other tokens than the rest, so where completions end by themselves, the time is scaled per token.

The embedded policy ends its completions by itself, after at most 40 tokens. The Llamas have random weights and do not
end, so the length of each of their completions is fixed beforehand: log-normal with a median of 90 tokens, at most 256.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

LLAMAS = {
    "20M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "layers": 8, "heads": 6},
    "100M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "layers": 12, "heads": 12},
}
"""Approximate parameter count -> shape; the output layer shares the embedding's weights."""
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2}
"""Shape of the Llama "tiny", which is for trying the script."""


def build_policy(name: str) -> str:
    """Build a policy; return its folder."""
    from grpo_ray.models.embedded_policy import embedded_policy
    from grpo_ray.models.warm_up import build_tokenizer

    if name == "embedded":
        return str(embedded_policy())
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(TINY if name == "tiny" else LLAMAS[name])
    layers, heads = shape.pop("layers"), shape.pop("heads")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape, num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=1024,
            bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
        )
    )  # fmt: skip
    folder = tempfile.mkdtemp(prefix="bench_engine-")
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def start_engine(path: str, dtype: str, requests: int) -> Any:
    """Start an engine in this process as a worker does, with the learner's model beside it."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.engine import Engine
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.models.tokenizer import load_tokenizer

    # Port 0 is any free one; no other worker connects.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo")
    config = load_config(
        None,
        [
            f"model.path={path}",
            f"model.dtype={dtype}",
            "cluster.num_workers=1",
            f"grpo.prompts_per_step={requests // 8}",
            "grpo.max_completion_length=40",
        ],
    )
    args = trl_arguments(config, tempfile.mkdtemp())
    model = AutoModelForCausalLM.from_pretrained(path)  # float32, like the learner's weights
    return Engine(model, Accelerator(cpu=True), load_tokenizer(path), config=config, args=args)


def measure(name: str, dtype: str, requests: int, rounds: int) -> None:
    """Print one line: seconds per step of each variant."""
    import torch

    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.inference import cpu_packing
    from grpo_ray.inference.vllm_internals import token_sampler
    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    path = build_policy(name)
    engine = start_engine(path, dtype, requests)
    sampler = token_sampler(engine.llm)
    rule = cpu_packing.is_faster_packed
    problems = [problem.prompt for problem in itertools.islice(arithmetic_problems("train"), requests // 8)]
    prompts = [ids for ids in tokenize_prompts(load_tokenizer(path), problems, {}) for _ in range(8)]
    lengths = (torch.randn(requests, generator=torch.Generator().manual_seed(0)) * 0.7 + 4.5).exp().clamp(8, 256)
    settings = [
        {"temperature": 1.0, "logprobs": 0, "seed": seed, "max_tokens": 40 if name == "embedded" else int(length)}
        | {"ignore_eos": name != "embedded"}
        for seed, length in enumerate(lengths)
    ]
    own_sampler = sampler.forward
    variants: dict[str, tuple[Callable[[Any], bool], Callable[..., Any]]] = {
        "as vLLM": (lambda weight: False, sampler.forward_cpu),
        "noise": (rule, sampler.forward_native),
        "unpacked": (lambda weight: False, own_sampler),
        "packed": (lambda weight: True, own_sampler),
        "ours": (rule, own_sampler),
    }
    sync: dict[str, list[float]] = {variant: [] for variant in variants}
    total: dict[str, list[float]] = {variant: [] for variant in variants}
    completions: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for variant, (packed, forward) in variants.items():
            cpu_packing.is_faster_packed, sampler.forward = packed, forward  # type: ignore[assignment]
            started = time.perf_counter()
            engine.sync_weights()
            synced = time.perf_counter()
            text = {"detokenize": variant == "as vLLM"}
            finished = engine.run_requests(prompts, [each | text for each in settings])
            completions[variant] = [each.token_ids for each in finished]
            if number:  # the first round compiles oneDNN's kernels
                sync[variant].append(synced - started)
                total[variant].append(time.perf_counter() - started)
    tokens = sum(map(len, completions["ours"]))
    seconds = {
        variant: statistics.median(each) * tokens / sum(map(len, completions[variant]))
        for variant, each in total.items()
    }
    report = ", ".join(
        f"{variant} {value:.3f} s ({seconds['as vLLM'] / value:.2f}x)" for variant, value in seconds.items()
    )
    share = statistics.median(sync["ours"]) / seconds["ours"]
    print(
        f"{name}, {dtype}, {torch.get_num_threads()} threads, {requests} requests of {tokens} tokens: {report}; "
        f"copying weights {share:.1%} of it; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=["embedded", *LLAMAS], choices=["embedded", "tiny", *LLAMAS])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each variant; the median is reported")
    parser.add_argument("--here", action="store_true", help="measure the first of each option in this process")
    arguments = parser.parse_args()
    chosen = (arguments.policies, arguments.dtypes, arguments.requests)
    if arguments.here:
        name, dtype, requests = (each[0] for each in chosen)
        measure(name, dtype, requests, arguments.rounds)
        return

    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import worker_environment

    for name, dtype, requests, threads in itertools.product(*chosen, arguments.threads):
        environment = os.environ | worker_environment(load_config(), threads) | {"VLLM_LOGGING_LEVEL": "ERROR"}
        command = ["--here", "--policies", name, "--dtypes", dtype, "--requests", str(requests)]
        command += ["--rounds", str(arguments.rounds)]
        subprocess.run([sys.executable, __file__, *command], env=environment, check=True)


if __name__ == "__main__":
    main()
