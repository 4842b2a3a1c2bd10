"""Seconds of the learner's part of a step, stock TRL's and with its savings: python tests/benchmarks/bench_thrift.py

A Llama of 20 million parameters on the CPU, float32, 2 threads; 32 completions of up to 256 tokens in 4 micro-batches,
their lengths spread as a real model's are. What samples is a stand-in that takes no time, so a step is TRL's forward
passes, backward and optimizer. Both take the same steps in turn in one process, and the best of each is compared.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_ray.models.toy_policy import build_tokenizer
from grpo_ray.training.exact_savings import ExactSavings
from grpo_ray.training.micro_batches import SavingsPlan

GROUPS, GROUP, LONGEST = 8, 4, 256
KINDS = {
    "stock TRL": None,
    "one pass": SavingsPlan(one_pass=True),
    "and rows": SavingsPlan(one_pass=True, rows=True),
    "and padding": SavingsPlan(one_pass=True, rows=True, regroup=True, trim_prompts=True, trim_completions=True),
    "and labels only": SavingsPlan(
        one_pass=True, rows=True, regroup=True, trim_prompts=True, trim_completions=True, head=True
    ),
    "and shifted": SavingsPlan(
        one_pass=True, rows=True, regroup=True, trim_prompts=True, trim_completions=True, head=True, shift=True
    ),
}


class Ours(ExactSavings, GRPOTrainer):
    """TRL's trainer with the savings."""


class HandMade:
    """Completions of random tokens; lengths are log-normal, with a median of 90 tokens."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def sync_weights(self) -> None:
        """There is no engine."""

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        lengths = (torch.randn(len(prompts), generator=self.generator) * 0.7 + 4.5).exp().clamp(8, LONGEST).int()
        completions = [torch.randint(10, 8000, (int(n),), generator=self.generator).tolist() for n in lengths]
        return prompts, completions, [[[-9.0]] * len(ids) for ids in completions], None


def pay(completions: list[Any], signal: list[bool], **kwargs: Any) -> list[float]:
    """Different rewards in a group with signal, and equal ones in one without."""
    return [float(has and row % 2) for row, has in enumerate(signal)]


def trainer(savings: SavingsPlan | None, dead: int, folder: str) -> Any:
    """A trainer whose batches have `dead` groups without signal of 8."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
            bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
        )
    )  # fmt: skip
    prompts = [{"prompt": "7 + 5 " * (4 + n % 8), "signal": n >= dead} for n in range(GROUPS)]
    made = (Ours if savings else GRPOTrainer)(
        model=model,
        reward_funcs=pay,
        args=GRPOConfig(
            output_dir=folder, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=GROUP,
            max_completion_length=LONGEST, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False, max_steps=1, logging_steps=1000,
            vllm_importance_sampling_mode="token_truncate",
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=build_tokenizer(),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    made.use_vllm, made.vllm_generation, made._last_loaded_step = True, HandMade(), -1
    if savings:
        made.__dict__["savings"] = savings  # in place of the cached property
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each; the best counts")
    parser.add_argument("--dead", type=int, nargs="*", default=[0, 4, 7], help="groups of 8 without signal")
    parser.add_argument("--cpu", action="store_true", help="seconds of CPU instead, for a machine that others use too")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    torch.set_num_threads(2)
    logging.disable(logging.WARNING)
    for dead in arguments.dead:  # 7 of 8 is 88 %
        with tempfile.TemporaryDirectory() as folder:
            best = dict.fromkeys(KINDS, float("inf"))
            for _ in range(arguments.steps):
                for name, savings in KINDS.items():
                    made = trainer(savings, dead, str(Path(folder, "out")))
                    begun = clock()
                    made.train()
                    best[name] = min(best[name], clock() - begun)
        said = ", ".join(
            f"{name} {seconds:.2f} s ({best['stock TRL'] / seconds:.2f}x)" for name, seconds in best.items()
        )
        print(f"{dead / GROUPS:.0%} of groups without signal: {said}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
