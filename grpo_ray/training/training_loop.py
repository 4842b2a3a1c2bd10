"""Training of one worker, from loaded libraries to the last step: learner, callbacks and watchdog put together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.baseline import BaselineFile, measure_baseline
from grpo_ray.learner.learner import Learner, LearnerHooks, build_learner
from grpo_ray.resilience.chaos import FaultInjector
from grpo_ray.resilience.elastic import PreemptionNotice
from grpo_ray.resilience.error_triage import error_context
from grpo_ray.resilience.nonfinite import NonFiniteMonitor
from grpo_ray.resilience.signals import StopRequest
from grpo_ray.resilience.watchdog import Watchdog
from grpo_ray.storage import checkpoints
from grpo_ray.storage.fencing import FencingToken
from grpo_ray.storage.run_folder import RunFolder, fetch_folder
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.training.attempt import Attempt
from grpo_ray.training.problem_loader import ProblemLoader
from grpo_ray.training.report_callback import (
    BaselineCallback,
    EndSignals,
    OptimizerTimer,
    ReportCallback,
    ReportInputs,
    ReportTarget,
    WatchdogCallback,
)
from grpo_ray.training.start_point import StartPoint


def run_training(
    attempt: Attempt,
    start: StartPoint,
    checkpoint: Path | None,
    loader: ProblemLoader,
    problems: Iterator[tuple[Problem, int]],
    heldout: list[Problem],
    history: list[dict[str, Any]],
    fence: FencingToken,
) -> None:
    """Build the learner with its callbacks and train until `grpo.max_steps`; collective.

    Args:
        checkpoint: local folder with the checkpoint to resume from; None for a run that begins.
        problems: the worker's problems with their epochs, from the first one not yet used.
        heldout: all held-out problems.
        history: metrics of all steps before.
    """
    config = attempt.config
    profiler = PhaseProfiler(trace=config.run.trace)
    watchdog = Watchdog(
        Path(attempt.scratch, f"stacks-worker-{attempt.rank}.txt"),  # on this node, since the storage may hang
        config.run.hang_factor,
        config.run.hang_seconds,
        lambda message, stacks: report_hang(attempt, message, stacks),
    )

    def make_hooks(learner: Learner) -> LearnerHooks:
        monitor = NonFiniteMonitor(
            config.run.max_bad_steps,
            groups=learner.groups_for_study,
            save=lambda groups, step: save_groups(attempt.folder, groups, step, attempt.rank),
        )
        report = ReportCallback(
            config,
            ReportTarget(
                folder=attempt.folder,
                coordinator=attempt.spec.coordinator,
                fence=fence,
                history=history,
                next_serial=start.last_serial + 1,
            ),
            ReportInputs(
                settle=loader.settle,
                measure_heldout=lambda: learner.heldout.accuracy(heldout),
                heldout_fingerprint=attempt.spec.heldout_fingerprint,
                reward_states=learner.reward_states,
                skipped_steps=lambda: monitor.skipped,
            ),
            EndSignals(preemption=PreemptionNotice(), stop_requested=StopRequest(attempt.spec.coordinator)),
            profiler,
        )
        baseline: list[TrainerCallback] = []
        if checkpoint is None and attempt.spec.measures_baseline:
            baseline = [BaselineCallback(lambda: measure_initial_policy(attempt, learner, heldout))]
        # The watchdog comes last: the other callbacks decide whether the step ends with a checkpoint.
        return LearnerHooks(
            callbacks=[*baseline, OptimizerTimer(profiler), monitor, report, WatchdogCallback(watchdog)],
            record_groups=loader.record,
            observe_loss=monitor.observe_loss,
        )

    learner = build_learner(
        config,
        model_path=fetch_folder(attempt.spec.model_path, config.run.storage_retry_seconds, into=attempt.scratch),
        output_dir=attempt.scratch,
        problems=problems,
        make_hooks=make_hooks,
        on_progress=attempt.set_status,
        profiler=profiler,
    )
    with error_context(lambda: learner.state.global_step or start.step):
        FaultInjector(attempt.spec.faults, attempt.folder, attempt.rank, attempt.workers).install(learner)
        if checkpoint is not None:
            learner.load_reward_states(checkpoints.load_reward_states(checkpoint, attempt.rank))
        with watchdog:
            learner.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def measure_initial_policy(attempt: Attempt, learner: Learner, heldout: list[Problem]) -> None:
    """Measure the baseline with the learner's engine, unless an earlier attempt did; collective."""
    file = BaselineFile(attempt.folder, attempt.spec.heldout_fingerprint)
    measure_baseline(file, learner.heldout.solve, heldout, attempt.set_status, attempt.notify)


def report_hang(attempt: Attempt, message: str, stacks: Path) -> None:
    """Tell the user about a worker that hangs, and copy the stacks of its threads to the run folder."""
    uri = attempt.folder.uri_of("logs", stacks.name)
    attempt.notify(f"worker {attempt.rank}: {message}; stacks of all threads are in {uri}")
    attempt.folder.write_text(stacks.read_text(), "logs", stacks.name)


def save_groups(folder: RunFolder, groups: list[dict[str, Any]], step: int, rank: int) -> str:
    """Write groups with non-finite numbers to the run folder, and return their location."""
    name = f"step-{step:06d}-worker-{rank}.json"
    folder.write_text(json.dumps(groups, indent=1) + "\n", "bad_numbers", name)
    return folder.uri_of("bad_numbers", name)
