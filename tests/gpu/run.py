"""All tests on one GPU, each file in a process of its own with a time limit: `make test-gpu`

A test that hangs does not stop the others. The folder gets the output of each file, and `outcomes.jsonl`.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from parts import Part, run_parts

HERE = Path(__file__).parent

SECONDS = {
    "test_weight_sync.py": 240,
    "test_run.py": 180,
    "test_packing.py": 60,
    "test_generate_ahead.py": 130,
    "test_resume.py": 260,
}
"""File -> expected time on an H100, in the order of running."""
LIMIT = 2.0
"""A file is stopped after so many times its expected time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="time for all files; the others are left out")
    parser.add_argument("--only", nargs="*", help=f"some of {', '.join(SECONDS)}", default=list(SECONDS))
    parser.add_argument("--folder", type=Path, default=Path("test-gpu"), help="folder of outcomes, logs and policies")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU in place of a GPU")
    arguments = parser.parse_args()
    import torch

    if not arguments.dry and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; try the tests without one: make test-gpu DRY=1")
    folder = arguments.folder.resolve()
    options = ["-p", "no:cacheprovider", "-s", "--tb=short", f"--policies={folder / 'policies'}"]
    parts = [
        Part(
            name=name.removesuffix(".py").removeprefix("test_"),
            command=[sys.executable, "-m", "pytest", str(HERE / name), *options, *(["--dry"] * arguments.dry)],
            limit=60 * arguments.minutes if arguments.dry else LIMIT * seconds,
            expected=0 if arguments.dry else seconds,
        )
        for name, seconds in SECONDS.items()
        if name in arguments.only
    ]
    outcomes = run_parts(parts, folder, 60 * arguments.minutes)
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    print(f"{passed} of {len(outcomes)} passed; outputs are in {os.path.relpath(folder)}")
    sys.exit(0 if passed == len(outcomes) else 1)


if __name__ == "__main__":
    main()
