"""Smoke tests of the benchmark scripts: `--help` of each, and full runs of the cheap ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = sorted(
    path.name
    for path in HERE.glob("*.py")
    if path != Path(__file__) and 'if __name__ == "__main__"' in path.read_text()
)


def output_of(*arguments: str) -> str:
    """Run Python with the arguments; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != Path(__file__).name])
def test_benchmark_help_names_its_arguments(script: str) -> None:
    assert "usage:" in output_of(f"tests/benchmarks/{script}", "--help")


def test_bench_startup_splits_the_time_to_the_first_step(policy: Path) -> None:
    text = output_of("tests/benchmarks/bench_startup.py", f"model.path={policy}", "data.heldout_limit=24")
    assert "to the first step" in text and "ray::RayTrainWorker" in text


def test_measure_coverage_counts_lines_of_subprocesses(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import grpo_ray.data.ledger'], check=True)"
    text = output_of("tests/benchmarks/measure_coverage.py", "--", sys.executable, "-c", code)
    (line,) = [line for line in text.splitlines() if line.startswith("grpo_ray/data/ledger.py")]
    statements, missing = (int(word) for word in line.split()[1:3])
    assert 0 < missing < statements


def test_bench_gpu_dry_run_measures_every_part(tmp_path: Path) -> None:
    text = output_of("tests/benchmarks/bench_gpu.py", "--dry", "--folder", str(tmp_path))
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert {outcome["status"] for outcome in outcomes} == {"passed"}
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny, 56 of up to tiny tokens | ")]
    assert [row[1] for row in rows[:3]] == ["all", "half", "14 %"]
    assert not any("-" in row for row in rows[:3])  # nothing is missing


def test_gpu_tests_dry_run_passes(tmp_path: Path) -> None:
    text = output_of("tests/gpu/run.py", "--dry", "--only", "test_packing.py", "--folder", str(tmp_path))
    assert "1 of 1 passed" in text
