"""Checks that refuse to continue a run with another policy, other settings or other problems than it began with."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.config.sources import describe_training
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.preflight.resume_fields import is_same_setting, require_same_fields
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.models.policy_digest import COMMIT, changed_on_hub, changed_parts
from grpo_ray.storage import checkpoint_upload, checkpoints
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials
from grpo_ray.text.redaction import redact

FINGERPRINT_FILE = "problems.json"
"""File of the run folder with the fingerprint of the training problems (`ledger.DatasetFingerprint`)."""
FORK_FILE = "fork.json"
"""File of a branch of another run with its origin, written when the copy is complete (`experiments/`). The branch is a
continuation of that run from its first launch on, even at step 0, where it has no checkpoint."""
POLICY_CONTENTS = "policy.json"
"""File of the run folder with the contents of the policy that the run began with (`policy_digest.policy_contents`)."""


def replaces_old_run(context: RunContext) -> bool:
    """Return True if this launch starts over in the place of a run that exists (`run.resume=never`)."""
    if context.config.run.resume != "never":
        return False
    return context.folder.exists("config.yaml") or bool(context.folder.list_folders(checkpoints.PREFIX))


def check_old_run(context: RunContext) -> Sequence[str]:
    """Check that the folder of an old run can be renamed, if `run.resume=never` demands it. Raises ConfigError."""
    if context.folder.local is None and replaces_old_run(context):
        raise ConfigError(
            f"run.resume=never: the run {context.folder.uri} exists, and folders of an object store cannot be "
            "renamed; choose another run.name, or run.resume=latest to continue the run"
        )
    return ()


def check_same_run(context: RunContext) -> Sequence[str]:
    """Refuse to continue a run with another value of a field that cannot change. Raises ConfigError."""
    folder = context.folder
    if replaces_old_run(context):
        return ()
    checkpoint_upload.finish_commits(folder)
    if not _is_continued(folder) or not folder.exists("config.yaml"):
        return ()
    recorded = _with_moved_policy(context, read_recorded_config(folder))
    require_same_fields(context.config, recorded, folder.uri, is_other_run=False)
    return ()


def _is_continued(folder: RunFolder) -> bool:
    """Return True if a launch continues a run, and does not begin it anew."""
    return bool(checkpoints.list_checkpoints(folder)) or folder.exists(FORK_FILE)


def _with_moved_policy(context: RunContext, recorded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a run's recorded config, with the new path of its policy if the policy has moved.

    Raises:
        ConfigError: `model.path` is the same as before, but the policy there is not the one that the run began with.
    """
    folder, path = context.folder, context.config.model.path
    begun = read_policy_contents(folder)
    changed = changed_parts(begun, context.policy_contents) if begun else None
    model = recorded.get("model", {})
    if changed == ():
        return recorded | {"model": model | {"path": path}}
    if not is_same_setting(model.get("path"), path):
        return recorded
    mend = "restore them"
    if changed is None and COMMIT in begun and (commit := context.policy_contents.get(COMMIT)):
        changed = changed_on_hub(path, begun[COMMIT], commit)
        if changed is None:
            raise ConfigError(
                f"model.path={path} is at revision {commit}, the run {folder.uri} began with {begun[COMMIT]}, and the "
                f"hub does not list their files; {_use_revision(path, begun[COMMIT])}"
            )
        mend = _use_revision(path, begun[COMMIT])
    if changed:
        raise ConfigError(
            f"model.path={redact(redact_credentials(path))}: its {' and '.join(changed)} are not those that the run "
            f"{folder.uri} began with; {mend}, or set another run.name, or run.resume=never to start over"
        )
    return recorded


def _use_revision(name: str, commit: str) -> str:
    return f"run `hf download {name} --revision {commit}` and set model.path to the folder that it prints"


def read_policy_contents(folder: RunFolder) -> dict[str, str]:
    """Return the contents of the policy that a run began with; empty if they were not recorded.

    Raises DamagedFileError.
    """
    if not folder.exists(POLICY_CONTENTS):
        return {}
    try:
        contents = folder.read_json(POLICY_CONTENTS)
        if not isinstance(contents, dict) or not all(isinstance(each, str) for each in contents.values()):
            raise DamagedFileError(f"{folder.uri_of(POLICY_CONTENTS)} is damaged: it is no mapping of texts")
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{error}; it shows which policy the run began with; restore it, or delete it to continue with model.path"
        ) from None
    return contents


def read_recorded_config(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read the config with which a run trained. Raises DamagedFileError."""
    try:
        return read_recorded(folder)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{error}; it shows which settings the run started with; restore it, or delete it to continue with the "
            "settings of this command"
        ) from None


def check_dataset(context: RunContext, fingerprint: DatasetFingerprint) -> None:
    """Refuse to continue a run whose training problems have changed.

    Compares contents: the order of files, and their division into shards, may change.

    Raises:
        ConfigError: the problems have changed, and `data.accept_changes` is off.
    """
    config, folder = context.config, context.folder
    if replaces_old_run(context):
        return
    has_started = folder.exists(FINGERPRINT_FILE) and _is_continued(folder)
    if has_started and not config.data.accept_changes:
        require_same_problems(config, read_fingerprint(folder), fingerprint, folder.uri)


def record_dataset(folder: RunFolder, fingerprint: DatasetFingerprint) -> None:
    """Write the fingerprint of the training problems, once the whole launch is accepted."""
    folder.write_json(asdict(fingerprint), FINGERPRINT_FILE)


def read_fingerprint(folder: RunFolder) -> DatasetFingerprint:
    """Read the fingerprint of the training problems of a run.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it cannot be read, so it is unknown whether the problems have changed.
    """
    try:
        recorded = folder.read_json(FINGERPRINT_FILE)
        return DatasetFingerprint(count=int(recorded["count"]), checksum=str(recorded["checksum"]))
    except (DamagedFileError, TypeError, ValueError, KeyError) as error:
        reason = str(error) if isinstance(error, DamagedFileError) else f"{folder.uri_of(FINGERPRINT_FILE)} is damaged"
        raise DamagedFileError(
            f"{reason}; if the training problems have not changed since the run started, set data.accept_changes=true"
        ) from None


def require_same_problems(
    config: Config, recorded: DatasetFingerprint, current: DatasetFingerprint, run_uri: str
) -> None:
    """Raise ConfigError unless the training problems are those that the run at `run_uri` started with."""
    if recorded == current:
        return
    change = (
        f"{current.count} problems instead of {recorded.count}"
        if current.count != recorded.count
        else f"{current.count} problems as before, but not the same ones"
    )
    raise ConfigError(
        f"data.train={describe_training(config)} has changed since the run {run_uri} started: {change} (those left "
        "out as overlong, data.max_prompt_length, or as unverifiable do not count); set another run.name, or "
        "data.accept_changes=true to continue (problems used in the current epoch stay used)"
    )
