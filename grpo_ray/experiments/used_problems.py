"""Problems that a policy was trained on, from the ledger in its checkpoint and the rollouts of its run.

An open epoch of the ledger lists its problems. A closed epoch has no record, as it used every training problem, or left
it out by the curriculum: its problems are those of the epoch in `rollouts/`. Where these are missing, and do not add up
to the fingerprint of the training problems that the ledger records, it is unknown whether a problem was used.
A policy that began with one of another run, or of an earlier stage, has used problems that no ledger of its own lists.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from grpo_ray.config.recorded import RECORDED_CONFIG
from grpo_ray.config.schema import DataConfig
from grpo_ray.data.demonstrations import COMPLETION
from grpo_ray.data.ledger import DatasetFingerprint, IdArray, Ledger, ids_to_uint64, isin_sorted, uint64_to_ids
from grpo_ray.data.mixture_ledger import ledger_files
from grpo_ray.data.problem import Problem, problem_id
from grpo_ray.data.registry import as_demonstrations, open_dataset
from grpo_ray.errors import CheckpointError, DataError
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.storage.checkpoint_integrity import file_checksum
from grpo_ray.storage.checkpoints import NAME_PATTERN, CheckpointInfo, read_returns
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.records.rollout_files import list_rollout_files, read_rollout_file
from grpo_ray.storage.stage_folders import POLICIES
from grpo_ray.storage.uris import split_path
from grpo_ray.text.truncation import recorded_text

Answer = Literal["used", "not used", "unknown"]
BEGUN_WITH = "begun_with"
"""File of a run folder with the identity of the other run's checkpoint that the run began with."""
PROMPT_BYTES = 200
"""Largest size of the text of a prompt in an answer, bytes of UTF-8."""


@dataclass(frozen=True)
class ProblemUse:
    """Answer for one problem of the file."""

    id: str
    """Hash of its content, 16 hex digits (`Problem.id`)."""
    where: str
    """File and row; "" for a problem of a generated dataset."""
    prompt: str
    """Beginning and end of the last message."""
    answer: Answer
    epochs: tuple[int, ...] = ()
    """Epochs that have used the problem, as far as they are recorded; from 0."""
    source: str = ""
    """Source of a mixture in which it was used; "" for a run on a single dataset."""


@dataclass(frozen=True)
class UsedProblems:
    """Which problems of a file the policy of a checkpoint was trained on."""

    checkpoint: str
    """Path, or URI without credentials."""
    step: int
    closed_epochs: Mapping[str, int]
    """Source -> number of whole epochs."""
    begun_with: str | None
    """Checkpoint of another run that the run began with, whose ledger it continues; None: it has no such one."""
    problems: Sequence[ProblemUse]
    """In the order of the file, each once."""
    notes: Sequence[str] = field(default_factory=list)
    """One line for each file that could not be read, and for each reason why an answer is not known."""

    def count(self, answer: Answer) -> int:
        """Return the number of problems with an answer."""
        return Counter(each.answer for each in self.problems)[answer]

    def to_dict(self) -> dict[str, Any]:
        """Return the totals and the answer for each problem, in JSON's types."""
        totals = {"problems": len(self.problems), "used": self.count("used"), "unknown": self.count("unknown")}
        return {"totals": totals, **asdict(self)}


@dataclass
class _Uses:
    """Problems of one source that the run has used, by epoch, as sorted ids."""

    ledger: Ledger
    recorded: dict[int, IdArray]
    """Closed epoch -> problems that rollouts record."""
    accepts_changes: bool
    """True if earlier epochs may have had other problems than the dataset has now."""
    is_read: bool
    """False if a file of rollouts could not be read."""
    is_continued: bool = False
    """True if the ledger began as that of another run, whose rollouts are elsewhere."""

    @property
    def is_complete(self) -> bool:
        """True if every problem that the source has used is known."""
        if not self.ledger.closed_epochs:
            return True
        if self.is_continued and not self._is_whole(0):
            return False  # the other run may have used a part of epoch 0, which no ledger lists since the epoch closed
        if self.accepts_changes or self._has_more_problems:
            return self.is_read and sum(epoch >= 0 for epoch in self.recorded) == self.ledger.closed_epochs
        return any(map(self._is_whole, self.recorded))

    def _is_whole(self, epoch: int) -> bool:
        """Return True if the rollouts of an epoch record exactly the problems that the dataset has now."""
        ids = self.recorded.get(epoch)
        return ids is not None and DatasetFingerprint.of(uint64_to_ids(ids)) == self.ledger.fingerprint

    @property
    def _has_more_problems(self) -> bool:
        """True if more problems were used than the dataset has now, so that it has changed."""
        known = [*self.recorded.values(), *map(self.ledger.ever_used, self.ledger.open_epochs)]
        fingerprint = self.ledger.fingerprint
        return bool(known) and fingerprint is not None and np.unique(np.concatenate(known)).size > fingerprint.count

    def epochs_of(self, ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the epochs that have used each id; ids without any are left out."""
        epochs = self.recorded | {epoch: self.ledger.ever_used(epoch) for epoch in self.ledger.open_epochs}
        numbers = ids_to_uint64(ids)
        found: dict[str, tuple[int, ...]] = {}
        for epoch, used in sorted(epochs.items()):
            for place in np.flatnonzero(isin_sorted(numbers, used)):
                found[ids[place]] = (*found.get(ids[place], ()), epoch)
        return found


def find_used_problems(path: str, problems: str, columns: Mapping[str, str] | None = None) -> UsedProblems:
    """Find the problems of a file that the policy of a checkpoint was trained on.

    Args:
        path: path or URI of a checkpoint, or of a run folder, whose best checkpoint is taken.
        problems: dataset in any form of `data.train`.
        columns: our column name -> the file's; None: `data.columns` of the run, or of each source of a mixture.

    Raises:
        CheckpointError: there is no complete checkpoint, or its ledger is missing or damaged.
        DataError: the problems cannot be read.
        ConfigError: the columns are not valid.
    """
    checkpoint = find_checkpoint(path)
    folder = checkpoint.folder
    ledgers = read_ledgers(checkpoint)
    recorded, notes = _recorded_uses(checkpoint, ledgers)
    settings = read_recorded(folder) if folder.exists(RECORDED_CONFIG) else {}
    begun_with = folder.read_text(BEGUN_WITH) if folder.exists(BEGUN_WITH) else None
    is_continued = begun_with is not None
    accepts_changes = is_continued or bool(settings.get("data", {}).get("accept_changes"))
    uses = {
        source: _Uses(ledger, recorded.get(source, {}), accepts_changes, not notes, is_continued)
        for source, ledger in ledgers.items()
    }
    complete = {source: each.is_complete for source, each in uses.items()}
    if not all(complete.values()):
        notes.append("a whole epoch was used, and its rollouts are missing or incomplete")
    if (policy := _policy_of_other_run(settings)) is not None:
        notes.append(f"the run began with {policy}, a policy that was trained before: ask its checkpoint, too")
    known_columns = _columns_of_sources(settings)
    read = _read_for_sources(
        problems,
        {source: known_columns.get(source, {}) if columns is None else columns for source in uses},
        are_demonstrations=settings.get("run", {}).get("kind") == "sft",
        notes=notes,
    )
    answers: dict[str, ProblemUse] = {}
    for source, use in uses.items():
        own = read[source]
        is_known = complete[source] and policy is None and own.is_comparable
        for problem, epochs in zip(own.problems, _epochs_of(use, own.problems, source), strict=True):
            answer: Answer = "used" if epochs else "not used" if is_known else "unknown"
            before = answers.get(problem.id)
            if before is None or _rank(answer) > _rank(before.answer):
                answers[problem.id] = _answer(problem, answer, epochs, source if epochs else "")
    return UsedProblems(
        checkpoint=checkpoint.uri,
        step=checkpoint.step,
        closed_epochs={source: ledger.closed_epochs for source, ledger in ledgers.items()},
        begun_with=begun_with,
        problems=list(answers.values()),
        notes=notes,
    )


def _policy_of_other_run(settings: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the recorded `model.path` if it names a checkpoint, or the exported policy of a stage; else None.

    Its folder is not opened: the config may be a stranger's.
    """
    path = settings.get("model", {}).get("path")
    if not isinstance(path, str):
        return None
    parent, name = split_path(path)
    return path if NAME_PATTERN.fullmatch(name) or split_path(parent)[1] == POLICIES else None


def _rank(answer: Answer) -> int:
    """Return the rank of an answer among those of several sources: the highest one counts."""
    return ("not used", "unknown", "used").index(answer)


def _answer(problem: Problem, answer: Answer, epochs: tuple[int, ...], source: str) -> ProblemUse:
    prompt = recorded_text(problem.prompt[-1]["content"], PROMPT_BYTES)
    return ProblemUse(problem.id, problem.where, prompt, answer, epochs, source)


@dataclass(frozen=True)
class _Read:
    """Problems of the file, as the columns of a source name them."""

    problems: list[Problem]
    """Each once."""
    is_comparable: bool = True
    """False if their ids cannot be those of the run, which has trained on demonstrations: the file has none."""


def _read_for_sources(
    problems: str, columns: Mapping[str, Mapping[str, str]], *, are_demonstrations: bool, notes: list[str]
) -> dict[str, _Read]:
    """Read the problems of a dataset for each source.

    Where the file lacks columns of a source, its problems are those that it has with another source's columns.

    Args:
        columns: source -> our column name -> the file's.
        are_demonstrations: the run has trained on demonstrations.
        notes: gets a line for each source whose columns the file lacks, and one if it has no demonstrations.

    Raises:
        DataError: the problems cannot be read with the columns of any source.
    """
    read: dict[str, _Read] = {}
    errors: dict[str, DataError] = {}
    for source, own in columns.items():
        try:
            # Sources mostly have the same columns: the file is read once for each form.
            same = next((other for other in read if columns[other] == own), None)
            read[source] = read[same] if same is not None else _read_problems(problems, own, are_demonstrations)
        except DataError as error:
            errors[source] = error
    if not read:
        raise next(iter(errors.values()))
    first, found = next(iter(read.items()))
    for source, reason in errors.items():
        notes.append(f"the columns of the source {source} do not fit, those of {first} are taken for it: {reason}")
        read[source] = found
    if not all(each.is_comparable for each in read.values()):
        notes.append(f"the run has trained on demonstrations (run.kind=sft), and {problems} has no column {COMPLETION}")
    return read


def _read_problems(problems: str, columns: Mapping[str, str], are_demonstrations: bool) -> _Read:
    """Read the problems of a dataset, each once; rows without a solution are accepted. Raises DataError."""
    try:
        shards = open_dataset(problems, "train", DataConfig(columns=columns), needs_solutions=False)
        if are_demonstrations:
            shards = as_demonstrations(shards, problems)
        return _Read(list({problem.id: problem for shard in shards for problem in shard.read()}.values()))
    except DataError as error:
        if not are_demonstrations:
            raise
        try:
            others = {ours: theirs for ours, theirs in columns.items() if ours != COMPLETION}
            return _Read(_read_problems(problems, others, are_demonstrations=False).problems, is_comparable=False)
        except DataError:
            raise error from None


def _epochs_of(uses: _Uses, problems: Sequence[Problem], source: str) -> list[tuple[int, ...]]:
    """Return the epochs in which each problem was used, as it is, or without the columns that no task needs."""
    ids: list[str] = []
    for problem in problems:
        # A run on rows without the further columns of this file has given the problem this id.
        plain_id = problem.question_id
        if COMPLETION in problem.columns:
            plain_id = problem_id(problem.prompt, problem.solution, {COMPLETION: problem.columns[COMPLETION]})
        plain = Problem(id=plain_id, prompt=problem.prompt, solution=problem.solution)
        ids += [each.of_source(source).id if source else each.id for each in (problem, plain)]
    found = uses.epochs_of(ids)
    return [
        tuple(sorted({*found.get(own, ()), *found.get(plain, ())}))
        for own, plain in zip(ids[::2], ids[1::2], strict=True)
    ]


def _columns_of_sources(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, str]]:
    """Return the columns of each source that the run's config records.

    Little else of the config is used: it may be a stranger's.
    """
    data = settings.get("data", {})
    default, train = data.get("columns"), data.get("train")
    own = {"": default} | (
        {str(name): source.get("columns") or default for name, source in train.items() if isinstance(source, Mapping)}
        if isinstance(train, Mapping)
        else {}
    )
    return {
        name: {str(ours): str(theirs) for ours, theirs in columns.items()} if isinstance(columns, Mapping) else {}
        for name, columns in own.items()
    }


def read_ledgers(checkpoint: CheckpointInfo) -> dict[str, Ledger]:
    """Read the ledgers of a checkpoint, which may be untrusted, by source.

    Raises:
        CheckpointError: there is none, or one is damaged.
    """
    found = ledger_files(checkpoint.files)
    if not found:
        raise CheckpointError(f"{checkpoint.uri} has no ledger, so its problems are not known")
    ledgers = {}
    with ExitStack() as stack:
        local = None if checkpoint.folder.local is None else checkpoint.folder.local / checkpoint.name
        if local is None:
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo_ray-")))
            for name in found:
                checkpoint.folder.download_file(local / name, checkpoint.name, name)
        for name, source in found.items():
            where = checkpoint.folder.uri_of(checkpoint.name, name)
            try:
                if file_checksum(checkpoint.folder, checkpoint.name, name) != checkpoint.files[name].get("sha256"):
                    raise ValueError("it is not the file that the manifest names")
                with ZipFile(local / name) as file:
                    # The writer does not compress: what is read is then never larger than the file.
                    if any(info.compress_type != ZIP_STORED for info in file.infolist()):
                        raise ValueError("it is compressed")
                ledgers[source] = _plausible(Ledger.load(local, name))
            except (OSError, ValueError, TypeError, AttributeError, MemoryError, BadZipFile) as error:
                reason = str(error) if isinstance(error, ValueError) else type(error).__name__
                raise CheckpointError(f"{where} cannot be read as a ledger: {reason}") from error
    return ledgers


def _plausible(ledger: Ledger) -> Ledger:
    """Return a ledger whose numbers have the types of those that grpo_ray writes. Raises ValueError."""
    if not isinstance(ledger.closed_epochs, int) or not 0 <= ledger.closed_epochs < 1 << 40:
        raise ValueError(f"closed epochs: {ledger.closed_epochs!r}")
    if ledger.fingerprint is not None and not isinstance(ledger.fingerprint.count, int):
        raise ValueError(f"number of problems: {ledger.fingerprint.count!r}")
    for epoch in ledger.open_epochs:
        used = ledger.ever_used(epoch)
        if not isinstance(epoch, int) or used.dtype != np.uint64 or used.ndim != 1:
            raise ValueError(f"the problems of epoch {epoch!r} are no ids")
    return ledger


def _recorded_uses(
    checkpoint: CheckpointInfo, ledgers: Mapping[str, Ledger]
) -> tuple[dict[str, dict[int, IdArray]], list[str]]:
    """Return source -> closed epoch -> problems that the run's rollouts record up to the checkpoint; and notes."""
    folder = checkpoint.folder
    parts: dict[str, dict[int, list[IdArray]]] = {source: {} for source in ledgers}
    if not any(ledger.closed_epochs for ledger in ledgers.values()):
        return {}, []
    if any(to < checkpoint.serial <= newest for to, newest in read_returns(folder)):
        return {}, [f"{checkpoint.name} was discarded by run.resume=best, and so were the rollouts of its later steps"]
    notes: list[str] = []
    for file in list_rollout_files(folder):
        if file.first_step > checkpoint.step:
            continue
        try:
            table = read_rollout_file(folder, file, ["epoch", "problem", "source"]).to_pandas()
            table = table[table["step"] <= checkpoint.step]
            for (source, epoch), group in table.groupby(["source", "epoch"]):
                if source in ledgers and epoch < ledgers[source].closed_epochs:
                    parts[source].setdefault(int(epoch), []).append(ids_to_uint64(group["problem"]))
        except (DataError, ValueError, TypeError) as error:
            notes.append(str(error))
    uses = {
        source: {epoch: np.unique(np.concatenate(ids)) for epoch, ids in epochs.items()}
        for source, epochs in parts.items()
    }
    return uses, notes
