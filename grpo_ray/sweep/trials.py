"""Trials of a sweep: their names, their overrides, and the config of each."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.config.sweep_file import NOT_FOR_ALL_TRIALS, SET_BY_SWEEP, TRIAL_NAME, DrawConfig, SweepConfig
from grpo_ray.errors import ConfigError
from grpo_ray.storage.uris import join_path

RESERVED_NAMES = ("driver", "requests", "sweep.json", "summary.json", "report.html")
"""Entries of the sweep's own folder, beside those of its trials."""


@dataclass(frozen=True, kw_only=True)
class SweepTrial:
    """One run of a sweep."""

    name: str
    """Name of the trial, and of its run folder below that of the sweep."""
    overrides: Mapping[str, Any]
    """Key of the config -> value."""
    parent: str | None = None
    """Trial that this one was cloned from; None for a trial of the sweep file."""

    @property
    def text(self) -> str:
        """The overrides in one line, without the names of sections."""
        parts = (f"{key.partition('.')[2]}={format_value(value)}" for key, value in self.overrides.items())
        return " ".join(parts)


def format_value(value: Any) -> str:
    """Format the value of an override: four digits of a number, JSON for everything but text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def to_yaml(value: Any) -> str:
    """Format the value of an override as JSON that is YAML too: of other characters than ASCII's, the two differ."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if " " <= each <= "~" else f"\\U{ord(each):08x}" for each in text)


def list_trials(sweep: SweepConfig) -> list[SweepTrial]:
    """Return the trials of a sweep file, in order: a grid, a list, or random draws.

    Raises:
        ConfigError: two trials have one name, one has none or that of a file or folder of the sweep, or a value cannot
            be recorded.
    """
    entries: list[dict[str, Any]]
    if sweep.vary is not None:
        entries = [dict(zip(sweep.vary, values, strict=True)) for values in itertools.product(*sweep.vary.values())]
    elif sweep.draw is not None:
        entries = draw_values(sweep.draw)
    else:
        entries = [dict(entry) for entry in sweep.trials or ()]
    width = max(2, len(str(len(entries))))
    trials: list[SweepTrial] = []
    for number, entry in enumerate(entries, 1):
        given = entry.pop(TRIAL_NAME, f"trial-{number:0{width}d}")
        if given is None:
            raise ConfigError(f"trials: the name of entry {number} is null; set one, or leave `name` out")
        name = str(given)
        if name in RESERVED_NAMES:
            raise ConfigError(f"a trial cannot be named {name}, as the sweep's own folder has it; set another name")
        if any(name == other.name for other in trials):
            raise ConfigError(f"two trials are named {name}; set another name")
        require_plain(entry, f"{name}: ")
        trials.append(SweepTrial(name=name, overrides=entry))
    return trials


def require_plain(overrides: Mapping[str, Any], prefix: str = "") -> None:
    """Check that the record of the sweep, which is JSON, has the same values when it is read again.

    Raises:
        ConfigError: a value has a date, or a mapping with other keys than texts; the message begins with `prefix`.
    """
    for key, value in overrides.items():
        try:
            # By `repr`, since NaN equals nothing; the config refuses it with a line about its field.
            is_plain = repr(json.loads(json.dumps(value))) == repr(value)
        except TypeError:
            is_plain = False
        if not is_plain:
            raise ConfigError(f"{prefix}{key} has a date, or a key that is no text; put it in quotes")


def draw_values(draw: DrawConfig) -> list[dict[str, Any]]:
    """Draw the values of each trial with the search spaces of Ray Tune.

    A trial has a generator of its own, so that its values do not depend on the number of trials.
    """
    import numpy as np
    from ray import tune

    spaces: Mapping[str, Any] = {
        "uniform": tune.uniform,
        "log_uniform": tune.loguniform,
        "int": lambda low, high: tune.randint(low, high + 1),
        "log_int": lambda low, high: tune.lograndint(low, high + 1),
        "choice": lambda *values: tune.choice(values),
    }
    drawn = []
    for number in range(draw.n):
        generator = np.random.default_rng([draw.seed, number])
        values = {}
        for key, distribution in draw.space.items():
            ((kind, arguments),) = distribution.items()
            value = spaces[kind](*arguments).sample(random_state=generator)
            values[key] = value.item() if isinstance(value, np.generic) else value
        drawn.append(values)
    return drawn


class TrialConfigs:
    """Builder of the trials' configs from the base config.

    Args:
        base: YAML file of the base config; None: the defaults.
        overrides: overrides of the command line, for all trials.
        name: name of the sweep.
        metric: metric that trials are compared by; None: `run.best_metric` of the base config.

    Raises:
        ConfigError: the base config cannot be read or is invalid, or an override sets a field that the sweep sets.
    """

    def __init__(self, base: str | None, overrides: Sequence[str], name: str, metric: str | None = None):
        set_by_sweep = (*NOT_FOR_ALL_TRIALS, *(() if metric is None else ("run.best_metric",)))
        for key in (word.partition("=")[0] for word in overrides):
            if key in set_by_sweep:
                raise ConfigError(f"{key} has no effect on the command line of a sweep; {SET_BY_SWEEP[key]}")
        self._base = base
        try:
            self._text = None if base is None else Path(base).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"base={base}: cannot be read: {error}") from None
        self._overrides = [*overrides, "run.resume=latest"]
        self._metric = metric
        self._name = name
        self.base = self._load(["run.name=base"])

    @property
    def folder(self) -> tuple[str, str]:
        """Parent and name of the sweep's folder."""
        return self.base.run.storage_path, self._name

    def config_of(self, trial: SweepTrial) -> Config:
        """Return the config of a trial.

        Raises:
            ConfigError: a setting is invalid; the message begins with the trial's name.
        """
        storage_path, name = self.folder
        if mistakes := [key for key in trial.overrides if key in SET_BY_SWEEP]:
            raise ConfigError(f"{trial.name}: trials cannot vary {mistakes[0]}; {SET_BY_SWEEP[mistakes[0]]}")
        own = {
            **trial.overrides,
            "run.name": trial.name,
            "run.storage_path": join_path(storage_path, name),
            "run.group": name,
            "run.pause_at": None,
        }
        try:
            return self._load([f"{key}={to_yaml(value)}" for key, value in own.items()])
        except ConfigError as error:
            raise ConfigError("\n".join(f"{trial.name}: {line}" for line in str(error).splitlines())) from None

    def _load(self, own: Sequence[str]) -> Config:
        metric = [] if self._metric is None else [f"run.best_metric={self._metric}"]
        return load_config(self._base, [*self._overrides, *metric, *own], text=self._text)
