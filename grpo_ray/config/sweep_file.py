"""Schema and loader of a sweep file: the trials of `grpo-ray sweep`, and how their steps are divided."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError

from grpo_ray.config.fields import VALUES, describe_errors, type_adapter
from grpo_ray.config.loader import parse_file
from grpo_ray.config.schema import STRICT, FolderName, NonNegativeInt, PositiveInt
from grpo_ray.errors import ConfigError

Values = Annotated[
    Mapping[str, tuple[Any, ...]],
    Field(min_length=1, json_schema_extra={VALUES: "a mapping from keys of the config to lists of values"}),
]
Overrides = Annotated[
    tuple[Mapping[str, Any], ...],
    Field(min_length=1, json_schema_extra={VALUES: "a list of mappings from keys of the config to values"}),
]
Distribution = Literal["uniform", "log_uniform", "int", "log_int", "choice"]
Space = Annotated[
    Mapping[str, Annotated[Mapping[Distribution, tuple[Any, ...]], Field(min_length=1, max_length=1)]],
    Field(
        min_length=1,
        json_schema_extra={
            VALUES: "a mapping from keys of the config to one of {uniform: [low, high]}, {log_uniform: [low, high]}, "
            "{int: [low, high]}, {log_int: [low, high]} and {choice: [a, b, ...]}"
        },
    ),
]

SET_BY_SWEEP = {
    "run.name": "it is set by the key `name` of an entry of `trials`, and that of the sweep by `name`",
    "run.storage_path": "it is set by an override on the command line",
    "run.resume": "a trial always continues from its latest checkpoint",
    "run.takeover": "a sweep has its own lease",
    "run.pause_at": "it is set by `rungs` or `turns`",
    "run.group": "it is set by `name`, the sweep's",
    "run.best_metric": "it is set by `rungs.metric` or the base config: trials are compared by one metric",
    "run.from_checkpoint": "it is set by the base config, or by `grpo-ray sweep clone`",
}
"""Key that trials cannot vary -> the reason, or the place that sets it."""
NOT_FOR_ALL_TRIALS = ("run.name", "run.resume", "run.pause_at", "run.group")
"""Those of them that an override on the command line cannot set either: it would have no effect."""
TRIAL_NAME = "name"
"""Key of an entry of `trials` that is no key of the config."""


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Random trials: independent draws of values."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    n: PositiveInt
    """Number of trials. In a sweep of another name, a larger one draws the same first trials."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""
    space: Space
    """Distribution of each key's values."""


@dataclass(frozen=True, kw_only=True)
class RungsConfig:
    """Successive halving: steps after which the worst trials are dropped."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Rising steps at which all remaining trials are compared; those that stay go on to `grpo.max_steps`."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the compared trials that stay, rounded up to whole trials."""
    metric: str | None = None
    """Metric that the trials, and the checkpoints of each, are compared by; higher is better. null: `run.best_metric`
    of the base config."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Sweep over the settings of a base config. One of `vary`, `trials` and `draw` must be given."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: FolderName | None = None
    """Name of the sweep; its folder is `<run.storage_path>/<name>`, with one run folder per trial. null: the name of
    the file without its ending."""
    base: str | None = None
    """YAML file with the settings that all trials share. null: the defaults."""
    vary: Values | None = None
    """Grid: key -> values; one trial for each combination, the last key's values varying fastest."""
    trials: Overrides | None = None
    """Trials one by one: key -> value, and optionally `name`."""
    draw: DrawConfig | None = None
    """Random trials."""
    rungs: RungsConfig | None = None
    """Successive halving. null: all trials take all steps."""
    turns: PositiveInt | None = None
    """Steps that a trial takes in one turn while more trials are left than fit into the cluster at once, so that all of
    them advance together. null: a trial takes all its steps, or those up to the next rung, in one go."""
    parallel: PositiveInt | None = None
    """Largest number of trials at a time. null: as many as the free CPUs and GPUs of the cluster allow."""

    def __post_init__(self) -> None:
        given = [name for name in ("vary", "trials", "draw") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"one of vary, trials and draw must be given; got {' and '.join(given) or 'none'}")
        if self.rungs is not None and list(self.rungs.steps) != sorted({*self.rungs.steps}):
            raise ConfigError(f"rungs.steps={list(self.rungs.steps)} must rise; write each step once, in order")
        for key, values in (self.vary or {}).items():
            if not values:
                raise ConfigError(f"vary: {key} has no values; add one, or remove the key")
        for key, distribution in (self.draw.space if self.draw else {}).items():
            ((kind, bounds),) = distribution.items()
            _check_distribution(f"draw.space: {key}", kind, bounds)
        for key in self.keys:
            if key in SET_BY_SWEEP:
                raise ConfigError(f"trials cannot vary {key}; {SET_BY_SWEEP[key]}")
            if "." not in key:
                raise ConfigError(f"{key} is no key of the config; write section.field, as in grpo.learning_rate")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the config that the trials set, in the order of the file."""
        if self.vary is not None:
            return tuple(self.vary)
        if self.draw is not None:
            return tuple(self.draw.space)
        names = itertools.chain.from_iterable(self.trials or ())
        return tuple(dict.fromkeys(name for name in names if name != TRIAL_NAME))


def _check_distribution(where: str, kind: str, bounds: tuple[Any, ...]) -> None:
    """Check the arguments of a distribution. Raises ConfigError."""
    if kind == "choice":
        if not bounds:
            raise ConfigError(f"{where}: choice must have at least one value")
        return
    needed = int if kind in ("int", "log_int") else (int, float)
    is_numbers = all(isinstance(each, needed) and not isinstance(each, bool) and math.isfinite(each) for each in bounds)
    if len(bounds) != 2 or not is_numbers or not bounds[0] < bounds[1]:
        noun = "whole numbers" if needed is int else "numbers"
        raise ConfigError(f"{where}: {kind}={list(bounds)} must be two {noun}, the smaller one first")
    if kind.startswith("log") and bounds[0] <= 0:
        raise ConfigError(f"{where}: {kind}={list(bounds)} must have bounds above 0")


def load_sweep(path: str) -> SweepConfig:
    """Read a sweep file; the sweep gets the file's name unless it has one.

    Raises:
        ConfigError: the file is invalid; each line begins with its path.
    """
    settings = parse_file(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must be a mapping with base and vary, trials or draw")
    if settings.get("name") is None:
        settings = settings | {"name": Path(path).stem}
    try:
        sweep: SweepConfig = type_adapter(SweepConfig).validate_python(settings)
    except ValidationError as error:
        lines = describe_errors(error, SweepConfig, settings).splitlines()
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return sweep
