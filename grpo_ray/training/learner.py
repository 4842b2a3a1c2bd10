"""The GRPO learner: TRL's trainer, narrowly extended.

Twelve methods of `GRPOTrainer` are overridden here and five in `thrift.py`, each watched by a test in
`tests/integration/test_learner.py` that fails when a TRL release changes beneath it: `__init__` (our engine instead of
TRL's), `create_accelerator_and_postprocess` (a sharded learner without GPUs), `get_train_dataloader` (the worker's own
shard instead of a `datasets` object), `_generate_and_score_completions` (seeds in, the record of groups out),
`_calculate_rewards` (timed, and kept for the record), `training_step` (timed, its loss is looked at),
`_generate_single_turn`, `_clip_grad_norm` and `_save_checkpoint` (timed), `_save` (an adapter's checkpoint names its
policy), `_load_from_checkpoint` (refuses one of the wrong kind) and `create_model_card` (not written).
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import CheckpointError
from grpo_ray.evaluation.confidence import Estimate, mean_with_interval
from grpo_ray.evaluation.metrics import score_completions
from grpo_ray.inference.engine import Engine, request_seed
from grpo_ray.models.lora import has_adapter, peft_settings, record_base_policy
from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts
from grpo_ray.rewards.registry import heldout_reward, load_rewards, start_grading
from grpo_ray.storage.rollouts import GroupRecord, attach_texts
from grpo_ray.telemetry.profiler import PhaseProfiler, in_phase
from grpo_ray.training.dynamic_sampling import CompletionRows, combine_rewards, fill_step
from grpo_ray.training.exact_savings import ExactSavings
from grpo_ray.training.micro_batches import loss_mask
from grpo_ray.training.problem_loader import GroupBatches
from grpo_ray.training.trl_config import trl_arguments

SHARDED_OPTIMIZER = "optimizer.bin"
"""File of a checkpoint with the optimizer's state, if the learner was sharded."""


class Learner(ExactSavings, GRPOTrainer):
    """One worker's learner. It draws the step's problems from the worker's shard and updates the policy on them."""

    is_fsdp_enabled: bool

    def __init__(
        self,
        config: Config,
        *,
        model_path: str,
        output_dir: str,
        problems: Iterable[tuple[Problem, int]],
        callbacks: list[TrainerCallback],
        record: Callable[[list[GroupRecord]], None] = lambda groups: None,
        see_loss: Callable[[torch.Tensor], None] = lambda loss: None,
        say: Callable[[str], None] = lambda phase: None,
        phases: PhaseProfiler | None = None,
    ):
        """
        model_path: local folder or hub id of the policy.
        output_dir: a folder of this worker and this attempt alone; checkpoints are written there before upload.
        problems: the worker's own problems with their epochs, in order, from the first one not yet used.
        record: told what became of this worker's groups, before the step is taken on them.
        see_loss: shown the loss of each forward pass.
        say: told what is being done, for the progress line.
        phases: the worker's clock; made by the thread that trains.
        """
        self.config = config
        self.phases = phases or PhaseProfiler()
        self.problems = self.phases.drawn("wait", problems)
        self.record = record
        self.see_loss = see_loss
        self.thrifty = config.grpo.exact_savings
        args = trl_arguments(config, output_dir)
        tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
        say("loading the policy")
        super().__init__(
            model=model_path,
            reward_funcs=load_rewards(config.rewards),
            args=args,
            # TRL wants a `datasets` object to measure; the problems come from `get_train_dataloader`.
            train_dataset=Dataset.from_dict({"prompt": ["-"]}),
            processing_class=tokenizer,
            callbacks=callbacks,
            peft_config=peft_settings(config),
        )
        self.remove_callback(PrinterCallback)  # the metrics are in metrics.jsonl; the log is for words
        if self.accelerator.device.type == "cuda":
            self.phases.wait_for_device = torch.cuda.synchronize
        say("starting the engine")
        self.use_vllm = True
        self.vllm_generation = Engine(
            self.model,
            self.accelerator,
            tokenizer,
            config=config.engine,
            dtype=config.dtype,
            args=args,
            phases=self.phases,
        )
        self._tokens_read = torch.zeros((), dtype=torch.long, device=self.accelerator.device)
        self._last_loaded_step = -1
        self._batch: dict[str, Any] = {}

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's. Without GPUs accelerate passes over a sharded learner in silence; torch can do it all the same."""
        super().create_accelerator_and_postprocess()
        if self.config.cluster.shard_learner and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True

    @property
    def engine(self) -> Engine:
        """The worker's engine (TRL's name for it is `vllm_generation`)."""
        return self.vllm_generation

    def reward_states(self) -> dict[str, Any]:
        """State of each reward that has one (`state_dict`), by its name."""
        return {
            name: reward.state_dict()
            for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True)
            if _is_stateful(reward)
        }

    def load_reward_states(self, states: dict[str, Any]) -> None:
        """Put back what `reward_states` gave."""
        for name, reward in zip(self.reward_func_names, self.reward_funcs, strict=True):
            if _is_stateful(reward) and name in states:
                reward.load_state_dict(states[name])

    def get_train_dataloader(self) -> Iterable[list[dict[str, Any]]]:
        """This worker's batches of completions to be: whole groups, repeated as often as TRL asks for each."""
        repeats = self.args.steps_per_generation * self.num_iterations
        self._batches = GroupBatches(self.problems, self.config.prompts_per_worker, self.num_generations, repeats)
        return self._batches

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, in rounds where `grpo.dynamic_sampling` says so; then the record of it, and the proof of sync."""
        with without_dropout(self.model):  # the engine knows none either
            self._round(inputs)
            groups = self._topped_up() if self.config.grpo.dynamic_sampling else self._groups()
            output = self._batch["output"]
            if not self.savings.one_pass:
                learner_logps = output.get("old_per_token_logps")
                if learner_logps is None:  # TRL computes them only for its importance correction
                    learner_logps = self._logps(output)
                self.prove(learner_logps, output["sampling_per_token_logps"], output["completion_mask"])
        self.record(groups)
        return output

    def prepare_engine(self, inputs: list[dict[str, Any]]) -> None:
        """Give the engine's next completions their seeds, and have each judged when it is finished."""
        self.engine.seeds = [
            request_seed(self.config.run.seed, row["id"], row["epoch"], row["index"]) for row in inputs
        ]
        self._judge_ahead(inputs)

    def _round(self, inputs: list[dict[str, Any]]) -> None:
        """Generate and score; what came of it is the present batch."""
        self.prepare_engine(inputs)
        output = super()._generate_and_score_completions(inputs)
        self.engine.on_finished = _ignore
        self._batch |= {"inputs": inputs, "output": output}

    def _topped_up(self) -> list[GroupRecord]:
        """Top the present batch up with groups that have signal; gives all groups that this worker drew for it."""
        drawn = [self._groups()]

        def another() -> CompletionRows:
            self._round(self._batches.draw())
            drawn.append(self._groups(texts=False))
            return CompletionRows(**self._batch)

        step = fill_step(self, CompletionRows(**self._batch), another, self.config.grpo.dynamic_sampling)
        self._batch = dict(vars(step.rows))
        rounds = zip(drawn, step.kept, strict=True)
        return [replace(group, trained=kept) for each in rounds for group, kept in zip(*each, strict=True)]

    def prove(self, learner_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> None:
        """Prove that the engine has the learner's weights, or raise SyncError; law 4 has no off-switch."""
        gap = self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)
        self._metrics["train"]["engine/logprob_gap_mean"].append(gap.mean)
        self._metrics["train"]["engine/logprob_gap_max"].append(gap.max)

    def _groups(self, texts: bool = True) -> list[GroupRecord]:
        """What became of this worker's groups of the present batch; texts: keep those of the step's first group."""
        inputs, per_reward, token_ids = self._batch["inputs"], self._batch["rewards"], self._batch["token_ids"]
        rewards = combine_rewards(per_reward, self.reward_weights)
        correct = None
        if "correctness" in self.reward_func_names:
            correct = per_reward[:, self.reward_func_names.index("correctness")].tolist()
        truncated = self._truncated(token_ids)
        groups = []
        for first in range(0, len(inputs), self.num_generations):
            group = slice(first, first + self.num_generations)
            groups.append(
                GroupRecord(
                    step=self.state.global_step + 1,
                    epoch=inputs[first]["epoch"],
                    problem=inputs[first]["id"],
                    rewards=tuple(rewards[group].tolist()),
                    correct=tuple(correct[group]) if correct is not None else None,
                    lengths=tuple(len(ids) for ids in token_ids[group]),
                    truncated=tuple(truncated[group]),
                )
            )
        if texts and self.accelerator.is_main_process:  # the step's first problem, however many workers there are
            said = self.processing_class.batch_decode(token_ids[: self.num_generations], skip_special_tokens=True)
            groups[0] = attach_texts(groups[0], inputs[0]["prompt"], said)
        return groups

    def _truncated(self, completions: list[list[int]]) -> list[bool]:
        """Whether each completion was cut off at the longest allowed."""
        ends = {*self.eos_token_ids, self.processing_class.pad_token_id}
        return [not ids or ids[-1] not in ends for ids in completions]

    def groups_for_study(self) -> list[dict[str, Any]]:
        """This worker's groups of the present batch in JSON's types, with what was sampled and whether it is finite."""
        if not self._batch:
            return []
        output, studied = self._batch["output"], []
        texts = self.processing_class.batch_decode(output["completion_ids"])
        for number, group in enumerate(self._groups()):
            part = slice(number * self.num_generations, (number + 1) * self.num_generations)
            values = [output["advantages"][part]]
            values += [output[k][part] for k in ("old_per_token_logps", "sampling_per_token_logps") if k in output]
            studied.append(
                asdict(group)
                | {
                    "completions": texts[part],
                    "advantages": output["advantages"][part].tolist(),
                    "finite": all(bool(each.isfinite().all()) for each in values if each is not None),
                }
            )
        return studied

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. It gathers lengths next, so that the workers wait for each other anyway; here that wait is seen."""
        generated = super()._generate_single_turn(*args, **kwargs)
        with self.phases("wait_workers"):
            self.accelerator.wait_for_everyone()
        return generated

    @in_phase("forward_backward")
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's; its loss is shown to whoever looks for numbers that are not finite, and its tokens are counted."""
        loss = super().training_step(*args, **kwargs)
        self.see_loss(loss)
        batch = self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation]
        self._tokens_read += loss_mask(batch).sum()
        if self.accelerator.sync_gradients:  # the gradient is looked at next, which waits for the device anyway
            self.phases.wait_for_device()
            self.phases.count("learner", int(self._tokens_read))
            self._tokens_read.zero_()
        return loss

    @in_phase("optimizer")
    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """TRL's, timed."""
        return super()._clip_grad_norm(model)

    @in_phase("checkpoint")
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """TRL's, timed."""
        super()._save_checkpoint(model, trial)

    def _judge_ahead(self, inputs: list[dict[str, Any]]) -> None:
        """Have each completion judged as soon as it is finished, while the engine still generates the others.

        The accuracy reward then finds the verdicts ready: their cost hides behind generation.
        """
        rewards = self.config.rewards
        if "correctness" not in rewards.functions:
            return

        def judge(index: int, token_ids: list[int]) -> None:
            text = self.processing_class.decode(token_ids, skip_special_tokens=True)
            verdict = start_grading(text, inputs[index]["solution"], rewards.strict, rewards.time_limit)
            verdict.add_done_callback(self.phases.beside("verdicts"))

        self.engine.on_finished = judge

    @in_phase("score")
    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> torch.Tensor:
        """TRL's, timed: what of scoring did not hide behind generation. Keeps this worker's part for the record."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # TRL gathers the rewards of all workers, by rank, and none has more than another.
        own = rewards.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        self._batch = {"rewards": own.clone(), "token_ids": completion_ids_list}
        return rewards

    @torch.no_grad()
    def _logps(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The learner's log-probabilities of a batch's completions: (B, T), nats."""
        logps, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
        )
        return logps

    def solve(self, problems: list[Problem]) -> list[dict[str, Any]]:
        """Solve this worker's part of the held-out problems, every n-th, greedily; every worker must call it.

        Returns a row for each of them, as `scores.summarise` takes it.
        """
        if self.state.global_step != self._last_loaded_step:
            self.engine.sync_weights()
            self._last_loaded_step = self.state.global_step
        mine = problems[self.accelerator.process_index :: self.accelerator.num_processes]
        prompts = tokenize_prompts(self.processing_class, [problem.prompt for problem in mine])
        begun = time.perf_counter()
        completions = self.engine.greedy(prompts)
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        columns = score_completions(
            mine, texts, self._truncated(completions), heldout_reward(self.config.rewards), begun
        )
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def heldout(self, problems: list[Problem]) -> Estimate:
        """Share of held-out problems that the policy solves greedily; every worker must call it.

        A problem whose solution cannot be understood counts for nothing.
        """
        known = [score for row in self.solve(problems) for score in row["scores"] if not math.isnan(score)]
        totals = torch.tensor([float(sum(known)), float(len(known))], device=self.accelerator.device)
        solved, of = (int(total) for total in self.accelerator.reduce(totals, reduction="sum").tolist())
        return mean_with_interval([1.0] * solved + [0.0] * (of - solved))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """TRL's. An adapter's checkpoint then names its policy as the config does, and not this worker's copy.

        state_dict: what was gathered of a sharded learner. There a tied weight comes under each of its names.
        """
        if state_dict is not None:
            once = dict(itertools.chain(self.model.named_parameters(), self.model.named_buffers()))
            state_dict = {name: weight for name, weight in state_dict.items() if name in once}
        super()._save(output_dir, state_dict)
        if self.config.model.lora:
            record_base_policy(Path(output_dir or self.args.output_dir), self.config)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """TRL's, which would pass over weights or optimizer of a checkpoint of another kind in silence."""
        is_adapter = has_adapter(resume_from_checkpoint)
        if is_adapter != (self.config.model.lora is not None):
            holds = "an adapter" if is_adapter else "a whole policy"
            raise CheckpointError(
                f"the checkpoint holds {holds}, and model.lora says otherwise; to begin with another kind, export the "
                "checkpoint (grpo-ray export) and name the folder as model.path"
            )
        was_sharded = Path(resume_from_checkpoint, SHARDED_OPTIMIZER).exists()
        if was_sharded != self.config.cluster.shard_learner:
            raise CheckpointError(
                f"the checkpoint was written with cluster.shard_learner={str(was_sharded).lower()}, which keeps the "
                "optimizer's state in a form of its own; set it as it was"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: a checkpoint of a run is not a published model."""


def _is_stateful(reward: Any) -> bool:
    """A reward with a state of ours, in JSON's types; a reward model's weights do not change and are not saved."""
    return hasattr(reward, "state_dict") and not isinstance(reward, torch.nn.Module)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Everything below a model in evaluation mode; by the model's own flag TRL tells training from measuring."""
    training = [module for module in model.modules() if module.training and module is not model]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _ignore(index: int, token_ids: list[int]) -> None:
    """Outside of a step nobody asks for completions before the last one is there."""
