"""Slow tests that guard changed files: the last look before a commit.

    python tests/helpers/slow_tests.py                  # files changed since the default branch, and their slow tests
    python tests/helpers/slow_tests.py --base HEAD~3 --run

Changed are files that differ from the base, committed or not, and new ones. A test file with slow tests (marker `slow`)
guards a changed file of the package if one of these holds:

- `planted_faults.TESTS` names it for the module;
- it has the module's place: `tests/integration/export/test_hub.py` has that of `export/hub.py`, and
  a test file without a module of its name has that of the whole folder;
- it imports the module, or a module of the same package that imports it;
- `WHOLE_PROGRAMS` names the package: tests that start whole runs, in which imports do not show what is tested.

Besides, a test guards itself and the helpers that it imports, `conftest.py` guards the tests below it, and every other
file is guarded by the tests whose source has its name, such as `arithmetic.yaml`.
"""

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from import_graph import MODULES, ROOT, imports_of, inner, name_of, own_imports, parse

sys.path.append(str(ROOT / "tests" / "benchmarks"))

import planted_faults

TIERS = ("unit", "integration", "fault_injection", "benchmarks")
"""Folders of the tests that `make test-all` runs."""
HELPERS = ROOT / "tests" / "helpers"
NO_TESTS = 5
"""pytest's exit status if no test has the marker: cases that a helper may mark need not be slow."""

WHOLE_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "benchmarks/test_benchmarks.py": ("driver/launch.py", "models/embedded_policy.py", "models/policies", "device.py"),
    "fault_injection/test_chaos.py": ("resilience", "training", "storage", "data", "distributed.py"),
    "fault_injection/test_drivers.py": ("driver/run.py", "driver/trainer.py", "storage/lease.py"),
    "fault_injection/test_dynamic_sampling.py": ("learner/rollouts", "data"),
    "fault_injection/test_elastic.py": ("resilience/elastic.py", "driver/trainer.py"),
    "fault_injection/test_health.py": (
        "telemetry",
        "observers/feed.py",
        "pages/report",
        "text",
        "training/report_callback.py",
    ),
    "fault_injection/test_hostile_answers.py": ("rewards",),
    "fault_injection/test_machines.py": ("resilience", "training", "storage/checkpoint_upload.py"),
    "fault_injection/test_network.py": ("resilience", "storage", "driver/trainer.py"),
    "fault_injection/test_bounded_staleness.py": ("learner/rollouts", "inference"),
    "fault_injection/test_resume.py": (
        "training",
        "storage",
        "data",
        "driver/preflight",
        "evaluation/baseline.py",
        "models/policy_digest.py",
    ),
    "fault_injection/test_s3.py": ("storage",),
    "fault_injection/test_several_steps.py": ("learner", "training/report_callback.py", "training/problem_loader.py"),
    "fault_injection/test_sharded.py": ("learner/sharding.py", "learner/resume.py", "models/shards.py", "training"),
    "fault_injection/test_slurm.py": ("driver/run.py", "resilience/signals.py"),
    "integration/test_slurm.py": ("driver/run.py", "resilience/signals.py"),
    "fault_injection/test_survival.py": ("training", "storage", "data", "learner", "resilience"),
    "fault_injection/test_terminals.py": ("observers/terminal", "observers/follower.py"),
    "integration/test_wheel.py": ("examples",),
    "integration/test_jobs.py": ("driver/run.py", "driver/cluster", "resilience/signals.py"),
    "integration/test_library_contract.py": ("learner", "inference", "training", "config/vllm_fields.json"),
    "integration/models/test_lora.py": ("config/peft_fields.json",),
    "integration/test_logical_gpus.py": ("device.py", "driver/cluster", "driver/preflight", "evaluation", "inference"),
    "integration/test_notebook.py": ("__init__.py", "driver/run.py", "evaluation", "rewards", "models/tokenizer.py"),
    "integration/test_sharding.py": ("learner", "models/shards.py", "export"),
    "integration/test_tools_notebook.py": (
        "tools",
        "data/multiplication.py",
        "data/guessing.py",
        "models/demonstrations.py",
    ),
    "integration/driver/test_memory.py": ("driver", "observers"),
    "integration/driver/test_rollout_function_run.py": ("learner/rollouts", "inference", "loopback.py"),
    "integration/driver/test_sampling_run.py": ("config/sampling.py", "inference", "learner"),
    "integration/driver/test_tool_run.py": ("tools", "processes", "inference", "learner"),
    "integration/observers/trackers/test_tracked_run.py": ("observers/trackers",),
    "integration/sweep/test_sweep.py": (
        "config/sweep_file.py",
        "sweep",
        "driver/run.py",
        "resilience/ray_internals.py",
    ),
    "unit/training/test_run_histories.py": ("data", "storage", "training"),
}
"""Test file below `tests/` -> packages and files of the package that its runs exercise. Each file without a folder of
the package of its own is here."""

UNGUARDED: Mapping[str, str] = {
    "config/__init__.py": "has no code",
    "config/import_path.py": "imports what a path names, of which unit tests have every form",
    "config/recorded.py": "reads a file, of which unit tests have every form",
    "config/trl_fields.json": "is compared with the installed TRL by a unit test",
    "pages/__init__.py": "has no code",
}
"""File of the package that no slow test guards -> the reason."""

Reasons = dict[str, set[str]]
"""Test file below `tests/` -> the reasons why it guards what has changed."""


@functools.cache
def slow_test_files() -> tuple[str, ...]:
    """Return the test files with slow tests, from their source, as paths below `tests/`."""
    files = [path for tier in TIERS for path in sorted((ROOT / "tests" / tier).rglob("test_*.py"))]
    return tuple(str(path.relative_to(ROOT / "tests")) for path in files if has_slow_tests(path))


def has_slow_tests(path: Path) -> bool:
    """Return True if a test file has the marker `slow`, or cases from a helper that gives it."""
    markers = slow_helpers()
    return any(
        is_slow_mark(node)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in markers)
        for node in ast.walk(parse(path))
    )


def is_slow_mark(node: ast.AST) -> bool:
    """Return True for the expression `pytest.mark.slow`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.slow"


@functools.cache
def slow_helpers() -> frozenset[str]:
    """Return the names of the helpers' functions that mark cases as slow, or call one that does."""
    functions = [
        node for path in HELPERS.rglob("*.py") for node in parse(path).body if isinstance(node, ast.FunctionDef)
    ]
    found = {each.name for each in functions if any(map(is_slow_mark, ast.walk(each)))}
    while more := {each.name for each in functions if found & _called(each)} - found:
        found |= more
    return frozenset(found)


def _called(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {each.id for each in calls if isinstance(each, ast.Name)}


@functools.cache
def imported_modules(test: str) -> frozenset[str]:
    """Return the modules of the package that a test file imports, and those of the same packages that these import.

    Arrangement and results of a test reach a package through its other modules, so `storage.run_folder` stands for
    `storage.retry` as well; further packages are behind an interface, and have tests of their own.
    """
    tree = parse(ROOT / "tests" / test)
    found = {inner(each.target) for each in imports_of("", tree) if each.library == "grpo_ray"} & MODULES.keys()
    while (
        more := {
            target
            for each in own_imports()
            if each.module in found
            and (target := inner(each.target)).partition(".")[0] == each.top
            and target in MODULES
        }
        - found
    ):
        found |= more
    return frozenset(found)


@functools.cache
def imported_helpers(path: Path) -> frozenset[str]:
    """Return the paths below the repository of the helpers that a file imports, directly or through others."""
    found: set[Path] = set()
    while more := {helper for file in (path, *found) for helper in _direct_helpers(file)} - found:
        found |= more
    return frozenset(str(file.relative_to(ROOT)) for file in found)


@functools.cache
def _direct_helpers(path: Path) -> tuple[Path, ...]:
    """Return the helpers that a file imports: modules, and all files of packages."""
    names = {HELPERS / each.library for each in imports_of("", parse(path))}
    files = (file for name in names for file in (name.with_suffix(".py"), *name.glob("*.py")))
    return tuple(sorted(file for file in files if file.is_file()))


def reason(test: str, changed: str) -> str | None:
    """Return why a test file guards a changed file; None if it does not.

    Args:
        test: path below `tests/`.
        changed: path below the repository, also of a file that is deleted.
    """
    if changed == f"tests/{test}":
        return "is changed"
    if changed.startswith("grpo_ray/"):
        return _package_reason(test, changed.removeprefix("grpo_ray/"))
    path = Path(changed)
    if path.name == "conftest.py":
        return f"uses {changed}" if Path("tests", test).is_relative_to(path.parent) else None
    if changed in imported_helpers(ROOT / "tests" / test):
        return f"imports {changed}"
    # Test files and helpers are named in others by chance; benchmarks are programs that tests start.
    is_program = not changed.startswith("tests/") or changed.startswith(("tests/benchmarks/", "tests/gpu/"))
    source = (ROOT / "tests" / test).read_text(encoding="utf-8")
    if is_program and re.search(rf"(?<![\w.-]){re.escape(path.name)}(?!\w)", source):
        return f"names {path.name}"
    # test_benchmarks.py starts every script of its folder.
    return f"starts {changed}" if path.parent == Path("tests", test).parent == Path("tests/benchmarks") else None


def _package_reason(test: str, file: str) -> str | None:
    """Return what `reason` returns, for a file below `grpo_ray/`."""
    tier, _, below = test.partition("/")
    tests = planted_faults.TESTS.get(file)
    if tests is not None and below in getattr(tests, tier, ()):
        return f"catches planted faults in {file}"
    folder = Path(below).parent
    if folder != Path("."):
        module = folder / Path(below).name.removeprefix("test_")
        place = module if (ROOT / "grpo_ray" / module).is_file() else folder
        if Path(file).is_relative_to(place):
            return f"has the place of {place}"
    if any(file == each or file.startswith(f"{each}/") for each in WHOLE_PROGRAMS.get(test, ())):
        return f"runs {file}"
    path = ROOT / "grpo_ray" / file
    if path.suffix == ".py" and path.is_file() and name_of(path) in imported_modules(test):
        return f"imports {file}"
    return None


def guards(changed: Iterable[str]) -> Reasons:
    """Return the test files that guard changed files."""
    found: Reasons = {}
    for file in changed:
        for test in slow_test_files():
            if why := reason(test, file):
                found.setdefault(test, set()).add(why)
    return found


def default_base(root: Path) -> str:
    """Return the commit at which this branch left the default branch: that of the remote, else `main` or `master`."""
    for branch in ("origin/HEAD", "origin/main", "origin/master", "main", "master"):
        done = subprocess.run(["git", "merge-base", "HEAD", branch], cwd=root, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return "HEAD"


def changed_files(root: Path, base: str) -> list[str]:
    """Return the files that differ from a commit in the working tree, and untracked ones."""
    lines = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        if done.returncode:
            mend = "--base must be a commit of this repository"
            raise SystemExit(f"git {' '.join(command)}: {done.stderr.strip()}; {mend}")
        lines += done.stdout.splitlines()
    return sorted(set(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the slow tests that guard what has changed. Returns pytest's exit status with `--run`, else 0."""
    parser = argparse.ArgumentParser(description="Print the slow tests that guard changed files.")
    parser.add_argument("--base", metavar="COMMIT", help="commit to compare with; default: where the branch began")
    parser.add_argument("--run", action="store_true", help="run these tests")
    options = parser.parse_args(arguments)
    base = options.base or default_base(ROOT)
    changed = changed_files(ROOT, base)
    found = guards(changed)
    print(f"{len(changed)} files differ from {base}; slow tests in {len(found)} files guard them", flush=True)
    for test, reasons in sorted(found.items()):
        first, *others = sorted(reasons)
        print(f"  tests/{test}: {first}{f', and {len(others)} further reasons' if others else ''}", flush=True)
    for file in changed:
        if file.startswith("grpo_ray/") and not guards([file]):
            why = UNGUARDED.get(file.removeprefix("grpo_ray/"), "is in no table of tests/helpers/slow_tests.py")
            print(f"  no slow test guards {file}: it {why}", flush=True)
    if not found or not options.run:
        return 0
    files = [str(ROOT / "tests" / test) for test in sorted(found)]
    status = subprocess.run([sys.executable, "-m", "pytest", "-m", "slow", *files], cwd=ROOT).returncode
    return 0 if status == NO_TESTS else status


if __name__ == "__main__":
    sys.exit(main())
