"""Unmodified TRL and our learner, which take the same steps on scripted completions.

TRL's own `train()` runs with all of its GRPO trainer; only the engine is replaced. The learner is the real one too, on
TRL's dataloader. All arithmetic is in float64, also
where TRL or transformers use float32 for a model of any dtype: the language model's head, the norms and the angles of
rotary positions.
"""

import copy
import functools
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.utils
from datasets import Dataset
from torch.distributed.tensor import DTensor
from trainer_costs import cheap_trainers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grpo_ray.config.loader import load_config
from grpo_ray.errors import SyncError
from grpo_ray.inference.sampling import Completion
from grpo_ray.inference.sync_proof import LogprobGap
from grpo_ray.learner.learner import Learner
from grpo_ray.models.warm_up import build_tokenizer

VOCABULARY, GROUP, LONGEST = 384, 4, 12
TOKENIZER = build_tokenizer()

NEAR = 1e-12
"""Tolerance for the relative difference of two gradients that must be equal, in the norm of each parameter. Differences
of 1e-14 have been observed; a wrong denominator or one missing row gives more than 1e-2."""

SIGNAL, EQUAL, UNSCORABLE = (1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0, 1.0), (None, None, None, None)
PARTLY = (1.0, 0.0, 0.5, 0.5)  # mean 0.5: half of the group has no gradient
REWARDS = (SIGNAL, EQUAL, PARTLY, UNSCORABLE, (0.0,) * 4, EQUAL, (0.0, 1.0, None, 0.0), EQUAL)
"""Rewards of the groups of a batch, repeated. One of three rows has a gradient."""


class ScriptedEngine:
    """Replacement of the engine: completions and log-probabilities depend on prompt, position and call alone."""

    max_model_len = 1 << 20

    training_sampling: ClassVar[dict[str, Any]] = {}

    def __init__(self, seed: int, longest: int) -> None:
        self.rng = random.Random(seed)
        self.longest = longest
        self.syncs: list[threading.Thread] = []
        self.proofs = 0
        self.metrics: dict[str, float] = {}
        self.proven: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Step, and log-probabilities of learner and engine, of each check of the sync."""

    def sync_weights(self) -> None:
        """Record the calling thread; the engine has no weights."""
        self.syncs.append(threading.current_thread())
        self.prove_weights()

    def prove_weights(self) -> None:
        """Count the proofs."""
        self.proofs += 1

    def prove_sync(
        self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor, step: int
    ) -> LogprobGap:
        """Record the log-probabilities; scripted ones prove nothing."""
        self.proven.append((step, learner_logps[mask.bool()], engine_logps[mask.bool()]))
        return LogprobGap(mean=0.0, max=0.0, tokens=int(mask.sum()))

    def run_requests(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: Callable[[int, list[int]], None]
    ) -> list[Completion]:
        """Sample as our learner's sampler does; nothing is graded early."""
        _, completions, logprobs, _ = self.generate(prompts)
        return [
            Completion(ids, False, [logp for (logp,) in logps], [])
            for ids, logps in zip(completions, logprobs, strict=True)
        ]

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        """Sample as TRL asks for it."""
        completions, logprobs = [], []
        for _ in prompts:
            length = self.rng.randint(1, self.longest)
            ends = length < self.longest or self.rng.random() < 0.5
            completions.append([self.rng.randrange(10, VOCABULARY - 10) for _ in range(length - ends)] + [1] * ends)
            # Near the log-probabilities of an untrained policy, and further from them than rounding can be.
            sampled = [-math.log(VOCABULARY) + self.rng.gauss(0, 0.4) for _ in range(length)]
            logprobs.append([[None if self.rng.random() < 0.03 else value] for value in sampled])
        return prompts, completions, logprobs, None


class ScriptedLearner(Learner):
    """Our learner, on the dataloader of TRL."""

    overrides: Sequence[str] = ()
    """Settings of the config; those that TRL has too are TRL's arguments."""
    engine_class: type[ScriptedEngine] = ScriptedEngine

    def __init__(self, **trl_trainer: Any) -> None:
        super().__init__(
            load_config(None, list(self.overrides)),
            problems=(),
            make_engine=lambda learner: self.engine_class(  # type: ignore[arg-type, return-value]
                learner.accelerator.process_index, LONGEST
            ),
            **trl_trainer,
        )

    def get_train_dataloader(self) -> Any:
        return self.collector.attach(GRPOTrainer.get_train_dataloader(self))


@dataclass
class Record(TrainerCallback):
    """The gradients before each optimizer step, and the logged metrics."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = getattr(model, "module", model)
        self.gradients.append({name: _whole(p.grad) for name, p in model.named_parameters() if p.requires_grad})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" not in logs:
            self.logs.append(dict(logs))


def _whole(gradient: Any) -> torch.Tensor:
    """Copy a gradient, gathered from all workers if it is sharded."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.detach().clone()


def float64_head(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *rest: Any) -> tuple[Any, ...]:
    """Compute in float64, by the definition, the result of TRL's chunked head, which works in float32."""
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


@functools.cache
def _initial_llama() -> LlamaForCausalLM:
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


def exact_llama() -> LlamaForCausalLM:
    """Return a new model of two layers in float64, always with the same random weights."""
    return copy.deepcopy(_initial_llama())


@functools.cache
def _dataset(rewards: tuple[Any, ...]) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "7 + 5 " * (1 + n % 5)}], "pays": rewards[n % len(rewards)]}
            | {"id": f"{n:016x}", "epoch": 0, "index": 0}
            for n in range(32)
        ]
    )


def pay(completions: list[Any], pays: list[Sequence[float | None]], **kwargs: Any) -> list[float | None]:
    """Return the rewards of each group, in order."""
    return [pays[row][row % GROUP] for row in range(len(completions))]


class LossInFloat64(TrainerCallback):
    """Adds up the logged loss in float64; transformers adds up that of micro-batches, which may cancel, in float32."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer._tr_loss.dtype == torch.float32
        self.trainer._tr_loss = self.trainer._tr_loss.double()


@contextmanager
def in_float64() -> Iterator[None]:
    class Head:
        apply = staticmethod(float64_head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Head)
        yield


@contextmanager
def shuffling_within_steps(args: GRPOConfig) -> Iterator[None]:
    """Have TRL shuffle the rows of each optimizer step of a generation batch among themselves.

    TRL shuffles all rows of a worker before it divides them, so that the rows of a step depend on the number of
    workers. Where a generation batch serves one step, TRL stays as it is.
    """
    parts = args.steps_per_generation // math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)

    def shuffle(columns: dict[str, Any]) -> dict[str, Any]:
        rows = len(columns["advantages"])
        order = torch.cat([first + torch.randperm(rows // parts) for first in range(0, rows, rows // parts)])
        return {
            name: column[order] if isinstance(column, torch.Tensor) and column.ndim else column
            for name, column in columns.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        if parts > 1:
            patch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", shuffle)
        yield


class StoppedByProof:
    """Part of a learner whose engine fails a proof: it requires that no weight has moved by then."""

    model: torch.nn.Module

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> None:
        first = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        with pytest.raises(SyncError, match="not in sync"):
            super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        assert all(torch.equal(first[name], weight) for name, weight in self.model.named_parameters())
        self.stopped = True


def train_steps(
    kind: type[GRPOTrainer],
    folder: Path,
    *,
    rewards: Sequence[Any] = REWARDS,
    rank: int = 0,
    beta: float = 0.0,
    make_model: Callable[[], Any] = exact_llama,
    resume: Path | None = None,
    reward: Callable[..., Any] = pay,
    tokenizer: Any = TOKENIZER,
    dataset: Dataset | None = None,
    arguments: Mapping[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: Any,
) -> tuple[Record, Any]:
    """Train two steps with micro-batches of 8 completions, unless `settings` differ; return the record and the trainer.

    beta: set after construction, since TRL would load the reference model by the model's name; unless `make_model`
        returns a folder.
    resume: checkpoint to begin with.
    dataset: in place of the problems of `rewards`.
    arguments: further arguments of the trainer.
    """
    defaults = dict(
        per_device_train_batch_size=8, num_generations=GROUP, max_completion_length=LONGEST, max_steps=2,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        temperature=0.9, shuffle_dataset=False,
    )  # fmt: skip
    record, model = Record(), make_model()
    if beta and isinstance(model, str):
        settings["beta"] = beta
    args = GRPOConfig(output_dir=str(folder), **(defaults | settings))
    with cheap_trainers(), in_float64(), shuffling_within_steps(args):
        trainer = kind(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=_dataset(tuple(map(tuple, rewards))) if dataset is None else dataset,
            processing_class=tokenizer,
            callbacks=[record, *callbacks],
            **(arguments or {}),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(LossInFloat64(trainer))
        if not isinstance(trainer, Learner):
            trainer.use_vllm = True
            trainer.vllm_generation = getattr(kind, "engine_class", ScriptedEngine)(rank, LONGEST)
            trainer._last_loaded_step = -1
        if beta and not isinstance(model, str):
            trainer.beta, trainer.ref_model = beta, make_model()
            add_fused_lm_head(trainer.ref_model, temperature=trainer.temperature)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return record, trainer


_REFERENCES: dict[str, Record] = {}


def reference_steps(kind: type[GRPOTrainer], folder: Path, **settings: Any) -> Record:
    """Return the record of a trainer without our code; each combination of settings is trained once in a process."""
    defaults = GRPOConfig.__dataclass_fields__
    changed = {
        name: value for name, value in settings.items() if name not in defaults or value != defaults[name].default
    }
    key = f"{kind.__qualname__} {sorted(changed.items())}"
    if key not in _REFERENCES:
        _REFERENCES[key] = train_steps(kind, folder, **settings)[0]
    return _REFERENCES[key]


def accumulated(steps: int, per_generation: int | None = None) -> dict[str, Any]:
    """Return the settings for so many micro-batches in an optimizer step, and in a generation batch."""
    return {"gradient_accumulation_steps": steps, "steps_per_generation": per_generation or steps}


def largest_difference(ours: Record, stock: Record) -> float:
    """Return the largest relative difference of a parameter's gradient; infinite where only one is zero."""
    assert len(ours.gradients) == len(stock.gradients) > 0
    worst = 0.0
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert a[name].isfinite().all() and b[name].isfinite().all(), name  # a comparison with NaN is always false
            distance, size = (a[name] - b[name]).norm().item(), b[name].norm().item()
            worst = max(worst, 0.0 if distance == 0 else distance / size if size else math.inf)
    return worst
