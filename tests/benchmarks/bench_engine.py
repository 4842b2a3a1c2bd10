"""Seconds of generating a step on the CPU, packed and unpacked, sync included: python tests/benchmarks/bench_engine.py

Each round gives the engine the learner's weights again and generates one step. The kinds take turns in one process, on
the same weights and seeds, and the medians are compared; each number of threads has a process of its own.

as vLLM   unpacked, vLLM's sampler for the CPU, and the text of each completion beside its token ids
noise     ours, but vLLM's common sampler draws the tokens, with noise for every word once (vLLM's for the CPU: twice)
unpacked  torch's product with the weights as they are; what follows differs from it in nothing but the packing
packed    every layer is packed again after each sync
ours      packed where it pays (`is_faster_packed`)

The first two draw other tokens than the rest, so where completions end themselves, seconds are taken per token.

The embedded policy ends its completions itself, at 40 tokens at the latest. The Llamas are random and do not end, so
each of their completions has a length beforehand, log-normal with a median of 90 tokens and at most 256.
"""

import argparse
import itertools
import os
import socket
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
"""About so many parameters, output layer shared with the embedding."""


def policy(name: str) -> str:
    """Folder of a policy."""
    from grpo_ray.models.toy_policy import build_tokenizer, build_toy_policy

    if name == "embedded":
        return str(build_toy_policy())
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(LLAMAS[name])
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


def start(path: str, dtype: str, requests: int) -> Any:
    """An engine in this process, as a worker starts it, and a learner's weights beside it."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.engine import Engine
    from grpo_ray.models.tokenizer import load_tokenizer
    from grpo_ray.training.trl_config import trl_arguments

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
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
    model = AutoModelForCausalLM.from_pretrained(path)  # in float32, as the learner holds it
    return Engine(model, Accelerator(cpu=True), load_tokenizer(path), config=config.engine, dtype=dtype, args=args)


def measure(name: str, dtype: str, requests: int, rounds: int) -> None:
    """Print one line: the kinds' seconds of a step."""
    import torch

    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.inference import cpu_packing
    from grpo_ray.inference.vllm_internals import token_sampler
    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    path = policy(name)
    engine = start(path, dtype, requests)
    sampler = token_sampler(engine.llm)
    rule = cpu_packing.is_faster_packed
    problems = [problem.prompt for problem in itertools.islice(arithmetic_problems("train"), requests // 8)]
    prompts = [ids for ids in tokenize_prompts(load_tokenizer(path), problems) for _ in range(8)]
    lengths = (torch.randn(requests, generator=torch.Generator().manual_seed(0)) * 0.7 + 4.5).exp().clamp(8, 256)
    settings = [
        {"temperature": 1.0, "logprobs": 0, "seed": seed, "max_tokens": 40 if name == "embedded" else int(length)}
        | {"ignore_eos": name != "embedded"}
        for seed, length in enumerate(lengths)
    ]
    little_noise = sampler.forward
    kinds: dict[str, tuple[Callable[[Any], bool], Callable[..., Any]]] = {
        "as vLLM": (lambda weight: False, sampler.forward_cpu),
        "noise": (rule, sampler.forward_native),
        "unpacked": (lambda weight: False, little_noise),
        "packed": (lambda weight: True, little_noise),
        "ours": (rule, little_noise),
    }
    sync: dict[str, list[float]] = {kind: [] for kind in kinds}
    both: dict[str, list[float]] = {kind: [] for kind in kinds}
    said: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for kind, (cpu_packing.is_faster_packed, sampler.forward) in kinds.items():
            begun = time.perf_counter()
            engine.sync_weights()
            synced = time.perf_counter()
            text = {"detokenize": kind == "as vLLM"}
            said[kind] = engine.run_requests(prompts, [each | text for each in settings]).completion_ids
            if number:  # the first round makes oneDNN's kernels
                sync[kind].append(synced - begun)
                both[kind].append(time.perf_counter() - begun)
    tokens = sum(map(len, said["ours"]))
    seconds = {kind: statistics.median(each) * tokens / sum(map(len, said[kind])) for kind, each in both.items()}
    shown = ", ".join(f"{kind} {value:.3f} s ({seconds['as vLLM'] / value:.2f}x)" for kind, value in seconds.items())
    share = statistics.median(sync["ours"]) / seconds["ours"]
    print(
        f"{name}, {dtype}, {torch.get_num_threads()} threads, {requests} requests of {tokens} tokens: {shown}; "
        f"copying weights {share:.1%} of it; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=["embedded", *LLAMAS], choices=["embedded", *LLAMAS])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind; the median counts")
    parser.add_argument("--here", action="store_true", help="measure one of each in this process")
    arguments = parser.parse_args()
    chosen = (arguments.policies, arguments.dtypes, arguments.requests)
    if arguments.here:
        measure(*(each[0] for each in chosen), arguments.rounds)
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
