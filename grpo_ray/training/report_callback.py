"""From the trainer to Ray Train: metrics on every log, a checkpoint on every save.

Ray's own `RayTrainReportCallback` reports on save only. This one extends its idea: `ray.train.report` is called
exactly once for each step that is logged or saved, by every worker, since it is a barrier. Reports wait in the
background for the checkpoints before them to be uploaded, so training does not.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode, ValidationTaskConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.evaluation.confidence import Estimate, heldout_metrics
from grpo_ray.resilience.elastic import PreemptionNotice
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage.checkpoints import (
    CheckpointUploader,
    checkpoint_name,
    checkpoint_score,
    save_reward_states,
    save_rows,
)
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.profiler import PHASES, PhaseProfiler
from grpo_ray.training.problem_loader import ProblemLoader

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "Mean reward of the step's completions, all reward functions together."),
    "reward/std": ("reward_std", "Standard deviation of that reward."),
    "group/equal_share": ("frac_reward_zero_std", "Share of groups with equal rewards: no gradient comes of them."),
    "group/rounds": (
        "group/rounds",
        "Rounds in which a step's groups were generated; there with grpo.dynamic_sampling. Metrics of rewards, groups "
        "and completions are then taken over all that was generated.",
    ),
    "group/signal_share": (
        "group/signal_share",
        "Share of the groups that a step was taken on that have signal; there with grpo.dynamic_sampling.",
    ),
    "completion/length_mean": ("completions/mean_length", "Mean length of completions, tokens."),
    "completion/length_max": ("completions/max_length", "Longest completion, tokens."),
    "completion/truncated_share": ("completions/clipped_ratio", "Share of completions cut off at the longest allowed."),
    "policy/entropy": (
        "entropy",
        "Mean entropy of the policy over the tokens that the learner read, nats.",
    ),
    "policy/kl": ("kl", "Mean divergence from the reference, nats; there with grpo.beta > 0."),
    "policy/clipped_share": ("clip_ratio/region_mean", "Share of tokens whose ratio left the trust region."),
    "learner/loss": ("loss", "The loss; near zero on-policy, and no measure of success."),
    "learner/gradient_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "learner/learning_rate": ("learning_rate", "Learning rate of the step."),
    "learner/completions_share": (
        "learner/completions_share",
        "Share of the step's completions that the learner read, forward and backward; the others have no gradient.",
    ),
    "learner/positions_share": (
        "learner/positions_share",
        "Token positions of what it read, padding included, as a share of what stock TRL's loss reads.",
    ),
    "learner/tokens_saved": (
        "learner/tokens_saved",
        "Completion tokens of a step, over all workers, that the learner did not have to read.",
    ),
    "engine/logprob_gap_mean": (
        "engine/logprob_gap_mean",
        "Mean gap between engine's and learner's log-probabilities of the same tokens, nats (law 4).",
    ),
    "engine/logprob_gap_max": ("engine/logprob_gap_max", "Largest such gap, nats."),
    "reward/verifier_timeouts": (
        "reward/verifier_timeouts",
        "Completions of one call, on average, whose verdict hit a time or memory limit; they count as wrong.",
    ),
    "reward/unscorable_share": (
        "reward/unscorable_share",
        "Share of completions without a verdict, because the solution is not understood.",
    ),
    "engine/ratio_mean": (
        "sampling/importance_sampling_ratio/mean",
        "Mean importance ratio of learner to engine over what the learner read; 1 when they agree.",
    ),
}
"""Metric -> TRL's name for it, and what it means."""

OWN_METRICS = {
    "step": "Optimizer steps taken.",
    "heldout/accuracy": "Share of held-out problems solved greedily; on steps with a checkpoint.",
    "heldout/low": "Lower end of its 95 % confidence interval.",
    "heldout/high": "Upper end of that interval.",
    "learner/skipped_steps": "Steps skipped so far because loss or gradient was not a finite number; there if any was.",
    **{f"phase/{phase}": text for phase, text in PHASES.items()},
    "engine/tokens_per_second": "Completion tokens that one worker's engine generates per second of `phase/generate`.",
    "learner/tokens_per_second": "Completion tokens that one worker's learner reads per second of "
    "`phase/forward_backward`.",
    "step/overhead_share": "Share of the time that is neither generation nor forward, backward and optimizer.",
    "step/seconds": "Wall-clock seconds from the last report to this one, all included.",
    "step/completions_per_second": "Completions generated, scored and learned from, per second of that time.",
}
"""Metrics that TRL does not have. A reward function's own are `reward/<name>_mean` and `reward/<name>_std`."""


def rename_metrics(logs: dict[str, Any]) -> dict[str, float]:
    """TRL's logs under our names; what has no name of ours is left out, and so is what is not a finite number."""
    metrics = {ours: logs[theirs] for ours, (theirs, _) in METRICS.items() if theirs in logs}
    for key, value in logs.items():
        kind, _, rest = key.partition("/")
        if kind == "rewards":
            name, _, measure = rest.rpartition("/")
            metrics[f"reward/{name}_{measure}"] = value
        elif kind == "reward" and rest:
            metrics[key] = value
    return {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(float(v))}


class ReportCallback(TrainerCallback):
    """Reports to Ray Train on each logging step, and with a checkpoint on each save."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        course: ProblemLoader,
        *,
        rows: list[dict[str, Any]],
        serial: int,
        measure: Callable[[], Estimate],
        measured_on: DatasetFingerprint,
        reward_states: Callable[[], dict[str, Any]] = dict,
        skipped: Callable[[], int] = lambda: 0,
        draining: PreemptionNotice | None = None,
        stopping: Callable[[], bool] = lambda: False,
        fence: FencingToken | None = None,
        phases: PhaseProfiler | None = None,
        board: Any,
    ):
        """
        rows: the metrics so far, of all steps before.
        serial: number of the next checkpoint in the order of writing.
        measure: gives the held-out accuracy; called on every worker at each save.
        measured_on: contents of the held-out problems.
        reward_states: gives the state of each reward that has one, for the checkpoint.
        skipped: gives the number of steps skipped so far.
        draining: knows when a machine is about to be taken away; the step is then saved, and the attempt ends.
        stopping: whether the run was asked to stop; the step is then saved, and training ends.
        fence: keeps checkpoints out once another attempt has taken this one's place.
        phases: the worker's clock.
        board: actor that hears of the phase and of trouble.
        """
        self.config = config
        self.folder = folder
        self.course = course
        self.rows = rows
        self.serial = serial
        self.measure = measure
        self.measured_on = asdict(measured_on)
        self.reward_states = reward_states
        self.skipped = skipped
        self.draining = draining
        self.stopping = stopping
        self.fence = fence
        self._hurried = False
        self.board = board
        self.phases = phases or PhaseProfiler()
        self._waiting: dict[str, float] = {}
        self._first_step = self._reported_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_step = self._reported_step = state.global_step
        self.phases.restart()
        if is_rank_zero():
            self.board.happened.remote("training", step=state.global_step)
            self.board.phase.remote("training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.phases.mark(f"end of step {state.global_step}")
        leaving = self.draining is not None and (self.draining() or self.draining.announced)
        stopping = self.stopping()
        # Inside a batch of several iterations a checkpoint would not know what is used of it.
        if (leaving or stopping) and state.global_step % self.config.num_iterations == 0:
            control.should_save = True
            control.should_training_stop |= stopping
            self._hurried = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "train_runtime" in logs:  # TRL's summary at the end; every step has been reported by then
            return
        if control.should_save:  # on_save follows, and one step has one report
            self._waiting = rename_metrics(logs)
        else:
            ray.train.report(self._row(state, rename_metrics(logs)), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        inline = self.config.run.measure == "inline"
        measured: dict[str, float] = {}
        # On a machine that leaves, or a cluster that takes back what it lent, every second counts.
        if inline and not self._hurried:
            with self.phases("measure"):
                measured = heldout_metrics(self.measure())
        local = Path(args.output_dir, f"checkpoint-{state.global_step}")
        context = ray.train.get_context()
        rank = context.get_world_rank()
        with self.phases("checkpoint"):
            # One name, chosen before any worker begins to upload.
            name = all_gather_object(checkpoint_name(self.folder, state.global_step) if is_rank_zero() else "")[0]
            local.mkdir(parents=True, exist_ok=True)
            write_rollouts = self.course.settle(local)
            save_reward_states(local, rank, self.reward_states())
            self._write_trace()
        row = self._row(state, self._waiting | measured)
        row["checkpoint"] = name
        self._waiting = {}
        if is_rank_zero():
            save_rows(local, self.rows)
        board = self.board
        upload = CheckpointUploader(
            self.folder,
            rank,
            context.get_world_size(),
            row,
            self.serial,
            self.config.run.storage_patience,
            say=lambda text: board.happened.remote("notice", what=text),
            before_naming=write_rollouts,
            fence=self.fence,
            measured_on=self.measured_on if measured else None,
        )
        self.serial += 1
        ray.train.report(
            row | checkpoint_score(row, self.config.run.best_metric),
            checkpoint=ray.train.Checkpoint.from_directory(str(local)),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._timed(upload),
            delete_local_checkpoint_after_upload=True,
            validation=False if inline else ValidationTaskConfig(fn_kwargs={"step": state.global_step}),
        )
        if self.draining is not None and self.draining.announced and state.global_step < args.max_steps:
            self.draining.leave()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._write_trace()

    def _timed(self, upload: CheckpointUploader) -> Callable[[ray.train.Checkpoint, str], ray.train.Checkpoint]:
        """The upload, which has a thread of its own, with its place in the trace."""

        def timed(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            with self.phases("upload"):
                return upload(checkpoint, name)

        return timed

    def _write_trace(self) -> None:
        """Write what this worker did when into the run folder, over what was there of this attempt."""
        if not self.phases.trace:
            return
        rank = ray.train.get_context().get_world_rank()
        name = f"worker-{rank}-from-step-{self._first_step}.json"
        try:
            with single_attempt():
                self.folder.write_bytes(self.phases.trace_file(rank), "trace", name)
        except OSError as error:  # no run waits or ends for its trace; the next save writes it whole
            self.board.happened.remote("notice", what=f"trace/{name} could not be written: {error}")

    def _row(self, state: TrainerState, metrics: dict[str, float]) -> dict[str, Any]:
        steps, self._reported_step = state.global_step - self._reported_step, state.global_step
        profile = self.phases.take()
        row = {
            "step": state.global_step,
            **metrics,
            **({"learner/skipped_steps": float(skipped)} if (skipped := self.skipped()) else {}),
            **profile,
            "step/completions_per_second": steps * self.config.completions_per_step / profile["step/seconds"],
        }
        self.rows.append(row)
        return row


class BaselineCallback(TrainerCallback):
    """Calls a function before the first step.

    By then the trainer has prepared its model: a sharded learner is sharded, and can give its weights to the engine.
    """

    def __init__(self, act: Callable[[], None]):
        self.act = act

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.act()


class OptimizerTimer(TrainerCallback):
    """Times the optimizer's step, to the end of it on the device."""

    def __init__(self, phases: PhaseProfiler):
        self.phases = phases

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.phases.begin("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.phases.wait_for_device()
        self.phases.end()


class WatchdogCallback(TrainerCallback):
    """Tells the worker's watchdog what the trainer is at."""

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.beat("drawing problems", state.global_step + 1)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.beat("a step", state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.watchdog.beat("a checkpoint" if control.should_save else "drawing problems", state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.suspend()
