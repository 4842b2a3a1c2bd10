"""Stages of one YAML: runs that follow one another, each with the sections of the YAML and changes of its own.

    run: {name: math, storage_path: ~/grpo_ray_runs}
    model: {path: Qwen/Qwen2.5-0.5B}
    stages:
      - {name: easy, data: {train: easy.jsonl}}
      - {name: hard, data: {train: hard.jsonl}, grpo: {max_steps: 400}}

Each stage is a plain run, in the run folder `math/01-easy`, `math/02-hard`, and so on. The policy that a later stage
begins with is not in its config until the stage before has ended (`driver/stage_runs.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ray.config.loader import STAGES, apply_override, load_config, read_yaml
from grpo_ray.config.schema import SECTIONS, Config
from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError
from grpo_ray.storage.uris import join_path

NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of stages, which are parts of the names of their run folders."""
MAX_STAGES = 99
"""Most stages of one YAML: their numbers have two digits."""
DERIVED = {
    ("model", "path"): "a later stage begins with the best checkpoint of the stage before it",
}
"""Field that stages after the first one may not set -> reason."""
OF_ALL = {
    ("run", "name"): "it is the name of the folder of all stages",
    ("run", "storage_path"): "the run folders of all stages are in one folder",
}
"""Field that no stage may set for itself -> reason."""


@dataclass(frozen=True, kw_only=True)
class RunStage:
    """One run of a YAML with stages."""

    name: str
    number: int
    """Place among the stages, from 1."""
    config: Config
    """Config of its run. In stages after the first one, `model.path` is that of the first one until `begin_with`."""

    @property
    def folder_name(self) -> str:
        """Name of its run folder, which is `run.name` of its config."""
        return self.config.run.name

    def begin_with(self, policy: str) -> "RunStage":
        """Return the stage with a policy (path or URI) to begin with."""
        return replace(self, config=replace(self.config, model=replace(self.config.model, path=policy)))


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Stages of one YAML, in order."""

    name: str
    """Name of the folder of all stages: `run.name` of the YAML."""
    storage_path: str
    """Parent of that folder: `run.storage_path` of the YAML."""
    stages: tuple[RunStage, ...]

    def __iter__(self) -> Iterator[RunStage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)


def has_stages(path: str | Path | None) -> bool:
    """Return True if a YAML file has the key `stages`. Raises ConfigError if it cannot be read."""
    return path is not None and STAGES in read_yaml(str(path), None)


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> Stages:
    """Read a YAML file with stages, and apply overrides.

    Args:
        overrides: `section.field=value` for all stages, `stages.NAME.section.field=value` for one. An override of one
            stage wins over one of all stages, and both over the file.

    Raises:
        ConfigError: the file or a setting is invalid; one line per mistake, which names the stage.
    """
    settings = read_yaml(str(path), None)
    entries, shared = settings.pop(STAGES, None), settings
    if not (isinstance(entries, Sequence) and not isinstance(entries, str) and entries):
        raise ConfigError(f"{path}: stages must be a list of stages, each with a `name`; got {entries!r}")
    if len(entries) > MAX_STAGES:
        raise ConfigError(f"{path}: stages may have at most {MAX_STAGES} entries; got {len(entries)}")
    names = [_name_of(entry, number) for number, entry in enumerate(entries, 1)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"stages: the name {repeated[0]} is used twice; give each stage a name of its own")
    of_all, of_stages = _divide_overrides(overrides, names)
    for override in of_all:
        apply_override(shared, override)
    whole = _whole_run(shared, path)
    stages: list[RunStage] = []
    mistakes: list[str] = []
    for number, (name, entry) in enumerate(zip(names, entries, strict=True), 1):
        try:
            merged = _merge(shared, entry, of_all, of_stages[name], is_first=number == 1)
            if stages and stages[0].number == 1:  # which may have a `model.path` of its own
                merged["model"] = {**_section(merged, "model"), "path": stages[0].config.model.path}
            merged["run"] = {
                **_section(merged, "run"),
                "name": f"{number:02}-{name}",
                "storage_path": join_path(whole.run.storage_path, whole.run.name),
            }
            stages.append(RunStage(name=name, number=number, config=load_config(settings=merged)))
        except ConfigError as error:
            mistakes += [f"stage {name}: {line}" for line in str(error).splitlines()]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Stages(name=whole.run.name, storage_path=whole.run.storage_path, stages=tuple(stages))


def _name_of(entry: Any, number: int) -> str:
    """Return the name of a stage. Raises ConfigError if the entry is no mapping, or has no usable name."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"stages: entry {number} must be a mapping with a `name`; got {entry!r}")
    name = entry.get("name")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(
            f"stages: the name of entry {number} must have letters, digits, '.', '_' and '-', beginning with a letter "
            f"or digit; got {name!r}"
        )
    return name


def _divide_overrides(overrides: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the overrides of all stages from those of one, which are returned without `stages.NAME.`."""
    of_all: list[str] = []
    of_stages: dict[str, list[str]] = {name: [] for name in names}
    for override in overrides:
        if not override.startswith(f"{STAGES}."):
            of_all.append(override)
            continue
        rest = override.removeprefix(f"{STAGES}.")
        key = rest.partition("=")[0]
        if key in names:
            raise ConfigError(f"{override} names no setting of stage {key}; write {STAGES}.{key}.section.field=value")
        # A name may contain dots, so that the longest match is the stage's.
        name = max((name for name in names if rest.startswith(f"{name}.")), key=len, default=None)
        if name is None:
            given = key.partition(".")[0]
            raise ConfigError(
                f"{override}: there is no stage {given}, but {', '.join(names)}{suggestion(given, names)}"
            )
        of_stages[name].append(rest.removeprefix(f"{name}."))
    return of_all, of_stages


def _whole_run(shared: Mapping[str, Any], path: str | Path) -> Config:
    """Return a config with the name and the storage of all stages.

    Raises:
        ConfigError: a section is unknown or no mapping, or a field is set that has no meaning for all stages.
    """
    if unknown := [str(name) for name in shared if name not in SECTIONS]:
        raise ConfigError(f"{path}: unknown key {unknown[0]}{suggestion(unknown[0], [*SECTIONS, STAGES])}")
    run = _section(shared, "run")
    if "name" not in run:
        raise ConfigError(f"{path}: run.name must be set in a file with stages: it is the name of their folder")
    _refuse_start(run)
    return load_config(settings={"run": {key: run[key] for key in ("name", "storage_path") if key in run}})


def _refuse_start(run: Mapping[str, Any]) -> None:
    """Raise ConfigError if a section `run` sets `from_checkpoint`."""
    if run.get("from_checkpoint") is not None:
        raise ConfigError(
            "run.from_checkpoint has no place in a file with stages, whose optimizers begin anew; set model.path to "
            "begin the first stage with a policy"
        )


def _merge(
    shared: Mapping[str, Any],
    entry: Mapping[str, Any],
    of_all: Sequence[str],
    of_stage: Sequence[str],
    *,
    is_first: bool,
) -> dict[str, Any]:
    """Return the settings of a stage: section -> fields.

    Raises:
        ConfigError: an unknown key, or a field that this stage may not set.
    """
    own: dict[str, Any] = {key: value for key, value in entry.items() if key not in ("name", "kind")}
    if unknown := [str(key) for key in own if key not in SECTIONS]:
        raise ConfigError(f"unknown key {unknown[0]}{suggestion(unknown[0], ['name', 'kind', *SECTIONS])}")
    own = {key: dict(_section(own, key)) for key in own}
    # Only to find refused fields: merged with the shared sections, an override of one entry of a mapping
    # (`rewards.settings.judge.model=...`) would replace all of its other entries.
    overridden = dict(own)
    for override in of_stage:
        apply_override(overridden, override)
    for (section, field), reason in (OF_ALL if is_first else OF_ALL | DERIVED).items():
        if field in _section(overridden, section):
            raise ConfigError(f"{section}.{field} cannot be set for one stage: {reason}; remove it")
    _refuse_start(_section(overridden, "run"))
    merged = {key: dict(_section(shared, key)) for key in shared}
    for section in own:
        merged[section] = {**merged.get(section, {}), **own[section]}
    if "kind" in entry and "kind" not in _section(own, "run"):
        merged["run"] = {**merged.get("run", {}), "kind": entry["kind"]}
    for override in of_all:  # the command line wins over the stage's own entry in the file
        apply_override(merged, override)
    for override in of_stage:
        apply_override(merged, override)
    return merged


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the fields of a section; an empty or missing one has none. Raises ConfigError for any other value."""
    section = settings.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}={section!r} must be a section with fields")
    return section
