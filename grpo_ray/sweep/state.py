"""Record of a sweep, `sweep.json` in its folder: trials, decisions, and requests of the user.

The file is replaced as a whole after each change, so that a sweep that is killed continues from its latest decision.
The steps of a trial are not in it: its own run folder has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_ray.config.sources import CHECKPOINT_PREFIX
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage.run_folder import RECORD_BYTES, RunFolder
from grpo_ray.sweep.trials import SweepTrial
from grpo_ray.text.redaction import redact, remember_secrets

FILE = "sweep.json"
KEPT_REQUESTS = 1000
"""Latest requests whose ids are recorded; a request's file is deleted right after it was recorded."""

Standing = Literal["active", "stopped", "dropped", "failed"]
"""active: takes steps until the next rung or its end. stopped: by the user. dropped: at a rung. failed: by an error."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial and its standing in the sweep."""

    trial: SweepTrial
    standing: Standing = "active"
    reason: str = ""
    """Error of a failed trial; rung of a dropped one."""
    started_from: str | None = None
    """Name of the parent's checkpoint that a clone has begun with."""


@dataclass(frozen=True, kw_only=True)
class RungDecision:
    """Comparison of the trials at a rung."""

    step: int
    values: Mapping[str, float | None]
    """Trial -> its metric; None if it was not known."""
    kept: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """State of a sweep between two launches of its trials."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    records: tuple[TrialRecord, ...]
    decisions: tuple[RungDecision, ...] = ()
    requests: tuple[str, ...] = ()
    """Ids of the latest requests that have been carried out."""

    def record(self, name: str) -> TrialRecord:
        """Return the record of a trial. Raises KeyError."""
        return next(each for each in self.records if each.trial.name == name)

    @property
    def names(self) -> list[str]:
        """Names of all trials, in order."""
        return [each.trial.name for each in self.records]

    @property
    def active(self) -> list[TrialRecord]:
        """Trials that still take steps, or have taken all of them."""
        return [each for each in self.records if each.standing == "active"]

    def with_record(self, record: TrialRecord) -> "SweepState":
        """Return the state with a new or changed record."""
        name = record.trial.name
        if name not in self.names:
            return replace(self, records=(*self.records, record))
        return replace(self, records=tuple(record if each.trial.name == name else each for each in self.records))

    def with_standing(self, name: str, standing: Standing, reason: str = "") -> "SweepState":
        """Return the state with another standing of a trial."""
        return self.with_record(replace(self.record(name), standing=standing, reason=reason))

    def with_decision(self, decision: RungDecision) -> "SweepState":
        """Return the state after a rung: the compared trials that are not kept are dropped."""
        state = replace(self, decisions=(*self.decisions, decision))
        for name in decision.values:
            if name not in decision.kept:
                state = state.with_standing(name, "dropped", f"at step {decision.step}")
        return state

    def with_request(self, request_id: str) -> "SweepState":
        """Return the state after a request."""
        return replace(self, requests=(*self.requests, request_id)[-KEPT_REQUESTS:])

    def write(self, folder: RunFolder) -> None:
        """Replace the record in the sweep's folder."""
        folder.write_json(asdict(self), FILE)


_ADAPTER: TypeAdapter[SweepState] = TypeAdapter(SweepState)


def read_state(folder: RunFolder) -> SweepState | None:
    """Read the record of a sweep; None if there is none.

    Raises:
        DamagedFileError: it cannot be read.
    """
    if not folder.exists(FILE):
        return None
    try:
        state = _ADAPTER.validate_python(folder.read_json(FILE, limit=RECORD_BYTES))
    except (DamagedFileError, ValidationError) as error:
        reason = str(error) if isinstance(error, DamagedFileError) else f"{folder.uri_of(FILE)} is damaged"
        raise DamagedFileError(
            f"{reason}; it has the trials and decisions of the sweep; restore it, or delete it to continue all trials "
            "of the sweep file, those that were dropped too"
        ) from None
    return state


def require_no_run(folder: RunFolder) -> None:
    """Raise ConfigError if the folder of a sweep is that of a run."""
    if not folder.exists(FILE) and (folder.exists("config.yaml") or folder.list_folders(CHECKPOINT_PREFIX)):
        raise ConfigError(f"{folder.uri} is the folder of a run; set another `name` in the sweep file")


def begin_state(folder: RunFolder, trials: Sequence[SweepTrial]) -> SweepState:
    """Return the recorded state of a sweep, or that of a new one.

    A failed trial becomes active again: the cause may have been removed. The record has no secrets, so the settings of
    the given trials are taken.

    Raises:
        ConfigError: the sweep in this folder has other trials.
        DamagedFileError: the record cannot be read.
    """
    for trial in trials:
        remember_secrets(trial.overrides)
    state = read_state(folder)
    if state is None:
        return SweepState(records=tuple(TrialRecord(trial=trial) for trial in trials))
    own = {each.trial.name: dict(each.trial.overrides) for each in state.records if each.trial.parent is None}
    given = {trial.name: redact(dict(trial.overrides)) for trial in trials}
    if changed := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
        raise ConfigError(
            f"the sweep {folder.uri} was begun with other trials: {', '.join(changed)} differ; restore the sweep file, "
            "or set another `name` in it"
        )
    for trial in trials:
        state = state.with_record(replace(state.record(trial.name), trial=trial))
    for record in state.records:
        if record.standing == "failed":
            state = state.with_standing(record.trial.name, "active")
    return state
