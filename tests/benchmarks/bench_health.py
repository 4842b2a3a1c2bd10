"""Runs that go wrong: the step of each warning, beside the step from which a person sees it in the curve.

    python tests/benchmarks/bench_health.py [--runs NAME ...] [--folder FOLDER] [OVERRIDE ...]

Each run is the embedded task with one setting that spoils it (`tests/helpers/wrong_runs.py`); the first one is without.
Prints a table in Markdown. A curve that is wrong from the first step on is visible at once: "from the start".
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
sys.path.insert(0, str(HELPERS))

from wrong_runs import SETTINGS, WRONG_RUNS, visible_step  # noqa: E402  (on the path only now)

HEALTHY = "healthy"

STEPS = 60
"""Least steps of a run."""


def train_run(name: str, folder: str, overrides: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, and return the rows of metrics and the warnings."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import train

    wrong = WRONG_RUNS.get(name)
    steps = max(STEPS, wrong.steps) if wrong else STEPS
    run = name.replace(" ", "-")
    own = [
        f"run.name={run}",
        f"run.storage_path={folder}",
        f"grpo.max_steps={steps}",
        *(wrong.overrides if wrong else ()),
    ]
    settings = [*SETTINGS, *own, *overrides]
    train(load_config(ROOT / "jobs" / "configs" / "arithmetic.yaml", settings))
    rows, events = (
        [json.loads(line) for line in Path(folder, run, file).read_text().splitlines()]
        for file in ("metrics.jsonl", "events.jsonl")
    )
    return rows, [event for event in events if event["event"] == "warning"]


def table_row(name: str, rows: list[dict[str, Any]], warnings: list[dict[str, Any]]) -> str:
    """Format the outcome of a run as a row of the table."""
    others = ", ".join(f"`{each['name']}` at {each['step']}" for each in warnings)
    if name == HEALTHY:
        return f"| {name} | - | - | - | {others or 'none'} |"
    wrong = WRONG_RUNS[name]
    values = [row[wrong.metric] for row in rows if wrong.metric in row]
    step = next((each["step"] for each in warnings if each["name"] == wrong.warning), "never")
    seen = visible_step(rows, wrong.metric) or "from the start"
    curve = f"`{wrong.metric}` {sum(values[:3]) / 3:.3g} to {sum(values[-10:]) / 10:.3g}"
    others = ", ".join(f"`{each['name']}` at {each['step']}" for each in warnings if each["name"] != wrong.warning)
    return f"| {name} | {curve} | {seen} | `{wrong.warning}` at {step} | {others or 'none'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", metavar="NAME", default=[HEALTHY, *WRONG_RUNS], help="default: all")
    parser.add_argument("--folder", help="folder for the runs, which are kept; default: a temporary one")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of all runs")
    arguments = parser.parse_intermixed_args()
    # The workers import the rewards from there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as temporary:
        table = ["| run | curve | visible from step | warning | other warnings |", "|---|---|---|---|---|"]
        for name in arguments.runs:
            table.append(table_row(name, *train_run(name, arguments.folder or temporary, arguments.overrides)))
            print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
