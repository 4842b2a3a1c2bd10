"""The driver: from a config to a Ray Train run, and what came of it.

Everything that can be wrong with a config, its data or the cluster is found here, before a worker starts.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ray
import ray.data
import ray.train
import yaml
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.config.schema import Config, ModelConfig
from grpo_ray.data.split import StepDataConfig
from grpo_ray.data.stream import DatasetIndex, build_index, heldout_dataset, open_splits, training_stream
from grpo_ray.driver.preflight import (
    check_cluster,
    check_contents,
    check_model,
    check_same_run,
    check_trl,
    other_runs_checkpoint,
)
from grpo_ray.driver.progress import CoordinatorCallback, ProgressFollower, ProgressLine
from grpo_ray.driver.summary import RunSummary, describe_run, summarize_run
from grpo_ray.driver.warm_start import is_wanted, warm_executable
from grpo_ray.errors import ConfigError, GrpoRayError, RepeatedWorkerError, TrainingError
from grpo_ray.evaluation.baseline import Baseline, describe_baseline
from grpo_ray.evaluation.evaluate import Validation, evaluate, worker_environment
from grpo_ray.resilience.chaos import Fault
from grpo_ray.resilience.elastic import PreemptibleTrainer, explain_scaling, scaling_config
from grpo_ray.resilience.error_triage import describe_worker_error, root_cause
from grpo_ray.resilience.nodes import check_nodes, versions
from grpo_ray.resilience.signals import StopSignals
from grpo_ray.storage import checkpoints
from grpo_ray.storage.jsonl import EventsFile, MetricsFile
from grpo_ray.storage.run_folder import RunFolder, redact_credentials
from grpo_ray.telemetry.coordinator import RunCoordinator
from grpo_ray.training.worker import WorkerSpec, train_worker

UNVERIFIABLE = "unverifiable.json"
"""What `grpo-ray check` leaves in the run folder: a list of problem ids."""


def train(config: Config, line: ProgressLine | None = None, faults: Sequence[Fault] = ()) -> RunSummary:
    """Run a config from wherever it is to its last step.

    faults: put into the run on purpose (`chaos.py`).
    Raises ConfigError or DataError before any worker starts, TrainingError if the workers failed for good.
    """
    with prepare(config, line, faults) as run:
        if run.has_steps_left:
            run.fit(run.trainer())
        return run.finish()


def prepare(config: Config, line: ProgressLine | None = None, faults: Sequence[Fault] = ()) -> "PreparedRun":
    """Check everything that can be wrong, and read the problems.

    Raises ConfigError or DataError; no worker has been started then.
    """
    launched_at = time.time()
    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_patience)
    with ExitStack() as stack:
        line = stack.enter_context(line or ProgressLine(config.grpo.max_steps))
        line.phase("checking the settings")
        with ThreadPoolExecutor(1) as beside:
            # Importing TRL takes as long as starting a cluster, and either leaves a core idle.
            checked = beside.submit(check_trl, config)
            connect(config)
            checked.result()
        check_model(config)
        if config.run.resume == "never" and folder.exists("config.yaml"):
            line.phase(f"the old run is now {folder.set_aside()}")
        check_same_run(config, folder)
        folder.check_writable()
        for said in (check_cluster(config), explain_scaling(config)):
            if said:
                line.notice(said)
        line.phase("reading the problems")
        training, heldout = open_splits(config)
        check_nodes(config, folder, [split.shards[0] for split in (training, heldout) if split.shards])
        if left_out := read_unverifiable(config, folder):
            line.phase(f"leaving out {len(left_out)} problems whose solution does not verify (grpo-ray check)")
            training = replace(training, left_out=left_out)
        surveyed, measured = build_index(training), build_index(heldout)
        check_contents(config, folder, surveyed.contents)
        model_path = prepare_model(config, folder, line)
        folder.write_text(yaml.safe_dump(describe_run(config), sort_keys=False, allow_unicode=True), "config.yaml")
        checkpoints.prune_checkpoints(folder, config.run.best_metric, config.run.keep_checkpoints)
        checkpoints.repair_ray_snapshot(folder, config.run.best_metric)
        found = checkpoints.resume_candidates(folder, config.run.resume, config.run.best_metric)
        if not found and config.run.from_checkpoint:
            found = [other_runs_checkpoint(config, surveyed.contents)]
        start = found[0] if found else None
        run = PreparedRun(
            config, folder, line, model_path, surveyed, measured, start, faults=faults, launched_at=launched_at
        )
        stack.pop_all()
        return run


class PreparedRun:
    """A run that has passed every check: what Ray Train's trainer takes, and what is done around it.

    `train` makes the trainer by itself (`trainer`); one of your own takes what is offered here under the trainer's own
    names, and goes through `fit`.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        line: ProgressLine,
        model_path: str,
        training: DatasetIndex,
        heldout: DatasetIndex,
        start: checkpoints.CheckpointInfo | None,
        *,
        faults: Sequence[Fault],
        launched_at: float,
    ):
        """
        start: the checkpoint that the run goes on from, unless it turns out to be spoilt.
        launched_at: seconds since 1970.
        """
        self.config, self.folder, self.line = config, folder, line
        self.model_path, self.training, self.heldout = model_path, training, heldout
        self.start, self.faults = start, faults
        self.before = Baseline(folder, heldout.contents)
        self.launched_at = launched_at
        # On the driver's node: a machine that goes away must not take the board with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(RunCoordinator).remote()
        self.stop = StopSignals(self.board, line.notice, lambda: self._follower is not None and self._follower.training)
        self._follower: ProgressFollower | None = None

    def __enter__(self) -> "PreparedRun":
        return self

    def __exit__(self, *exc: object) -> None:
        self.line.__exit__(*exc)

    @property
    def heldout_before(self) -> dict[str, Any]:
        """The evaluation of the policy that the run begins with; if there is none yet, it is measured now."""
        return self.measure_before()

    def measure_before(self) -> dict[str, Any]:
        """Measure the policy that the run begins with, unless that is done; gives its evaluation."""
        before = self.before.read()
        if before is None:
            evaluation = evaluate(self.config, self.model_path, self.heldout.split, say=self.line.phase)
            before = self.before.write(evaluation)
            self.line.phase(describe_baseline(before))
        return before

    @property
    def has_steps_left(self) -> bool:
        """False if the run has taken its last step already."""
        return self.start is None or self.start.step < self.config.grpo.max_steps

    @property
    def train_loop_config(self) -> dict[str, WorkerSpec]:
        """What `worker.train_worker` is called with."""
        stored = checkpoints.stored_checkpoints(self.folder)
        assignment = WorkerSpec(
            self.config,
            self.model_path,
            contents=self.training.contents,
            numbers=ray.put(self.training.numbers),
            serial=stored[-1].serial if stored else 0,
            board=self.board,
            versions=versions(),
            faults=self.faults,
            heldout=self.heldout.contents,
            measures_before=self.start is None and self.before.read() is None,
        )
        return {"assignment": assignment}

    @property
    def datasets(self) -> dict[str, Any]:
        """Name -> what makes the Ray Dataset of problems. Each epoch runs the training stream anew."""
        return {
            "train": partial(
                training_stream,
                self.training.split,
                self.config.run.seed,
                self.board,
                prefers=self.config.data.prefer_mixed,
            ),
            "heldout": partial(heldout_dataset, self.heldout.split),
        }

    @property
    def dataset_config(self) -> ray.train.DataConfig:
        """How the problems of each step are dealt to the workers."""
        return StepDataConfig(self.config.grpo.prompts_per_step)

    @property
    def callbacks(self) -> list[ray.train.UserCallback]:
        """What carries the workers' metrics to the driver, and ends a run that trying again would not help."""
        return [CoordinatorCallback(self.board)]

    @property
    def torch_config(self) -> TorchConfig:
        return TorchConfig(backend="nccl" if self.config.cluster.use_gpu else "gloo")

    @property
    def worker_runtime_env(self) -> dict[str, Any]:
        """Environment variables of the workers."""
        return {"env_vars": worker_environment(self.config, threads_per_worker(self.config))}

    def trainer(self) -> PreemptibleTrainer:
        """The trainer of the run."""
        config, folder = self.config, self.folder
        background = ray.train.ValidationConfig(
            fn=Validation(config, folder, self.heldout.split, self.heldout.contents, self.board),
            ray_remote_kwargs={"num_cpus": 0},  # what it starts takes what it needs
        )
        return PreemptibleTrainer(
            train_worker,
            worker_counts=config.worker_counts,
            take_signals=self.stop.install,
            train_loop_config=self.train_loop_config,
            scaling_config=scaling_config(config),
            torch_config=self.torch_config,
            run_config=ray.train.RunConfig(
                name=config.run.name,
                storage_path=folder.path().rpartition("/")[0],
                storage_filesystem=folder.filesystem,
                # Machines that go away with notice are no failures.
                failure_config=ray.train.FailureConfig(
                    max_failures=config.run.max_failures, max_preemption_failures=-1
                ),
                checkpoint_config=ray.train.CheckpointConfig(
                    num_to_keep=config.run.keep_checkpoints,
                    checkpoint_score_attribute=checkpoints.SCORE,
                    checkpoint_score_order="max",
                ),
                callbacks=self.callbacks,
                worker_runtime_env=self.worker_runtime_env,
            ),
            datasets=self.datasets,
            dataset_config=self.dataset_config,
            validation_config=background if config.run.measure == "background" else None,
        )

    def fit(self, trainer: TorchTrainer) -> ray.train.Result:
        """`trainer.fit()`, while progress is shown and `metrics.jsonl` and `events.jsonl` are written.

        Raises TrainingError.
        """
        folder, events = self.folder, EventsFile(self.folder)
        if self.start:
            self.measure_before()  # the workers' policy is another one already
            self.line.notice(f"going on from {self.start.name}")
        events.add({"event": "launched", "at": self.launched_at})
        try:
            with ProgressFollower(self.board, self.line, MetricsFile(folder), events) as self._follower:
                result = trainer.fit()
                events.add({"event": "ended", "at": time.time()})
        except ray.train.TrainingFailedError as error:
            raise TrainingError(describe_failure(error, folder)) from error
        except ray.exceptions.RayError as error:
            latest = checkpoints.resume_candidates(folder, "latest", self.config.run.best_metric)
            where = f"from {latest[0].name}" if latest else "from the start"
            raise TrainingError(
                f"the Ray cluster was lost: {' '.join(str(error).split())[:200]}\n"
                f"once there is one again, the same command goes on {where}"
            ) from error
        finally:
            self.stop.remove()
        return result

    def finish(self) -> RunSummary:
        """Summarise the run in `summary.json`."""
        config, folder, line = self.config, self.folder, self.line
        if self.start is not None and not self.has_steps_left:
            line.phase(f"the run has taken its {self.start.step} steps; raise grpo.max_steps to go on")
        checkpoints.prune_checkpoints(folder, config.run.best_metric, config.run.keep_checkpoints)
        stored = checkpoints.stored_checkpoints(folder)
        best = checkpoints.best_checkpoint(stored, config.run.best_metric)
        took_all = bool(stored) and stored[-1].step >= config.grpo.max_steps
        stopped = None if took_all else self.stop.heard
        after = None if stopped or best is None else self._accuracy_of(best)
        seconds = time.time() - self.launched_at
        problems = self.heldout.contents.count
        before = self.before.read() if stopped else self.heldout_before
        summary = summarize_run(config, folder, before, after, problems, seconds, stopped)
        folder.write_json(asdict(summary), "summary.json")
        return summary

    def _accuracy_of(self, stored: checkpoints.CheckpointInfo) -> float:
        """Held-out accuracy of a checkpoint: as measured when it was saved, else measured now.

        It is measured now if it was saved in a hurry, or when the run had other held-out problems.
        """
        recorded = stored.metrics.get("heldout/accuracy")
        if recorded is not None and stored.measured_on == asdict(self.heldout.contents):
            return float(recorded)
        path = stored.path if self.folder.local else stored.uri
        return evaluate(self.config, path, self.heldout.split, say=self.line.phase).pass_at_1.value


def connect(config: Config) -> None:
    """Connect to the cluster of `RAY_ADDRESS` (set inside a Ray job), or start one on this machine."""
    # Ray Train takes one report from each worker at every look, and by default looks every 2 s: with a report for
    # each step, no step could be shorter than that. Read by the controller, whose environment comes from here.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "2")  # some clouds give notice of 30 s
    if config.worker_counts != [config.cluster.max_workers]:  # a group that waits for a dead machine tries others
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # a line for each pipeline, over the progress bar
    ray.data.DataContext.get_current().enable_progress_bars = False
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(**quiet)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"the Ray cluster at RAY_ADDRESS={redact_credentials(address)} cannot be reached: "
                f"{' '.join(str(error).split())[:200]}\n"
                "if it wants a token (`InvalidAuthToken` above): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what "
                "`ray get-auth-token` says on one of its nodes"
            ) from None
    else:
        cluster = config.cluster
        # One core more than the workers take, even where there are fewer: Ray Data must be able to run beside them.
        cpus = max(os.cpu_count() or 1, cluster.max_workers * cluster.cpus_per_worker + 1)
        with ExitStack() as stack:
            if is_wanted(cluster.use_gpu):
                stack.enter_context(warm_executable(worker_environment(config, threads_on_this_machine(config))))
            ray.init(num_cpus=cpus, include_dashboard=False, **quiet)


def read_unverifiable(config: Config, folder: RunFolder) -> frozenset[str]:
    """Ids of training problems that can never be rewarded, as `grpo-ray check` left them in the run folder."""
    if config.data.keep_unverifiable or not folder.exists(UNVERIFIABLE):
        return frozenset()
    return frozenset(json.loads(folder.read_text(UNVERIFIABLE)))


def threads_per_worker(config: Config) -> int:
    """Compute threads of one worker: what is set, or a node's cores shared out among its workers."""
    if config.cluster.threads_per_worker:
        return config.cluster.threads_per_worker
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if config.cluster.use_gpu else "CPU"
    nodes = [node for node in nodes if node.get(resource)]
    if len(nodes) <= 1:  # Ray may have been told of more cores than there are
        return threads_on_this_machine(config)
    workers_on_node = -(-config.cluster.max_workers // len(nodes))
    return max(1, int(min(node.get("CPU", 1) for node in nodes)) // workers_on_node)


def threads_on_this_machine(config: Config) -> int:
    """Compute threads of one worker where all workers share this machine."""
    return config.cluster.threads_per_worker or max(1, (os.cpu_count() or 1) // config.cluster.max_workers)


def prepare_model(config: Config, folder: RunFolder, line: ProgressLine) -> str:
    """Where the workers find the policy. The embedded one is built on first use and laid into the run folder."""
    if config.model.path != ModelConfig.path:  # the embedded one
        return os.path.expanduser(config.model.path)
    uploaded = ("policy", "uploaded")  # a driver that dies in the middle leaves half of it
    if not folder.exists(*uploaded):
        from grpo_ray.models.toy_policy import tiny_policy

        said = "warming up the embedded policy (once, about a minute)"
        built = tiny_policy(
            config.run.seed,
            progress=lambda step, steps: line.phase(said, step, steps) if step % 20 == 0 or step == 1 else None,
        )
        folder.upload(built, "policy")
        folder.write_text("", *uploaded)
    return folder.uri_of("policy")


def describe_failure(error: Exception, folder: RunFolder) -> str:
    """What went wrong in the workers, in two lines, and where to read the rest."""
    where = (
        f"the workers' own words are in {folder.uri_of('logs')}"
        if folder.local
        else "see Ray's log folder on the nodes"
    )
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, RepeatedWorkerError):
        return f"{cause}\n{where}"
    if isinstance(cause, GrpoRayError):
        return f"{describe_worker_error(cause)}\n{where}"
    failures = getattr(error, "worker_failures", {})
    if not failures:
        return f"{' '.join(str(error).split())}; {where}"
    rank, first = root_cause(failures)
    return f"worker {rank}: {describe_worker_error(first)}\n{where}"
