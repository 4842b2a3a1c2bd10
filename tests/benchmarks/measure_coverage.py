"""Line and branch coverage of grpo_ray by a command, including its subprocesses and Ray workers:

    python tests/benchmarks/measure_coverage.py [--keep FOLDER] -- python -m pytest ...

Every Python process that inherits the environment measures itself and saves its data every two seconds, because Ray
kills its workers without giving them time to save. So do processes forked from others; the last two seconds of those
that end without Python's exit are not measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "grpo_ray"

SITECUSTOMIZE = """
import atexit, os, threading, time
import coverage

def _save_periodically():
    while True:
        time.sleep(2)
        _cov.save()

def _start_saving():
    threading.Thread(target=_save_periodically, daemon=True).start()

_cov = coverage.Coverage(
    data_file={data_file!r}, data_suffix=True, branch=True, source=[{package!r}], config_file=False, messages=False
)
_cov._warn_no_data = False
_cov.start()
atexit.register(_cov.save)
os.register_at_fork(after_in_child=_start_saving)  # coverage.py saves a child's data in a file of its own
_start_saving()
"""
"""Source of the `sitecustomize` module that every process imports."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder for the data files (default: deleted)")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch:
        data = (arguments.keep or Path(scratch, "data")).absolute()
        data.mkdir(parents=True, exist_ok=True)
        settings = {"data_file": str(data / ".coverage"), "package": str(PACKAGE)}
        Path(scratch, "sitecustomize.py").write_text(SITECUSTOMIZE.format(**settings))
        path = os.pathsep.join(filter(None, [scratch, os.environ.get("PYTHONPATH")]))
        status = subprocess.run(arguments.command, env=os.environ | {"PYTHONPATH": path}).returncode
        print(report(data))
    return status


def report(data: Path) -> str:
    """Combine the data files of a folder; return the coverage table with missing lines and branches."""
    coverage = [sys.executable, "-m", "coverage"]
    combined = f"--data-file={data / 'combined'}"
    files = [str(file) for file in data.glob(".coverage.*")]
    subprocess.run([*coverage, "combine", "--keep", "-q", combined, *files], check=True)
    table = subprocess.run(
        [*coverage, "report", "--show-missing", combined], text=True, capture_output=True, check=True
    )
    return table.stdout


if __name__ == "__main__":
    sys.exit(main())
