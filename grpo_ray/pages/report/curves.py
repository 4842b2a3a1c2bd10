"""Selection of the curves on the page, for one run or for several runs overlaid."""

import math
from collections.abc import Sequence

from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.pages.report.charts import Chart, Curve, layout_chart
from grpo_ray.pages.report.facts import MAX_NAME_CHARS, baseline_accuracy, run_name
from grpo_ray.pages.report.read import RunData
from grpo_ray.storage.numbers import to_float
from grpo_ray.telemetry.measures import ACCURACY_MEASURES, Measure, heldout_measure, heldout_title
from grpo_ray.telemetry.profiler import PHASE_CATEGORIES, PHASES
from grpo_ray.telemetry.run_facts import RunFacts
from grpo_ray.text.display import safe_text

MAIN_CURVES = (
    ("Reward", "reward/mean", "mean over the completions of a step"),
    ("Completion length", "completion/length_mean", "mean, tokens"),
    ("Truncated completions", "completion/truncated_share", "share that reached the maximum length"),
    ("Zero-variance groups", "group/equal_share", "share of groups with equal rewards, which give no gradient"),
    ("Entropy", "policy/entropy", "mean over completion tokens, nats"),
    ("KL divergence from the reference", "policy/kl", "nats"),
    ("Gradient norm", "learner/gradient_norm", "before clipping"),
    ("Engine vs. learner", "engine/logprob_gap_mean", "mean absolute log-probability difference, nats"),
    ("Step time", "step/seconds", "wall-clock seconds, everything included"),
)
"""Title, metric and note of each main chart; a metric that the run does not have is skipped."""
LOGARITHMIC_METRICS = {"learner/gradient_norm", "engine/logprob_gap_mean", "policy/kl"}
"""Metrics whose outliers may be a hundred times the usual value."""
UNSMOOTHED_METRICS = {"learner/learning_rate"}
"""Metrics without noise, which a moving average would only distort."""
MAX_OTHER_CHARTS = 24
MAX_RESTART_MARKS = 50


def layout_main_curves(runs: Sequence[RunData]) -> list[Chart]:
    """Lay out the charts of the main metrics."""
    marks = _restart_marks(runs[0]) if len(runs) == 1 else []
    charts = [_heldout_chart(runs, key, marks) for key in _heldout_sets(runs)]
    charts += [_metric_chart(runs, title, metric, note, marks) for title, metric, note in MAIN_CURVES]
    if len(runs) == 1:
        charts.append(_phase_chart(runs[0], marks))
    return [chart for chart in charts if chart]


def layout_other_curves(runs: Sequence[RunData]) -> list[Chart]:
    """Lay out the charts of the metrics that no main chart shows."""
    marks = _restart_marks(runs[0]) if len(runs) == 1 else []
    charts = [_metric_chart(runs, safe_text(name, MAX_NAME_CHARS), name, "", marks) for name in _other_metrics(runs)]
    return [chart for chart in charts if chart]


def _other_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics that no main chart shows: the first `MAX_OTHER_CHARTS` by name."""
    charted = {metric for _, metric, _ in MAIN_CURVES} | {"step"}
    charted |= {f"{prefix}/{measure}" for prefix in (HELDOUT, *_heldout_sets(runs)) for measure in ACCURACY_MEASURES}
    charted |= {f"phase/{phase}" for phase in PHASES} if len(runs) == 1 else set()
    return sorted(set().union(*(run.metric_names() for run in runs)) - charted)[:MAX_OTHER_CHARTS]


def _heldout_sets(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.heldout_keys))


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """Return a label for each run: its name, or its URI if several runs have the same name."""
    names = [run_name(run) for run in runs]
    return [
        safe_text(run.folder.uri, 300) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)
    ]


def _metric_chart(
    runs: Sequence[RunData], title: str, metric: str, note: str, marks: list[tuple[int, str]]
) -> Chart | None:
    labels = run_labels(runs) if len(runs) > 1 else [title]
    curves = [
        Curve(label=label, colour=index, points=points)
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        if (points := run.series(metric))
    ]
    return layout_chart(
        title,
        note,
        curves,
        marks=marks,
        smooth=metric not in UNSMOOTHED_METRICS,
        logarithmic=metric in LOGARITHMIC_METRICS,
    )


def _heldout_chart(runs: Sequence[RunData], key: str, marks: list[tuple[int, str]]) -> Chart | None:
    """Lay out the accuracy on a held-out set of the initial policy (step 0) and each checkpoint, with intervals."""
    noun = RunFacts.recorded(runs[0].config).heldout_noun
    labels = run_labels(runs) if len(runs) > 1 else [noun]
    curves = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        baseline = baseline_accuracy(run, key)
        measured = [(run.first_step, baseline)] if baseline else []
        for row in run.rows:
            if f"{key}/accuracy" in row:  # a number that is not finite leaves a gap
                measured.append((run.first_step + int(row["step"]), heldout_measure(row, key) or Measure(math.nan)))
        if measured:
            points = [(step, each.value) for step, each in measured]
            intervals = [(each.low, each.high) for _, each in measured]
            curves.append(Curve(label=label, colour=index, points=points, intervals=intervals))
    title = heldout_title(key, noun)
    return layout_chart(title[0].upper() + title[1:], "with 95 % interval", curves, marks=marks)


def _phase_chart(run: RunData, marks: list[tuple[int, str]]) -> Chart | None:
    """Lay out the seconds of each category of phases."""
    curves = []
    for index, (category, phases) in enumerate(PHASE_CATEGORIES.items()):
        metrics = [f"phase/{phase}" for phase in phases]
        points = [
            (int(row["step"]), sum(row[metric] for metric in metrics if metric in row.columns))
            for row in run.rows
            if not row.columns.keys().isdisjoint(metrics)
        ]
        if any(value for _, value in points):
            curves.append(Curve(label=category, colour=index, points=points))
    return layout_chart(
        "Step time by phase", "seconds per phase; they add up to the step time", curves, marks=marks, legend=True
    )


def _restart_marks(run: RunData) -> list[tuple[int, str]]:
    """Return the steps from which the workers were restarted, with the text of each mark."""
    marks: dict[int, str] = {}
    began = [event for event in run.events if event["event"] == "began"]
    for event in began[1:]:
        step = int(to_float(event["step"]))
        marks[step] = f"workers restarted from step {step}"
    return list(marks.items())[:MAX_RESTART_MARKS]
