"""Halving of learning rates against full runs: python tests/benchmarks/bench_sweep.py [section.field=value ...]

For each seed, a sweep of the embedded task (`grpo-ray sweep`) and, with the same settings, one command `grpo-ray train`
for each learning rate. Prints the time of both, the accuracy of each full run, the trials that each rung kept, and
whether the sweep has chosen the best rate. Each survivor must have the full run's weights, bit for bit. `--seeds 0 1 2`
repeats it with other seeds, `--json FILE` writes the results after each seed, and a file with results is continued.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "jobs/configs/arithmetic.yaml"
RATES = (3e-5, 6e-5, 1.2e-4, 2.4e-4, 4.8e-4, 9.6e-4, 1.9e-3, 3.8e-3)


def command(*words: object) -> float:
    """Run `grpo-ray` with its own cluster; return the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return time.monotonic() - began


def digest(run: Path) -> str:
    """Return a hash of the weights of a run's latest checkpoint."""
    checkpoint = json.loads((run / "summary.json").read_text())["latest_checkpoint"]
    return hashlib.sha256(Path(checkpoint, "model.safetensors").read_bytes()).hexdigest()


def accuracy(run: Path) -> float:
    """Return the held-out accuracy of a run's best checkpoint."""
    return float(json.loads((run / "summary.json").read_text())["heldout_after"])


def measure(seed: int, rates: Sequence[float], rungs: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    """Run the sweep and all full runs of one seed."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        shared = [f"run.storage_path={folder}", f"run.seed={seed}", *overrides]
        trials = [{"name": f"rate-{number}", "grpo.learning_rate": rate} for number, rate in enumerate(rates)]
        sweep = {"base": str(CONFIG), "trials": trials, "rungs": {"steps": list(rungs), "keep": 0.5}}
        file = folder / "sweep.yaml"
        file.write_text(json.dumps(sweep))  # JSON is YAML
        sweep_seconds = command("sweep", file, *shared)
        print(f"seed {seed}: sweep {sweep_seconds:.0f} s", flush=True)
        ranked = json.loads((folder / "sweep" / "summary.json").read_text())["trials"]
        decisions = json.loads((folder / "sweep" / "sweep.json").read_text())["decisions"]
        full_seconds, accuracies, equal = 0.0, {}, []
        for trial in trials:
            name, rate = trial["name"], trial["grpo.learning_rate"]
            full_seconds += command("train", CONFIG, *shared, f"run.name={name}", f"grpo.learning_rate={rate}")
            accuracies[str(name)] = accuracy(folder / str(name))
            print(f"seed {seed}: learning rate {rate:g} {accuracies[str(name)]:.3f}", flush=True)
        for row in ranked:
            if row["standing"] == "active":  # it has taken all steps
                equal.append(digest(folder / "sweep" / row["trial"]) == digest(folder / row["trial"]))
        best = max(accuracies, key=lambda name: accuracies[name])  # the first of equals
        return {
            "seed": seed,
            "rates": list(rates),
            "sweep_seconds": sweep_seconds,
            "full_seconds": full_seconds,
            "accuracies": accuracies,
            "kept": {str(each["step"]): each["kept"] for each in decisions},
            "sweep_steps": sum(row["steps"] for row in ranked),
            "chosen": ranked[0]["trial"],
            "chosen_value": ranked[0]["value"],
            "best": best,
            "survivors_equal": equal,
        }


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print one line per seed, and the means."""
    print(
        f"{'seed':>4}  {'sweep':>7}  {'full runs':>9}  {'chosen':>8}  {'best':>8}  {'its accuracy':>12}  {'lost':>6}  "
        "equal"
    )
    lost = []
    for each in results:
        top = each["accuracies"][each["best"]]
        lost.append(top - each["chosen_value"])
        chosen, best = (each["rates"][int(each[name].partition("-")[2])] for name in ("chosen", "best"))
        print(
            f"{each['seed']:>4}  {each['sweep_seconds']:>5.0f} s  {each['full_seconds']:>7.0f} s  {chosen:>8.2g}  "
            f"{best:>8.2g}  {top:>12.3f}  {lost[-1]:>6.3f}  {all(each['survivors_equal'])}"
        )
    count = len(results)
    sweep, full = (sum(each[name] for each in results) for name in ("sweep_seconds", "full_seconds"))
    same = sum(each["chosen"] == each["best"] for each in results)
    print(
        f"{full / sweep:.2f} times as fast; the best rate was chosen for {same} of {count} seeds; accuracy lost "
        f"{sum(lost) / count:.3f} on average, {max(lost):.3f} at most"
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="S")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="R", help="learning rates")
    parser.add_argument("--rungs", type=int, nargs="+", default=(12, 25, 50), metavar="STEP", help="steps of the rungs")
    parser.add_argument("--json", metavar="FILE", help="results, written after each seed; those in it are kept")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_intermixed_args()
    file = Path(arguments.json) if arguments.json else None
    results = json.loads(file.read_text()) if file is not None and file.exists() else []
    for seed in arguments.seeds:
        if any(each["seed"] == seed for each in results):
            continue
        results.append(measure(seed, arguments.rates, arguments.rungs, arguments.overrides))
        if file is not None:
            file.write_text(json.dumps(results, indent=2))
    report(results)


if __name__ == "__main__":
    main()
