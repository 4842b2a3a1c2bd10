"""Callbacks of the trainer: reports to Ray Train, the baseline, the optimizer's time and the watchdog.

Ray's own `RayTrainReportCallback` reports on save only. With `ReportCallback`, every worker calls `ray.train.report`,
which is collective, exactly once for each step that is logged or saved. Reports wait in the
background until the checkpoints before them are uploaded, so training does not wait.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode, ValidationTaskConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_ray.config.schema import Config
from grpo_ray.distributed import all_gather_object, is_rank_zero
from grpo_ray.evaluation.metrics import EvaluationResult, heldout_metrics
from grpo_ray.evaluation.records import write_records
from grpo_ray.resilience.elastic import PreemptionNotice
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.checkpoints import (
    checkpoint_name,
    checkpoint_score,
    save_reward_states,
)
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.jsonl import HISTORY_ROWS, save_metrics_history
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.training.metric_names import rename_metrics

LOG_HISTORY_ROWS = 100
"""Latest rows kept of `TrainerState.log_history`, which TRL passes to rewards."""


@dataclass(frozen=True, kw_only=True)
class ReportTarget:
    """Destination of a run's reports and checkpoints."""

    folder: RunFolder
    coordinator: Any
    """Handle of the run's `RunCoordinator` actor."""
    fence: FencingToken | None = None
    """Stops checkpoints once another attempt has replaced this one; None for no check."""
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY_ROWS))
    """Metrics of the latest steps, for checkpoints; new rows are appended."""
    next_serial: int = 1
    """Serial number of the next checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """Functions that return the content of reports and checkpoints."""

    settle: Callable[[Path], Callable[[], None]]
    """Writes the ledger into a checkpoint's folder, and returns the function that writes the rollouts; collective
    (`ProblemLoader.settle`)."""
    measure_heldout: Callable[[], dict[str, EvaluationResult]]
    """Returns the evaluation of each held-out set by key; collective, called at each save."""
    heldout_conditions: Mapping[str, Any]
    """Key of a held-out set -> conditions of its measurement (`metrics.measurement_conditions`)."""
    save_open_rollouts: Callable[[Path], None] = lambda folder: None
    """Writes the completions of later steps into a checkpoint's folder; collective."""
    reward_states: Callable[[], dict[str, Any]] = dict
    """Returns the state of each reward that has one."""
    skipped_steps: Callable[[], int] = lambda: 0
    """Returns the number of steps skipped so far."""


@dataclass(frozen=True, kw_only=True)
class EndSignals:
    """Signals that end training, or this attempt, after the current step; both are collective."""

    preemption: PreemptionNotice | None = None
    """Returns True when a node is about to be taken away: the step is saved, and the attempt ends."""
    stop_requested: Callable[[], bool] = lambda: False
    """Returns True once the run was asked to stop: the step is saved, and training ends."""


class ReportCallback(TrainerCallback):
    """Reporter to Ray Train: metrics on each logged or saved step, and a checkpoint on each save."""

    def __init__(
        self,
        config: Config,
        target: ReportTarget,
        inputs: ReportInputs,
        signals: EndSignals | None = None,
        profiler: PhaseProfiler | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self.inputs = inputs
        self.signals = signals or EndSignals()
        self.profiler = profiler or PhaseProfiler()
        self._serial = target.next_serial
        self._ends_early = False
        self._unreported: dict[str, float] = {}
        self._first_step = self._reported_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and record for the driver that training began."""
        self._first_step = self._reported_step = state.global_step
        self.profiler.reset()
        if is_rank_zero():
            self.target.coordinator.record_event.remote("training", step=state.global_step)
            self.target.coordinator.set_status.remote("training")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request a save at `run.pause_at`, on a request to stop and on a preemption, and a log of every saved step.

        Every saved step is logged: its checkpoint is ranked by its metrics, and after a resume these are the only
        metrics of the steps since the last report.
        """
        self.profiler.mark_instant(f"end of step {state.global_step}")
        preemption = self.signals.preemption
        preempted = preemption is not None and (preemption() or preemption.announced)
        stopping = self.signals.stop_requested()
        # Between two steps on one batch, a checkpoint could not record which part of it is used.
        if (preempted or stopping) and state.global_step % self.config.steps_per_batch == 0:
            control.should_save = True
            control.should_training_stop |= stopping
            self._ends_early = True
        if state.global_step >= self.config.last_step:  # at `grpo.max_steps` transformers ends and saves in any case
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save  # `grpo.logging_steps` need not divide a saved step, nor the last one

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Report the step's metrics, unless `on_save` is going to: one step has one report."""
        # transformers keeps the logs of all steps, also in each checkpoint.
        del state.log_history[:-LOG_HISTORY_ROWS]
        if "train_runtime" in logs:  # TRL's summary at the end; every step has been reported by then
            return
        if control.should_save:
            self._unreported = rename_metrics(logs)
        else:
            ray.train.report(self._row(state, rename_metrics(logs)), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint in the local folder, report it, and have it uploaded in the background.

        `Learner._save_checkpoint` has written weights and optimizer into the folder before. `CheckpointUploader`
        (`storage/checkpoint_upload.py`) writes the manifest, which makes the checkpoint valid.
        """
        results = self._measure()
        measured = heldout_metrics(results, self.config.primary_heldout) if results else {}
        local = Path(args.output_dir, f"checkpoint-{state.global_step}")
        with self.profiler.span("checkpoint"):
            # One name, chosen before any worker begins to upload.
            name = all_gather_object(checkpoint_name(self.target.folder, state.global_step) if is_rank_zero() else "")[
                0
            ]
            local.mkdir(parents=True, exist_ok=True)
            write_rollouts = self.inputs.settle(local)
            self.inputs.save_open_rollouts(local)
            save_reward_states(local, ray.train.get_context().get_world_rank(), self.inputs.reward_states())
            self._write_trace()
        row = self._row(state, self._unreported | measured)
        row["checkpoint"] = name
        self._unreported = {}
        if is_rank_zero():
            save_metrics_history(local, self.target.history)

        def write_files() -> None:
            write_rollouts()
            conditions = self.inputs.heldout_conditions
            write_records(self.target.folder, state.global_step, results, policy=name, conditions=conditions)

        self._report_checkpoint(local, row, self._uploader(row, write_files, is_measured=bool(measured)))
        preemption = self.signals.preemption
        if preemption is not None and preemption.announced and state.global_step < self.config.last_step:
            preemption.leave()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the trace of the last steps."""
        self._write_trace()

    def _measure(self) -> dict[str, EvaluationResult]:
        """Measure the held-out sets with the learner's engine, unless another one does so or training ends early."""
        # On a node that is being preempted, and on a cluster that takes back its machines, every second counts.
        if self.config.run.measure != "inline" or self._ends_early:
            return {}
        with self.profiler.span("measure"):
            return self.inputs.measure_heldout()

    def _uploader(self, row: dict[str, Any], write_files: Callable[[], None], is_measured: bool) -> CheckpointUploader:
        """Return the upload of this worker's part of the next checkpoint."""
        context = ray.train.get_context()
        coordinator = self.target.coordinator
        uploader = CheckpointUploader(
            self.target.folder,
            context.get_world_rank(),
            context.get_world_size(),
            row,
            self._serial,
            self.config.run.storage_retry_seconds,
            on_progress=lambda text: coordinator.record_event.remote("notice", what=text),
            before_commit=write_files,
            fence=self.target.fence,
            measured_on=self.inputs.heldout_conditions if is_measured else None,
        )
        self._serial += 1
        return uploader

    def _report_checkpoint(self, local: Path, row: dict[str, Any], uploader: CheckpointUploader) -> None:
        inline = self.config.run.measure == "inline"
        ray.train.report(
            row | checkpoint_score(row, self.config.ranking_metric),
            checkpoint=ray.train.Checkpoint.from_directory(str(local)),
            checkpoint_dir_name=row["checkpoint"],
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._timed(uploader),
            delete_local_checkpoint_after_upload=True,
            validation=False if inline else ValidationTaskConfig(fn_kwargs={"step": row["step"]}),
        )

    def _timed(self, upload: CheckpointUploader) -> Callable[[ray.train.Checkpoint, str], ray.train.Checkpoint]:
        """Return the upload with a span in the trace; Ray Train calls it in a thread of its own."""

        def timed(checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            with self.profiler.span("upload"):
                return upload(checkpoint, name)

        return timed

    def _write_trace(self) -> None:
        """Write this worker's trace into the run folder, over the one written earlier in this attempt."""
        if not self.profiler.trace:
            return
        rank = ray.train.get_context().get_world_rank()
        name = f"worker-{rank}-from-step-{self._first_step}.json"
        try:
            with single_attempt():
                self.target.folder.write_bytes(self.profiler.chrome_trace(rank), "trace", name)
        except OSError as error:  # a trace must not delay or end a run; the next save writes all of it again
            self.target.coordinator.record_event.remote("notice", what=f"trace/{name} could not be written: {error}")

    def _row(self, state: TrainerState, metrics: dict[str, float]) -> dict[str, Any]:
        """Append the step's row to the history, and return it."""
        steps, self._reported_step = state.global_step - self._reported_step, state.global_step
        profile = self.profiler.take_metrics()
        completions = steps * self.config.sizes.completions_per_step / self.config.num_iterations
        row = {
            "step": state.global_step,
            **metrics,
            **({"learner/skipped_steps": float(skipped)} if (skipped := self.inputs.skipped_steps()) else {}),
            **profile,
            "step/completions_per_second": completions / profile["step/seconds"],
        }
        self.target.history.append(row)
        return row


class BaselineCallback(TrainerCallback):
    """Caller of a function before the first step.

    By then the trainer has prepared its model: a sharded learner is sharded, and can give its weights to the engine.
    """

    def __init__(self, measure: Callable[[], None]) -> None:
        self.measure = measure

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.measure()


class FirstStepCallback(TrainerCallback):
    """Caller of a function after the first step of an attempt, before that step is saved."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


class OptimizerTimer(TrainerCallback):
    """Timer of the optimizer step, until its work on the device is done."""

    def __init__(self, profiler: PhaseProfiler) -> None:
        self.profiler = profiler

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.profiler.begin("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.profiler.wait_for_device()
        self.profiler.end()


class WatchdogCallback(TrainerCallback):
    """Sender of heartbeats from the trainer to the worker's watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.heartbeat("drawing problems", state.global_step + 1)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.heartbeat("a step", state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.watchdog.heartbeat("a checkpoint" if control.should_save else "drawing problems", state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.suspend()
