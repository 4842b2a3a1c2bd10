"""Settings, versions and short description of a run, with secrets masked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.loader import describe_fields
from grpo_ray.config.sources import shown_training
from grpo_ray.pages.report.charts import short
from grpo_ray.pages.report.facts import MAX_LINE_CHARS, MAX_NAME_CHARS, format_utc
from grpo_ray.pages.report.read import RunData
from grpo_ray.storage.numbers import to_float
from grpo_ray.text.display import safe_text
from grpo_ray.text.redaction import HIDDEN, is_secret_name

MAX_SETTINGS = 300
MAX_VERSIONS = 30
MAX_ITEMS, MAX_DEPTH = 20, 3
"""Entries shown of a list or mapping, and levels of nesting."""


@dataclass(frozen=True)
class Setting:
    """One field of the config."""

    name: str
    """`section.field`."""
    value: str
    changed: bool
    """True if the value is not the default."""


def run_settings(run: RunData) -> list[Setting]:
    """List every field of the run's config except the versions."""
    defaults = {
        f"{section}.{name}": _format_value(default)
        for section, fields in describe_fields().items()
        for name, (default, _) in fields.items()
    }
    settings = []
    for section, fields in run.config.items():
        if section == "versions" or not isinstance(fields, Mapping):
            continue
        for name, value in fields.items():
            path = f"{section}.{name}"
            text = _format_value(value, str(name))
            settings.append(Setting(safe_text(path, MAX_NAME_CHARS), text, text != defaults.get(path)))
    return settings[:MAX_SETTINGS]


def run_versions(run: RunData) -> list[tuple[str, str]]:
    """Return name and version of each recorded package, and the commit."""
    versions = list(run.section("versions").items())[:MAX_VERSIONS]
    return [(safe_text(name, MAX_NAME_CHARS), safe_text(version, MAX_NAME_CHARS)) for name, version in versions]


def _generation_batch(grpo: Mapping[str, Any]) -> str | None:
    """Describe how often a generation batch is used; None if it is used for one optimizer step."""
    steps = grpo.get("steps_per_generation", 1)
    epochs = [value for name in ("epochs", "num_iterations") if (value := grpo.get(name, 1)) != 1]
    if steps == 1 and not epochs:
        return None
    return f"{_format_value(steps)} steps x {_format_value(epochs[0] if epochs else 1)} epochs"


def _dedicated_engines(engine: Mapping[str, Any], device: str) -> str | None:
    """Describe dedicated engines; None for colocated ones, of which each worker has one."""
    if engine.get("placement") != "dedicated":
        return None
    size = engine.get("tensor_parallel_size", 1)
    text = f"{_format_value(engine.get('replicas', 1))} dedicated"
    if device == "CPU":
        return f"{text} on CPU" if size == 1 else f"{text}, each of {_format_value(size)} processes on CPU"
    return f"{text}, each on {_format_value(size)} {'GPU' if size == 1 else 'GPUs'}"


def run_facts(run: RunData) -> list[tuple[str, str]]:
    """Return name and value of each fact at the top of the page: model, data, rewards, workers, engines and so on."""
    model, data, rewards, cluster, grpo = (
        run.section(name) for name in ("model", "data", "rewards", "cluster", "grpo")
    )
    device = "GPUs" if cluster.get("use_gpu") else "CPU"
    prompts, completions = (_format_value(grpo.get(name)) for name in ("prompts_per_step", "num_generations"))
    is_fine_tuning = run.section("run").get("kind") == "sft"
    per_step = f"{prompts} demonstrations" if is_fine_tuning else f"{prompts} problems x {completions} completions"
    facts = {
        "model": model.get("path"),
        "data": shown_training(data.get("train")),
        "rewards": None if is_fine_tuning else rewards.get("functions"),
        "workers": f"{_format_value(cluster['num_workers'])} on {device}" if "num_workers" in cluster else None,
        "engines": _dedicated_engines(run.section("engine"), device),
        "per step": per_step if grpo else None,
        "per generation batch": _generation_batch(grpo),
        "commit": run.section("versions").get("commit"),
        "started": format_utc(to_float(run.events[0]["at"])) + " UTC" if run.events else None,
        "folder": run.folder.uri,
    }
    return [
        (name, safe_text(_format_value(value).strip("[]"), 160) if isinstance(value, list) else safe_text(value, 160))
        for name, value in facts.items()
        if value is not None
    ]


def _format_value(value: object, name: str = "", depth: int = 0) -> str:
    """Format a setting's value in one line, in the style of YAML.

    Args:
        value: Value read from YAML.
        name: Name of the setting; the value of a secret is masked if it has one.
        depth: Levels of nesting around the value.
    """
    if is_secret_name(name) and value is not None:
        return HIDDEN
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple) and depth > MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        parts = [
            f"{safe_text(key, MAX_NAME_CHARS)}: {_format_value(item, str(key)[:MAX_NAME_CHARS], depth + 1)}"
            for key, item in list(value.items())[:MAX_ITEMS]
        ]
        return safe_text("{" + ", ".join(parts) + "}", MAX_LINE_CHARS)
    if isinstance(value, list | tuple):
        parts = [_format_value(item, "", depth + 1) for item in value[:MAX_ITEMS]]
        return safe_text("[" + ", ".join(parts) + "]", MAX_LINE_CHARS)
    if isinstance(value, float):
        return short(value, 6) if abs(value) >= 1e-3 or not value else f"{value:g}"
    return safe_text(value, MAX_LINE_CHARS)
