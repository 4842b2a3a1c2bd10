"""Scoring time hidden behind generation: the same run with and without early verification, alternating.

    python tests/benchmarks/bench_overlap.py [STEPS] [OVERRIDE ...]

The embedded policy, 2 workers, 128 completions per step. Math-Verify without our strict checks (rewards.strict=false)
represents expensive rewards: each verdict takes milliseconds. Prints, for each run, the median seconds of a step and of
scoring after the last completion was generated, and the ratio.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
FIRST = 5
"""Steps that are left out: the workers' libraries are loaded and compiled in them."""


def measure(name: str, folder: str, steps: int, functions: str, overrides: Sequence[str]) -> tuple[float, float]:
    """Return the median seconds of a step and of its scoring, without the first and the last steps."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import train

    config = load_config(
        ROOT / "jobs" / "configs" / "arithmetic.yaml",
        [
            f"run.name={name}",
            f"run.storage_path={folder}",
            f"grpo.max_steps={steps}",
            f"grpo.save_steps={steps}",
            "rewards.strict=false",
            f"rewards.functions={functions}",
            *overrides,
        ],
    )
    train(config)
    rows = [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()][FIRST:-1]
    return statistics.median(r["step/seconds"] for r in rows), statistics.median(r["phase/score"] for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=40, help="optimizer steps of each run")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of all runs")
    arguments = parser.parse_intermixed_args()
    # The workers import the rewards from there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.pairs):
            for variant, functions in (
                ("late", "[correctness, 'zero_rewards:disable_early_verification']"),
                ("early", "[correctness, 'zero_rewards:zero_reward']"),
            ):
                step, score = measure(f"{variant}-{turn}", folder, arguments.steps, functions, arguments.overrides)
                print(
                    f"{variant:7} step {step:.3f} s, scoring after generation {score:.3f} s, {score / step:.1%} of it"
                )


if __name__ == "__main__":
    main()
