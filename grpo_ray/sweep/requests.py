"""Requests of the user to a sweep that runs: stop, resume or clone a trial.

Each request is a file in `requests/` of the sweep's folder, which the sweep deletes once it is carried out. A sweep
that does not run carries them out when it continues.
"""

import functools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from grpo_ray.config.fields import field_descriptions
from grpo_ray.config.loader import apply_override
from grpo_ray.config.schema import Config, unknown_key
from grpo_ray.config.sweep_file import SET_BY_SWEEP
from grpo_ray.config.trl_fields import trl_fields
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage.run_folder import RECORD_BYTES, RunFolder
from grpo_ray.sweep.state import SweepState, TrialRecord
from grpo_ray.sweep.trials import SweepTrial, require_plain
from grpo_ray.text.redaction import hidden_settings, redact, remember_secrets

FOLDER = "requests"
Action = Literal["stop", "resume", "clone"]
ACTIONS: tuple[Action, ...] = ("stop", "resume", "clone")


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Request of the user."""

    action: Action
    trial: str
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Changed settings of a clone: key of the config -> value."""


_ADAPTER: TypeAdapter[SweepRequest] = TypeAdapter(SweepRequest)


def parse_request(action: str, words: Sequence[str]) -> SweepRequest:
    """Return the request of the words after `grpo-ray sweep ACTION SWEEP`: a trial, and overrides for a clone.

    Raises:
        ConfigError: there is no trial, a word too many, or a setting that a clone cannot have.
    """
    trials = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(trials) != 1:
        raise ConfigError(
            f"grpo-ray sweep {action} takes a sweep and one of its trials; got {' '.join(trials) or 'none'}"
        )
    if overrides and action != "clone":
        raise ConfigError(f"grpo-ray sweep {action} changes no settings; leave {overrides[0]} out")
    values: dict[str, Any] = {}
    for word in overrides:
        key = word.partition("=")[0]
        _check_key(key)
        settings: dict[str, Any] = {}
        apply_override(settings, word)
        values[key] = functools.reduce(lambda section, name: section[name], key.split("."), settings)
    require_plain(values)
    return SweepRequest(action=next(each for each in ACTIONS if each == action), trial=trials[0], overrides=values)


def _check_key(key: str) -> None:
    """Raise ConfigError if a clone cannot set this key; the sweep checks the value."""
    if key in SET_BY_SWEEP:
        raise ConfigError(f"trials cannot vary {key}; {SET_BY_SWEEP[key]}")
    known = [*field_descriptions(Config), *(f"grpo.{name}" for name in trl_fields())]
    if tuple(key.split(".")[:2]) not in {tuple(path.split(".")[:2]) for path in known if "." in path}:
        raise ConfigError(unknown_key(key))


def write_request(folder: RunFolder, request: SweepRequest) -> str:
    """Write a request to the folder of a sweep; return its id."""
    # The time first: requests are carried out in the order of their names.
    request_id = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    content = {"action": request.action, "trial": request.trial, "overrides": dict(request.overrides)}
    folder.write_json(content, FOLDER, f"{request_id}.json")
    return request_id


def read_requests(folder: RunFolder) -> list[tuple[str, SweepRequest | None]]:
    """Return the ids and contents of the pending requests, the oldest first; None for a file that cannot be read."""
    requests: list[tuple[str, SweepRequest | None]] = []
    for name in sorted(name for name in folder.file_sizes(FOLDER, recursive=False) if name.endswith(".json")):
        try:
            content = folder.read_json(FOLDER, name, limit=RECORD_BYTES)
            requests.append((name.removesuffix(".json"), _ADAPTER.validate_python(content)))
        except FileNotFoundError:
            continue
        except (DamagedFileError, ValidationError):
            requests.append((name.removesuffix(".json"), None))
    return requests


def delete_request(folder: RunFolder, request_id: str) -> None:
    """Delete the file of a request."""
    folder.delete_file(FOLDER, f"{request_id}.json")


def apply_request(state: SweepState, request: SweepRequest) -> tuple[SweepState, str]:
    """Return the state after a request, and a line for the user.

    Raises:
        ConfigError: there is no such trial, the request has no effect, or a clone would have settings with secrets.
    """
    name = request.trial
    if name not in state.names:
        raise ConfigError(f"there is no trial {name}; the sweep has {', '.join(state.names)}")
    record = state.record(name)
    if request.action == "stop":
        if record.standing != "active":
            raise ConfigError(f"{name} takes no steps: it is {record.standing}")
        line = f"{name}: stops after its current step, or at once if it takes none"
        return state.with_standing(name, "stopped", "by the user"), line
    if request.action == "resume":
        if record.standing == "active":
            raise ConfigError(f"{name} is active already")
        return state.with_standing(name, "active"), f"{name}: continues"
    overrides = {**record.trial.overrides, **request.overrides}
    remember_secrets(overrides)
    if hidden := hidden_settings(redact(overrides)):
        raise ConfigError(
            f"a clone cannot have settings with secrets, which are not recorded ({', '.join(hidden)}); add a trial to "
            "another sweep file, or set them for all trials on the command line"
        )
    clone = SweepTrial(name=clone_name(state, name), overrides=overrides, parent=name)
    return state.with_record(TrialRecord(trial=clone)), f"{name}: cloned as {clone.name} with {clone.text}"


def clone_name(state: SweepState, parent: str) -> str:
    """Return the name of a trial's next clone."""
    number = 1
    while (name := f"{parent}-clone-{number}") in state.names:
        number += 1
    return name
