"""The driver: from a config to a finished Ray Train run and its summary.

`prepare` and `train` are a list of phases. A config, dataset or cluster that cannot work is refused before a worker
starts.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer

from grpo_ray.config.schema import Config
from grpo_ray.driver.cluster.connection import ClusterWatch, owns_cluster, start_coordinator
from grpo_ray.driver.cluster.warm_start import end_warm_start
from grpo_ray.driver.engines import running_engines, start_pool
from grpo_ray.driver.launch import ResumePoint, begin_launch, find_resume_point, index_datasets, prepare_policy
from grpo_ray.driver.preflight.checks import run_preflight
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.run_observers import build_observers
from grpo_ray.driver.summary import PAUSED, HeldoutSummary, RunSummary, summarize_run
from grpo_ray.driver.trainer import TrainerPlan
from grpo_ray.errors import GrpoRayError, RepeatedWorkerError, SupersededError, TrainingError
from grpo_ray.evaluation.baseline import baseline_metrics, describe_baseline
from grpo_ray.evaluation.evaluate import evaluate
from grpo_ray.evaluation.metrics import EvaluationResult, heldout_metrics, recorded_measures
from grpo_ray.evaluation.records import write_records
from grpo_ray.observers.feed import RunFeed, RunObserver
from grpo_ray.observers.follower import RunFiles, RunFollower
from grpo_ray.observers.terminal.progress import ProgressLine, build_progress
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.elastic import PreemptibleTrainer
from grpo_ray.resilience.error_triage import MEMORY_ADVICE, describe_worker_error, is_memory_kill, root_cause
from grpo_ray.resilience.hangup import survives_hangup
from grpo_ray.resilience.signals import StopSignals
from grpo_ray.rewards.reward_models import running_reward_models
from grpo_ray.storage import checkpoint_upload, checkpoints, ray_snapshot
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder


def train(config: Config, progress: ProgressLine | None = None, faults: Sequence[Fault] = ()) -> RunSummary:
    """Run a config from its resume point to its last step.

    Args:
        progress: display of the run; None: a new one on standard output.
        faults: faults injected on purpose (`chaos.py`).

    Raises:
        GrpoRayError: preflight refused the run; no worker was started.
        TrainingError: the workers failed and are not started again.
    """
    with prepare(config, progress, faults) as run:
        if run.has_steps_left:
            run.fit(run.trainer())
        return run.finish()


def prepare(
    config: Config,
    progress: ProgressLine | None = None,
    faults: Sequence[Fault] = (),
    observers: Sequence[RunObserver] = (),
) -> "PreparedRun":
    """Check the run, index its datasets, and find its resume point.

    Args:
        progress: display of the run; None: a new one on standard output.
        faults: faults injected on purpose (`chaos.py`).
        observers: further observers of the run.

    Raises:
        GrpoRayError: mostly ConfigError or DataError; no worker was started.
    """
    launched_at = time.time()
    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_retry_seconds)
    folder.require_plain_files()
    with ExitStack() as stack:
        stack.enter_context(survives_hangup())
        line = stack.enter_context(progress or build_progress(config))
        context = RunContext(config, folder, line, owns_cluster=owns_cluster())
        lease = stack.enter_context(RunLease.acquire(folder, config.run.takeover, context.progress.notice))
        run_preflight(context)
        indexes = index_datasets(context)
        resume = find_resume_point(context, indexes)
        changes_config = begin_launch(context, lease, indexes)
        policy = prepare_policy(context, resume)
        coordinator = start_coordinator()
        pool = start_pool(config, policy.path, coordinator)
        plan = TrainerPlan(context, indexes, policy, resume, coordinator, pool, faults)
        # The progress line stays open, and the lease is kept, until the run is closed.
        run = PreparedRun(plan, launched_at, lease, stack.pop_all(), observers, changes_config)
    with ExitStack() as on_error:
        on_error.push(run)
        run.choose_best()
        on_error.pop_all()
    return run


class PreparedRun:
    """Lifecycle of a run that passed preflight: baseline, training, summary.

    `train` uses the trainer of `trainer()`; a trainer of your own is built from the properties of `plan` and passed to
    `fit`. Close the run, or use it as a context manager, to end the progress display.

    Args:
        launched_at: start of this launch, seconds since 1970.
        lease: lease of the run folder.
        resources: closed together with the run.
        observers: further observers of the run.
        changes_config: True if this launch has written other settings or versions to `config.yaml`.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        launched_at: float,
        lease: RunLease,
        resources: ExitStack,
        observers: Sequence[RunObserver] = (),
        changes_config: bool = False,
    ):
        self.plan, self.launched_at, self.lease, self._resources = plan, launched_at, lease, resources
        self._observers, self._changes_config = observers, changes_config
        self.config, self.folder, self.progress = plan.context.config, plan.context.folder, plan.context.progress
        self._follower: RunFollower | None = None
        self._has_trained = False
        self._stop_signals = StopSignals(plan.coordinator, self.progress.notice, self._is_training)

    def __enter__(self) -> "PreparedRun":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and "feed" in vars(self):  # before the first launch event there is nothing to end
            self.feed.aborted(error)
        self._resources.close()

    def _is_training(self) -> bool:
        return self._follower is not None and self._follower.is_training

    @property
    def model_path(self) -> str:
        """Path, URI or hub id of the initial policy; with `run.from_checkpoint`, that of `model.path`."""
        return self.plan.policy.path

    @property
    def heldout_before(self) -> dict[str, Any]:
        """Evaluation of the initial policy on the primary held-out set, in JSON's types; measured now if missing."""
        return self.measure_heldout_before()[self.config.primary_heldout]

    def measure_heldout_before(self) -> dict[str, dict[str, Any]]:
        """Measure the initial policy with an engine of its own on the held-out sets that have no evaluation yet.

        Returns:
            Key of a held-out set -> the initial policy's evaluation, in JSON's types.
        """
        baseline = self.plan.baseline
        if missing := baseline.missing():
            policy = self.plan.policy
            if policy.measured_path is None:
                where = self.config.run.from_checkpoint
                self.progress.notice(f"{', '.join(missing)}: not measured before training: {where} has changed")
                return baseline.read()
            # The policy of `model.path` is the user's own: the workers render its template without limits too.
            limits_template = policy.is_of_other_run and not self.config.model.trust_remote_code
            results = self._evaluate(policy.measured_path, missing, limits_template)
            baseline.write(results)
            self.progress.phase(describe_baseline(results, self.config.heldout_score))
            self.feed.event({"event": "baseline", "at": time.time(), "metrics": baseline_metrics(results)})
        return baseline.read()

    def _evaluate(self, policy: str, keys: Sequence[str], limits_template: bool = False) -> dict[str, EvaluationResult]:
        """Evaluate a policy on some held-out sets with an engine of its own."""
        if self.config.rollout.has_conversations and self.plan.context.owns_cluster:
            end_warm_start()  # code of the policy is about to run, before the workers of training have started
        splits = self.plan.indexes.heldout_splits
        wanted = {key: splits[key] for key in keys}
        return evaluate(self.config, policy, wanted, limits_template=limits_template, on_progress=self.progress.phase)

    @cached_property
    def feed(self) -> RunFeed:
        """Distributor of the run's progress to everything that follows it."""
        optional = build_observers(
            self.plan.context,
            publish=lambda entry: self.feed.event(entry),
            request_stop=self._stop_signals.request_stop,
        )
        feed = RunFeed([self._files, self.progress, *self._observers, *optional])
        self._resources.callback(feed.close)
        return feed

    @cached_property
    def _files(self) -> RunFiles:
        return RunFiles(self.folder, self.progress.notice)

    @property
    def has_steps_left(self) -> bool:
        """False if the run has taken its last step, or that of `run.pause_at`, already."""
        resume = self.plan.resume
        return resume.step < self.config.last_step

    def choose_best(self) -> None:
        """Take missed measurements with `run.resume=best`, and resume from the checkpoint that is the best one then.

        A checkpoint without its measurement could not be the best one, and the run would discard it.
        """
        run, metric = self.config.run, self.config.ranking_metric
        if run.resume != "best" or metric.rpartition("/")[0] not in self.config.heldout_keys:
            return
        stored = checkpoints.resume_candidates(self.folder, "latest", metric)
        if [each.name for each in stored if self._measure_missed(each)]:
            best = checkpoints.resume_candidates(self.folder, run.resume, metric)[0]
            self.plan = replace(self.plan, resume=ResumePoint(best))

    def trainer(self) -> PreemptibleTrainer:
        """Build the trainer of this run."""
        return self.plan.build(self._stop_signals.install)

    @property
    def stopped_by(self) -> str | None:
        """Name of the signal or of the warning that stopped this launch; None if none did."""
        return self._stop_signals.requested_by

    def request_stop(self, reason: str | None = None) -> None:
        """Ask the workers to finish the current step, save it and end; from any thread.

        Args:
            reason: `RunSummary.stopped` of a run that ends before its last step; None: it counts as not stopped.
        """
        if reason is None:
            self.plan.coordinator.request_stop.remote()
        else:
            self._stop_signals.request_stop(reason, f"stopped by {reason}")

    def fit(self, trainer: TorchTrainer) -> ray.train.Result:
        """Run `trainer.fit()` while showing progress and writing `metrics.jsonl` and `events.jsonl`.

        Raises:
            TrainingError: the workers failed and are not started again, or the cluster was lost.
        """
        resume = self.plan.resume
        if resume.checkpoint is not None and resume.is_of_other_run:
            self.progress.notice(f"beginning with {resume.checkpoint.uri}")
        elif resume.checkpoint is not None:
            before = self.measure_heldout_before()  # the workers cannot: they load the checkpoint's policy
            results = {key: EvaluationResult.from_dict(each) for key, each in before.items()}
            self.progress.baseline(baseline_metrics(results))
            self.progress.notice(f"resuming from {resume.checkpoint.name}")
        self.feed.event({"event": "launched", "at": self.launched_at})
        if resume.checkpoint is not None and not resume.is_of_other_run:
            self._measure_missed(resume.checkpoint)
        # Ray Train reads it when it starts. It is written after that measurement: by the scores in it Ray Train decides
        # which checkpoints to delete.
        ray_snapshot.repair_ray_snapshot(self.folder, self.config.ranking_metric)
        try:
            with (
                RunFollower(self.plan.coordinator, self.feed, self.config.last_step) as self._follower,
                self._ends_when_run_or_cluster_is_lost(),
                self._reward_models(),
                self._engines(),
            ):
                result = trainer.fit()
                self._has_trained = True
                self.feed.event({"event": "ended", "at": time.time()})
        except ray.train.TrainingFailedError as error:
            raise TrainingError(describe_training_failure(error, self.folder)) from error
        except ray.exceptions.RayError as error:
            raise TrainingError(self._describe_lost_cluster(" ".join(str(error).split())[:200])) from error
        finally:
            self._stop_signals.remove()
        return result

    @contextmanager
    def _reward_models(self) -> Iterator[None]:
        """Keep the reward models running, if the run uses any."""
        if not self.config.uses_reward_models:
            yield
            return
        self.progress.phase("loading the reward models")
        with running_reward_models(self.config):
            yield

    @contextmanager
    def _engines(self) -> Iterator[None]:
        """Keep the dedicated engines running, if the run has any."""
        if self.plan.pool is not None:
            self.progress.phase("reserving the engines")
        with running_engines(self.plan.pool):
            yield

    @contextmanager
    def _ends_when_run_or_cluster_is_lost(self) -> Iterator[None]:
        """End the block with an error once another driver has taken the run, or the embedded cluster has ended."""
        if threading.current_thread() is not threading.main_thread():
            yield  # nothing can interrupt this thread; its next call to the run folder or to the cluster fails
            return
        follower, stop = self._follower, self._stop_signals
        assert follower is not None

        def end_for_other_driver(error: SupersededError) -> None:
            self._files.may_write = False
            stop.abort(error, stops_workers=True)

        def end_for_lost_cluster(process: str) -> None:
            follower.can_read = False
            error = TrainingError(self._describe_lost_cluster(f"its process {process} has ended"))
            stop.abort(error, stops_workers=False)

        self.lease.on_lost = end_for_other_driver
        try:
            with ClusterWatch(end_for_lost_cluster):
                yield
        except BaseException:  # an interrupt too, with which the watching threads end the block
            if stop.error is not None:
                raise stop.error from None
            raise
        finally:
            self.lease.on_lost = lambda error: None

    def _describe_lost_cluster(self, reason: str) -> str:
        candidates = checkpoints.resume_candidates(self.folder, self.config.run.resume, self.config.ranking_metric)
        start = candidates[0].name if candidates else "the start"
        return (
            f"the Ray cluster was lost: {reason}; steps since the last checkpoint are lost\n"
            f"run the same command again to resume from {start}"
        )

    def finish(self) -> RunSummary:
        """Take the missing measurements, and summarise the run in `summary.json`."""
        config, folder, plan = self.config, self.folder, self.plan
        self.lease.confirm()
        if not self.has_steps_left:
            field = "grpo.max_steps" if plan.resume.step >= config.grpo.max_steps else "run.pause_at"
            self.progress.phase(f"the run has taken its {plan.resume.step} steps; raise {field} to continue")
        # Without steps, a launch leaves no trace but its settings in `config.yaml`, with which no step was taken.
        is_recorded_here = self._changes_config and not self.has_steps_left
        if is_recorded_here:
            self.feed.event({"event": "launched", "at": self.launched_at})
        if self._has_trained:  # a launch that took no step deletes nothing
            checkpoint_upload.clear_unfinished(folder)
            checkpoints.prune_checkpoints(folder, config.ranking_metric, config.run.keep_checkpoints)
        stored = checkpoints.list_checkpoints(folder)
        is_complete = bool(stored) and stored[-1].step >= config.grpo.max_steps
        stopped_by = None if is_complete else self.stopped_by
        is_paused = not is_complete and not stopped_by and bool(stored) and stored[-1].step >= config.last_step
        measured_on = stored[-1].measured_on if stored else None
        if (is_complete and measured_on is None) or (is_paused and measured_on != plan.heldout_conditions):
            stored[-1] = self._measure_checkpoint(stored[-1])
        best = checkpoints.best_checkpoint(stored, config.ranking_metric)
        after = {} if best is None else self._heldout_measures(best, measure_others=not stopped_by)
        seconds = time.time() - self.launched_at
        before = plan.baseline.read() if stopped_by else self.measure_heldout_before()
        heldout = {
            key: HeldoutSummary(
                problems=fingerprint.count,
                before=EvaluationResult.from_dict(before[key]).measures() if key in before else {},
                after=after.get(key, {}),
            )
            for key, fingerprint in plan.indexes.heldout_fingerprints.items()
        }
        if is_recorded_here:
            self.feed.event({"event": "ended", "at": time.time()})
        summary = summarize_run(config, folder, heldout, seconds, stopped_by or (PAUSED if is_paused else None))
        folder.write_json(asdict(summary), "summary.json")
        self.feed.finished(asdict(summary))
        return summary

    def _measure_missed(self, checkpoint: CheckpointInfo) -> bool:
        """Measure a checkpoint that the run may resume from, if the run would have measured it without a stop.

        Otherwise it would never be the best one. A checkpoint that is damaged is left to the workers, which resume from
        an older one.

        Returns:
            True if it was measured now.
        """
        step, config = checkpoint.step, self.config
        is_regular = step % config.grpo.save_steps == 0 or step >= config.last_step
        if not is_regular or checkpoint.measured_on is not None or find_faults(checkpoint):
            return False
        self._measure_checkpoint(checkpoint)
        return True

    def _measure_checkpoint(self, checkpoint: CheckpointInfo) -> CheckpointInfo:
        """Measure a checkpoint that a stop, a preemption or the driver's death has left without a measurement.

        Returns:
            The checkpoint with its measurement.
        """
        conditions = self.plan.heldout_conditions
        if not conditions:
            return checkpoint
        results = self._evaluate(checkpoint.folder.address_of(checkpoint.name), list(conditions))
        metrics = heldout_metrics(results, self.config.primary_heldout)
        write_records(self.folder, checkpoint.step, results, policy=checkpoint.name, conditions=conditions)
        measured = {"metrics": metrics, "measured_on": conditions}
        self.folder.write_json(measured, checkpoint.name, checkpoints.MEASURED)
        self.feed.measured(checkpoint.step, metrics)
        self.feed.event({"event": "measured", "at": time.time(), "step": checkpoint.step, "metrics": metrics})
        return replace(checkpoint, metrics={**checkpoint.metrics, **metrics}, measured_on=conditions)

    def _heldout_measures(self, checkpoint: CheckpointInfo, measure_others: bool) -> dict[str, dict[str, float]]:
        """Return the measures of each held-out set that are recorded with a checkpoint, or measured now.

        A set has no usable record if the checkpoint was saved without measuring, because of a stop or a preemption, or
        if it was measured under other conditions.
        """
        conditions, measured_on = self.plan.heldout_conditions, checkpoint.measured_on or {}
        valid = [key for key in conditions if measured_on.get(key) == conditions[key]]
        measures = {key: recorded for key in valid if (recorded := recorded_measures(checkpoint.metrics, key))}
        missing = [key for key in conditions if key not in measures]
        if missing and measure_others:
            results = self._evaluate(checkpoint.folder.address_of(checkpoint.name), missing)
            write_records(self.folder, checkpoint.step, results, policy=checkpoint.name, conditions=conditions)
            measures |= {key: result.measures() for key, result in results.items()}
        return measures


def describe_training_failure(error: Exception, folder: RunFolder) -> str:
    """Describe in one or two lines why the workers failed, and where their logs are."""
    logs = (
        f"the workers' logs are in {folder.uri_of('logs')}"
        if folder.local
        else "the workers' logs are in Ray's log folder on the nodes"
    )
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, RepeatedWorkerError):
        return f"{cause}\n{logs}"
    if isinstance(cause, GrpoRayError):
        return f"{describe_worker_error(cause)}\n{logs}"
    if is_memory_kill(error):
        return f"a worker died: {MEMORY_ADVICE}\n{logs}"
    failures = getattr(error, "worker_failures", {})
    if not failures:
        return f"{' '.join(str(error).split())}; {logs}"
    rank, worker_error = root_cause(failures)
    return f"worker {rank}: {describe_worker_error(worker_error)}\n{logs}"
