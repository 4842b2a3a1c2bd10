"""Loading of a config: a YAML file, overrides on top of it, and one line of error message per mistake."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from grpo_ray.config.fields import INTERNAL, describe_errors, field_descriptions, type_adapter
from grpo_ray.config.schema import SECTIONS, TRL_KEYS, Config, DataConfig, GrpoConfig, ModelConfig, RunConfig
from grpo_ray.config.sources import CHECKPOINT_PREFIX
from grpo_ray.config.yaml_documents import RepeatedKeyError, YamlError, parse_yaml
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import HIDDEN, hidden_settings, redact_text, remember_secrets, strip_hidden

STAGES = "stages"
"""Key of a YAML whose runs follow one another (`driver/stage_config.py`); it is no section."""
VERSIONS = "versions"
"""Section of the `config.yaml` of a run folder with the versions of its libraries; it is ignored here."""
COMMENT = re.compile(r"(?:^|\s)#")
"""Start of a comment in YAML."""


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    text: str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Config:
    """Read a YAML file and apply overrides.

    Args:
        path: YAML file, also the `config.yaml` of a run folder; None starts from the defaults.
        overrides: settings of the form `section.field=value`, or `section.field.entry=value` for an entry of a mapping;
            the last one for a field wins.
        text: content of the file if it has been read already; `path` then only names it in error messages.
        settings: section -> fields, if the file has been parsed already.
        defaults: section -> fields whose defaults replace the schema's; the file and overrides take precedence.

    Raises:
        ConfigError: the file or a setting is invalid; one line per mistake.
    """
    if path is None or settings is not None:
        merged: dict[str, Any] = {name: dict(section) for name, section in (settings or {}).items()}
    else:
        merged = {name: section for name, section in read_yaml(str(path), text).items() if name != VERSIONS}
        if STAGES in merged:
            raise ConfigError(
                f"{path}: has stages, which only grpo-ray train and check (in Python: load_stages) can read; name the "
                "config.yaml in the run folder of one stage"
            )
    for override in overrides:
        apply_override(merged, override)
    for section, fields in defaults.items():
        if isinstance(given := merged.get(section) or {}, dict):
            merged[section] = {**fields, **given}
    if hidden := hidden_settings(merged):
        raise ConfigError(
            f"{', '.join(hidden)}: the value contains {HIDDEN}, which is written in place of a secret; set the real "
            f"value again, as in {hidden[0]}=..."
        )
    return from_mapping(merged)


def apply_override(settings: dict[str, Any], override: str) -> None:
    """Set the field that an override names, or an entry of a field that is a mapping; changes `settings`.

    Raises:
        ConfigError: the override is malformed, or the value that it names is no mapping.
    """
    key, equals, value = override.partition("=")
    section, *names = key.split(".")
    if not (equals and section and names and all(names)):
        raise ConfigError(f"{override!r} is not an override; write section.field=value, as in grpo.max_steps=100")
    target, path = settings, section
    for name in names:
        target[path.rpartition(".")[2]] = inner = _copy_of_mapping(path, target.get(path.rpartition(".")[2]))
        target, path = inner, f"{path}.{name}"
    target[names[-1]] = _parse_value(value, _field_type(section, names[0]) if len(names) == 1 else None)


def _copy_of_mapping(path: str, value: Any) -> dict[str, Any]:
    """Return a copy of a mapping of settings; a missing one is empty. Raises ConfigError for any other value."""
    if not isinstance(value, Mapping | None):
        content = "a section with fields" if "." not in path else "a mapping, if an entry of it is set"
        raise ConfigError(f"{path}={value!r} must be {content}")
    return dict(value or {})


def _parse_value(value: str, hint: Any) -> Any:
    """Parse an override's value as YAML; for a text field, keep everything but null and quoted text as written.

    Args:
        hint: type of the field; None for a field of TRL's.
    """
    try:
        parsed = parse_yaml(value)
    except RepeatedKeyError as error:
        raise ConfigError(f"the value {value!r} {error}") from None
    except YamlError:  # free text, or something like a date that is not valid
        return value
    is_quoted = value.lstrip().startswith(('"', "'"))
    if COMMENT.search(value) and not is_quoted and (parsed is None or isinstance(parsed, str)):
        return value.strip()  # "Use #1" is text to its end: a command line has no comments
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    forms = typing.get_args(hint) if is_union else (hint,)
    is_mapping = isinstance(parsed, dict) and any(typing.get_origin(each) is Mapping for each in forms)
    return value if str in forms and not (parsed is None or isinstance(parsed, str) or is_mapping) else parsed


def _field_type(section: str, name: str) -> Any:
    """Return the type of a field of the schema; None if it has no such field."""
    return typing.get_type_hints(SECTIONS[section]).get(name) if section in SECTIONS else None


def from_mapping(settings: Mapping[str, Any]) -> Config:
    """Build a Config from nested settings in the shape of the YAML; `grpo` may hold TRL's fields too.

    Raises:
        ConfigError: a setting is invalid; one line per mistake.
    """
    remember_secrets(settings)  # before the checks, whose messages quote values
    settings = {name: {} if section is None else section for name, section in settings.items()}
    if isinstance(grpo := settings.get("grpo", {}), Mapping):
        own = {f.name for f in dataclasses.fields(GrpoConfig)} - {"trl"}
        trl = {key: value for key, value in grpo.items() if key not in own}
        settings["grpo"] = {key: value for key, value in grpo.items() if key in own} | {"trl": trl}
    if isinstance(run := settings.get("run", {}), Mapping) and "name" not in run:
        settings["run"] = {**run, "name": _default_run_name(settings)}
    try:
        config: Config = type_adapter(Config).validate_python(settings)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, Config, settings, further=TRL_KEYS)) from None
    return config


def _default_run_name(settings: Mapping[str, Any]) -> str:
    """Derive a run name from model and data, so that another model or dataset never resumes the same run."""
    parts: list[str] = []
    for section, key, default in (("model", "path", ModelConfig().path), ("data", "train", DataConfig().train)):
        fields = settings.get(section, {})
        value = fields.get(key, default) if isinstance(fields, Mapping) else default
        if isinstance(value, Mapping):  # a mixture
            parts += map(str, value)
            continue
        value = str(value)
        if "://" in value:  # a run name must contain neither credentials nor a query
            value = strip_hidden(redact_text(value)).partition("?")[0]
        if value != ModelConfig().path:  # the embedded policy is not mentioned
            parts.append(Path(value.rstrip("/")).stem if section == "data" else value.rstrip("/").rpartition("/")[2])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-.") or RunConfig().name
    return f"run-{name}" if name.startswith(CHECKPOINT_PREFIX) else name


def describe_fields() -> dict[str, dict[str, tuple[Any, str]]]:
    """Return section -> field -> (default, meaning) for `--help`."""
    return {
        section: {
            name: (described.default, described.meaning)
            for name, described in field_descriptions(cls).items()
            if "." not in name and f"{section}.{name}" not in INTERNAL
        }
        for section, cls in SECTIONS.items()
    }


def parse_file(path: str, text: str | None = None) -> Any:
    """Parse a YAML file, or its content if that has been read already. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8") if text is None else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        return parse_yaml(text)
    except RepeatedKeyError as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from None
    except YamlError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None


def read_yaml(path: str, text: str | None) -> dict[str, Any]:
    """Parse the YAML of a run, or its content if that has been read already. Raises ConfigError."""
    settings = parse_file(path, text)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold sections ({', '.join(SECTIONS)}); got {type(settings).__name__}")
    return settings
