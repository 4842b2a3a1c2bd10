"""Problems that a policy was trained on, from the ledger in its checkpoint and the rollouts of its run.

An open epoch of the ledger lists its problems. A closed epoch has no record, as it used every training problem, or left
it out by the curriculum: its problems are those of the epoch in `rollouts/`. Where these are missing, and do not add up
to the fingerprint of the training problems that the ledger records, it is unknown whether a problem was used.
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
from grpo_ray.data.ledger import DatasetFingerprint, IdArray, Ledger, ids_to_uint64, isin_sorted, uint64_to_ids
from grpo_ray.data.mixture_ledger import ledger_files
from grpo_ray.data.problem import Problem
from grpo_ray.data.registry import open_dataset
from grpo_ray.errors import CheckpointError, DataError
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.storage.checkpoint_integrity import file_checksum
from grpo_ray.storage.checkpoints import CheckpointInfo, read_returns
from grpo_ray.storage.recorded_config import read_recorded
from grpo_ray.storage.records.rollout_files import list_rollout_files, read_rollout_file
from grpo_ray.storage.run_folder import RunFolder
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
    """One line for each file that could not be read."""

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

    @property
    def is_complete(self) -> bool:
        """True if every problem that the source has used is known."""
        return not self.ledger.closed_epochs or any(
            DatasetFingerprint.of(uint64_to_ids(ids)) == self.ledger.fingerprint for ids in self.recorded.values()
        )

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
    ledgers = read_ledgers(checkpoint)
    recorded, notes = _recorded_uses(checkpoint, ledgers)
    uses = {source: _Uses(ledger, recorded.get(source, {})) for source, ledger in ledgers.items()}
    complete = {source: each.is_complete for source, each in uses.items()}
    known_columns = _columns_of_sources(checkpoint.folder)
    answers: dict[str, ProblemUse] = {}
    for source, use in uses.items():
        own = known_columns.get(source, {}) if columns is None else columns
        read = _read_problems(problems, own)
        for problem, epochs in zip(read, _epochs_of(use, read, source), strict=True):
            answer: Answer = "used" if epochs else "not used" if complete[source] else "unknown"
            before = answers.get(problem.id)
            if before is None or _rank(answer) > _rank(before.answer):
                answers[problem.id] = _answer(problem, answer, epochs, source if epochs else "")
    return UsedProblems(
        checkpoint=checkpoint.uri,
        step=checkpoint.step,
        closed_epochs={source: ledger.closed_epochs for source, ledger in ledgers.items()},
        begun_with=checkpoint.folder.read_text(BEGUN_WITH) if checkpoint.folder.exists(BEGUN_WITH) else None,
        problems=list(answers.values()),
        notes=notes,
    )


def _rank(answer: Answer) -> int:
    """Return the rank of an answer among those of several sources: the highest one counts."""
    return ("not used", "unknown", "used").index(answer)


def _answer(problem: Problem, answer: Answer, epochs: tuple[int, ...], source: str) -> ProblemUse:
    prompt = recorded_text(problem.prompt[-1]["content"], PROMPT_BYTES)
    return ProblemUse(problem.id, problem.where, prompt, answer, epochs, source)


def _read_problems(problems: str, columns: Mapping[str, str]) -> list[Problem]:
    """Read the problems of a dataset, each once; rows without a solution are accepted. Raises DataError."""
    shards = open_dataset(problems, "train", DataConfig(columns=columns), needs_solutions=False)
    return list({problem.id: problem for shard in shards for problem in shard.read()}.values())


def _epochs_of(uses: _Uses, problems: Sequence[Problem], source: str) -> list[tuple[int, ...]]:
    """Return the epochs in which each problem was used, as it is, or with prompt and solution alone."""
    ids: list[str] = []
    for problem in problems:
        # A run on rows without the further columns of this file has given the problem its `question_id`.
        plain = Problem(id=problem.question_id, prompt=problem.prompt, solution=problem.solution)
        ids += [each.of_source(source).id if source else each.id for each in (problem, plain)]
    found = uses.epochs_of(ids)
    return [
        tuple(sorted({*found.get(own, ()), *found.get(plain, ())}))
        for own, plain in zip(ids[::2], ids[1::2], strict=True)
    ]


def _columns_of_sources(folder: RunFolder) -> dict[str, Mapping[str, str]]:
    """Return the columns of each source that the run's config records; a config that cannot be read has none.

    Nothing else of the config is used: it may be a stranger's.
    """
    if not folder.exists(RECORDED_CONFIG):
        return {}
    data = read_recorded(folder).get("data", {})
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
    notes = []
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
