"""Training of one worker, from loaded libraries to the last step: learner, callbacks and watchdog put together."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.baseline import (
    MEASURING,
    Baseline,
    baseline_metrics,
    describe_baseline,
    measure_baseline,
)
from grpo_ray.evaluation.metrics import EvaluationResult, unique_problems
from grpo_ray.learner.hooks import LearnerHooks
from grpo_ray.learner.learner import Learner, build_learner
from grpo_ray.models.memory import MemoryPlan
from grpo_ray.resilience.chaos import FaultInjector
from grpo_ray.resilience.elastic import PreemptionNotice
from grpo_ray.resilience.error_triage import error_context
from grpo_ray.resilience.nonfinite import NonFiniteMonitor
from grpo_ray.resilience.signals import StopRequest
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage import checkpoints
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.filesystem import fetch_folder
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.text.redaction import redact
from grpo_ray.training.attempt import Attempt, GroupProgress, remove_leftovers
from grpo_ray.training.memory_use import MemoryCallback, apply_plan, describe_plan, plan_for_workers
from grpo_ray.training.problem_loader import ProblemLoader
from grpo_ray.training.report_callback import (
    BaselineCallback,
    EndSignals,
    FirstStepCallback,
    OptimizerTimer,
    ReportCallback,
    ReportInputs,
    ReportTarget,
    WatchdogCallback,
)
from grpo_ray.training.start_point import StartPoint

if TYPE_CHECKING:
    from grpo_ray.learner.sft import SftLearner


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """Inputs of a worker's training, gathered before the heavy libraries are loaded."""

    attempt: Attempt
    start: StartPoint
    checkpoint: Path | None
    """Local folder with the checkpoint to start from; None for a run that begins with `model.path`."""
    loader: ProblemLoader
    problems: Iterator[tuple[Problem, int]]
    """The worker's problems with their epochs, from the first one not yet used."""
    heldout: Mapping[str, list[Problem]]
    """Key of a held-out set -> its problems."""
    history: deque[dict[str, Any]]
    """Metrics of the latest steps before the start."""
    fence: FencingToken


def run_training(inputs: TrainingInputs) -> None:
    """Build the learner with its callbacks and train until `grpo.max_steps` or `run.pause_at`; collective."""
    attempt, checkpoint, run = inputs.attempt, inputs.checkpoint, inputs.attempt.config.run
    profiler = PhaseProfiler(trace=run.trace)
    watchdog = Watchdog(
        Path(attempt.scratch, f"stacks-worker-{attempt.rank}.txt"),  # on this node, since the storage may hang
        run.hang_factor,
        run.hang_seconds,
        lambda message, stacks: report_hang(attempt, message, stacks),
        GroupProgress(attempt, lambda: (profiler.progress, checkpoint_bytes(attempt.scratch))),
    )
    attempt.set_status("fetching the policy")
    model_path = fetch_folder(attempt.spec.model_path, run.storage_retry_seconds, into=attempt.scratch)
    plan = plan_for_workers(attempt.config, model_path)
    if plan is not None and attempt.rank == 0:
        attempt.notify(describe_plan(plan))
    learner = _builder(attempt.config.run.kind)(
        apply_plan(attempt.config, plan),
        model_path=model_path,
        output_dir=attempt.scratch,
        problems=inputs.problems,
        make_hooks=lambda learner: build_hooks(inputs, learner, profiler, watchdog, plan),
        on_progress=attempt.set_status,
        profiler=profiler,
        pool=attempt.spec.pool,
    )
    with error_context(lambda: learner.state.global_step or inputs.start.step):
        FaultInjector(attempt.spec.faults, attempt.folder, attempt.rank, attempt.workers, attempt.notify).install(
            learner
        )
        if checkpoint is not None:  # of another run, it has neither states of rewards nor completions of later steps
            learner.load_reward_states(checkpoints.load_reward_states(checkpoint, attempt.rank))
            learner.load_open_rollouts(checkpoint)
        try:
            with watchdog:
                learner.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            learner.end_tools()


def _builder(kind: str) -> Callable[..., Any]:
    """Return the function that builds the learner of a kind of run (`run.kind`)."""
    if kind == "grpo":
        return build_learner
    from grpo_ray.learner.sft import build_sft_learner  # the other trainer of TRL, which most runs do not need

    return build_sft_learner


def build_hooks(
    inputs: TrainingInputs,
    learner: "Learner | SftLearner",
    profiler: PhaseProfiler,
    watchdog: Watchdog,
    plan: MemoryPlan | None,
) -> LearnerHooks:
    """Create the callbacks of a learner, and the functions that it calls while it trains.

    Args:
        plan: GPU memory of the learner's passes; None without GPUs.
    """
    attempt = inputs.attempt
    monitor = NonFiniteMonitor(
        attempt.config.run.max_bad_steps,
        groups=learner.groups_for_study,
        save=lambda groups, step: save_groups(attempt.folder, groups, step, attempt.rank),
    )
    report = build_report(inputs, learner, monitor, profiler)
    baseline: list[TrainerCallback] = []
    setup = attempt.spec.baseline_setup
    if inputs.start.step == 0 and setup is not None:
        before = Baseline(attempt.folder, attempt.spec.heldout_conditions, setup)

        def measure() -> None:
            watchdog.heartbeat("measuring the policy before training")
            measure_initial_policy(attempt, learner, inputs.heldout, before)

        baseline = [BaselineCallback(measure)]
    memory = MemoryCallback(
        plan,
        lambda fields: attempt.spec.coordinator.record_event.remote("memory", **fields),
        attempt.notify,
    )
    clean_up = FirstStepCallback(lambda: remove_leftovers(attempt, inputs.start))
    # The watchdog comes last: the other callbacks decide whether the step ends with a checkpoint.
    return LearnerHooks(
        callbacks=[*baseline, clean_up, OptimizerTimer(profiler), monitor, memory, report, WatchdogCallback(watchdog)],
        record_groups=inputs.loader.record,
        record_tokens=inputs.loader.record_tokens,
        observe_loss=monitor.observe_loss,
        notify=attempt.notify,
    )


def build_report(
    inputs: TrainingInputs, learner: "Learner | SftLearner", monitor: NonFiniteMonitor, profiler: PhaseProfiler
) -> ReportCallback:
    """Create the callback that reports metrics and checkpoints to Ray Train."""
    attempt = inputs.attempt
    return ReportCallback(
        attempt.config,
        ReportTarget(
            folder=attempt.folder,
            coordinator=attempt.spec.coordinator,
            fence=inputs.fence,
            history=inputs.history,
            next_serial=inputs.start.last_serial + 1,
        ),
        ReportInputs(
            settle=inputs.loader.settle,
            measure_heldout=lambda: learner.heldout.evaluate(inputs.heldout),
            heldout_conditions=attempt.spec.heldout_conditions,
            save_open_rollouts=learner.save_open_rollouts,
            reward_states=learner.reward_states,
            skipped_steps=lambda: monitor.skipped,
        ),
        EndSignals(preemption=PreemptionNotice(), stop_requested=StopRequest(attempt.spec.coordinator)),
        profiler,
    )


def measure_initial_policy(
    attempt: Attempt, learner: "Learner | SftLearner", heldout: Mapping[str, list[Problem]], baseline: Baseline
) -> None:
    """Measure the baseline with the learner's engine, unless an earlier attempt did; collective."""

    def announce(results: Mapping[str, EvaluationResult]) -> None:
        attempt.notify(describe_baseline(results, attempt.config.heldout_score))
        attempt.spec.coordinator.record_event.remote("baseline", metrics=baseline_metrics(results))

    def evaluate(sets: Mapping[str, list[Problem]]) -> dict[str, EvaluationResult]:
        total = len(unique_problems(sets)) * attempt.config.heldout.num_samples
        return learner.heldout.evaluate(sets, CompletionCount(attempt, total))

    measure_baseline(baseline, evaluate, heldout, attempt.set_status, announce)


class CompletionCount:
    """Counter of completions of the baseline, for the driver's display.

    Args:
        total: completions of all workers. Their parts are equal, so rank 0 extrapolates from its own.
    """

    REPORTS = 50

    def __init__(self, attempt: Attempt, total: int):
        self.attempt, self.total = attempt, total
        self._finished = 0

    def __call__(self, index: int, token_ids: list[int]) -> None:
        self._finished += 1
        if self._finished % max(1, self.total // self.attempt.workers // self.REPORTS) == 0:
            done = min(self.total, self._finished * self.attempt.workers)
            self.attempt.set_status(MEASURING, done, self.total)


def checkpoint_bytes(scratch: str) -> int:
    """Return the size of the checkpoints in a worker's scratch folder, which grows while one is written."""
    total = 0
    for path in Path(scratch).glob("checkpoint-*/**/*"):
        with suppress(OSError):  # an uploaded checkpoint is deleted at the same time
            total += path.stat().st_size if path.is_file() else 0
    return total


def report_hang(attempt: Attempt, message: str, stacks: Path) -> None:
    """Notify the user of a worker that hangs, and copy the stacks of its threads to the run folder."""
    uri = attempt.folder.uri_of("logs", stacks.name)
    attempt.notify(f"worker {attempt.rank}: {message}; stacks of all threads are in {uri}", event="hang")
    attempt.folder.write_text(redact(stacks.read_text()), "logs", stacks.name)


def save_groups(folder: RunFolder, groups: list[dict[str, Any]], step: int, rank: int) -> str:
    """Write groups with non-finite numbers to the run folder, and return their location."""
    name = f"step-{step:06d}-worker-{rank}.json"
    folder.write_json(groups, "bad_numbers", name)
    return folder.uri_of("bad_numbers", name)
