"""`grpo-ray eval --suite`: a checkpoint measured on benchmarks, from files in the form of the hub's."""

import json
from pathlib import Path

import pytest
from small_runs import FinishedRun

from grpo_ray.cli import main

MATH = [{"problem": f"{n} + {n + 3}", "answer": str(2 * n + 3), "solution": "Add."} for n in range(10, 22)]
CODE = [
    {
        "prompt": f"def add(a, b):\n    '''Add {n}.'''\n",
        "entry_point": "add",
        "test": f"def check(candidate):\n    assert candidate({n}, 1) == {n + 1}\n",
    }
    for n in range(3)
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_suite_measures_each_benchmark_by_its_own_score(
    reference_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    math, code = write(tmp_path / "math.jsonl", MATH), write(tmp_path / "code.jsonl", CODE)
    written = tmp_path / "suite.json"
    checkpoint = str(reference_run.summary.best_checkpoint)
    suite = f"math500={math},humaneval={code}"
    assert main(["eval", checkpoint, "--suite", suite, "--num-samples", "2", "--json", str(written)]) == 0
    found = json.loads(written.read_text())
    assert {name: each["problems"] for name, each in found.items()} == {"math500": 12, "humaneval": 3}
    # The policy adds two numbers, and writes no program.
    assert found["humaneval"]["pass_at_1"]["value"] == 0.0
    assert found["math500"]["maj_at_k"] is not None and found["humaneval"]["maj_at_k"] is None
    printed = capsys.readouterr().out
    assert printed.count("pass@1") == printed.count("pass@2") == 2

    missing = tmp_path / "missing.jsonl"
    assert main(["eval", checkpoint, "--suite", f"aime25={missing}"]) == 2
    assert f"{missing}" in capsys.readouterr().err
    assert main(["eval", checkpoint, "--suite", "aime52"]) == 2
    assert "there is no benchmark 'aime52', but math500, aime24" in capsys.readouterr().err
