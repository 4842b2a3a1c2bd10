"""What is refused before a worker starts: settings, cluster, model and data that a run cannot go with."""

import json
from dataclasses import asdict, replace

import ray
import yaml

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.errors import ConfigError
from grpo_ray.resilience.nodes import autoscales, model_fault
from grpo_ray.storage import checkpoints
from grpo_ray.storage.run_folder import RunFolder

CONTENTS = "problems.json"
"""What a run's training problems are, by content: their number and a checksum (`ledger.DatasetFingerprint`)."""
FIXED = (
    ("model", "path"),
    ("model", "lora"),
    ("cluster", "shard_learner"),
    ("data", "train"),
    ("data", "limit"),
    ("run", "seed"),
    ("grpo", "prompts_per_step"),
    ("grpo", "num_generations"),
    ("grpo", "num_iterations"),
)
"""Section and field of what a run cannot change while it goes on: which problems are used up would not be known."""


def check_cluster(config: Config) -> str | None:
    """Refuse what the cluster does not have, before anything waits for it; raises ConfigError.

    A cluster with an autoscaler may come to have it: then it gives a sentence that says what is waited for.
    """
    have, cluster, least = ray.cluster_resources(), config.cluster, min(config.worker_counts)
    lacking = None
    cpus = least * cluster.cpus_per_worker + 1
    if cluster.use_gpu and have.get("GPU", 0) < least:
        lacking = (
            f"cluster.num_workers={least} with cluster.use_gpu=true needs {least} GPUs, "
            f"and the cluster has {have.get('GPU', 0):.0f}"
        )
    elif have.get("CPU", 0) < cpus:
        lacking = (
            f"cluster.num_workers={least} x cluster.cpus_per_worker={cluster.cpus_per_worker} and one "
            f"for Ray Data need {cpus} CPUs, and the cluster has {have.get('CPU', 0):.0f}"
        )
    if lacking and autoscales():
        return f"{lacking}; waiting for its autoscaler to start more nodes"
    if lacking:
        raise ConfigError(f"{lacking}; use fewer workers{', or cluster.use_gpu=false' if cluster.use_gpu else ''}")
    return None


def check_trl(config: Config) -> None:
    """Let TRL look at its settings on the driver; raises ConfigError."""
    from grpo_ray.rewards.registry import load_rewards
    from grpo_ray.training.trl_config import trl_arguments

    if config.cluster.use_gpu:  # the driver's machine may have no GPU, and TRL would refuse 16 bits for that alone
        config = replace(
            config, cluster=replace(config.cluster, use_gpu=False), model=replace(config.model, dtype="float32")
        )
    trl_arguments(config, output_dir=".")
    load_rewards(config.rewards)


def check_model(config: Config) -> None:
    """See that the policy's own config can be read, before anything is started for it; raises ConfigError."""
    if fault := model_fault(config):
        raise ConfigError(fault)


def check_same_run(config: Config, folder: RunFolder) -> None:
    """Refuse to go on with a run that was begun on other problems or another policy; raises ConfigError."""
    if not folder.exists(checkpoints.SNAPSHOT) or not folder.exists("config.yaml"):
        return
    begun, now = yaml.safe_load(folder.read_text("config.yaml")), config.to_dict()
    for section, name in FIXED:
        is_now = now[section].get(name)
        was = begun.get(section, {}).get(name, is_now)  # a field that did not exist then
        if was != is_now:
            raise ConfigError(
                f"{section}.{name}={is_now} differs from {was}, with which the run {folder.uri} was begun; "
                "give this one another run.name, or set run.resume=never to start over"
            )


def check_contents(config: Config, folder: RunFolder, contents: DatasetFingerprint) -> None:
    """Refuse to go on with a run whose training problems are no longer those that it was begun with.

    Goes by content: the order of files, and how they are cut, may change. Raises ConfigError.
    """
    begun = folder.exists(CONTENTS) and checkpoints.stored_checkpoints(folder)
    if begun and not config.data.accept_changes:
        _compare(config, DatasetFingerprint(**json.loads(folder.read_text(CONTENTS))), contents, folder.uri)
    folder.write_json(asdict(contents), CONTENTS)


def _compare(config: Config, was: DatasetFingerprint, now: DatasetFingerprint, run: str) -> None:
    if was == now:
        return
    how = (
        f"{now.count} problems where there were {was.count}"
        if now.count != was.count
        else f"{now.count} problems as before, but not the same ones"
    )
    raise ConfigError(
        f"data.train={config.data.train} has changed since the run {run} was begun: {how}; give this run another "
        "run.name, or set data.accept_changes=true to go on (what is used of the open epoch stays used)"
    )


def other_runs_checkpoint(config: Config, contents: DatasetFingerprint) -> checkpoints.CheckpointInfo:
    """The other run's checkpoint that this run begins with. Raises CheckpointError or ConfigError."""
    assert config.run.from_checkpoint
    stored = checkpoints.open_foreign_checkpoint(config.run.from_checkpoint, config.run.best_metric)
    if stored.folder.exists(CONTENTS) and not config.data.accept_changes:
        _compare(
            config, DatasetFingerprint(**json.loads(stored.folder.read_text(CONTENTS))), contents, stored.folder.uri
        )
    return stored
