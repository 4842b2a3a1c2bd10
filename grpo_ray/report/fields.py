"""The settings of a run, credentials aside."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ray.config import loader
from grpo_ray.report.charts import short
from grpo_ray.report.facts import LINE, NAME, clock
from grpo_ray.report.read import Run, number
from grpo_ray.report.text import is_secret, plain

MOST_SETTINGS = 300


@dataclass(frozen=True)
class Setting:
    """A field of the config."""

    name: str
    value: str
    changed: bool
    """Whether it is not the default."""


def settings_of(run: Run) -> list[Setting]:
    """Every field of the run's config, versions aside, with credentials hidden."""
    defaults = {
        f"{section}.{name}": _text(default)
        for section, fields in loader.describe_fields().items()
        for name, (default, _) in fields.items()
    }
    found = []
    for section, fields in run.config.items():
        if section == "versions" or not isinstance(fields, Mapping):
            continue
        for name, value in fields.items():
            path = f"{section}.{name}"
            text = _text(value, str(name))
            found.append(Setting(plain(path, NAME), text, text != defaults.get(path)))
    return found[:MOST_SETTINGS]


def _text(value: Any, name: str = "", depth: int = 0) -> str:
    """A setting's value in a line, as YAML would have it; what is deep or long is cut."""
    if is_secret(name):
        return "[hidden]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple) and depth > 3:
        return "..."
    if isinstance(value, Mapping):
        parts = [
            f"{plain(key, NAME)}: {_text(each, str(key)[:NAME], depth + 1)}" for key, each in list(value.items())[:20]
        ]
        return plain("{" + ", ".join(parts) + "}", LINE)
    if isinstance(value, list | tuple):
        return plain("[" + ", ".join(_text(each, "", depth + 1) for each in value[:20]) + "]", LINE)
    if isinstance(value, float):
        return short(value, 6) if abs(value) >= 1e-3 or not value else f"{value:g}"
    return plain(value, LINE)


def versions(run: Run) -> list[tuple[str, str]]:
    return [(plain(name, NAME), plain(version, NAME)) for name, version in list(run.fields("versions").items())[:30]]


def run_facts(run: Run) -> list[tuple[str, str]]:
    """The run in a few words: model, data, rewards and so on."""
    model, data, rewards, cluster, grpo = (run.fields(name) for name in ("model", "data", "rewards", "cluster", "grpo"))
    device = "GPUs" if cluster.get("use_gpu") else "the CPU"
    parts = {
        "model": model.get("path"),
        "problems": data.get("train"),
        "rewards": rewards.get("functions"),
        "workers": f"{_text(cluster['num_workers'])} on {device}" if "num_workers" in cluster else None,
        "a step": f"{_text(grpo.get('prompts_per_step'))} problems x {_text(grpo.get('num_generations'))} completions"
        if grpo
        else None,
        "commit": run.fields("versions").get("commit"),
        "began": clock(number(run.events[0]["at"])) + " UTC" if run.events else None,
        "lies in": run.folder.uri,
    }
    return [
        (name, plain(_text(value).strip("[]"), 160) if isinstance(value, list) else plain(value, 160))
        for name, value in parts.items()
        if value is not None
    ]
