"""Preflight: a table of named checks that refuse an unusable run before any worker starts.

Every check takes the run's context and returns notices for the user, or raises the one error that refuses the run. The
dataset itself is checked after it was read (`check_dataset`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from grpo_ray.config.reward_names import is_reward_model
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.stream import Split, open_splits
from grpo_ray.driver.cluster.connection import connect, require_engine_system, require_resources, starts_cluster
from grpo_ray.driver.preflight.resume_fields import is_same_setting, require_same_fields
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.models.policy_digest import COMMIT, changed_on_hub, changed_parts, policy_contents
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.observers.trackers.registry import check_trackers
from grpo_ray.resilience.elastic import explain_scaling
from grpo_ray.resilience.nodes import check_nodes, model_issue
from grpo_ray.storage import checkpoint_upload, checkpoints
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.run_folder import RunFolder, redact_credentials
from grpo_ray.text.redaction import redact
from grpo_ray.tools.remote.sandbox import sandbox_issue

FINGERPRINT_FILE = "problems.json"
"""File of the run folder with the fingerprint of the training problems (`ledger.DatasetFingerprint`)."""
POLICY_CONTENTS = "policy.json"
"""File of the run folder with the contents of the policy that the run began with (`policy_digest.policy_contents`)."""


@dataclass(frozen=True)
class RunContext:
    """Inputs that every stage of the driver shares."""

    config: Config
    folder: RunFolder
    progress: ProgressLine
    """Observer of the stages: shows phases and notices to the user."""
    owns_cluster: bool = False
    """True if a cluster is started for this run; False if it uses one that was there before."""

    @cached_property
    def splits(self) -> tuple[Split, dict[str, Split]]:
        """Training split and held-out sets by key, opened on first use.

        Raises DataError if a dataset cannot be opened.
        """
        return open_splits(self.config)

    @cached_property
    def policy_contents(self) -> dict[str, str]:
        """Contents of the policy `model.path` (`policy_digest.policy_contents`), read on first use.

        Empty for an embedded policy, whose files the run folder has. Raises ConfigError if they cannot be read.
        """
        path = self.config.model.path
        return {} if path in EMBEDDED_POLICIES else policy_contents(path, self.config.run.storage_retry_seconds)


@dataclass(frozen=True)
class Check:
    """One row of the table of checks."""

    name: str
    run: Callable[[RunContext], Sequence[str]]
    """Returns notices for the user; raises GrpoRayError to refuse the run."""
    phase: str = "checking the settings"
    """Phase shown while the check runs."""
    beside_connection: bool = False
    """Run in a thread while the driver connects to the cluster."""


def check_trl(context: RunContext) -> Sequence[str]:
    """Have TRL validate its arguments, and load rewards, advantages and rollout. Raises ConfigError or RewardError."""
    from grpo_ray.inference.rollout_function import load_rollout_function
    from grpo_ray.learner.advantages import try_advantage
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.rewards.registry import load_rewards

    trl_arguments(context.config, output_dir=".", on_driver=True)
    rewards = load_rewards(context.config.rewards)
    grpo = context.config.grpo
    try_advantage(grpo.advantages, context.config.sizes.prompts_per_generation, grpo.num_generations, len(rewards))
    if context.config.rollout.function is not None:
        load_rollout_function(context.config.rollout)
    return ()


def check_policy(context: RunContext) -> Sequence[str]:
    """Check that the policy's own config can be read. Raises ConfigError."""
    if issue := model_issue(context.config):
        raise ConfigError(issue)
    return ()


def check_reward_models(context: RunContext) -> Sequence[str]:
    """Check that the configs of reward models can be read. Raises ConfigError."""
    for name in filter(is_reward_model, context.config.rewards.functions):
        from transformers import AutoConfig  # takes seconds, and most runs have no reward model

        try:
            AutoConfig.from_pretrained(name, trust_remote_code=context.config.model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rewards.functions: the reward model {name} cannot be read: {str(error).splitlines()[0]}"
            ) from None
    return ()


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
    if not checkpoints.list_checkpoints(folder) or not folder.exists("config.yaml"):
        return ()
    recorded = _with_moved_policy(context, read_recorded_config(folder))
    require_same_fields(context.config, recorded, folder.uri, is_other_run=False)
    return ()


def _with_moved_policy(context: RunContext, recorded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a run's recorded config, with the new place of its policy if the policy has moved.

    Raises:
        ConfigError: the policy is another one than when the run began, at the same place.
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


def check_storage(context: RunContext) -> Sequence[str]:
    """Check that the run folder can be written. Raises ConfigError."""
    context.folder.check_writable()
    return ()


def check_run_trackers(context: RunContext) -> Sequence[str]:
    """Check that the trackers are installed and have the settings that they need. Raises ConfigError."""
    check_trackers(context.config.run.trackers, context.folder.storage_path)
    return ()


def check_resources(context: RunContext) -> Sequence[str]:
    """Check that the cluster has the resources of the workers, or an autoscaler. Raises ConfigError."""
    return _notices(require_resources(context.config))


def check_engine_system(context: RunContext) -> Sequence[str]:
    """Check that vLLM runs on this node's system (GPU driver, libnuma); `check_other_nodes` checks the others.

    Raises ConfigError.
    """
    require_engine_system(context.config)
    return ()


def check_remote_sandbox(context: RunContext) -> Sequence[str]:
    """Run a trivial program in the remote sandbox, if the run has one. Raises ConfigError."""
    rollout = context.config.rollout
    if rollout.sandbox_url is None:
        return ()
    if issue := sandbox_issue(rollout):
        raise ConfigError(
            f"rollout.sandbox_url={rollout.sandbox_url}: {issue}; start the service, or correct the address"
        )
    return (f"the remote sandbox at {rollout.sandbox_url} runs code",)


def explain_worker_counts(context: RunContext) -> Sequence[str]:
    """Give notice of the worker counts that an elastic run can take. Raises nothing."""
    return _notices(explain_scaling(context.config))


def explain_code_memory(context: RunContext) -> Sequence[str]:
    """Give notice if completions that run the policy's code may use more memory than this node has. Raises nothing."""
    rollout = context.config.rollout
    at_once = min(rollout.max_active, context.config.sizes.completions_per_generation)
    node_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if not rollout.runs_policy_code or at_once * rollout.memory_gib <= node_gib:
        return ()
    return _notices(
        f"code of the policy may use up to {at_once * rollout.memory_gib:g} GiB at once ({at_once} completions, "
        f"rollout.memory_gib={rollout.memory_gib:g}), and this node has {node_gib:.0f} GiB; lower "
        "rollout.memory_gib or rollout.max_active to rule out that it exhausts the node"
    )


def check_other_nodes(context: RunContext) -> Sequence[str]:
    """Check versions, storage, policy and data on every other node of the cluster. Raises ConfigError or DataError."""
    training, heldout = context.splits
    first_shards = [split.shards[0] for split in (training, *heldout.values()) if split.shards]
    check_nodes(context.config, context.folder, first_shards)
    return ()


def _notices(text: str | None) -> Sequence[str]:
    return (text,) if text else ()


CHECKS = (
    # Importing TRL takes as long as starting a cluster, and either leaves a core idle.
    Check("TRL arguments", check_trl, beside_connection=True),
    Check("trackers", check_run_trackers, beside_connection=True),
    Check("policy", check_policy),
    Check("reward models", check_reward_models),
    Check("old run", check_old_run),
    Check("same run", check_same_run),
    Check("storage", check_storage),
    Check("resources", check_resources),
    Check("engine system", check_engine_system),
    Check("remote sandbox", check_remote_sandbox, phase="trying the remote sandbox", beside_connection=True),
    Check("worker counts", explain_worker_counts),
    Check("memory of code", explain_code_memory),
    Check("other nodes", check_other_nodes, phase="reading the problems"),
)
"""Checks before training, in order."""

AUDIT_CHECKS = tuple(
    check for check in CHECKS if check.name in ("TRL arguments", "storage", "engine system", "remote sandbox")
)
"""Checks before `grpo-ray check` reads the data."""


def run_preflight(context: RunContext, checks: Sequence[Check] = CHECKS) -> None:
    """Connect to the cluster and run the checks in order, showing their notices.

    Raises:
        GrpoRayError: the first check that fails; later ones are not run.
    """
    early = [check for check in checks if check.beside_connection]
    context.progress.phase("starting Ray" if starts_cluster() else "connecting to the cluster")
    with ThreadPoolExecutor(max_workers=1) as pool:
        results = [pool.submit(check.run, context) for check in early]
        _show(context, connect(context.config))
        context.progress.phase(checks[0].phase)
        for result in results:
            _show(context, result.result())
    for check in checks:
        if not check.beside_connection:
            context.progress.phase(check.phase)
            _show(context, check.run(context))


def _show(context: RunContext, notices: Sequence[str]) -> None:
    for notice in notices:
        context.progress.notice(notice)


def check_dataset(context: RunContext, fingerprint: DatasetFingerprint) -> None:
    """Refuse to continue a run whose training problems have changed.

    Compares contents: the order of files, and their division into shards, may change.

    Raises:
        ConfigError: the problems have changed, and `data.accept_changes` is off.
    """
    config, folder = context.config, context.folder
    if replaces_old_run(context):
        return
    has_started = folder.exists(FINGERPRINT_FILE) and checkpoints.list_checkpoints(folder)
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
        f"data.train={config.data.train} has changed since the run {run_uri} started: {change} (those left "
        "out as overlong, data.max_prompt_length, or as unverifiable do not count); set another run.name, or "
        "data.accept_changes=true to continue (problems used in the current epoch stay used)"
    )
