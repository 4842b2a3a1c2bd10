"""Phases of a launch between preflight and training: dataset indexes, initial policy, resume point.

Each phase takes the run's context and earlier values, and returns a plain value.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from grpo_ray.config.heldout_keys import split_name, training_name
from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.config.yaml_documents import dump_yaml
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.stream import DatasetIndex, Split, build_index, describe_heldout_part, describe_repeated_rows
from grpo_ray.driver.preflight.overlong import PolicyTokenizer, leave_out_overlong
from grpo_ray.driver.preflight.resume_fields import require_same_fields
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import (
    FINGERPRINT_FILE,
    POLICY_CONTENTS,
    check_dataset,
    read_fingerprint,
    read_policy_contents,
    read_recorded_config,
    record_dataset,
    replaces_old_run,
    require_same_problems,
)
from grpo_ray.driver.preflight.tool_trial import PHASE, try_tools
from grpo_ray.driver.summary import describe_run
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.models.embedded_policy import embedded_policy, embedded_policy_digest
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.models.policy_digest import describe_contents
from grpo_ray.storage import checkpoint_upload, checkpoints
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials
from grpo_ray.text.redaction import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNVERIFIABLE_FILE = "unverifiable.json"
"""File of the run folder with a list of problem ids, written by `grpo-ray check`."""

BEGUN_WITH = "begun_with"
"""File with the identity of another run's checkpoint that the run began with."""
UPLOADED = ("policy", "uploaded")
"""File with the identity of the embedded policy in the run folder. Written after the policy's files, so that it is
missing if a driver died during the upload."""


@dataclass(frozen=True)
class DatasetIndexes:
    """Indexes of the training problems and of the held-out sets of a run."""

    training: Mapping[str, DatasetIndex]
    """Source of the training problems -> its index."""
    heldout: Mapping[str, DatasetIndex]
    """Key of a held-out set -> its index."""

    @property
    def training_splits(self) -> dict[str, Split]:
        """Source -> its training problems, all with the same columns: rewards get the problems of a step together."""
        columns = {name for index in self.training.values() for name in index.split.columns or ()}
        return {name: replace(index.split, columns=tuple(sorted(columns))) for name, index in self.training.items()}

    @property
    def training_fingerprint(self) -> DatasetFingerprint:
        """Fingerprint of all training problems."""
        first, *others = (index.fingerprint for index in self.training.values())
        return sum(others, first)

    @property
    def heldout_splits(self) -> dict[str, Split]:
        """Key of a held-out set -> its problems."""
        return {key: index.split for key, index in self.heldout.items()}

    @property
    def heldout_fingerprints(self) -> dict[str, DatasetFingerprint]:
        """Key of a held-out set -> fingerprint of its problems."""
        return {key: index.fingerprint for key, index in self.heldout.items()}


@dataclass(frozen=True)
class ResumePoint:
    """State that a launch continues from."""

    checkpoint: CheckpointInfo | None
    """None: the run begins with `model.path`. The workers take an older checkpoint if they find this one damaged."""
    is_of_other_run: bool = False
    """True for a run that begins with another run's checkpoint (`run.from_checkpoint`)."""

    @property
    def step(self) -> int:
        """Optimizer steps that the run has taken so far; another run's do not count."""
        return self.checkpoint.step if self.checkpoint and not self.is_of_other_run else 0


def index_datasets(context: RunContext) -> DatasetIndexes:
    """Read every training and held-out problem once, and leave out unverifiable ones and overlong prompts.

    Raises:
        DataError: a row, file or dataset cannot be used, or a prompt is too long (`data.overlong_prompts=error`).
        ConfigError: the training problems of the existing run have changed, or a tool or environment cannot be used.
    """
    training, heldout = context.splits
    if context.config.rollout.has_turns:
        context.progress.phase(PHASE)
        problems = chain.from_iterable(split.read() for split in (*training.values(), *heldout.values()))
        for notice in try_tools(context.config, problems, _tokenizer(context.config)).notices:
            context.progress.notice(notice)
    if unverifiable := read_unverifiable(context.config, context.folder):
        context.progress.phase(
            f"leaving out {len(unverifiable)} problems whose solution does not verify (grpo-ray check)"
        )
        training = {name: replace(split, excluded_ids=unverifiable) for name, split in training.items()}
    indexes = DatasetIndexes(
        {name: _index_split(context, training_name(name), split) for name, split in training.items()},
        {key: _index_split(context, split_name(key), split) for key, split in heldout.items()},
    )
    for key, index in indexes.heldout.items():
        if index.split.keep_heldout:
            counts = index.fingerprint.count, indexes.training[context.config.source_of(key)].fingerprint.count
            context.progress.notice(describe_heldout_part(index.split.name, *counts))
    check_dataset(context, indexes.training_fingerprint)
    return indexes


def _tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    return PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()


def _index_split(context: RunContext, name: str, split: Split) -> DatasetIndex:
    """Read every problem of a split once, and leave out those with overlong prompts."""
    phase = context.progress.phase
    phase(f"indexing the {name} problems")
    index = build_index(split, partial(phase, f"indexing the {name} problems"))
    if index.repeated_rows:
        context.progress.notice(describe_repeated_rows(index))
    filtered = leave_out_overlong(
        context.config, name, index, context.folder, on_shard=partial(phase, f"measuring the {name} prompts")
    )
    if filtered.notice:
        context.progress.notice(filtered.notice)
    return filtered.index


def read_unverifiable(config: Config, folder: RunFolder) -> frozenset[str]:
    """Read the ids of training problems that can never be rewarded, which `grpo-ray check` wrote to the run folder."""
    if config.data.keep_unverifiable or not folder.exists(UNVERIFIABLE_FILE):
        return frozenset()
    try:
        ids = folder.read_json(UNVERIFIABLE_FILE)
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise DamagedFileError(f"{folder.uri_of(UNVERIFIABLE_FILE)} is damaged: it is no list of ids")
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; run grpo-ray check again, or set data.keep_unverifiable=true") from None
    return frozenset(ids)


@dataclass(frozen=True)
class InitialPolicy:
    """Policy that a run begins with."""

    path: str = field(repr=False)  # a URI may contain credentials
    """Path, URI or hub id from which the workers load the tokenizer and the policy (of an adapter, its base policy)."""
    measured_path: str | None = field(repr=False)
    """Path, URI or hub id of the policy that the baseline measures: the checkpoint of `run.from_checkpoint`, or else
    `path`. None: the checkpoint that the run began with no longer exists."""
    identity: str
    """Identity of the policy that the baseline measures.

    Files: hashes of config, tokenizer and weights. Hub id: its revision. Either, if its contents are not known:
    `model.path` without credentials. Embedded policy: its name and a hash of its files. Another run's checkpoint: its
    URI and a hash of its files.
    """

    @property
    def is_of_other_run(self) -> bool:
        """True if the baseline measures a checkpoint of another run, which may be untrusted."""
        return self.measured_path != self.path


def prepare_policy(context: RunContext, resume: ResumePoint) -> InitialPolicy:
    """Return the policy that the run begins with, or began with before it was resumed; record it in the run folder."""
    policy, folder = _prepare_model(context), context.folder
    if resume.checkpoint is None or resume.is_of_other_run:
        # The policy of an earlier launch does not matter: that launch ended before its first checkpoint.
        if resume.checkpoint is None:
            folder.delete_file(BEGUN_WITH)
            return policy
        folder.write_text(_identity(resume.checkpoint), BEGUN_WITH)
        return _begun_with(policy, resume.checkpoint)
    if not folder.exists(BEGUN_WITH):
        return policy
    identity, path = folder.read_text(BEGUN_WITH), context.config.run.from_checkpoint
    known = checkpoints.list_checkpoints_at(path) if path else []
    found = next((each for each in known if _identity(each) == identity), None)
    return _begun_with(policy, found) if found else replace(policy, measured_path=None, identity=identity)


def _identity(checkpoint: CheckpointInfo) -> str:
    """Return the identity of a checkpoint of another run, without secrets."""
    return f"{redact(checkpoint.uri)} {checkpoint.digest}"


def _begun_with(policy: InitialPolicy, checkpoint: CheckpointInfo) -> InitialPolicy:
    address = checkpoint.folder.address_of(checkpoint.name)
    return replace(policy, measured_path=address, identity=_identity(checkpoint))


def _prepare_model(context: RunContext) -> InitialPolicy:
    """Return the policy of `model.path`; an embedded one is uploaded to the run folder, where every node finds it.

    A run with checkpoints keeps the policy that it began with, to which its adapters belong, even if the package now
    has another policy of this name. Without checkpoints, the policy of an earlier launch is replaced if it differs.
    """
    path, folder, contents = context.config.model.path, context.folder, context.policy_contents
    has_checkpoints = bool(checkpoints.list_checkpoints(folder))
    if has_checkpoints:
        # `check_same_run` has accepted the present files, which may be those of another revision on the hub.
        contents = read_policy_contents(folder) or contents
    elif contents:
        folder.write_json(contents, POLICY_CONTENTS)
    else:
        folder.delete_file(POLICY_CONTENTS)
    if path not in EMBEDDED_POLICIES:
        return InitialPolicy(path, path, describe_contents(contents) or redact(redact_credentials(path)))
    identity = f"{path} {embedded_policy_digest(path)}"
    uploaded = folder.read_text(*UPLOADED) if folder.exists(*UPLOADED) else None
    if uploaded is not None and has_checkpoints:
        identity = uploaded
    elif uploaded != identity:
        folder.delete_folder(UPLOADED[0])
        folder.upload(embedded_policy(path), UPLOADED[0])
        folder.write_text(identity, *UPLOADED)
    address = folder.address_of(UPLOADED[0])
    return InitialPolicy(address, address, identity)


def begin_launch(context: RunContext, lease: RunLease, datasets: DatasetIndexes) -> bool:
    """Set an old run aside if `run.resume=never`, and record config and problems.

    Call it once everything that can refuse the run has been checked: it is the first phase that changes the record of
    an existing run. Nothing is deleted.

    Returns:
        True if `config.yaml` has changed, or is new.

    Raises:
        SupersededError: another driver has taken the run.
    """
    folder = context.folder
    lease.confirm()
    if replaces_old_run(context):
        unverifiable = folder.read_text(UNVERIFIABLE_FILE) if folder.exists(UNVERIFIABLE_FILE) else None
        context.progress.notice(f"the old run is now {lease.set_aside_folder()}")
        if unverifiable is not None:  # a later launch leaves out the same problems
            folder.write_text(unverifiable, UNVERIFIABLE_FILE)
    record_dataset(folder, datasets.training_fingerprint)
    return record_config(context)


def record_config(context: RunContext) -> bool:
    """Write the resolved config and the versions of this launch to `config.yaml`; return True if that changes it."""
    folder, data = context.folder, dump_yaml(describe_run(context.config)).encode()
    with suppress(DamagedFileError):  # a file that is too large to be read is replaced
        if folder.exists(RECORDED_CONFIG) and folder.read_bytes(RECORDED_CONFIG) == data:
            return False
    folder.write_bytes(data, RECORDED_CONFIG)
    return True


def find_resume_point(context: RunContext, datasets: DatasetIndexes) -> ResumePoint:
    """Find the checkpoint that this launch continues from, and announce those that its next checkpoint will replace.

    Raises:
        CheckpointError: the run's checkpoints are all damaged, or there is no complete one at `run.from_checkpoint`.
        ConfigError: that checkpoint belongs to a run on other training problems, or to the run that is set aside.
    """
    run, folder = context.config.run, context.folder
    metric = context.config.ranking_metric
    candidates: list[CheckpointInfo] = []
    if not replaces_old_run(context):
        checkpoint_upload.finish_commits(folder)
        for name in checkpoints.damaged_measurements(folder):
            context.progress.notice(f"{name}: {checkpoints.MEASURED} is damaged; the checkpoint counts as not measured")
        candidates = checkpoints.resume_candidates(folder, run.resume, metric)
        if not candidates and checkpoints.has_damaged_checkpoints(folder):
            raise checkpoints.no_intact_checkpoint(folder)
    if candidates:
        stored = checkpoints.list_checkpoints(folder)
        _announce_other_measurements(context, datasets, stored)
        if surplus := checkpoints.surplus_checkpoints(stored, metric, run.keep_checkpoints):
            context.progress.notice(
                f"the next checkpoint will replace {', '.join(each.name for each in surplus)}: the run keeps the "
                f"latest, and the run.keep_checkpoints={run.keep_checkpoints} best by run.best_metric={metric}"
            )
        return ResumePoint(candidates[0])
    if run.from_checkpoint:
        checkpoint = open_checkpoint_of_other_run(context.config, run.from_checkpoint, datasets)
        if checkpoint.folder.uri == folder.uri:
            raise ConfigError(
                f"run.from_checkpoint={run.from_checkpoint} is in the run that run.resume=never sets aside; "
                "set another run.name"
            )
        return ResumePoint(checkpoint, is_of_other_run=True)
    return ResumePoint(None)


def _announce_other_measurements(
    context: RunContext, datasets: DatasetIndexes, stored: Sequence[CheckpointInfo]
) -> None:
    """Announce checkpoints that are ranked although their measurements cannot be compared with this launch's."""
    config = context.config
    key = config.ranking_metric.rpartition("/")[0]
    if key not in config.heldout_keys:
        return  # the ranking metric is a reward, not a held-out measure
    conditions = measurement_conditions(datasets.heldout_fingerprints, config)[key]
    other = [each.name for each in stored if (each.measured_on or {}).get(key, conditions) != conditions]
    if other:
        context.progress.notice(
            f"{', '.join(other)}: measured on other problems, or with other sampling, tools or grading than this "
            f"launch's, and ranked with its checkpoints by run.best_metric={config.ranking_metric}; for a fair choice "
            "set another run.name"
        )


def open_checkpoint_of_other_run(config: Config, path: str, datasets: DatasetIndexes) -> CheckpointInfo:
    """Open another run's checkpoint to start from. Raises CheckpointError or ConfigError."""
    checkpoint = checkpoints.resolve_checkpoint(path, config.run.best_metric)
    folder = checkpoint.folder
    if folder.local is not None:
        require_plausible_policy(folder.local / checkpoint.name)
    if folder.exists("config.yaml"):
        require_same_fields(config, read_recorded_config(folder), folder.uri, is_other_run=True)
    if folder.exists(FINGERPRINT_FILE) and not config.data.accept_changes:
        require_same_problems(config, read_fingerprint(folder), datasets.training_fingerprint, folder.uri)
    return checkpoint
