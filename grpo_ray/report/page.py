"""Puts a page together and writes it."""

import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_ray.errors import ConfigError
from grpo_ray.report import facts, fields, groups, health
from grpo_ray.report.curves import curves_of, labels
from grpo_ray.report.read import Run, read_run
from grpo_ray.report.text import shown

NAME = "report.html"
MOST_RUNS = 8


def write_page(paths: Sequence[str], out: str | None = None) -> str:
    """Write the page of a run, or of several with their curves over each other; says where it is.

    paths: run folders, local or URIs.
    out: local file; None for `report.html` in the folder of the one run.

    Raises ConfigError for a folder that is no run's, for several runs without `out`, and if `out` cannot be written.
    """
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} runs are more than one page can show; give at most {MOST_RUNS}")
    if out is None and len(paths) != 1:
        raise ConfigError("a page of several runs belongs into no run's folder; say where: --out FILE.html")
    runs = [read_run(path) for path in paths]
    page = render(runs, time.time()).encode()
    if out is None:
        runs[0].folder.write_bytes(page, NAME)
        return runs[0].folder.uri_of(NAME)
    target = Path(out).expanduser()
    try:
        target.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    return str(target)


def render(runs: Sequence[Run], now: float) -> str:
    """The page as HTML.

    now: seconds since 1970, for what is said of the time since the last event.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, finalize=shown, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files("grpo_ray.report").joinpath("page.html").read_text(encoding="utf-8"))
    main, others = curves_of(runs)
    sections = [_section(run, label, now, len(runs)) for run, label in zip(runs, labels(runs), strict=True)]
    return template.render(
        title=" and ".join(labels(runs)) if len(runs) < 3 else f"{len(runs)} runs",
        sections=sections,
        curves=main,
        more_curves=others,
        smoothed=max((chart.smoothed for chart in main), default=1),
        differences=_differences(runs) if len(runs) > 1 else [],
        classes=groups.CLASSES,
        bins=groups.BINS,
        made=facts.clock(now),
    )


def _section(run: Run, label: str, now: float, runs: int) -> dict[str, Any]:
    """All that the template shows of one run."""
    happened, omitted = health.event_lines(run)
    # Of several runs less of each, so that the page stays small.
    early, late = groups.early_and_late(run, max(1, groups.GROUPS // runs), groups.TEXT // runs)
    saved, best = facts.checkpoints(run), facts.best_stored(run)
    return {
        "label": label,
        "status": health.status(run, now),
        "what": fields.run_facts(run),
        "tiles": facts.tiles(run),
        "health": health.health(run),
        "checkpoints": [each for each in saved if each.there or len(saved) <= facts.FEW_CHECKPOINTS],
        "all_checkpoints": saved[-facts.MOST_CHECKPOINTS :] if len(saved) > facts.FEW_CHECKPOINTS else [],
        "best_metric": facts.best_metric(run),
        "best_uri": best.uri if best else None,
        "spent": facts.time_spent(run),
        "rates": groups.solve_rates(run),
        "early": early,
        "late": late,
        "price": facts.goodput_lines(run),
        "happened": happened,
        "omitted": omitted,
        "settings": fields.settings_of(run),
        "versions": fields.versions(run),
    }


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings and versions in which the runs differ: the name, and the value of each run."""
    found = []
    for run in runs:
        own = {setting.name: setting.value for setting in fields.settings_of(run)}
        found.append(own | {f"versions.{name}": version for name, version in fields.versions(run)})
    names = dict.fromkeys(name for own in found for name in own)
    rows = [(name, [own.get(name, "-") for own in found]) for name in names if name != "run.name"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
