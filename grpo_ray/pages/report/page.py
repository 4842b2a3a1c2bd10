"""Rendering of one or several runs as an HTML page, and writing it."""

import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from grpo_ray.errors import ConfigError
from grpo_ray.pages.report import facts, groups, health, settings
from grpo_ray.pages.report.curves import layout_main_curves, layout_other_curves, run_labels
from grpo_ray.pages.report.read import RunData, find_stages, follow_one_another, read_run
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.display import safe_text

if TYPE_CHECKING:
    import jinja2

PAGE_NAME = "report.html"
MAX_RUNS = 8
"""Runs on one page: the number of curve colours in `page.css`."""
SHOWN_ELSEWHERE = ("run.name", "run.pause_at")
"""Settings that the sections of the runs show in their titles."""


def write_page(paths: Sequence[str], out: str | None = None) -> str:
    """Write the page of one run, of several runs with overlaid curves, or of stages with joined curves.

    Args:
        paths: Run folders, local paths or URIs; or the folder of the stages of one YAML.
        out: Local file; None for `report.html` in the only folder.

    Returns:
        Path or URI of the page, without credentials.

    Raises:
        ConfigError: A path is not a run folder, several runs are given without `out`, there are too many runs, or
            `out` cannot be written.
    """
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"one page can show at most {MAX_RUNS} runs; got {len(paths)}")
    if out is None and len(paths) != 1:
        raise ConfigError("the page of several runs has no default location; set --out FILE.html")
    folder: RunFolder | None = None
    stages: list[str] = []
    if len(paths) == 1:
        folder, stages = find_stages(paths[0])
    runs = [read_run(path) for path in (stages or paths)]
    if len(runs) > MAX_RUNS:
        raise ConfigError(
            f"one page can show at most {MAX_RUNS} stages; got {len(runs)}; name some of their run folders"
        )
    page = render(runs, time.time(), are_stages=bool(stages)).encode()
    if out is None:
        folder = folder if folder is not None and stages else runs[0].folder
        folder.write_bytes(page, PAGE_NAME)
        return folder.uri_of(PAGE_NAME)
    target = Path(out).expanduser()
    try:
        target.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    return str(target)


def render(runs: Sequence[RunData], now: float, *, are_stages: bool = False, title: str | None = None) -> str:
    """Render the page as HTML.

    Args:
        runs: Runs in the order of their curve colours.
        now: Current time, seconds since 1970, for the time since the last event.
        are_stages: True for runs that follow one another, whose curves are joined; False to overlay them.
        title: Title of the page; None: the names of one or two runs, or the number of more.
    """
    if title is None:
        title = " and ".join(run_labels(runs)) if len(runs) < 3 else f"{len(runs)} runs"
    drawn = follow_one_another(runs) if are_stages else runs
    return _template("page.html").render(
        **_contents(runs, now, drawn),
        live=False,
        more_curves=layout_other_curves(drawn),
        title=title,
        generated_at=facts.format_utc(now),
    )


def render_contents(run: RunData, now: float) -> str:
    """Render the contents of a run's live page: no status, sample completions or charts of `render_more_curves`.

    Args:
        run: The run.
        now: Current time, seconds since 1970.
    """
    return _template("contents.html").render(**_contents([run], now, [run]), live=True, more_curves=[])


def render_more_curves(run: RunData) -> str:
    """Render the charts of the metrics that no main chart shows."""
    return _template("more_curves.html").render(more_curves=layout_other_curves([run]))


def warm_up() -> None:
    """Compile the templates of the contents."""
    for name in ("contents.html", "more_curves.html"):
        _template(name)


def read_stylesheet() -> str:
    """Read the stylesheet of the page."""
    return _read_file("page.css")


def _contents(runs: Sequence[RunData], now: float, drawn: Sequence[RunData]) -> dict[str, Any]:
    """Collect the variables of `contents.html`.

    Args:
        drawn: the runs as their curves show them.
    """
    main = layout_main_curves(drawn)
    return {
        "sections": [_section(run, label, now, len(runs)) for run, label in zip(runs, run_labels(runs), strict=True)],
        "curves": main,
        "smoothing_span": max((chart.smoothing_span for chart in main), default=1),
        "differences": _differences(runs) if len(runs) > 1 else [],
        "classes": groups.SOLVE_CLASSES,
        "bins": groups.RATE_BINS,
    }


def _template(name: str) -> "jinja2.Template":
    """Return a template, compiled once per process: compiling takes several times as long as rendering."""
    return _environment().get_template(name)


@cache
def _environment() -> "jinja2.Environment":
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_file),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: object) -> object:
    """Prepare a template expression for output: numbers and markup unchanged, everything else as safe text."""
    return value if isinstance(value, Markup | int | float) else safe_text(value)


def _read_file(name: str) -> str:
    return files("grpo_ray.pages.report").joinpath(name).read_text(encoding="utf-8")


def _section(run: RunData, label: str, now: float, num_runs: int) -> dict[str, Any]:
    """Collect the template's variables for one run."""
    events, omitted_events = health.event_rows(run)
    # A page of several runs shows less text of each run, so that the page stays small.
    first_groups, last_groups = groups.first_and_last_groups(
        run, max(1, groups.MAX_GROUPS // num_runs), groups.MAX_TEXT_CHARS // num_runs
    )
    rows, best = facts.checkpoint_rows(run), facts.best_kept_checkpoint(run)
    findings = health.health_findings(run)
    return {
        "label": label,
        "status": health.run_status(run, now),
        "facts": settings.run_facts(run),
        "tiles": facts.summary_tiles(run),
        "health": [finding for finding in findings if not finding.is_folded],
        "health_folded": [finding for finding in findings if finding.is_folded],
        "checkpoints": [row for row in rows if row.kept or len(rows) <= facts.MAX_CHECKPOINTS_UNFOLDED],
        "all_checkpoints": rows[-facts.MAX_CHECKPOINTS :] if len(rows) > facts.MAX_CHECKPOINTS_UNFOLDED else [],
        "heldout_titles": [
            facts.heldout_title(key, facts.RunFacts.recorded(run.config).heldout_noun) for key in run.heldout_keys
        ],
        "best_metric": facts.best_metric(run),
        "best_uri": best.uri if best else None,
        "phases": facts.phase_shares(run),
        "rates": groups.solve_rates(run),
        "first_groups": first_groups,
        "last_groups": last_groups,
        "goodput": facts.goodput_lines(run),
        "events": events,
        "omitted_events": omitted_events,
        "settings": settings.run_settings(run),
        "versions": settings.run_versions(run),
    }


def _differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """List the settings and versions in which the runs differ: name, and one value per run ("-" where absent)."""
    values_of_runs = []
    for run in runs:
        values = {setting.name: setting.value for setting in settings.run_settings(run)}
        values_of_runs.append(values | {f"versions.{name}": version for name, version in settings.run_versions(run)})
    names = dict.fromkeys(name for values in values_of_runs for name in values if name not in SHOWN_ELSEWHERE)
    rows = [(name, [values.get(name, "-") for values in values_of_runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
