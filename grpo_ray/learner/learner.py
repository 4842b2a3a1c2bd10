"""The GRPO learner: the subclass of TRL's GRPOTrainer (`sft.py` has that of its SFTTrainer).

A step's completions are collected by `rollouts/collector.py`, which does not depend on a trainer; TRL's code for this
is not called. The learner divides the rollout into micro-batches (`micro_batches.py`); TRL computes the loss, and
transformers runs the training loop. The overrides of their methods are short.
`tests/integration/learner/test_learner.py` lists the methods of TRL that are overridden or relied on, and fails if a
TRL release changes one of them.

| method of TRL | reason for the override |
|---|---|
| `__init__` | our engine in place of TRL's |
| `create_accelerator_and_postprocess` | a sharded learner without GPUs |
| `get_train_dataloader` | the worker's own stream of problems in place of a `datasets` object |
| `_prepare_inputs` | a step's micro-batches come from our rollout |
| `_compute_loss` | the loss of a repacked micro-batch; the entropy bonus of the whole step |
| `get_high_entropy_mask` | the quantile of the whole step in place of the micro-batch's |
| `_get_per_token_logps_and_entropies` | forward passes without padding; importance ratio from the loss's own pass |
| `create_optimizer` | PEFT's optimizers for LoRA |
| `training_step` | checks the sync before the optimizer step, reports the loss, and counts tokens |
| `_clip_grad_norm` | timed |
| `_save_checkpoint` | timed; saves a reference that follows the policy |
| `save_model` | for a sharded policy, one worker writes only the config, the tokenizer and an adapter |
| `_save_optimizer_and_scheduler` | each worker writes its part of a sharded learner |
| `_save` | an adapter's checkpoint names its policy |
| `_load_from_checkpoint` | refuses a checkpoint of the wrong kind; loads that reference, or this worker's part |
| `_load_optimizer_and_scheduler` | keeps the config's settings, not the checkpoint's; loads this worker's part |
| `create_model_card` | none is written |
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import create_model_from_path, use_adapter

from grpo_ray.config.checks import router_loss_issue
from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.inference.conversation_source import ConversationSource, conversation_source
from grpo_ray.inference.dedicated_engine import DedicatedEngine
from grpo_ray.inference.engine import Engine
from grpo_ray.inference.trl_without_trackers import GRPOTrainer
from grpo_ray.inference.vllm_internals import MaskReader
from grpo_ray.learner.attention import AttentionFacts, use_packing_attention
from grpo_ray.learner.batch import Batch, loss_mask, proof_logps, select_rows
from grpo_ray.learner.checkpoint_kind import check_checkpoint_kind, record_checkpoint_kind
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.entropy import EntropyTokens, entropy_bonus_correction, select_high_entropy
from grpo_ray.learner.exact_savings import LossSettings, SavingsPlan, can_pack, plan_savings
from grpo_ray.learner.forward_pass import score_rows, score_tokens
from grpo_ray.learner.hooks import LearnerHooks, ignore, no_hooks
from grpo_ray.learner.micro_batches import plan_micro_batches, scale_metrics
from grpo_ray.learner.passes import Layout, PassLimit, fewest_passes, split_rows
from grpo_ray.learner.resume import OptimizerSettings, ResumedSettings, move_named_state
from grpo_ray.learner.rollouts.assembly import LearnerParts, build_collector
from grpo_ray.learner.rollouts.collector import LossNeeds
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.heldout import HeldoutSolver
from grpo_ray.learner.rollouts.recorded_samples import SampleReader
from grpo_ray.learner.rollouts.rollout import Rollout, Rows
from grpo_ray.learner.rollouts.sampler import WeightSync
from grpo_ray.learner.rollouts.scoring import Reward
from grpo_ray.learner.schedule import BatchSchedule
from grpo_ray.learner.sharding import (
    gather_weights,
    load_everywhere,
    load_optimizer,
    load_policy,
    load_weights,
    policy_settings,
    reshard,
    save_state,
    trained_weights,
)
from grpo_ray.learner.sync_check import (
    ImportanceSampling,
    SyncChecker,
    TokenLogps,
    anchor_to_behaviour,
    compare_logps,
    sampling_metrics,
    turn_gap_metrics,
)
from grpo_ray.learner.trl_config import trl_arguments
from grpo_ray.learner.trl_internals import (
    Metrics,
    append_metrics,
    scoring_allowed_tokens,
    scoring_labels_only,
    shard_without_gpus,
    sharding_reference_by_layer,
)
from grpo_ray.models.adapters import adapter_optimizer, base_model, peft_config, train_in_float32
from grpo_ray.models.quantized import kept_modules, quantize_policy
from grpo_ray.models.tokenizer import load_tokenizer
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase

SCHEDULER = "scheduler.pt"
"""File of a checkpoint with the state of the learning rate schedule, under transformers' name."""

REFERENCE = "reference.pt"
"""File of a checkpoint with the weights of the reference, if it follows the policy (`grpo.sync_ref_model`). It is not
a safetensors file, because vLLM loads every safetensors file in a folder as part of the policy."""


@dataclass(frozen=True)
class LossPass:
    """State of the loss's forward pass, which the overridden methods share; TRL passes no such argument to them."""

    batch: Batch
    """Micro-batch that is read."""
    layout: Layout
    """Arrangement of the rows."""
    is_compared: bool = False
    """True if the importance ratio and the check of the sync use the log-probabilities of this pass."""
    entropy_tokens: EntropyTokens | None = None
    """Tokens on which the entropy terms act; None until they are known."""
    entropies: torch.Tensor | None = None
    """(B, T), entropies that the pass computed, nats, with gradient."""


class Learner(GRPOTrainer):
    """Learner of one worker. It draws the step's problems from the worker's stream and updates the policy on them."""

    accelerator: Accelerator
    args: GRPOConfig
    is_fsdp_enabled: bool
    vllm_importance_sampling_correction: bool
    _metrics: dict[str, Metrics]
    _step: int

    def __init__(
        self,
        config: Config,
        problems: Iterable[tuple[Problem, int]],
        *,
        make_engine: Callable[["Learner"], Engine | DedicatedEngine],
        make_hooks: Callable[["Learner"], LearnerHooks] = no_hooks,
        profiler: PhaseProfiler | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **trl_trainer: Any,
    ) -> None:
        """
        Args:
            problems: the worker's own problems with their epochs, in order, from the first one not yet used.
            make_engine: starts the engine of a learner whose policy is loaded.
            make_hooks: returns the learner's hooks, which may refer to it; called before its policy is loaded.
            profiler: phase times of this worker; created by the thread that trains.
            callbacks: callbacks that come before those of the hooks.
            trl_trainer: other arguments of `GRPOTrainer`.
        """
        self.config = config
        self.profiler = profiler or PhaseProfiler()
        self.hooks = make_hooks(self)
        self.problems = self.profiler.timed_iterator("wait", problems)
        with sharding_reference_by_layer(config.cluster.shard_learner):
            super().__init__(callbacks=[ResumedSettings(), *callbacks, *self.hooks.callbacks], **trl_trainer)
        if config.model.adapter:
            train_in_float32(self.model)
        self._refuse_router_loss()
        self.remove_callback(PrinterCallback)  # metrics are in metrics.jsonl; the log is for messages
        if self.accelerator.device.type == "cuda":
            self.profiler.wait_for_device = torch.cuda.synchronize
            self._pack_rows(torch.cuda.get_device_capability(self.accelerator.device))
        self.use_vllm = True  # TRL's loss corrects for the difference between engine and learner
        self.engine = make_engine(self)
        if config.cluster.use_gpu and self.accelerator.is_main_process:
            self.hooks.notify(f"engine: {self.engine.description}")
        self.workers = Workers.of(self.accelerator)
        self.sync = WeightSync(self.engine, lambda: self.state.global_step)
        self.sync_checker = SyncChecker(self.check_sync)
        self.sample_reader = SampleReader(self.num_generations)
        self.schedule = BatchSchedule.of(self.args)
        self.collector = build_collector(self._parts())
        self.rollout: Rollout | None = None
        """Rollout of the current generation batch."""
        self.shuffled_rows: list[list[int]] = []
        """Shuffled row indices of each part of the rollout (`schedule.py`), divided into micro-batches in order."""
        self.micro_batches: list[Batch] = []
        """Micro-batches of the parts up to the current one, in the order in which they are read."""
        self.entropy_tokens: list[EntropyTokens] = []
        """High-entropy tokens of each micro-batch of the current part; empty if they are not needed, or only selected
        during the loss."""
        self.tokens_in_part: torch.Tensor | None = None
        """Tokens of the current part that count in the loss, over all workers; None without an entropy bonus."""
        self._tokens_read = torch.zeros((), dtype=torch.long, device=self.accelerator.device)
        self._loss_pass: LossPass | None = None

    # Parts

    def _parts(self) -> LearnerParts:
        """Return the parts of this learner that the collector of its steps uses."""
        return LearnerParts(
            config=self.config,
            args=self.args,
            engine=self.engine,
            tokenizer=self.processing_class,
            sync=self.sync,
            conversation_source=self.conversation_source,
            rewards=list(map(Reward, self.reward_func_names, self.reward_funcs)),
            reward_weights=self.reward_weights,
            end_tokens={*self.eos_token_ids, self.processing_class.pad_token_id},
            num_generations=self.num_generations,
            parts=self.schedule.parts,
            repeats=self.schedule.reads,
            pad_to_multiple_of=self.pad_to_multiple_of,
            importance=self._importance,
            model=self.model,
            passes=self,
            needs=self.loss_needs,
            workers=self.workers,
            profiler=self.profiler,
            state=lambda: self.state,
            append_metrics=self.append_metrics,
            count_tokens=self._count_sampled_tokens,
            notify=lambda line: self.hooks.notify(line),
        )

    @functools.cached_property
    def conversation_source(self) -> ConversationSource | None:
        """Sampler of multi-turn completions; None in a run of single turns."""
        if not self.config.rollout.has_conversations:
            return None
        return conversation_source(
            self.config,
            self.processing_class,
            max_model_len=self.engine.max_model_len,
            vocabulary_size=self.engine.vocabulary_size,
            # Ray kills the children of a worker that ends; only the next attempt can then remove their files.
            folder=self.args.output_dir,
        )

    def end_tools(self) -> None:
        """End the processes of tools and environments, and remove their files."""
        source = vars(self).get("conversation_source")  # do not create a source only to close it
        if source is not None:
            source.close()

    @functools.cached_property
    def savings(self) -> SavingsPlan:
        """Savings that this learner makes."""
        if not self.config.grpo.exact_savings:
            return SavingsPlan()
        return plan_savings(self.model, self._loss_settings)

    @property
    def _loss_settings(self) -> LossSettings:
        return LossSettings(
            loss_type=self.loss_type,
            beta=self.beta,
            num_iterations=self.num_iterations,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            steps_per_generation=self.args.steps_per_generation,
            top_entropy_quantile=self.top_entropy_quantile,
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_router_loss=bool(self.aux_loss_enabled),
            pad_to_multiple_of=self.args.pad_to_multiple_of,
            importance=self._importance,
        )

    @property
    def _importance(self) -> ImportanceSampling:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        return ImportanceSampling(
            self.vllm_importance_sampling_mode, -math.inf if low is None else low, math.inf if high is None else high
        )

    def loss_needs(self) -> LossNeeds:
        """Return the data that the loss needs in a step's batch."""
        return LossNeeds(
            importance=self._active_importance,
            old_logps=self.args.gradient_accumulation_steps % self.schedule.reads != 0,
            one_pass=self.savings.one_pass,
            behaviour_anchor=self._anchors_to_behaviour,
            masks_truncated=self.mask_truncated_completions,
        )

    @property
    def _anchors_to_behaviour(self) -> bool:
        return self.config.rollout.anchor == "behaviour"

    @property
    def _active_importance(self) -> ImportanceSampling | None:
        """Correction of the loss; None if it is off."""
        return self._importance if self.vllm_importance_sampling_correction else None

    def _refuse_router_loss(self) -> None:
        """Raise ConfigError if a router's auxiliary loss would depend on micro-batches or workers.

        The driver checks this too, for a policy whose `config.json` it can read without a download.
        """
        has_parts = self.accelerator.num_processes > 1 or self.args.gradient_accumulation_steps > 1
        if self.aux_loss_enabled and has_parts and (issue := router_loss_issue(self.config, self.router_aux_loss_coef)):
            raise ConfigError(issue)

    def _pack_rows(self, capability: tuple[int, int]) -> None:
        """Give policy and reference a packed-row kernel, if one is available and `attn_implementation` is unset.

        Args:
            capability: compute capability of the GPU.
        """
        if not (self.config.grpo.exact_savings and can_pack(self.model, self._loss_settings)):
            return
        models = [model for model in (base_model(self.model), self.ref_model) if model is not None]
        facts = AttentionFacts.of(
            models[0],
            is_16_bit=self.config.dtype != "float32",
            capability=capability,
            is_chosen="attn_implementation" in (self.config.grpo.trl.get("model_init_kwargs") or {}),
        )
        line = use_packing_attention(models, facts)
        if self.accelerator.is_main_process:
            self.hooks.notify(line)

    @property
    def heldout(self) -> HeldoutSolver:
        """Solver of held-out problems with this learner's weights."""
        return HeldoutSolver(
            self.config,
            self.engine,
            self.processing_class,
            self.workers,
            self.sync.update,
            self.conversation_source,
        )

    def append_metrics(self, values: Mapping[str, float]) -> None:
        """Add values of metrics, whose means are logged."""
        append_metrics(self._metrics["train"], values)

    # Setup, data and checkpoints

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which shards the learner without GPUs too."""
        super().create_accelerator_and_postprocess()
        if self.config.cluster.shard_learner:
            if not self.is_fsdp_enabled:
                shard_without_gpus(self.accelerator, self.args.fsdp_plugin_args)
                self.is_fsdp_enabled = True
            load_everywhere()  # a reference model, loaded from now on, must not be zeros

    def get_train_dataloader(self) -> Iterable[Rows]:
        """Return this worker's batches: whole groups, each batch repeated as often as TRL requests it."""
        prompts = self.config.sizes.prompts_per_worker * self.config.grpo.steps_per_generation
        return self.collector.attach(
            GroupBatches(self.problems, prompts, self.num_generations, repeats=self.schedule.reads)
        )

    def reward_states(self) -> dict[str, Any]:
        """Return the state of each reward that has one (`state_dict`), by its name."""
        return {
            name: reward.state_dict()
            for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True)
            if _is_stateful(reward)
        }

    def save_open_rollouts(self, folder: Path) -> None:
        """Write the completions of later steps into a checkpoint's folder; collective."""
        self.collector.sampler.save(folder)

    def load_open_rollouts(self, folder: Path) -> None:
        """Read the completions of later steps from a checkpoint's folder; called before the first step."""
        self.collector.sampler.load(folder)

    def load_reward_states(self, states: dict[str, Any]) -> None:
        """Restore the states that `reward_states` returned."""
        for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True):
            if _is_stateful(reward) and name in states:
                reward.load_state_dict(states[name])

    @in_phase("checkpoint")
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, timed, with the reference if it follows the policy."""
        super()._save_checkpoint(model, trial)
        if self.args.sync_ref_model and self.args.should_save:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            torch.save(self.accelerator.unwrap_model(self.ref_model).state_dict(), folder / REFERENCE)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer of `grpo.optim`, or the one of PEFT that `model.adapter_optimizer` names."""
        if self.config.model.adapter_optimizer is None:
            built: torch.optim.Optimizer = super().create_optimizer(model)
            return built
        adapted = self.model if model is None else model
        built = adapter_optimizer(adapted, self.config, *self.get_optimizer_cls_and_kwargs(self.args, adapted))
        self.optimizer = built
        return built

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy; for a sharded one, only the files without weights, and a gathered adapter. Collective."""
        if not self.config.cluster.shard_learner:
            super().save_model(output_dir, _internal_call)
            return
        adapter = {}
        if self.config.model.adapter:  # small, and evaluation and export expect PEFT's files
            adapter = gather_weights(trained_weights(self.model), keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, adapter)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of optimizer and schedule; in a sharded learner, each worker's part, with weights."""
        if not self.config.cluster.shard_learner:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(Path(output_dir), self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the policy, and the base of an adapter."""
        super()._save(output_dir, state_dict)
        record_checkpoint_kind(Path(output_dir or self.args.output_dir), self.config)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint. TRL would ignore weights or optimizer state of another kind without an error.

        Raises:
            CheckpointError: the checkpoint was written with another adapter or `cluster.shard_learner`, or without
                the reference that `grpo.sync_ref_model` needs.
        """
        check_checkpoint_kind(resume_from_checkpoint, self.config)
        if self.config.cluster.shard_learner:
            load_weights(Path(resume_from_checkpoint), self.model)
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.args.sync_ref_model:
            self._load_reference(Path(resume_from_checkpoint, REFERENCE))

    def _load_reference(self, file: Path) -> None:
        if not file.exists():
            raise CheckpointError(
                f"grpo.sync_ref_model=true: the checkpoint has no {REFERENCE}, the reference that followed the policy; "
                "set grpo.sync_ref_model=false, or start a new run"
            )
        weights = torch.load(file, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.ref_model).load_state_dict(weights)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state of optimizer and schedule; their settings stay those of the config.

        A run that begins at step 0 with another run's checkpoint also keeps its own position in the schedule.
        """
        if checkpoint is None:
            return
        settings = OptimizerSettings.of(self.optimizer, self.lr_scheduler)
        beginning = self.lr_scheduler.state_dict()
        super()._load_optimizer_and_scheduler(checkpoint)  # finds no optimizer state of a sharded learner
        if self.config.cluster.shard_learner:
            load_optimizer(Path(checkpoint), self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
        if self.config.model.adapter_optimizer:
            move_named_state(self.optimizer, self.accelerator.device)
        if self.state.global_step == 0:
            self.lr_scheduler.load_state_dict(beginning)
        settings.apply(self.optimizer, self.lr_scheduler)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: a checkpoint of a run is not a published model."""

    # Collecting

    def _prepare_inputs(self, generation_batch: Rows) -> Batch:
        """Return the next micro-batch; at the start of a generation batch, collect its rollout first."""
        if self.schedule.begins_part(self._step):
            with self.profiler.span("prepare"):
                if self.schedule.begins_batch(self._step):
                    self._collect(generation_batch)
                self._begin_part()
            self.collector.sampler.start_ahead(self.state)
        return self.micro_batches[self.schedule.place(self._step)]

    def _collect(self, rows: Rows) -> None:
        """Collect the rollout of a generation batch from its drawn rows, record its groups, and shuffle its rows."""
        self.sync_checker.reset()
        self.sample_reader.start_step(self.state.global_step + 1)
        self.rollout = self.collector.collect(rows)
        self.append_metrics(self.engine.metrics)
        self.hooks.record_groups(list(self.rollout.groups))
        size = len(rows) // self.schedule.parts
        # Shuffled as in TRL, with the same generator, but within the rows of each optimizer step.
        self.shuffled_rows = [(first + torch.randperm(size)).tolist() for first in range(0, len(rows), size)]
        self.micro_batches = []

    def _begin_part(self) -> None:
        """Begin a part: make its micro-batches in the first epoch, and select its entropy tokens; collective.

        Metrics of the repacking belong to the part's first optimizer step.
        """
        if self.schedule.is_first_epoch(self._step):
            self.micro_batches += self._make_micro_batches(self.shuffled_rows[self.schedule.part(self._step)])
        first = self.schedule.place(self._step)
        batches = self.micro_batches[first : first + self.schedule.per_part]
        self.sample_reader.locate(batches)
        self.entropy_tokens = self._select_entropy_tokens(batches)
        if self._entropy_bonus_enabled:
            self.tokens_in_part = self.workers.sum(torch.stack([loss_mask(batch).sum() for batch in batches]).sum())

    def _make_micro_batches(self, rows: list[int]) -> list[Batch]:
        """Divide the rollout's rows of one part into micro-batches, repacked if the savings require it; collective."""
        assert self.rollout is not None
        size = len(rows) // self.schedule.per_part
        batches = [select_rows(self.rollout.batch, rows[first : first + size]) for first in range(0, len(rows), size)]
        return self._repack(batches) if self.savings.repacks else batches

    def _repack(self, batches: list[Batch]) -> list[Batch]:
        """Repack micro-batches, so that less is read for the same gradient (exact savings)."""
        tokens = self.config.grpo.tokens_per_micro_batch
        packed, metrics = plan_micro_batches(batches, self.savings, self.loss_type, self.workers, tokens)
        self.append_metrics(metrics)
        return [batch | {"loss_scale": scale} for batch, scale in packed]

    def _count_sampled_tokens(self, tokens: int) -> None:
        """Add the tokens of a round, over all workers, to transformers' count of the run."""
        self.state.num_input_tokens_seen += tokens
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]

    def logps(self, batch: Batch) -> torch.Tensor:
        """Compute the policy's log-probabilities of a batch's completions: (B, T), nats, without dropout; collective.

        The engine has no dropout either.
        """
        with without_dropout(self.model), self._without_checkpointing():
            logps: torch.Tensor = self._forward(self.model, batch)[0]
        return logps

    def reference_logps(self, batch: Batch) -> torch.Tensor | None:
        """Compute the reference's log-probabilities, (B, T) in nats; None without a KL term; collective.

        With an adapter, the reference is the policy without it, or with the adapter that training began with.
        """
        if self.beta == 0.0:
            return None
        with without_dropout(self.model), self._without_checkpointing():
            if self.ref_model is not None:
                logps: torch.Tensor = self._forward(self.ref_model, batch)[0]
                return logps
            adapted = self.accelerator.unwrap_model(self.model)
            with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
                logps = self._forward(self.model, batch)[0]
                return logps

    def _without_checkpointing(self) -> Any:
        """Return a context without gradient checkpointing, which would warn in a pass without gradient."""
        return disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)

    def groups_for_study(self) -> list[dict[str, Any]]:
        """Return this worker's groups of the current step in JSON types, for the study of non-finite numbers.

        Called after the step's last micro-batch, before the optimizer step.
        """
        if self.rollout is None:
            return []
        rows = sorted(self.shuffled_rows[self.schedule.part(self._step - 1)])
        return self.collector.recorder.study(self.rollout.take(rows), self.state.global_step + 1)

    def _select_entropy_tokens(self, batches: list[Batch]) -> list[EntropyTokens]:
        """Select the tokens of high entropy of each micro-batch of the step that begins; collective.

        Takes one more forward pass over each micro-batch, since the quantile of all of them must be known before the
        first loss. Empty, without a pass, for a single micro-batch or without a quantile.
        """
        if len(batches) == 1 or self.top_entropy_quantile == 1.0:
            return []
        with without_dropout(self.model):
            entropies = [self._forward(self.model, batch, compute_entropy=True)[1] for batch in batches]
        masks = [loss_mask(batch) for batch in batches]
        return select_high_entropy(entropies, masks, 1 - self.top_entropy_quantile, self.workers)

    # Loss and sync check

    @in_phase("forward_backward")
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward on a micro-batch; after the last one of a part, check the sync if that is still due.

        It is still due only if a batch serves one optimizer step, which has not been taken yet at that point.
        """
        loss = super().training_step(*args, **kwargs)
        if self.schedule.begins_part(self._step):
            assert self.rollout is not None
            if (tokens := self.sync_checker.take_observed(is_on_policy=self.rollout.is_on_policy)) is not None:
                self.append_metrics(sampling_metrics(tokens, self.workers))
                if self.rollout.is_on_policy:  # otherwise they also show how far the policy has moved
                    self._append_turn_gaps(tokens)
            self.collector.sampler.finish_ahead()
            self.hooks.record_tokens(self.sample_reader.collect())
        self.hooks.observe_loss(loss)
        self._count_tokens()
        return loss

    def _count_tokens(self) -> None:
        """Count the loss tokens of the last micro-batch; report the total after the last one of an optimizer step."""
        batch = self.micro_batches[self.schedule.place(self._step - 1)]
        self._tokens_read += loss_mask(batch).sum()
        if self.accelerator.sync_gradients:  # the gradient is checked next, which waits for the device anyway
            self.profiler.wait_for_device()
            self.profiler.count_tokens("learner", int(self._tokens_read))
            self._tokens_read.zero_()

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """Compute the loss of the remaining rows, scaled to their share of the original micro-batch."""
        scale = inputs.get("loss_scale")
        if scale is not None and not len(inputs["advantages"]):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        self._loss_pass = self._plan_loss_pass(inputs)
        coefficient = self._entropy_coefficient  # TRL's controller changes it with the last micro-batch
        try:
            loss = super()._compute_loss(model, inputs)
            if coefficient:
                loss = loss - coefficient * self._entropy_correction(inputs, self._loss_pass)
        finally:
            self._loss_pass = None
        if scale is None:
            return loss
        scale_metrics(self._metrics["train"], scale, self.importance_sampling_level)
        return loss * scale.loss_factor

    def _plan_loss_pass(self, inputs: Batch) -> LossPass:
        tokens = self.entropy_tokens[self.schedule.place_in_part(self._step)] if self.entropy_tokens else None
        return LossPass(inputs, self.savings.layout, self.savings.one_pass, tokens)

    @property
    def _entropy_coefficient(self) -> float:
        """Coefficient of the entropy bonus in this step, as TRL applies it; 0 if there is no bonus."""
        is_high = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return 0.0 if is_high else float(self.entropy_coef)

    def _entropy_correction(self, inputs: Batch, done: LossPass) -> torch.Tensor:
        """Compute the difference between a micro-batch's part of the step's mean entropy and TRL's part; (), nats."""
        assert done.entropies is not None and self.tokens_in_part is not None
        tokens = done.entropy_tokens or EntropyTokens(loss_mask(inputs), self.tokens_in_part)
        return entropy_bonus_correction(
            done.entropies, tokens, self.args.gradient_accumulation_steps, self.workers.count
        )

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """Return (B, T) bool, True on the micro-batch's tokens whose entropy is at or above the step's quantile."""
        assert self._loss_pass is not None
        tokens = self._loss_pass.entropy_tokens
        if tokens is None:  # the only micro-batch of the step
            (tokens,) = select_high_entropy([entropies.detach()], [mask], threshold, self.workers)
            self._loss_pass = replace(self._loss_pass, entropy_tokens=tokens)
        return tokens.mask

    @in_phase("forward_backward")
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Compute log-probabilities and entropies of completions, (B, T) in nats, and a router's loss or None.

        Takes one forward pass in the loss, and as many as the completions need elsewhere; collective.
        """
        loss_pass = self._loss_pass
        layout = self.savings.layout if loss_pass is None else loss_pass.layout
        scores: tuple[Any, ...]
        parts = None
        if layout != "padded" and loss_pass is None:
            parts = self._plan_scoring(attention_mask.sum(dim=1).tolist())
        reader = self._mask_reader(input_ids, attention_mask, logits_to_keep, parts)
        with scoring_labels_only(self.savings.head or reader is not None), scoring_allowed_tokens(reader):
            if layout == "padded":
                scores = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
            elif parts is not None:
                autocast = self.accelerator.autocast
                scores = *score_rows(layout, model, input_ids, attention_mask, logits_to_keep, autocast, parts), None
            else:
                autocast = self.accelerator.autocast()
                scores = *score_tokens(layout, model, input_ids, attention_mask, logits_to_keep, autocast), None
        if loss_pass is None:
            return scores
        self.sample_reader.observe_pass(self.schedule.place_in_part(self._step), loss_pass.batch, scores[0])
        if loss_pass.is_compared:  # now, since the rest of the loss needs the importance ratio
            logps = scores[0].detach()
            self.sync_checker.observe(compare_logps(loss_pass.batch, logps, self._active_importance))
            if self._anchors_to_behaviour:
                anchor_to_behaviour(loss_pass.batch, logps)
        self._loss_pass = replace(loss_pass, entropies=scores[1])
        return scores

    def _mask_reader(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completions: int,
        parts: list[list[int]] | None,
    ) -> MaskReader | None:
        """Return a reader of the masks of all completion tokens, in the order of the passes; None without a form.

        The last `completions` columns are the completions. `parts` has the rows of each pass; None: in their own order.
        """
        if self.config.rollout.structured_outputs is None:
            return None
        order = range(len(input_ids)) if parts is None else [row for part in parts for row in part]
        ids = input_ids[:, -completions:].tolist()
        lengths = attention_mask[:, -completions:].sum(dim=1).tolist()
        assert self.engine.form_masks is not None
        return self.engine.form_masks.reader([ids[row][: lengths[row]] for row in order])

    def _plan_scoring(self, lengths: list[int]) -> list[list[int]]:
        """Return the rows of each pass over completions of these lengths; collective.

        All workers make the same number of passes.
        """
        limit = self._pass_limit
        passes = fewest_passes(lengths, limit)
        if limit.tokens is not None:  # the rows of other workers have other lengths
            passes = int(self.workers.gather(torch.tensor([passes], device=self.accelerator.device)).max())
        return split_rows(lengths, passes, limit)

    @property
    def _pass_limit(self) -> PassLimit:
        """Limit of a forward pass."""
        return self.savings.pass_limit(self.args.per_device_train_batch_size, self.config.grpo.tokens_per_micro_batch)

    @in_phase("optimizer")
    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Clip the gradient, timed."""
        return super()._clip_grad_norm(model)

    @torch.no_grad()
    def _forward(self, model: Any, batch: Batch, **options: Any) -> tuple[Any, ...]:
        """Compute log-probabilities and entropies of a batch's completions, (B, T) in nats; collective."""
        scores: tuple[Any, ...] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            **options,
        )
        reshard(model)
        return scores

    def prove_batch(self, logps: torch.Tensor, batch: Batch) -> None:
        """Check the sync with the learner's log-probabilities of a whole batch, (B, T) in nats; collective."""
        self.sample_reader.observe_scored(batch, logps)
        self.check_sync(logps, proof_logps(batch), loss_mask(batch))
        self._append_turn_gaps(compare_logps(batch, logps, importance=None))

    def check_sync(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Check that the engine has the learner's weights, and append the gap to the metrics; collective.

        The check cannot be turned off (proven weight sync).

        Args:
            learner_logps, engine_logps, mask: of one shape; log-probabilities of the same tokens in nats, and 1 where
                they count.

        Raises:
            SyncError: the mean gap is beyond the engine's tolerance.
        """
        gap = self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)
        self.append_metrics({"engine/logprob_gap_mean": gap.mean, "engine/logprob_gap_max": gap.max})

    def _append_turn_gaps(self, tokens: TokenLogps | None) -> None:
        """Append the gaps of first and later turns to the metrics, if completions have several; collective."""
        if tokens is not None and self.config.rollout.has_conversations:
            self.append_metrics(turn_gap_metrics(tokens, self.workers))


def build_learner(
    config: Config,
    *,
    model_path: str,
    output_dir: str,
    problems: Iterable[tuple[Problem, int]],
    make_hooks: Callable[[Learner], LearnerHooks] = no_hooks,
    on_progress: Callable[[str], None] = ignore,
    profiler: PhaseProfiler | None = None,
    pool: Any = None,
) -> Learner:
    """Load the policy, start the engine, and return the worker's learner.

    Args:
        model_path: local folder or hub id of the policy.
        output_dir: folder of this worker and this attempt alone; checkpoints are written there before upload.
        problems: the worker's own problems with their epochs, in order, from the first one not yet used.
        make_hooks: returns the learner's hooks, which may refer to it; called before its policy is loaded.
        on_progress: called with the name of the stage that begins.
        profiler: phase times of this worker; created by the thread that trains.
        pool: handle of the run's `EnginePool` actor; None with colocated engines.
    """
    args = trl_arguments(config, output_dir)
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)

    def make_engine(learner: Learner) -> Engine | DedicatedEngine:
        notify = learner.hooks.notify if learner.accelerator.is_main_process else ignore
        of_learner = (learner.model, learner.accelerator, tokenizer)
        if pool is not None:
            on_progress("waiting for the engines")
            return DedicatedEngine(*of_learner, config=config, pool=pool, profiler=learner.profiler, notify=notify)
        on_progress("starting the engine")
        return Engine(*of_learner, config=config, args=args, profiler=learner.profiler, notify=notify)

    on_progress("loading the policy")
    return Learner(
        config,
        problems,
        make_engine=make_engine,
        make_hooks=make_hooks,
        profiler=profiler,
        model=_policy(config, model_path, args),
        reward_funcs=load_rewards(config.rewards),
        args=args,
        # TRL requires a `datasets` object; the problems come from `get_train_dataloader`.
        train_dataset=Dataset.from_dict({"prompt": ["-"]}),
        processing_class=tokenizer,
        peft_config=peft_config(config),
    )


def _policy(config: Config, model_path: str, args: GRPOConfig) -> Any:
    """Return the policy, or its path if TRL itself loads it."""
    if config.cluster.shard_learner:
        return load_policy(model_path, args)
    if config.model.quantization is None:
        return model_path
    policy = create_model_from_path(model_path, **policy_settings(args))
    quantize_policy(policy, config.model.quantization, kept_modules(config.model.adapter))
    return policy


def _is_stateful(reward: Any) -> bool:
    """Return True if a reward has a state to save."""
    return hasattr(reward, "state_dict")


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules below a model into evaluation mode; the model's own flag stays, since TRL reads it."""
    training = [module for module in model.modules() if module.training and module is not model]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
