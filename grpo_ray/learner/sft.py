"""The learner of supervised fine-tuning: a narrow subclass of TRL's SFTTrainer.

A step is `grpo.prompts_per_step` demonstrations over all workers. TRL computes the loss, the mean negative
log-likelihood over the completion tokens of the whole step, and transformers runs the training loop. Held-out problems
are solved by the worker's engine, as in a run of GRPO, so that both kinds of runs choose their best checkpoint by the
same measure.

`tests/integration/learner/test_sft.py` lists the methods of TRL that are overridden, and fails if a release changes
one of them.

| method of TRL | reason for the override |
|---|---|
| `__init__` | our engine beside the trainer, which measures held-out problems |
| `get_train_dataloader` | the worker's own stream of demonstrations in place of a `datasets` object |
| `training_step` | timed; reports the loss |
| `_save_checkpoint` | timed |
| `_save` | an adapter's checkpoint names its policy |
| `_load_from_checkpoint` | refuses a checkpoint of the wrong kind |
| `_load_optimizer_and_scheduler` | keeps the config's settings, not the checkpoint's |
| `create_model_card` | none is written |
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback

from grpo_ray.config.schema import Config
from grpo_ray.data.demonstrations import demonstrated_text
from grpo_ray.data.problem import Problem
from grpo_ray.errors import DataError
from grpo_ray.inference.without_trackers import TRACKERS, hidden
from grpo_ray.learner.checkpoint_kind import check_checkpoint_kind, record_checkpoint_kind
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.hooks import LearnerHooks, ignore, no_hooks
from grpo_ray.learner.resume import OptimizerSettings, ResumedSettings
from grpo_ray.learner.rollouts.heldout import HeldoutSolver
from grpo_ray.learner.rollouts.sampler import WeightSync
from grpo_ray.learner.sft_config import for_engine, sft_arguments
from grpo_ray.learner.trl_config import trl_arguments
from grpo_ray.models.adapters import peft_config, train_in_float32
from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_ray.inference.engine import Engine

with hidden(TRACKERS):
    from trl import SFTTrainer

IGNORED = -100
"""Label of a token that does not count in the loss."""


@dataclass(frozen=True)
class EncodedDemonstration:
    """Tokens of one demonstration."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """Ends with the tokenizer's end token, unless the demonstration was cut off."""
    truncated: bool

    def as_row(self) -> dict[str, list[int]]:
        """Return the demonstration as a row of TRL's collator; the loss counts the completion's tokens only."""
        ids = [*self.prompt_ids, *self.completion_ids]
        return {"input_ids": ids, "labels": [*[IGNORED] * len(self.prompt_ids), *self.completion_ids]}


def encode_demonstrations(
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    longest: int,
    chat_template_kwargs: Mapping[str, Any],
) -> list[EncodedDemonstration]:
    """Encode demonstrations: the prompt as for sampling, and the tokens that the policy would have to sample.

    The completion is its text and the end token, unless the text ends with it. A template that renders the assistant's
    turn in another way, such as one that removes its reasoning, has no effect.

    Args:
        longest: `grpo.max_completion_length`, tokens.
        chat_template_kwargs: further variables of the chat template.
    """
    prompts = tokenize_prompts(tokenizer, [list(problem.prompt) for problem in problems], chat_template_kwargs)
    encoded = []
    for problem, prompt_ids in zip(problems, prompts, strict=True):
        text_ids = tokenizer(demonstrated_text(problem), add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
        ids = [*text_ids] if text_ids[-1:] == [end] else [*text_ids, end]
        encoded.append(EncodedDemonstration(prompt_ids, ids[:longest], truncated=len(ids) > longest))
    return encoded


class DemonstrationBatches:
    """Micro-batches of one worker's demonstrations, a whole step at a time."""

    def __init__(
        self,
        demonstrations: Iterable[tuple[Problem, int]],
        per_step: int,
        per_pass: int,
        encode: Callable[[list[tuple[Problem, int]]], list[EncodedDemonstration]],
        collate: Callable[[list[dict[str, list[int]]]], dict[str, torch.Tensor]],
    ) -> None:
        """
        Args:
            demonstrations: demonstrations with their epochs.
            per_step: demonstrations of a step, of this worker.
            per_pass: demonstrations of a micro-batch, of this worker; divides `per_step`.
            encode: called once for the demonstrations of each step, before its first micro-batch.
            collate: joins rows into a batch.
        """
        self.demonstrations = iter(demonstrations)
        self.per_step, self.per_pass = per_step, per_pass
        self.encode, self.collate = encode, collate

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for first in self.demonstrations:
            drawn = [first, *itertools.islice(self.demonstrations, self.per_step - 1)]
            if len(drawn) < self.per_step:
                raise DataError(f"the stream ended with {len(drawn)} of a step's {self.per_step} demonstrations")
            rows = [each.as_row() for each in self.encode(drawn)]
            for start in range(0, self.per_step, self.per_pass):
                yield self.collate(rows[start : start + self.per_pass])


class SftLearner(SFTTrainer):
    """Learner of one worker. It draws the step's demonstrations from the worker's stream, and learns their text."""

    _metrics: dict[str, dict[str, list[float]]]

    def __init__(
        self,
        config: Config,
        demonstrations: Iterable[tuple[Problem, int]],
        *,
        make_engine: Callable[["SftLearner"], "Engine | None"],
        make_hooks: Callable[["SftLearner"], LearnerHooks] = no_hooks,
        profiler: PhaseProfiler | None = None,
        **trl_trainer: Any,
    ) -> None:
        """
        Args:
            demonstrations: the worker's own demonstrations with their epochs, in order, from the first one not yet
                used.
            make_engine: starts the engine of a learner whose policy is loaded; None for a learner that measures
                nothing.
            make_hooks: returns the learner's hooks, which may refer to it; called before its policy is loaded.
            profiler: phase times of this worker; created by the thread that trains.
            trl_trainer: other arguments of `SFTTrainer`.
        """
        self.config = config
        self.profiler = profiler or PhaseProfiler()
        self.hooks = make_hooks(self)
        self.demonstrations = self.profiler.timed_iterator("wait", demonstrations)
        self.drawn: Sequence[GroupRecord] = ()
        super().__init__(callbacks=[ResumedSettings(), *self.hooks.callbacks], **trl_trainer)
        if config.model.adapter:
            train_in_float32(self.model)
        self.remove_callback(PrinterCallback)  # metrics are in metrics.jsonl; the log is for messages
        if self.accelerator.device.type == "cuda":
            self.profiler.wait_for_device = torch.cuda.synchronize
        self.workers = Workers.of(self.accelerator)
        self.engine = make_engine(self)
        self.sync = WeightSync(self.engine, lambda: self.state.global_step) if self.engine else None

    @property
    def heldout(self) -> HeldoutSolver:
        """Solver of held-out problems with this learner's weights."""
        assert self.engine is not None and self.sync is not None
        return HeldoutSolver(self.config, self.engine, self.processing_class, self.workers, self.sync.update)

    def append_metrics(self, values: Mapping[str, float]) -> None:
        """Add values of metrics, whose means are logged."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    # Parts that a learner of GRPO has, and this one has not

    def reward_states(self) -> dict[str, Any]:
        """Return no states: nothing is rewarded."""
        return {}

    def load_reward_states(self, states: dict[str, Any]) -> None:
        """Restore nothing."""

    def save_open_rollouts(self, folder: Path) -> None:
        """Write nothing: nothing is sampled ahead."""

    def load_open_rollouts(self, folder: Path) -> None:
        """Read nothing."""

    def groups_for_study(self) -> list[dict[str, Any]]:
        """Return this worker's demonstrations of the current step in JSON types, to study non-finite numbers."""
        names = ("step", "epoch", "problem", "source", "lengths", "truncated")
        return [{name: getattr(group, name) for name in names} for group in self.drawn]

    def end_tools(self) -> None:
        """Do nothing: no tool runs."""

    # Overrides

    def get_train_dataloader(self) -> Iterable[dict[str, torch.Tensor]]:
        """Return this worker's micro-batches."""
        return DemonstrationBatches(
            self.demonstrations,
            self.config.sizes.prompts_per_worker,
            self.args.per_device_train_batch_size,
            self._begin_step,
            self.data_collator,
        )

    def _begin_step(self, drawn: list[tuple[Problem, int]]) -> list[EncodedDemonstration]:
        """Encode the demonstrations of a step that is about to be taken, and record them; collective."""
        longest = self.config.grpo.max_completion_length
        problems = [problem for problem, _ in drawn]
        encoded = encode_demonstrations(self.processing_class, problems, longest, self.config.chat_template_kwargs)
        self.drawn = [
            GroupRecord(
                step=self.state.global_step + 1,
                epoch=epoch,
                problem=problem.id,
                source=problem.source,
                rewards=(math.nan,),
                correct=None,
                lengths=(len(each.completion_ids),),
                truncated=(each.truncated,),
            )
            for (problem, epoch), each in zip(drawn, encoded, strict=True)
        ]
        self.hooks.record_groups([*self.drawn])
        own = [len(encoded), sum(len(each.completion_ids) for each in encoded), sum(each.truncated for each in encoded)]
        of_workers = self.workers.gather(torch.tensor(own, device=self.accelerator.device))  # (workers, 3)
        count, tokens, cut = of_workers.sum(dim=0).tolist()
        self.append_metrics({"completions/mean_length": tokens / count, "completions/clipped_ratio": cut / count})
        self.profiler.count_tokens("learner", own[1])
        return encoded

    @in_phase("forward_backward")
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward on a micro-batch."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.hooks.observe_loss(loss)
        return loss

    @in_phase("checkpoint")
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, timed."""
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the policy, and the base of an adapter."""
        super()._save(output_dir, state_dict)
        record_checkpoint_kind(Path(output_dir or self.args.output_dir), self.config)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint. Raises CheckpointError if it was written with another adapter or a sharded learner."""
        check_checkpoint_kind(resume_from_checkpoint, self.config)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state of optimizer and schedule; their settings stay those of the config."""
        if checkpoint is None:
            return
        settings = OptimizerSettings.of(self.optimizer, self.lr_scheduler)
        beginning = self.lr_scheduler.state_dict()
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.state.global_step == 0:  # another run's checkpoint: the schedule begins anew
            self.lr_scheduler.load_state_dict(beginning)
        settings.apply(self.optimizer, self.lr_scheduler)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: a checkpoint of a run is not a published model."""


def build_sft_learner(
    config: Config,
    *,
    model_path: str,
    output_dir: str,
    problems: Iterable[tuple[Problem, int]],
    make_hooks: Callable[[SftLearner], LearnerHooks],
    on_progress: Callable[[str], None],
    profiler: PhaseProfiler | None = None,
    pool: Any = None,
) -> SftLearner:
    """Load the policy, start the engine, and return the worker's learner; arguments as of `build_learner`."""
    assert pool is None, "the config refuses dedicated engines"
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    engine_arguments = trl_arguments(for_engine(config), output_dir)

    def make_engine(learner: SftLearner) -> "Engine":
        from grpo_ray.inference.engine import Engine  # imports vLLM

        on_progress("starting the engine")
        notify = learner.hooks.notify if learner.accelerator.is_main_process else ignore
        return Engine(
            learner.model,
            learner.accelerator,
            tokenizer,
            config=config,
            args=engine_arguments,
            profiler=learner.profiler,
            notify=notify,
        )

    on_progress("loading the policy")
    return SftLearner(
        config,
        problems,
        make_engine=make_engine,
        make_hooks=make_hooks,
        profiler=profiler,
        model=model_path,
        args=sft_arguments(config, output_dir),
        # TRL requires a `datasets` object; the demonstrations come from `get_train_dataloader`.
        train_dataset=placeholder(),
        processing_class=tokenizer,
        peft_config=peft_config(config),
    )


def placeholder() -> Dataset:
    """Return a dataset of one row, which nothing is trained on."""
    return Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
