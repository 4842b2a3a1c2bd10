"""Steps of supervised fine-tuning in float64: our learner, and unmodified TRL on the same demonstrations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trl.trainer.utils
from datasets import Dataset
from stock_trl import TOKENIZER, VOCABULARY, LossInFloat64, Record, exact_llama
from trainer_costs import cheap_trainers
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.learner.hooks import LearnerHooks
from grpo_ray.learner.sft import SftLearner, placeholder
from grpo_ray.storage.records.groups import GroupRecord

DEMONSTRATIONS = [
    Problem(
        id=f"{number:016x}",
        prompt=[{"role": "user", "content": "7 + 5 " * (1 + number % 5)}],
        solution="",
        columns={"completion": "12 = " * (1 + number % 3) + str(number)},
    )
    for number in range(8)
]
"""Prompts and completions of different lengths."""
STEP = len(DEMONSTRATIONS)
"""Demonstrations of a step: all of them, so that their order in TRL's sampler does not matter."""


def float64_head(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *rest: Any) -> tuple[Any, ...]:
    """Compute in float64, by the definition, the result of TRL's chunked head, which works in float32."""
    logps = (hidden @ weight.T / temperature).log_softmax(-1)
    top = (logps.argmax(-1) == labels).to(logps.dtype)
    return logps.gather(-1, labels[:, None])[:, 0], -(logps.exp() * logps).sum(-1), None, None, top


@contextmanager
def in_float64() -> Iterator[None]:
    class Head:
        apply = staticmethod(float64_head)

    with pytest.MonkeyPatch.context() as patch, cheap_trainers():
        patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Head)
        yield


def arguments(folder: Path, per_pass: int, passes: int, **settings: Any) -> SFTConfig:
    """Return TRL's arguments of two steps."""
    return SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=per_pass, gradient_accumulation_steps=passes, max_steps=2,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        max_length=None, **settings,
    )  # fmt: skip


def train_trl(folder: Path) -> Record:
    """Return the gradients of TRL's own trainer, which tokenizes the demonstrations itself, in one pass a step."""
    rows = [
        {"prompt": each.prompt, "completion": [{"role": "assistant", "content": each.columns["completion"]}]}
        for each in DEMONSTRATIONS
    ]
    record = Record()
    with in_float64():
        trainer = SFTTrainer(
            model=exact_llama(),
            args=arguments(folder, STEP, 1),
            train_dataset=Dataset.from_list(rows),
            processing_class=TOKENIZER,
            callbacks=[record],
        )
        run(trainer)
    return record


def train_ours(rank: int, folder: str, per_pass: int, workers: int) -> dict[str, Any]:
    """Return the gradients, logs and recorded groups of our learner, whose part of a step is every n-th demonstration.

    Args:
        per_pass: demonstrations of a micro-batch of this worker.
    """
    config = load_config(
        None, [f"grpo.prompts_per_step={STEP}", f"cluster.num_workers={workers}", "run.kind=sft", "data.train=a.jsonl"]
    )
    record = Record()
    groups: list[GroupRecord] = []
    own = [(problem, epoch) for epoch in range(2) for problem in DEMONSTRATIONS[rank::workers]]
    passes = STEP // workers // per_pass
    with in_float64():
        trainer = SftLearner(
            config,
            own,
            make_engine=lambda learner: None,
            make_hooks=lambda learner: LearnerHooks(callbacks=[record], record_groups=groups.extend),
            model=exact_llama(),
            args=arguments(
                Path(folder), per_pass, passes, dataset_kwargs={"skip_prepare_dataset": True},
                remove_unused_columns=False, **({"ddp_backend": "gloo"} if workers > 1 else {}),
            ),
            train_dataset=placeholder(),
            processing_class=TOKENIZER,
        )  # fmt: skip
        run(trainer)
    return {
        "gradients": [{name: each.numpy() for name, each in step.items()} for step in record.gradients],
        "logs": record.logs,
        "groups": [(group.step, group.problem, group.lengths) for group in groups],
    }


def run(trainer: SFTTrainer) -> None:
    """Train, with the loss added up in float64."""
    assert len(TOKENIZER) <= VOCABULARY
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LossInFloat64(trainer))
    trainer.train()
