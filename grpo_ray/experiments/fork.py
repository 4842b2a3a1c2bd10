"""Fork of a run: the same run from one of its checkpoints on, under changed settings, beside the original.

Both runs have the same seeds, problems, weights and optimizer state up to the checkpoint, so all that differs after it
is the effect of the settings. A fork without changes equals the original, on the CPU bit for bit.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_ray.config.loader import load_config
from grpo_ray.config.recorded import RECORDED_CONFIG, recorded_code
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.driver.launch import BEGUN_WITH, UPLOADED
from grpo_ray.driver.preflight.resume_fields import changed_fields
from grpo_ray.driver.preflight.same_run import FORK_FILE
from grpo_ray.driver.run import train
from grpo_ray.driver.summary import RunSummary
from grpo_ray.errors import CheckpointError, ConfigError, DamagedFileError
from grpo_ray.experiments.branch import find_start, require_sound, write_branch
from grpo_ray.experiments.fork_fields import identifying, require_changeable
from grpo_ray.experiments.run_comparison import RunComparison, compare_runs, read_contents
from grpo_ray.models.embedded_policy import embedded_policy_digest
from grpo_ray.pages.report.read import open_run
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints, resolve_checkpoint
from grpo_ray.storage.lease import FOLDER as LEASE_FOLDER
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import split_path
from grpo_ray.text.display import one_line
from grpo_ray.text.redaction import redact, redact_settings

NAME_CHARS = 80
"""Longest derived name of a fork, beyond which its changes are named by a hash, as are changes with secrets."""


@dataclass(frozen=True)
class Fork:
    """A fork that has been trained."""

    folder: RunFolder
    summary: RunSummary
    comparison: RunComparison
    """With the original, over the steps that both have taken."""
    stop_on: Sequence[str]
    """`run.stop_on` of the fork."""


def fork(
    path: str,
    step: int,
    overrides: Sequence[str] = (),
    *,
    config_path: str | None = None,
    trusts_settings: bool = False,
) -> Fork:
    """Train the fork of a run, or continue one that was interrupted, and compare it with the original.

    Args:
        path: run folder, local path or URI; it is only read.
        step: step of the checkpoint that the fork begins with; 0: the start.
        overrides: changed settings, as `section.field=value`.
        config_path: YAML file of the run's settings; None: those that its folder records.
        trusts_settings: use recorded settings that run code of the run folder's author, or call an address.

    Raises:
        CheckpointError: the run has no sound checkpoint of this step, and the fork has not begun.
        ConfigError: a setting cannot change, or the fork's folder is in use.
        TrainingError: the workers failed.
    """
    source = open_run(path)
    require_changeable(overrides)
    config = branch_config(source, overrides, config_path=config_path, trusts_settings=trusts_settings)
    if not any(override.startswith("run.name=") for override in overrides):
        config = with_run(config, name=fork_name(source.name, step, overrides))
    require_same_run(config, source, step, is_given=config_path is not None)
    target = run_folder_of(config)
    require_other_folder(source, target)
    if step == 0 and not list_checkpoints(target):
        require_same_start(config, source)
    prepare_fork(source, step, target, overrides, config.run.takeover)
    summary = train(config)
    comparison = compare_runs(read_contents(path), read_contents(target.address_of()), step)
    return Fork(target, summary, comparison, config.run.stop_on)


def prepare_fork(
    source: RunFolder, step: int, target: RunFolder, overrides: Sequence[str], takeover: str | None = None
) -> None:
    """Write the folder of a fork, unless it exists already, complete and with the same origin and changes.

    A fork that exists has its own copy of the checkpoint, so the run may have deleted it.

    Args:
        takeover: `run.takeover` of the fork.

    Raises:
        CheckpointError: the run does not have the checkpoint any more, or it is damaged.
        ConfigError: the folder exists, and is another fork, or not a complete one.
        TakenRunError: another process trains the fork.
    """
    with RunLease.acquire(target, takeover, print):
        if target.exists(FORK_FILE):
            found, wanted = target.read_json(FORK_FILE), describe_fork(source, step, overrides)
            if not isinstance(found, dict) or any(found.get(name) != value for name, value in wanted.items()):
                raise ConfigError(f"{target.uri} is another fork; set another run.name")
            return
        checkpoint = find_start(source, step)
        if has_files(target):
            raise ConfigError(
                f"{target.uri} exists, and is no fork of {source.uri}, or an incomplete one; delete it, or set another "
                "run.name"
            )
        if checkpoint is not None:
            require_sound(checkpoint)
        try:
            write_branch(source, checkpoint, target)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {target.uri} is incomplete, delete it") from None
        write_origin(source, checkpoint, target, overrides)


def has_files(target: RunFolder) -> bool:
    """Return True if a folder whose lease is held has files besides those of the lease."""
    return any(not name.startswith(f"{LEASE_FOLDER}/") for name in target.file_sizes())


def write_origin(
    source: RunFolder, checkpoint: CheckpointInfo | None, target: RunFolder, overrides: Sequence[str]
) -> None:
    """Write the origin of a branch, after all other files of it."""
    origin = describe_fork(source, 0 if checkpoint is None else checkpoint.step, overrides) | {
        "checkpoint": None if checkpoint is None else checkpoint.name,
        "digest": None if checkpoint is None else checkpoint.digest,
    }
    target.write_json(origin, FORK_FILE)


def describe_fork(source: RunFolder, step: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the identity of a fork: run, step and changes, in JSON's types and without secrets."""
    changes = list(map(_without_secrets, identifying(overrides)))
    identity: dict[str, Any] = redact({"run": source.uri, "step": step, "changes": changes})
    return identity


def _without_secrets(override: str) -> str:
    """Return an override whose value is hidden if its name is that of a secret."""
    name, equals, value = override.partition("=")
    return redact(f"{name}{equals}{redact_settings(value, name=name)}")


def branch_config(
    source: RunFolder, overrides: Sequence[str], *, config_path: str | None, trusts_settings: bool
) -> Config:
    """Return the config of a run under changed settings, for a folder beside the run's.

    Raises:
        ConfigError: a setting is invalid, or the recorded settings are not trusted.
        DamagedFileError: the recorded config cannot be read.
    """
    parent = split_path(source.address_of())[0]
    if config_path is not None:
        given = load_config(config_path, overrides)
        is_set = any(override.startswith("run.storage_path=") for override in overrides)
        storage = given.run.storage_path if is_set else parent
        given = replace(given, data=replace(given.data, accept_changes=False))  # `fork_fields.REFUSED`
        return with_run(given, resume="latest", takeover=given.run.takeover, storage_path=storage)
    try:
        recorded = read_recorded(source)
    except (DamagedFileError, FileNotFoundError) as error:
        raise DamagedFileError(f"{error}; give the run's own YAML with --config") from None
    if not trusts_settings and (code := recorded_code(recorded)):
        raise ConfigError(
            f"the run folder sets {code[0]}, which runs its author's code or calls an address; allow it with "
            "--trust-settings if the run is your own, or give your own YAML with --config"
        )
    settings = {name: fields for name, fields in recorded.items() if name != "versions"}
    run = {"resume": "latest", "takeover": None, "pause_at": None, "storage_path": parent, "name": source.name}
    # Messages are the original's: their address is a secret that is not recorded, or a stranger's.
    settings["run"] = settings.get("run", {}) | run | {"notify": None}
    settings["data"] = settings.get("data", {}) | {"accept_changes": False}
    return load_config(source.uri_of(RECORDED_CONFIG), overrides, settings=settings)


def require_same_run(config: Config, source: RunFolder, step: int, *, is_given: bool = False) -> None:
    """Refuse a config that changes a field which cannot change while a run continues (`resume_fields.FIXED`).

    Args:
        step: step that the branch begins at.
        is_given: the config is the user's own; a recorded one that is damaged is then not compared, with a note.

    Raises:
        ConfigError: with the field, both values and the reason.
        DamagedFileError: the recorded config cannot be read.
    """
    if not source.exists(RECORDED_CONFIG):
        return
    try:
        recorded = read_recorded(source)
    except DamagedFileError as error:
        if not is_given:
            raise
        print(f"{error}; its settings are not compared with those of --config")
        return
    for changed in changed_fields(config, recorded):
        if step and changed.name == "model.path":
            continue  # the policy may have moved: the driver compares its contents (`check_same_run`)
        raise ConfigError(
            f"{changed}, the value of the run {source.uri}, and cannot change in a fork: {changed.reason}; set "
            f"{changed.name}={changed.old}, or begin a run of its own (run.from_checkpoint)"
        )


def require_same_start(config: Config, source: RunFolder) -> None:
    """Refuse to begin at step 0 with another policy than the run, where the driver would not notice it.

    The driver compares the files of other policies (`check_same_run`).

    Raises:
        CheckpointError: there is no checkpoint at `run.from_checkpoint`.
        ConfigError: the run began with another checkpoint of another run, or with another embedded policy.
    """
    run, model = config.run, config.model.path
    if source.exists(BEGUN_WITH):
        begun_with = source.read_text(BEGUN_WITH)
        found = resolve_checkpoint(run.from_checkpoint, run.best_metric) if run.from_checkpoint else None
        if found is None or found.digest != begun_with.rpartition(" ")[2]:
            raise ConfigError(
                f"run.from_checkpoint={redact(run.from_checkpoint)} is not the checkpoint that the run {source.uri} "
                f"began with, {one_line(begun_with)}; restore it, or begin with a checkpoint of the run"
            )
    if model in EMBEDDED_POLICIES and source.exists(*UPLOADED):
        recorded, current = source.read_text(*UPLOADED), f"{model} {embedded_policy_digest(model)}"
        if recorded != current:
            raise ConfigError(
                f"model.path={model}: this version of grpo_ray has another policy of this name than the run "
                f"{source.uri} began with ({current} in place of {recorded}); install the version of the run, or begin "
                "with a checkpoint of the run"
            )


def require_other_folder(source: RunFolder, target: RunFolder) -> None:
    """Refuse to write into the folder of the original. Raises ConfigError."""
    if source.address_of() == target.address_of() or source.uri == target.uri:
        raise ConfigError(f"run.name={target.name} is the run itself, which is only read; set another run.name")


def fork_name(name: str, step: int, overrides: Sequence[str]) -> str:
    """Return the default name of a fork, from its run, its step and its changed settings."""
    overrides = [each for each in identifying(overrides) if not each.startswith("run.")]
    changes = [each.partition(".")[2] for each in overrides]
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([f"{name}-fork-{step}", *changes])).strip("-.")
    has_secrets = any(_without_secrets(each) != each for each in overrides)
    if len(text) <= NAME_CHARS and not has_secrets:
        return text
    digest = hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:8]
    return f"{name}-fork-{step}-{digest}"


def run_folder_of(config: Config) -> RunFolder:
    """Return the run folder of a config."""
    return RunFolder(config.run.storage_path, config.run.name, config.run.storage_retry_seconds)


def with_run(config: Config, **fields: Any) -> Config:
    """Return the config with other fields of the section `run`."""
    return replace(config, run=replace(config.run, **fields))
