"""Learner time of a step, stock TRL's and with the exact savings: python tests/benchmarks/bench_savings.py

A Llama of 20 million parameters on the CPU, float32, 2 threads; 32 completions of up to 256 tokens in 4 micro-batches,
with realistic lengths. A fake engine generates them in no time, so a step is TRL's forward passes, backward and
optimizer. All variants take the same steps, alternating in one process, and the fastest step of each is compared.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_ray.config.loader import load_config
from grpo_ray.inference.sampling import Completion
from grpo_ray.inference.sync_proof import LogprobGap
from grpo_ray.learner.exact_savings import SavingsPlan
from grpo_ray.learner.learner import Learner
from grpo_ray.learner.rollouts.rollout import Rollout
from grpo_ray.models.warm_up import build_tokenizer
from grpo_ray.storage.records.groups import GroupRecord

GROUPS, GROUP, LONGEST = 8, 4, 256
VARIANTS = {
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


class Ours(Learner):
    """Our learner on TRL's dataloader, without records of groups."""

    def __init__(self, **trl_trainer: Any) -> None:
        engine: Any = FakeEngine(trl_trainer["args"].max_completion_length)
        super().__init__(load_config(None, []), (), make_engine=lambda learner: engine, **trl_trainer)

        def record_nothing(rollout: Rollout, step: int) -> list[GroupRecord]:
            return []

        object.__setattr__(self.collector.recorder, "records", record_nothing)

    def get_train_dataloader(self) -> Any:
        return self.collector.attach(GRPOTrainer.get_train_dataloader(self))


class FakeEngine:
    """Engine that returns random tokens; lengths are log-normal with a median of 90 tokens."""

    training_sampling: ClassVar[dict[str, Any]] = {}
    description = "no engine"
    proofs = 0
    metrics: ClassVar[dict[str, float]] = {}

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self.generator = torch.Generator().manual_seed(0)

    def sync_weights(self) -> None:
        """Do nothing: there are no weights to sync."""

    def prove_weights(self) -> None:
        """Prove nothing, for the same reason."""

    def prove_sync(self, *args: Any) -> LogprobGap:
        """Prove nothing: the log-probabilities are made up."""
        return LogprobGap(mean=0.0, max=0.0, tokens=0)

    def run_requests(self, prompts: list[list[int]], *args: Any) -> list[Completion]:
        """Answer our learner."""
        _, completions, _, _ = self.generate(prompts)
        return [Completion(ids, False, [-9.0] * len(ids), []) for ids in completions]

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        lengths = (torch.randn(len(prompts), generator=self.generator) * 0.7 + 4.5).exp().clamp(8, self.longest).int()
        completions = [torch.randint(10, 8000, (int(n),), generator=self.generator).tolist() for n in lengths]
        return prompts, completions, [[[-9.0]] * len(ids) for ids in completions], None


def alternating_reward(completions: list[Any], signal: list[bool], **kwargs: Any) -> list[float]:
    """Return unequal rewards in a group with signal, and zeros in a group without."""
    return [float(has and row % 2) for row, has in enumerate(signal)]


def make_trainer(savings: SavingsPlan | None, dead: int, layers: int, longest: int, folder: str) -> Any:
    """Make a trainer; of the 8 groups of each batch, the first `dead` have no signal."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=6,
            bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
        )
    )  # fmt: skip
    prompts = [
        {
            "prompt": [{"role": "user", "content": "7 + 5 " * (4 + n % 8)}], "signal": n >= dead, "id": f"{n:016x}",
            "epoch": 0, "index": 0,
        }
        for n in range(GROUPS)
    ]  # fmt: skip
    trainer = (Ours if savings else GRPOTrainer)(
        model=model,
        reward_funcs=alternating_reward,
        args=GRPOConfig(
            output_dir=folder, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=GROUP,
            max_completion_length=longest, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False, max_steps=1, logging_steps=1000,
            vllm_importance_sampling_mode="token_truncate",
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=build_tokenizer(),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if savings is None:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, FakeEngine(longest), -1
    else:
        trainer.__dict__["savings"] = savings  # in place of the cached property
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant; the fastest is reported")
    parser.add_argument("--dead", type=int, nargs="*", default=[0, 4, 7], help="groups without signal, of 8")
    parser.add_argument("--layers", type=int, default=8, help="layers of the Llama")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of a completion")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="report CPU seconds, for a machine with other load")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)
    for dead in arguments.dead:  # 7 of 8 is 88 %
        with tempfile.TemporaryDirectory() as folder:
            best = dict.fromkeys(VARIANTS, float("inf"))
            for _ in range(arguments.steps):
                for name, savings in VARIANTS.items():
                    trainer = make_trainer(savings, dead, arguments.layers, arguments.longest, str(Path(folder, "out")))
                    started = clock()
                    trainer.train()
                    best[name] = min(best[name], clock() - started)
        report = ", ".join(
            f"{name} {seconds:.2f} s ({best['stock TRL'] / seconds:.2f}x)" for name, seconds in best.items()
        )
        print(f"{dead / GROUPS:.0%} of groups without signal: {report}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
