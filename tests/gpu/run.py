"""All tests on one GPU, each file in a process of its own with a time limit: `make test-gpu`

A test that hangs does not stop the others. The folder gets the output of each process, and `outcomes.jsonl`.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from parts import Part, run_parts

HERE = Path(__file__).parent

SECONDS = {
    "test_run.py": 430,
    "test_resume.py": 380,
    "test_weight_sync.py": 300,
    "test_packing.py": 90,
    "test_staleness.py": 90,
    "test_adapters.py": 800,
}
"""File -> expected time on an H100, in the order of running: what users run comes first.

A launch took two minutes until its first step, and one with vLLM's compilation cache."""
DRY_PARTS = {
    "probes": ("test_weight_sync.py", "test_packing.py", "test_staleness.py"),
    "runs": ("test_run.py", "test_resume.py", "test_adapters.py"),
}
"""Files of the two processes of a dry run, which run at the same time: those with probes, and the others."""
LIMIT = 2.0
"""A file is stopped after so many times its expected time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all files; the others are left out")
    parser.add_argument("--only", nargs="*", help=f"some of {', '.join(SECONDS)}", default=list(SECONDS))
    parser.add_argument("--folder", type=Path, default=Path("test-gpu"), help="folder of outcomes, logs and policies")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU in place of a GPU")
    arguments = parser.parse_args()
    import torch

    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; try the tests without one: make test-gpu DRY=1")
    folder = arguments.folder.resolve()
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-s", "--tb=short"]
    chosen = [name for name in SECONDS if name in arguments.only]
    if arguments.dry:
        parts = [
            Part(
                name=name,
                command=[*pytest, "--dry", *(str(HERE / file) for file in files)],
                limit=60 * arguments.minutes,
            )
            for name, known in DRY_PARTS.items()
            if (files := [file for file in chosen if file in known])
        ]
    else:
        parts = [
            Part(
                name=name.removesuffix(".py").removeprefix("test_"),
                command=[*pytest, f"--policies={folder / 'policies'}", str(HERE / name)],
                limit=LIMIT * SECONDS[name],
                expected=SECONDS[name],
            )
            for name in chosen
        ]
    outcomes = run_parts(parts, folder, 60 * arguments.minutes, at_once=2 if arguments.dry else 1)
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} passed; outputs are in {os.path.relpath(folder)}")
    sys.exit(0 if passed == len(outcomes) else 1)


if __name__ == "__main__":
    main()
