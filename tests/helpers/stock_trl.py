"""Stock TRL and its trainer with our savings, taking the same steps on completions made by hand.

No engine and no Ray: TRL's own `train()` runs, with everything of its GRPO trainer in place, and only what samples is a
stand-in. All arithmetic is in float64, where TRL or transformers would go through float32 whatever the model is in:
the language model's head, the norms and the angles of the positions.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grpo_ray.thrift import Thrift
from grpo_ray.tiny import build_tokenizer

VOCABULARY, GROUP, LONGEST = 384, 4, 12
TOKENIZER = build_tokenizer()

SIGNAL, EQUAL, UNSCORABLE = (1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0, 1.0), (None, None, None, None)
PARTLY = (1.0, 0.0, 0.5, 0.5)  # mean 0.5: half of the group has no gradient
REWARDS = (SIGNAL, EQUAL, PARTLY, UNSCORABLE, (0.0,) * 4, EQUAL, (0.0, 1.0, None, 0.0), EQUAL)
"""Rewards of the groups of a batch, over and over. One of three rows has a gradient."""


class Ours(Thrift, GRPOTrainer):
    """TRL's trainer with the savings; keeps what it was told of the sync."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.proven: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        super().__init__(*args, **kwargs)

    def prove(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        self.proven.append((self.state.global_step, learner_logps[mask.bool()], engine_logps[mask.bool()]))


class HandMade:
    """In the engine's place: completions and log-probabilities that depend on prompt, place and call alone."""

    def __init__(self, seed: int, longest: int) -> None:
        self.rng = random.Random(seed)
        self.longest = longest

    def sync_weights(self) -> None:
        """There is no engine."""

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        completions, logprobs = [], []
        for _ in prompts:
            length = self.rng.randint(1, self.longest)
            ends = length < self.longest or self.rng.random() < 0.5
            completions.append([self.rng.randrange(10, VOCABULARY - 10) for _ in range(length - ends)] + [1] * ends)
            # About what a policy says that knows nothing yet, and as far from it as a rounded engine never is.
            said = [-math.log(VOCABULARY) + self.rng.gauss(0, 0.4) for _ in range(length)]
            logprobs.append([[None if self.rng.random() < 0.03 else value] for value in said])
        return prompts, completions, logprobs, None


@dataclass
class Diary(TrainerCallback):
    """The gradients before each optimizer step, and what was logged."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = getattr(model, "module", model)
        self.gradients.append({name: p.grad.detach().clone() for name, p in model.named_parameters()})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" not in logs:
            self.logs.append(dict(logs))


def float64_head(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *rest: Any) -> tuple[Any, ...]:
    """What TRL's chunked head computes in float32, by the book."""
    logps = (hidden @ weight.T / temperature).log_softmax(-1)
    return logps.gather(-1, labels[:, None])[:, 0], -(logps.exp() * logps).sum(-1), None, None, None


class Angles(torch.nn.Module):
    """Rotary embeddings in float64."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        self.frequencies = 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def exact_llama() -> LlamaForCausalLM:
    """Two layers of random weights in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    model.model.rotary_emb = Angles(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, torch.nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=torch.float64))
    return model


def pay(completions: list[Any], pays: list[Sequence[float | None]], **kwargs: Any) -> list[float | None]:
    """The group's rewards, in order."""
    return [pays[row][row % GROUP] for row in range(len(completions))]


@contextmanager
def in_float64() -> Iterator[None]:
    class Head:
        apply = staticmethod(float64_head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Head)
        yield


def steps_of(
    kind: type[GRPOTrainer],
    folder: Path,
    *,
    rewards: Sequence[Any] = REWARDS,
    rank: int = 0,
    beta: float = 0.0,
    **settings: Any,
) -> tuple[Diary, Any]:
    """Train two steps of 8 completions to a micro-batch, if not said otherwise; gives what was noted, and the trainer.

    beta: set when the trainer is there, since it would look for the reference by the model's name.
    """
    defaults = dict(
        per_device_train_batch_size=8, num_generations=GROUP, max_completion_length=LONGEST, max_steps=2,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        temperature=0.9, shuffle_dataset=False,
    )  # fmt: skip
    prompts = [{"prompt": "7 + 5 " * (1 + n % 5), "pays": rewards[n % len(rewards)]} for n in range(32)]
    diary = Diary()
    trainer = kind(
        model=exact_llama(),
        reward_funcs=pay,
        args=GRPOConfig(output_dir=str(folder), **(defaults | settings)),
        train_dataset=Dataset.from_list(prompts),
        processing_class=TOKENIZER,
        callbacks=[diary],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, HandMade(rank, LONGEST), -1
    if beta:
        trainer.beta, trainer.ref_model = beta, exact_llama()
        add_fused_lm_head(trainer.ref_model, temperature=trainer.temperature)
    with in_float64():
        trainer.train()
    return diary, trainer


def furthest(ours: Diary, stock: Diary) -> float:
    """Largest relative distance of a parameter's gradient; infinite if one is zero and the other is not."""
    assert len(ours.gradients) == len(stock.gradients) > 0
    worst = 0.0
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert a[name].isfinite().all() and b[name].isfinite().all(), name  # a NaN is not near, nor far
            distance, size = (a[name] - b[name]).norm().item(), b[name].norm().item()
            worst = max(worst, 0.0 if distance == 0 else distance / size if size else math.inf)
    return worst
