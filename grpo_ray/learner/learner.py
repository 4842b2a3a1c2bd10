"""The GRPO learner: the one subclass of TRL's trainer.

Its overrides of TRL's methods are short, and delegate to objects that need no trainer: a savings plan
(`exact_savings.py`), the repacking of micro-batches (`micro_batches.py`), a rollout source (`rollouts/source.py`), the
check of the weight sync (`sync_check.py`) and the records of groups (`rollouts/group_recorder.py`, `samples.py`).
`tests/integration/learner/test_learner.py` lists the methods of TRL that are overridden or relied on, and fails if a
TRL release changes one of them.

| method of TRL | reason for the override |
|---|---|
| `__init__` | our engine in place of TRL's |
| `create_accelerator_and_postprocess` | a sharded learner without GPUs |
| `get_train_dataloader` | the worker's own stream of problems in place of a `datasets` object |
| `_prepare_inputs` | repack micro-batches; generate one step ahead |
| `_generate_and_score_completions` | rounds of dynamic sampling, records of groups, check of the sync |
| `_tokenize_prompts` | prompts are rendered by the function that held-out measuring uses |
| `_generate_single_turn` | completions that were generated ahead; the wait for other workers is timed |
| `_calculate_rewards` | timed; rewards are kept for the records |
| `_compute_loss` | the loss of a repacked micro-batch; the entropy bonus of the whole step |
| `get_high_entropy_mask` | the quantile of the whole step in place of the micro-batch's |
| `_get_per_token_logps_and_entropies` | forward passes without padding; importance ratio from the loss's own pass |
| `_log_metric`, `_log_completion_extra` | metrics of rewards get names of ours; dropped columns are announced |
| `training_step` | check of the sync before the optimizer step; loss observed, tokens counted |
| `_clip_grad_norm` | timed |
| `_save_checkpoint` | timed; saves a reference that follows the policy |
| `save_model` | of a sharded policy only the config, the tokenizer and an adapter are written by one worker |
| `_save_optimizer_and_scheduler` | each worker writes its part of a sharded learner |
| `_save` | an adapter's checkpoint names its policy |
| `_load_from_checkpoint` | a checkpoint of the wrong kind is refused; loads that reference, or this worker's part |
| `_load_optimizer_and_scheduler` | settings of the config in place of the checkpoint's; loads this worker's part |
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
from trl import GRPOConfig, GRPOTrainer

from grpo_ray.config.schema import Config
from grpo_ray.config.validation import router_loss_issue
from grpo_ray.data.problem import Problem, reward_columns
from grpo_ray.errors import CheckpointError, ConfigError
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.conversations import ConversationSampler
from grpo_ray.inference.engine import Engine, OnFinished
from grpo_ray.inference.sampling import Completion
from grpo_ray.learner.attention import AttentionFacts, use_packing_attention
from grpo_ray.learner.batch import Batch, CompletionRows, is_text_only, loss_mask, pad_logps, proof_logps
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.entropy import EntropyTokens, entropy_bonus_correction, select_high_entropy
from grpo_ray.learner.exact_savings import LossSettings, SavingsPlan, can_pack, plan_savings
from grpo_ray.learner.forward_pass import score_rows, score_tokens
from grpo_ray.learner.micro_batches import plan_micro_batches, scale_metrics
from grpo_ray.learner.passes import Layout, PassLimit, fewest_passes, split_rows
from grpo_ray.learner.resume import OptimizerSettings, ResumedSettings
from grpo_ray.learner.rollouts.diversity import distinct_share
from grpo_ray.learner.rollouts.dynamic_sampling import DynamicSampler, Padding
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder
from grpo_ray.learner.rollouts.heldout import HeldoutSolver
from grpo_ray.learner.rollouts.one_step_off_policy import (
    AheadGenerator,
    AheadOperations,
    Generation,
    Rows,
    require_deterministic_model,
)
from grpo_ray.learner.rollouts.samples import SampleChooser, SampleReader
from grpo_ray.learner.rollouts.source import OneStepOffPolicySource, OnPolicySource, RolloutSource
from grpo_ray.learner.sharding import (
    gather_weights,
    load_everywhere,
    load_optimizer,
    load_policy,
    load_weights,
    save_state,
    trained_weights,
)
from grpo_ray.learner.sync_check import (
    ImportanceSampling,
    SyncChecker,
    TokenLogps,
    compare_logps,
    sampling_metrics,
    turn_gap_metrics,
)
from grpo_ray.learner.trl_config import trl_arguments
from grpo_ray.learner.trl_internals import (
    Metrics,
    append_metrics,
    scoring_labels_only,
    shard_without_gpus,
    sharding_reference_by_layer,
)
from grpo_ray.models.lora import base_model, has_adapter, peft_config, record_base_policy
from grpo_ray.models.shards import has_shards
from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts
from grpo_ray.rewards.environment import COLUMN as ENVIRONMENT_REWARD
from grpo_ray.rewards.metrics import reward_metric
from grpo_ray.rewards.registry import load_rewards, start_grading
from grpo_ray.storage.rollouts import GroupRecord, LossTokens
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase
from grpo_ray.tools.conversation import Conversation, conversation_metrics
from grpo_ray.tools.template import GRAMMARS

GATHERED_OPTIMIZER = "optimizer.bin"
"""File of a checkpoint with the optimizer's state that earlier versions gathered from a sharded learner."""

SCHEDULER = "scheduler.pt"
"""transformers' file of a checkpoint with the state of the learning rate's schedule."""

REFERENCE = "reference.pt"
"""File of a checkpoint with the weights of the reference, if it follows the policy (`grpo.sync_ref_model`). It is no
safetensors file, since vLLM loads all of those in a folder as the policy's."""

SCORING_OPTIONS = {"batch_size", "compute_entropy", "compute_aux_loss"}
"""Options of TRL's `_get_per_token_logps_and_entropies` for completions of text; the others are columns of images."""


def _ignore(*args: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class LearnerHooks:
    """Callbacks of a learner and functions that it calls while it trains."""

    callbacks: Sequence[TrainerCallback] = ()
    record_groups: Callable[[list[GroupRecord]], None] = _ignore
    """Gets this worker's groups of a step, before the step is taken."""
    record_tokens: Callable[[list[LossTokens]], None] = _ignore
    """Gets the tokens of sampled completions that this worker has read, after the last micro-batch of a batch."""
    observe_loss: Callable[[torch.Tensor], None] = _ignore
    """Gets the loss of each micro-batch."""
    notify: Callable[[str], None] = _ignore
    """Shows the user a line."""


def no_hooks(learner: "Learner") -> LearnerHooks:
    """Return hooks that do nothing."""
    return LearnerHooks()


@dataclass(frozen=True)
class LossPass:
    """The forward pass that computes the loss, as its overridden parts need it; TRL passes no such argument."""

    batch: Batch
    """Micro-batch that is read."""
    layout: Layout
    """Arrangement of the rows."""
    is_compared: bool = False
    """Give the batch its importance ratio from this pass, and check the sync with it."""
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
    _buffered_inputs: list[Batch] | None
    _metrics: dict[str, Metrics]
    _step: int

    def __init__(
        self,
        config: Config,
        problems: Iterable[tuple[Problem, int]],
        *,
        make_engine: Callable[["Learner"], Engine],
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
        if config.rollout.has_turns:
            trl_trainer["rollout_func"] = self._generate_conversations
        with sharding_reference_by_layer(config.cluster.shard_learner):
            super().__init__(callbacks=[ResumedSettings(), *callbacks, *self.hooks.callbacks], **trl_trainer)
        self._refuse_router_loss()
        self.remove_callback(PrinterCallback)  # metrics are in metrics.jsonl; the log is for messages
        if self.accelerator.device.type == "cuda":
            self.profiler.wait_for_device = torch.cuda.synchronize
            self._pack_rows(torch.cuda.get_device_capability(self.accelerator.device))
        self.use_vllm = True
        self.vllm_generation = make_engine(self)
        if config.cluster.use_gpu and self.accelerator.is_main_process:
            self.hooks.notify(f"engine: {self.engine.description}")
        self._last_loaded_step = -1
        self.workers = Workers.of(self.accelerator)
        self.sync_checker = SyncChecker(self.check_sync)
        self.sample_chooser = SampleChooser(self.num_generations, self.reward_weights, self.workers.rank)
        self.sample_reader = SampleReader(self.num_generations)
        self.rollout_source = self._make_rollout_source()
        self._tokens_read = torch.zeros((), dtype=torch.long, device=self.accelerator.device)
        self._loss_pass: LossPass | None = None
        self._entropy_tokens: list[EntropyTokens] = []
        self._scored: tuple[torch.Tensor, list[list[int]]] | None = None
        self._dropped_columns: set[str] = set()
        self._unprocessed_logps: list[list[float | None]] | None = None
        self._rows: CompletionRows | None = None
        self._inputs: Rows = []
        self._conversations: list[Conversation] | None = None

    # Parts

    @property
    def engine(self) -> Engine:
        """Engine of the worker; TRL's name for it is `vllm_generation`."""
        return self.vllm_generation

    @functools.cached_property
    def conversation_sampler(self) -> ConversationSampler | None:
        """Sampler of completions with tools or an environment; None if the run has neither."""
        if not self.config.rollout.has_turns:
            return None
        # Ray kills the children of a worker that ends, so nothing but the next attempt can remove their files then.
        scratch = self.args.output_dir
        return ConversationSampler(self.config, self.processing_class, self.engine.max_model_len, scratch)

    def end_tools(self) -> None:
        """End the processes of tools and environments, and remove their files."""
        sampler = vars(self).get("conversation_sampler")  # none is made for this
        if sampler is not None:
            sampler.close()

    @functools.cached_property
    def savings(self) -> SavingsPlan:
        """Savings that this learner makes."""
        if not self.config.grpo.exact_savings:
            return SavingsPlan()
        plan = plan_savings(self.model, self._loss_settings)
        # One step off-policy, the policy has moved since the completions were generated.
        return replace(plan, one_pass=False) if self.config.grpo.generate_ahead else plan

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
        """Give policy and reference an attention for packed rows, where it can be had and the user chose none.

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

    def _make_rollout_source(self) -> RolloutSource:
        if self.config.grpo.generate_ahead:
            require_deterministic_model(self.model, self.accelerator.device)
            return OneStepOffPolicySource(
                self._roll_out, self._record, self._make_ahead_generator, self._active_importance, self.workers
            )
        sampler = None
        if self.config.grpo.dynamic_sampling:
            padding = Padding(self._tokenizer.pad_token_id, self.pad_to_multiple_of, self._importance.padding_ratio)
            sampler = DynamicSampler(
                self.config.grpo.dynamic_sampling, self.num_generations, self.reward_weights, padding, self.workers
            )
        return OnPolicySource(self._roll_out, self._record, sampler)

    def _make_ahead_generator(self, next_rows: Callable[[], Rows]) -> AheadGenerator:
        return AheadGenerator(
            AheadOperations(next_rows, self._prepare_generation, self._score_completions, self._compare_with_engine),
            pad_token_id=self.processing_class.pad_token_id,
            device=self.accelerator.device,
            profiler=self.profiler,
        )

    @property
    def _end_tokens(self) -> set[int]:
        """Token ids with which a completion can end."""
        return {*self.eos_token_ids, self.processing_class.pad_token_id}

    @property
    def recorder(self) -> GroupRecorder:
        """Converter of scored completions to group records."""
        return GroupRecorder(
            self.num_generations,
            self.reward_func_names,
            self.reward_weights,
            self.processing_class,
            self._end_tokens,
        )

    @property
    def heldout(self) -> HeldoutSolver:
        """Solver of held-out problems with this learner's weights."""
        return HeldoutSolver(
            self.config,
            self.engine,
            self.processing_class,
            self.workers,
            self._sync_weights,
            self.conversation_sampler,
        )

    # Setup, data and checkpoints

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which shards the learner without GPUs too."""
        super().create_accelerator_and_postprocess()
        if self.config.cluster.shard_learner:
            if not self.is_fsdp_enabled:
                shard_without_gpus(self.accelerator, self.args.fsdp_plugin_args)
                self.is_fsdp_enabled = True
            load_everywhere()  # the policy is loaded; no worker may get zeros for a reference or reward model

    def get_train_dataloader(self) -> Iterable[Rows]:
        """Return this worker's batches: whole groups, each batch repeated as often as TRL asks for it."""
        repeats = self.args.steps_per_generation * self.num_iterations
        batches = GroupBatches(self.problems, self.config.prompts_per_worker, self.num_generations, repeats)
        return self.rollout_source.attach(batches)

    def reward_states(self) -> dict[str, Any]:
        """Return the state of each reward that has one (`state_dict`), by its name."""
        return {
            name: reward.state_dict()
            for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True)
            if _is_stateful(reward)
        }

    def load_reward_states(self, states: dict[str, Any]) -> None:
        """Restore the states that `reward_states` returned."""
        for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True):
            if _is_stateful(reward) and name in states:
                reward.load_state_dict(states[name])

    @in_phase("checkpoint")
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, timed, with the reference if it is not the initial policy."""
        super()._save_checkpoint(model, trial)
        if self.args.sync_ref_model and self.args.should_save:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            torch.save(self.accelerator.unwrap_model(self.ref_model).state_dict(), folder / REFERENCE)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy; of a sharded one only the files without weights, and a gathered adapter. Collective."""
        if not self.config.cluster.shard_learner:
            super().save_model(output_dir, _internal_call)
            return
        adapter = {}
        if self.config.model.lora:  # small, and evaluation and export expect PEFT's files
            adapter = gather_weights(trained_weights(self.model), keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, adapter)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of optimizer and schedule; of a sharded learner each worker's part, the weights' too."""
        if not self.config.cluster.shard_learner:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(Path(output_dir), self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the policy. An adapter's checkpoint names its policy as the config does, not this worker's copy."""
        super()._save(output_dir, state_dict)
        if self.config.model.lora:
            record_base_policy(Path(output_dir or self.args.output_dir), self.config)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint. TRL would ignore weights or optimizer state of another kind without an error.

        Raises:
            CheckpointError: the checkpoint was written with another `model.lora` or `cluster.shard_learner`, or without
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

        The checkpoint of another run, with which a run begins at step 0, gives no position in the schedule.
        """
        if checkpoint is None:
            return
        settings = OptimizerSettings.of(self.optimizer, self.lr_scheduler)
        beginning = self.lr_scheduler.state_dict()
        super()._load_optimizer_and_scheduler(checkpoint)  # finds no optimizer state of a sharded learner
        if self.config.cluster.shard_learner:
            load_optimizer(Path(checkpoint), self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
        if self.state.global_step == 0:
            self.lr_scheduler.load_state_dict(beginning)
        settings.apply(self.optimizer, self.lr_scheduler)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: a checkpoint of a run is not a published model."""

    # Generation

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """Return the next micro-batch; those of a new generation batch are repacked first."""
        starts_batch = self._step % self.args.steps_per_generation == 0
        with self.profiler.span("prepare"):
            before = self._buffered_inputs
            inputs = super()._prepare_inputs(generation_batch)
            batches = self._buffered_inputs
            if batches is not None and batches is not before and self.savings.repacks and is_text_only(batches[0]):
                inputs = self._repack(batches)
            if starts_batch:
                self.sample_reader.locate(self._buffered_inputs or ())
                self._entropy_tokens = self._select_entropy_tokens()
        if starts_batch:
            self.rollout_source.start_ahead(self.state)
        return inputs

    def _repack(self, batches: list[Batch]) -> Batch:
        """Repack the micro-batches of a generation batch, and return the first one."""
        tokens = self.config.grpo.tokens_per_micro_batch
        packed, metrics = plan_micro_batches(batches, self.savings, self.loss_type, self.workers, tokens)
        append_metrics(self._metrics["train"], metrics)
        self._buffered_inputs = [batch | {"loss_scale": scale} for batch, scale in packed]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _select_entropy_tokens(self) -> list[EntropyTokens]:
        """Select the tokens of high entropy of each micro-batch of the step that begins; collective.

        Takes one more forward pass over each micro-batch if there are several, since their quantile must be known
        before the first loss. The list is empty otherwise.
        """
        batches = self._buffered_inputs
        if batches is None or len(batches) == 1 or self.top_entropy_quantile == 1.0:
            return []
        with without_dropout(self.model):
            entropies = [self._forward(batch, compute_entropy=True)[1] for batch in batches]
        masks = [loss_mask(batch) for batch in batches]
        return select_high_entropy(entropies, masks, 1 - self.top_entropy_quantile, self.workers)

    def _generate_and_score_completions(self, inputs: Rows) -> Batch:
        """Collect a step's completions and record them; check the sync now, unless the loss's own pass does it."""
        self.sample_chooser.start_step()
        self.sample_reader.start_step(self.state.global_step + 1)
        with without_dropout(self.model):  # the engine has no dropout either
            step = self.rollout_source.collect(inputs)
            append_metrics(self._metrics["train"], step.metrics)
            self._rows = step.rows
            output = step.rows.output
            if not self.savings.one_pass:
                learner_logps = output.get("old_per_token_logps")
                if learner_logps is None:  # TRL computes them only for its importance correction
                    learner_logps = self._logps(output)
                self.sample_reader.observe_scored(output, learner_logps)
                self.check_sync(learner_logps, proof_logps(output), loss_mask(output))
                self._append_turn_gaps(compare_logps(output, learner_logps, importance=None))
        self.hooks.record_groups(step.groups)
        return output

    def _roll_out(self, inputs: Rows, *, score_logps: bool = True) -> CompletionRows:
        """Generate and score one batch with TRL.

        Args:
            score_logps: let TRL compute the learner's log-probabilities for its importance correction, unless the
                loss's own pass computes them.
        """
        self._prepare_engine(inputs)
        if self.config.rollout.has_turns:
            self._sync_weights()  # before TRL would, which does not prove the engine's weights when it needs no sync
        self.sync_checker.reset()
        configured = self.vllm_importance_sampling_correction
        if not score_logps or (self.savings.one_pass and self.model.training):
            self.vllm_importance_sampling_correction = False
        try:
            with self._hidden_grammar():
                output = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = configured
        self.engine.on_finished = _ignore
        assert self._scored is not None
        rewards_of_all, token_ids = self._scored
        # TRL gathers the rewards of all workers, by rank, and each worker has as many.
        rewards = rewards_of_all.chunk(self.workers.count)[self.workers.rank].clone()
        self.sample_chooser.mark(output, rewards_of_all)
        diversity = distinct_share(token_ids, self.num_generations, self.workers)
        append_metrics(self._metrics["train"], {"group/distinct_share": diversity})
        if self._unprocessed_logps is not None:
            width = output["completion_ids"].size(1)
            output["unprocessed_per_token_logps"] = pad_logps(self._unprocessed_logps, width, self.accelerator.device)
        return CompletionRows(inputs, token_ids, rewards, output, self._conversations)

    @contextmanager
    def _hidden_grammar(self) -> Iterator[None]:
        """Hide the grammar of calls from TRL, which would read whole conversations with it, and fail on deep brackets.

        The sampler has read each turn with a copy of the tokenizer.
        """
        tokenizer = self.processing_class
        shown = {name: getattr(tokenizer, name, None) for name in GRAMMARS} if self.conversation_sampler else {}
        for name in shown:
            setattr(tokenizer, name, None)
        try:
            yield
        finally:
            for name, grammar in shown.items():
                setattr(tokenizer, name, grammar)

    def _prepare_engine(self, inputs: Rows) -> None:
        """Give the engine's next completions their seeds, and start grading each as soon as it is finished."""
        self._inputs = inputs
        self.engine.seeds = [
            request_seed(self.config.run.seed, row["id"], row["epoch"], row["index"]) for row in inputs
        ]
        self._start_early_grading(inputs)

    def _start_early_grading(self, inputs: Rows) -> None:
        """Grade each completion while the engine still generates others, so that the reward finds its verdict ready."""
        rewards = self.config.rewards
        if "correctness" not in rewards.functions:
            return

        def grade(index: int, token_ids: list[int]) -> None:
            self._grade(index, self.processing_class.decode(token_ids, skip_special_tokens=True))

        self.engine.on_finished = grade

    def _grade(self, index: int, answer: str | list[dict[str, Any]]) -> None:
        """Start grading a row's text or conversation."""
        rewards = self.config.rewards
        verdict = start_grading(answer, self._inputs[index]["solution"], rewards.strict, rewards.time_limit)
        verdict.add_done_callback(self.profiler.begin_concurrent("verdicts"))

    def _generate_conversations(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Sample completions of several turns; TRL's `rollout_func`. The prompts are those of the rows of the batch.

        Returns:
            (B,) lists of token ids of prompts and completions, of log-probabilities in nats, and of `env_mask`: 1 on
            tokens of the policy, 0 on those of results.
        """
        sampler = self.conversation_sampler
        assert sampler is not None
        grades = "correctness" in self.config.rewards.functions

        def grade(row: int, conversation: Conversation) -> None:
            if grades:
                self._grade(row, conversation.messages)

        with self.profiler.span("tools"), self.engine.rounds() as run_round:

            def generate(
                prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: OnFinished
            ) -> list[Completion]:
                with self.profiler.span("generate"):
                    completions = run_round(prompts, sampling, on_finished)
                self.profiler.count_tokens("engine", sum(len(each.token_ids) for each in completions))
                return completions

            sampled = sampler.sample(
                self._inputs,
                self.engine.training_sampling,
                generate,
                is_any_active=self.engine.is_any_active,
                on_ended=grade,
                on_result=self.profiler.note_progress,
            )
        self._conversations = sampled
        self._unprocessed_logps = None
        if self.config.sampling.processing:
            self._unprocessed_logps = [each.unprocessed_logps or [] for each in sampled]
        with self.profiler.span("wait_workers"):
            self.accelerator.wait_for_everyone()
            summaries = self.workers.gather_objects([each.summary for each in sampled])
        metrics = conversation_metrics([each for worker in summaries for each in worker])
        append_metrics(self._metrics["train"], metrics)
        return {
            "prompt_ids": [each.prompt_ids for each in sampled],
            "completion_ids": [each.token_ids for each in sampled],
            "logprobs": [each.logps for each in sampled],
            "env_mask": [each.own for each in sampled],
        }

    def _prepare_generation(self, inputs: Rows) -> tuple[list[list[int]], Callable[[], Generation]]:
        """Sync the engine for a batch generated ahead; return its prompts, and the function that generates for them."""
        self._prepare_engine(inputs)
        prompt_ids, images, fields = self._tokenize_prompts([row["prompt"] for row in inputs])
        self._sync_weights()
        return prompt_ids, lambda: self._generate_now(prompt_ids, images, fields, self.num_generations)

    def _sync_weights(self) -> None:
        """Give the engine the learner's weights, if it does not have those of this step; prove that it has them."""
        proofs = self.engine.proofs
        if self._last_loaded_step != self.state.global_step:
            self.engine.sync_weights()
            self._last_loaded_step = self.state.global_step
        if self.engine.proofs == proofs:  # without a sync, or with one that was left out by mistake
            self.engine.prove_weights()

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Render and tokenize prompts of chat messages; returns their token ids, (B,) lists, and no images."""
        return tokenize_prompts(self.processing_class, prompts, self.config.chat_template_kwargs), None, {}

    def _generate_now(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Generation:
        """Generate with the engine. TRL passes on the log-probabilities of sampling; the others come directly."""
        completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return Generation(completion_ids, logps, self.engine.unprocessed_logps)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """Generate, unless completions were generated ahead; return token ids and log-probabilities, (B, T_b).

        TRL gathers lengths next, so that workers wait for each other anyway; waiting here makes that time visible.
        """
        generation = self.rollout_source.generation_for(prompt_ids)
        if generation is None:
            self._sync_weights()
            generation = self._generate_now(prompt_ids, *args, **kwargs)
        self._unprocessed_logps = generation.unprocessed_logps
        with self.profiler.span("wait_workers"):
            self.accelerator.wait_for_everyone()
        return generation.completion_ids, generation.logps

    @in_phase("score")
    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """Compute the rewards, (all workers' B, R), and keep them; timed without early grading.

        Of a completion of several turns they get the messages, the tokens of the policy and the environment's reward.
        """
        columns = [reward_columns(row) for row in inputs]
        own_ids = completion_ids_list
        if self._conversations is not None:
            completions = [each.messages for each in self._conversations]
            own_ids = [each.own_ids for each in self._conversations]
            for row, conversation in zip(columns, self._conversations, strict=True):
                row[ENVIRONMENT_REWARD] = conversation.reward
        rewards = super()._calculate_rewards(columns, prompts, completions, own_ids)
        if self._conversations is not None:  # other rewards would punish a completion for a failure of its environment
            functions = self.config.rewards.functions
            unscorable = self.workers.gather_objects([each.is_unscorable(functions) for each in self._conversations])
            rewards[torch.tensor([flag for flags in unscorable for flag in flags], device=rewards.device)] = torch.nan
        self._scored = rewards.clone(), completion_ids_list
        return rewards

    def _log_metric(self, name: str, value: float) -> None:
        """Record a metric of a reward, the function's `log_metric`. Raises RewardError if it would hide one of ours."""
        super()._log_metric(*reward_metric(name, value, self.reward_func_names))

    def _log_completion_extra(self, column: str, values: Sequence[Any]) -> None:
        """Announce once that a column of a reward's `log_extra` is not kept: TRL's table of completions is off."""
        if column not in self._dropped_columns and self.accelerator.is_main_process:
            self._dropped_columns.add(column)
            self.hooks.notify(
                f"a reward calls log_extra({column!r}), whose values are not kept; record a number with log_metric"
            )

    def _record(self, rows: CompletionRows) -> list[GroupRecord]:
        return self.recorder.records(rows, self.state.global_step + 1)

    def groups_for_study(self) -> list[dict[str, Any]]:
        """Return this worker's groups of the current step in JSON's types, for the study of non-finite numbers."""
        return [] if self._rows is None else self.recorder.study(self._rows, self.state.global_step + 1)

    # Loss and sync check

    @in_phase("forward_backward")
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward on a micro-batch; after the last one of a batch, check the sync.

        At that moment no optimizer step has been taken on the batch.
        """
        loss = super().training_step(*args, **kwargs)
        if self._step % self.args.steps_per_generation == 0:
            if (tokens := self.sync_checker.check_observed()) is not None:
                append_metrics(self._metrics["train"], sampling_metrics(tokens, self.workers))
                self._append_turn_gaps(tokens)
            self.rollout_source.finish_ahead()
            self.hooks.record_tokens(self.sample_reader.collect())
        self.hooks.observe_loss(loss)
        self._count_tokens()
        return loss

    def _count_tokens(self) -> None:
        """Count the loss tokens of the last micro-batch; report them with the last one of an optimizer step."""
        assert self._buffered_inputs is not None
        batch = self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation]
        self._tokens_read += loss_mask(batch).sum()
        if self.accelerator.sync_gradients:  # the gradient is checked next, which waits for the device anyway
            self.profiler.wait_for_device()
            self.profiler.count_tokens("learner", int(self._tokens_read))
            self._tokens_read.zero_()

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """Compute the loss of the rows that are left, scaled to their share of the original micro-batch."""
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
        tokens = self._entropy_tokens[self._step % self.args.steps_per_generation] if self._entropy_tokens else None
        layout = self.savings.layout if is_text_only(inputs) else "padded"
        return LossPass(inputs, layout, self.savings.one_pass and self.model.training, tokens)

    @property
    def _entropy_coefficient(self) -> float:
        """Coefficient of the entropy bonus in this step, as TRL applies it; 0 if there is no bonus."""
        is_high = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return 0.0 if is_high else float(self.entropy_coef)

    def _entropy_correction(self, inputs: Batch, done: LossPass) -> torch.Tensor:
        """Compute what turns TRL's mean entropy of a micro-batch into its part of the step's mean; scalar, nats."""
        assert done.entropies is not None
        tokens = done.entropy_tokens or EntropyTokens(loss_mask(inputs), inputs["num_items_in_batch"])
        return entropy_bonus_correction(
            done.entropies, tokens, self.args.gradient_accumulation_steps, self.workers.count
        )

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """Return (B, T) bool, True on the micro-batch's tokens whose entropy is above the quantile of the step."""
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

        One forward pass in the loss. Elsewhere completions are scored in as many passes as they need; collective.
        """
        loss_pass = self._loss_pass
        layout = self._scoring_layout(kwargs) if loss_pass is None else loss_pass.layout
        scores: tuple[Any, ...]
        with scoring_labels_only(self.savings.head):
            if layout == "padded":
                scores = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
            elif loss_pass is None:
                parts = self._plan_scoring(attention_mask.sum(dim=1).tolist())
                autocast = self.accelerator.autocast
                scores = *score_rows(layout, model, input_ids, attention_mask, logits_to_keep, autocast, parts), None
            else:
                autocast = self.accelerator.autocast()
                scores = *score_tokens(layout, model, input_ids, attention_mask, logits_to_keep, autocast), None
        if loss_pass is None:
            return scores
        self.sample_reader.observe_pass(self._step % self.args.steps_per_generation, loss_pass.batch, scores[0])
        if loss_pass.is_compared:  # before the loss goes on: it needs the importance ratio
            logps = scores[0].detach()
            self.sync_checker.observe(compare_logps(loss_pass.batch, logps, self._active_importance))
        self._loss_pass = replace(loss_pass, entropies=scores[1])
        return scores

    def _scoring_layout(self, options: Mapping[str, Any]) -> Layout:
        """Return the layout of rows that are scored with TRL's options; with images it is TRL's own."""
        has_images = any(value is not None for name, value in options.items() if name not in SCORING_OPTIONS)
        return "padded" if has_images else self.savings.layout

    def _plan_scoring(self, lengths: list[int]) -> list[list[int]]:
        """Return the rows of each pass over completions of these lengths; collective.

        All workers make as many passes.
        """
        limit = self._pass_limit
        passes = fewest_passes(lengths, limit)
        if limit.tokens is not None:  # the rows of other workers have other lengths
            passes = int(self.workers.gather(torch.tensor([passes], device=self.accelerator.device)).max())
        return split_rows(lengths, passes, limit)

    @property
    def _pass_limit(self) -> PassLimit:
        """Most that a forward pass may read."""
        return self.savings.pass_limit(self.args.per_device_train_batch_size, self.config.grpo.tokens_per_micro_batch)

    @in_phase("optimizer")
    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Clip the gradient, timed."""
        return super()._clip_grad_norm(model)

    @torch.no_grad()
    def _forward(self, batch: Batch, **options: Any) -> tuple[Any, ...]:
        """Compute log-probabilities and entropies of a batch's completions, (B, T) in nats; collective."""
        return self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            **options,
        )

    def _logps(self, batch: Batch) -> torch.Tensor:
        """Compute the learner's log-probabilities of a batch's completions: (B, T), nats."""
        logps: torch.Tensor = self._forward(batch)[0]
        return logps

    def _score_completions(self, batch: Batch) -> torch.Tensor:
        """Compute log-probabilities as the engine does, without dropout: (B, T), nats."""
        with without_dropout(self.model):
            return self._logps(batch)

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
        append_metrics(self._metrics["train"], {"engine/logprob_gap_mean": gap.mean, "engine/logprob_gap_max": gap.max})

    def _append_turn_gaps(self, tokens: TokenLogps | None) -> None:
        """Append the gaps of first and later turns to the metrics, with tools or an environment; collective."""
        if tokens is not None and self.config.rollout.has_turns:
            append_metrics(self._metrics["train"], turn_gap_metrics(tokens, self.workers))

    def _compare_with_engine(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Check the sync for completions generated ahead, without metrics.

        `check_sync` gets the same numbers when the step is taken on them, so that metrics belong to that step.
        """
        self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)


def build_learner(
    config: Config,
    *,
    model_path: str,
    output_dir: str,
    problems: Iterable[tuple[Problem, int]],
    make_hooks: Callable[[Learner], LearnerHooks] = no_hooks,
    on_progress: Callable[[str], None] = _ignore,
    profiler: PhaseProfiler | None = None,
) -> Learner:
    """Load the policy, start the engine, and return the worker's learner.

    Args:
        model_path: local folder or hub id of the policy.
        output_dir: folder of this worker and this attempt alone; checkpoints are written there before upload.
        problems: the worker's own problems with their epochs, in order, from the first one not yet used.
        make_hooks: returns the learner's hooks, which may refer to it; called before its policy is loaded.
        on_progress: gets the name of the stage that begins.
        profiler: phase times of this worker; created by the thread that trains.
    """
    args = trl_arguments(config, output_dir)
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)

    def make_engine(learner: Learner) -> Engine:
        on_progress("starting the engine")
        return Engine(
            learner.model,
            learner.accelerator,
            tokenizer,
            config=config,
            args=args,
            profiler=learner.profiler,
            notify=learner.hooks.notify if learner.accelerator.is_main_process else _ignore,
        )

    on_progress("loading the policy")
    return Learner(
        config,
        problems,
        make_engine=make_engine,
        make_hooks=make_hooks,
        profiler=profiler,
        model=load_policy(model_path, args) if config.cluster.shard_learner else model_path,
        reward_funcs=load_rewards(config.rewards),
        args=args,
        # TRL requires a `datasets` object; the problems come from `get_train_dataloader`.
        train_dataset=Dataset.from_dict({"prompt": ["-"]}),
        processing_class=tokenizer,
        peft_config=peft_config(config),
    )


def check_checkpoint_kind(checkpoint: str, config: Config) -> None:
    """Raise CheckpointError if a checkpoint was written with another `model.lora` or `cluster.shard_learner`."""
    is_adapter = has_adapter(checkpoint)
    if is_adapter != (config.model.lora is not None):
        content = "an adapter" if is_adapter else "a whole policy"
        raise CheckpointError(
            f"the checkpoint holds {content}, which does not match model.lora; to begin with another kind, export the "
            "checkpoint (grpo-ray export) and name the folder as model.path"
        )
    if Path(checkpoint, GATHERED_OPTIMIZER).exists():
        raise CheckpointError(
            "the checkpoint was written by an earlier version, whose sharded learner gathered its state on one worker; "
            "export the checkpoint (grpo-ray export) and begin a new run with the folder as model.path"
        )
    was_sharded = has_shards(checkpoint)
    if was_sharded != config.cluster.shard_learner:
        raise CheckpointError(
            f"the checkpoint was written with cluster.shard_learner={str(was_sharded).lower()}, and its optimizer "
            "state can only be loaded with the same setting; set it as it was"
        )


def _is_stateful(reward: Any) -> bool:
    """Return True if a reward has a state in JSON's types; a reward model's weights do not change and are not saved."""
    return hasattr(reward, "state_dict") and not isinstance(reward, torch.nn.Module)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules below a model into evaluation mode; the model's own flag is TRL's mark of training."""
    training = [module for module in model.modules() if module.training and module is not model]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
