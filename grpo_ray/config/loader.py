"""Reading a config: a YAML file, overrides over it, and one clear line for each mistake."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from grpo_ray.config.schema import SECTIONS, Config, DataConfig, GrpoConfig, LoraConfig, ModelConfig, RunConfig
from grpo_ray.errors import ConfigError


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, drop: Sequence[str] = (), text: str | None = None
) -> Config:
    """Read a YAML file and lay `section.field=value` overrides over it.

    text: what the file holds, where somebody has read it already; `path` only names it then.
    drop: sections to pass over, such as the `versions` in a run folder's own config.yaml.
    Raises ConfigError with one line per mistake; an unknown key names the nearest one.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        settings = {name: section for name, section in _read_yaml(str(path), text).items() if name not in drop}
    for override in overrides:
        key, equals, value = override.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"{override!r} is not an override; write section.field=value, as in grpo.max_steps=100")
        if settings.get(section) is None:
            settings[section] = {}
        if not isinstance(settings[section], dict):
            raise ConfigError(f"{section}: must be a section with fields, not {settings[section]!r}")
        settings[section][name] = _parse_value(value, takes_text=(section, name) in _text_fields())
    return from_mapping(settings)


def _parse_value(value: str, *, takes_text: bool) -> Any:
    """Read an override's value as YAML would; for a field of text, all but null and quoted text is taken as it is."""
    try:
        parsed = yaml.load(value, Loader=_Loader)
    except (yaml.YAMLError, ValueError):  # free text, or a date that is none
        return value
    return value if takes_text and parsed is not None and not isinstance(parsed, str) else parsed


def _text_fields() -> set[tuple[str, str]]:
    """(section, field) of all fields that hold text."""
    return {
        (name, f.name) for name, cls in SECTIONS.items() for f in dataclasses.fields(cls) if f.type in (str, str | None)
    }


def from_mapping(settings: Mapping[str, Any]) -> Config:
    """Build a Config from the YAML's shape: sections of fields, TRL's fields among ours in `grpo`."""
    settings = {name: {} if section is None else section for name, section in settings.items()}
    grpo = settings.get("grpo", {})
    if isinstance(grpo, Mapping):
        ours = {f.name for f in dataclasses.fields(GrpoConfig)} - {"trl"}
        trl = {key: value for key, value in grpo.items() if key not in ours}
        settings["grpo"] = {key: value for key, value in grpo.items() if key in ours} | {"trl": trl}
    if isinstance(run := settings.get("run", {}), Mapping) and "name" not in run:
        settings["run"] = {**run, "name": _run_name(settings)}
    try:
        return TypeAdapter(Config).validate_python(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(map(_describe, error.errors())))) from None


def _run_name(settings: Mapping[str, Any]) -> str:
    """A name for a run that was given none: other data or another model must not go on with the same run."""
    named = []
    for section, key, default in (("model", "path", ModelConfig().path), ("data", "train", DataConfig().train)):
        fields = settings.get(section, {})
        value = str(fields.get(key, default)) if isinstance(fields, Mapping) else default
        if value != ModelConfig().path:  # the embedded policy goes without saying
            named.append(Path(value.rstrip("/")).stem if section == "data" else value.rstrip("/").rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(named)).strip("-.") or RunConfig().name


def _describe(error: Any) -> str:
    """One line for one of pydantic's findings."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if where.startswith("cluster.num_workers."):  # pydantic says what is wrong with each of the two forms
        return f"cluster.num_workers={error['input']!r}: must be a whole number, or two of them: [least, most]"
    if error["type"] == "unexpected_keyword_argument":
        return unknown_key(where, [f"model.lora.{f.name}" for f in dataclasses.fields(LoraConfig)])
    if error["type"] == "dataclass_type":
        return f"{where}: must be a section with fields, not {error['input']!r}"
    return f"{where}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def unknown_key(key: str, known: Sequence[str] = ()) -> str:
    """Say that a key is not known, and which one was probably meant.

    known: further keys to look among, besides the fields of this module.
    """
    ours = [f"{name}.{f.name}" for name, cls in SECTIONS.items() for f in dataclasses.fields(cls) if f.name != "trl"]
    every = [*SECTIONS, *ours, *known]
    field_of = {k: k.rpartition(".")[2] for k in every}
    wanted = key.rpartition(".")[2]
    exact = [k for k in every if field_of[k] == wanted and k != key]
    same_section = [k for k in every if k.rpartition(".")[0] == key.rpartition(".")[0]]
    near = exact or difflib.get_close_matches(key, same_section, n=1)
    near = near or [
        k for name in difflib.get_close_matches(wanted, field_of.values(), n=1) for k in every if field_of[k] == name
    ]
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "; see grpo-ray train --help")


def describe_fields() -> dict[str, dict[str, tuple[Any, str]]]:
    """Section -> field -> (default, what it means), read off the dataclasses, for `--help`."""
    fields: dict[str, dict[str, tuple[Any, str]]] = {}
    for name, cls in SECTIONS.items():
        texts = TypeAdapter(cls).json_schema()["properties"]
        default = cls()
        fields[name] = {
            f.name: (getattr(default, f.name), " ".join(texts[f.name]["description"].split()))
            for f in dataclasses.fields(cls)
            if f.name != "trl"
        }
    return fields


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-6 as text; everyone who writes it means a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _read_yaml(path: str, text: str | None) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8") if text is None else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        settings = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold sections ({', '.join(SECTIONS)}), not {type(settings).__name__}")
    return settings
