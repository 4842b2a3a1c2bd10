"""Which curves the page shows, of one run or of several over each other."""

from collections.abc import Sequence

from grpo_ray.report.charts import Chart, Curve, Point, chart
from grpo_ray.report.facts import NAME, heldout_before, name_of
from grpo_ray.report.read import Run, number
from grpo_ray.report.text import plain
from grpo_ray.telemetry.profiler import GROUPS, PHASES

CURVES = (
    ("Reward", "reward/mean", "mean of a step's completions"),
    ("Completion length", "completion/length_mean", "mean, tokens"),
    ("Cut off", "completion/truncated_share", "share of completions that reached the longest allowed"),
    ("Groups without signal", "group/equal_share", "share of groups with equal rewards"),
    ("Entropy", "policy/entropy", "mean over the completions' tokens, nats"),
    ("Divergence from the reference", "policy/kl", "nats"),
    ("Gradient norm", "learner/gradient_norm", "before clipping"),
    ("Engine against learner", "engine/logprob_gap_mean", "mean gap of log-probabilities, nats"),
    ("Seconds of a step", "step/seconds", "wall clock, all included"),
)
"""Title, metric and what it is; a metric that the run has not is passed over."""
LOGARITHMIC = {"learner/gradient_norm", "engine/logprob_gap_mean", "policy/kl"}
"""Metrics of which a single step may be a hundred times the usual."""
EXACT = {"learner/learning_rate"}
"""Metrics without noise, which an average would only falsify."""
HELDOUT = ("heldout/accuracy", "heldout/low", "heldout/high")
MOST_OTHERS = 24


def curves_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """The charts of what matters most, and those of all other metrics."""
    marks = _restarts(runs[0]) if len(runs) == 1 else []
    main = [_heldout(runs, marks)]
    main += [_chart(runs, title, metric, note, marks) for title, metric, note in CURVES]
    if len(runs) == 1:
        main.append(_phases(runs[0], marks))
    taken = {metric for _, metric, _ in CURVES} | {*HELDOUT, "step"}
    taken |= {f"phase/{phase}" for phase in PHASES} if len(runs) == 1 else set()
    names = sorted({name for run in runs for row in run.rows for name in row} - taken)
    others = [_chart(runs, plain(name, NAME), name, "", marks) for name in names[:MOST_OTHERS]]
    return [each for each in main if each], [each for each in others if each]


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its own, or where it lies if two have the same."""
    names = [name_of(run) for run in runs]
    return [
        plain(run.folder.uri, 300) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)
    ]


def _chart(runs: Sequence[Run], title: str, metric: str, note: str, marks: list[tuple[int, str]]) -> Chart | None:
    names = labels(runs) if len(runs) > 1 else [title]
    curves = [
        Curve(label=name, colour=index, points=run.values(metric))
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
        if run.values(metric)
    ]
    return chart(title, note, curves, marks=marks, smooth=metric not in EXACT, logarithmic=metric in LOGARITHMIC)


def _heldout(runs: Sequence[Run], marks: list[tuple[int, str]]) -> Chart | None:
    """The held-out accuracy of each checkpoint with its interval, from the policy that the run began with."""
    names = labels(runs) if len(runs) > 1 else ["accuracy"]
    curves = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        points: list[Point] = []
        intervals = []
        if before := heldout_before(run):
            points.append((0, before.value))
            intervals.append((before.low, before.high))
        for row in run.rows:
            if HELDOUT[0] in row:
                points.append((int(row["step"]), row[HELDOUT[0]]))
                intervals.append((number(row.get(HELDOUT[1])), number(row.get(HELDOUT[2]))))
        if points:
            curves.append(Curve(label=name, colour=index, points=points, intervals=intervals))
    return chart("Held-out accuracy", "greedy, with its 95 % interval", curves, marks=marks)


def _phases(run: Run, marks: list[tuple[int, str]]) -> Chart | None:
    """What the parts of a step took."""
    curves = []
    for index, (name, phases) in enumerate(GROUPS.items()):
        metrics = [f"phase/{phase}" for phase in phases]
        points = [
            (int(row["step"]), sum(row.get(metric, 0.0) for metric in metrics))
            for row in run.rows
            if any(metric in row for metric in metrics)
        ]
        if any(value for _, value in points):
            curves.append(Curve(label=name, colour=index, points=points))
    return chart("Phases of a step", "seconds of each; together they are the step", curves, marks=marks, legend=True)


def _restarts(run: Run) -> list[tuple[int, str]]:
    """Steps from which training went on after it had stopped, with what was said of it."""
    marks: dict[int, str] = {}
    began = [event for event in run.events if event["event"] == "began"]
    for event in began[1:]:
        step = int(number(event["step"]))
        marks[step] = f"workers started again from step {step}"
    return list(marks.items())[:50]
