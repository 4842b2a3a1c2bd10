"""Draw the training reward and the held-out score of a run as an SVG, for a recipe.

python scripts/recipe_curve.py RUN recipes/TASK/curve.svg
"""

import argparse
import json
from pathlib import Path
from xml.sax.saxutils import escape

from generated_file import write_file

from grpo_ray.pages.report.charts import Chart, Curve, layout_chart

WIDTH, HEIGHT = 360, 228
COLOURS = ("#8a6d3b", "#1f6f8b")
"""Colours of the training reward and of the held-out score, on white and on black pages."""


def curves_of(folder: Path) -> list[Curve]:
    """Return the training reward of each logged step, and the primary held-out score with its 95 % interval."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    before = [each["before"] for each in summary["heldout"].values()]
    # `heldout_before` is that of the primary set; null if it was not measured.
    measured = [(0, each) for each in before if each and each["accuracy"] == summary["heldout_before"]][:1]
    for row in rows:
        if "heldout/accuracy" in row:
            measured.append((row["step"], {name: row[f"heldout/{name}"] for name in ("accuracy", "low", "high")}))
    return [
        Curve(
            label="training reward, moving average",
            colour=0,
            points=[(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row],
        ),
        Curve(
            label="held-out score, greedy, 95 %",
            colour=1,
            points=[(step, each["accuracy"]) for step, each in measured],
            intervals=[(each["low"], each["high"]) for _, each in measured],
        ),
    ]


def draw(chart: Chart) -> str:
    """Return a chart as an SVG that needs no style sheet."""
    left, _, right, bottom = chart.box
    font = 'font-size="10" font-family="sans-serif" fill="#777"'
    text = f'<text {font} text-anchor="{{}}" x="{{:.1f}}" y="{{:.1f}}">{{}}</text>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{2 * WIDTH}" role="img">',
        f"<title>{escape(chart.title)}</title>",
    ]
    for y, label in chart.y_ticks:
        parts.append(f'<path stroke="#777" stroke-opacity=".25" d="M{left} {y:.1f}H{right}"/>')
        parts.append(text.format("end", left - 6, y + 3.5, escape(label)))
    parts += [text.format("middle", x, bottom + 14, escape(label)) for x, label in chart.x_ticks]
    parts.append(f'<path stroke="#777" d="M{left} {bottom}H{right}"/>')
    for curve, colour in zip(chart.curves, COLOURS, strict=True):
        marks = "".join(f"M{x} {low}V{high}" for x, low, high in curve.bars)
        parts.append(f'<path fill="none" stroke="{colour}" stroke-width="1.8" d="{curve.line}{marks}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour}"/>' for x, y in curve.dots]
    for y, curve, colour in zip((bottom + 32, bottom + 46), chart.curves, COLOURS, strict=True):
        parts.append(f'<circle cx="{left + 4}" cy="{y}" r="3" fill="{colour}"/>')
        parts.append(text.format("start", left + 12, y + 3.5, escape(curve.label)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="local run folder")
    parser.add_argument("output", type=Path, metavar="FILE.svg")
    arguments = parser.parse_args()
    chart = layout_chart(f"{arguments.run.name}: reward by step", "", curves_of(arguments.run))
    if chart is None:
        parser.error(f"{arguments.run} has no step yet")
    return write_file(arguments.output, draw(chart))


if __name__ == "__main__":
    raise SystemExit(main())
