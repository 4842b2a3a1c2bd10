"""Tests of the choice of slow tests for changed files (`tests/helpers/slow_tests.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import ROOT
from slow_tests import (
    TIERS,
    UNGUARDED,
    WHOLE_PROGRAMS,
    changed_files,
    default_base,
    guards,
    has_slow_tests,
    main,
    reason,
    slow_test_files,
)

PACKAGE_FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "grpo_ray").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)

OTHER_FILES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*", "jobs/**/*", "notebooks/*", "scripts/**/*", "tests/benchmarks/*.py", "tests/helpers/**/*.py")
    for path in ROOT.glob(pattern)
    if path.is_file() and not path.name.startswith((".", "test_"))
)
"""Files beside the package that a test may guard: of the repository's top, and programs and helpers."""


@pytest.mark.long
def test_every_slow_test_is_picked_for_some_file() -> None:
    never = [test for test in slow_test_files() if not any(reason(test, file) for file in OTHER_FILES + PACKAGE_FILES)]
    assert never == [], "slow_tests.py: add them to WHOLE_PROGRAMS, with the files that their runs test"


@pytest.mark.long
def test_every_file_of_the_package_has_a_slow_test_or_a_reason() -> None:
    unguarded = {file.removeprefix("grpo_ray/") for file in PACKAGE_FILES if not guards([file])}
    missing, stale = sorted(unguarded - UNGUARDED.keys()), sorted(UNGUARDED.keys() - unguarded)
    assert missing == [], "slow_tests.py: add a slow test in WHOLE_PROGRAMS, or else a reason in UNGUARDED"
    assert stale == [], "these have a slow test; remove them from UNGUARDED"


@pytest.mark.long
def test_tables_have_no_stale_entry() -> None:
    assert WHOLE_PROGRAMS.keys() <= set(slow_test_files())
    named = [*UNGUARDED, *(each for paths in WHOLE_PROGRAMS.values() for each in paths)]
    assert [each for each in named if not (ROOT / "grpo_ray" / each).exists()] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "test", "found"),
    [
        ("grpo_ray/storage/lease.py", "fault_injection/test_drivers.py", "catches planted faults in storage/lease.py"),
        (
            "grpo_ray/export/hub.py",
            "integration/export/test_hub.py",
            "has the place of export/hub.py",
        ),
        ("grpo_ray/export/card.py", "integration/export/test_hub.py", None),
        ("grpo_ray/pages/watch/deleted.py", "integration/pages/watch/test_page.py", "has the place of pages/watch"),
        ("grpo_ray/rewards/math/deleted.py", "fault_injection/test_hostile_answers.py", "runs rewards/math/deleted.py"),
        ("grpo_ray/storage/retry.py", "integration/pages/watch/test_page.py", "imports storage/retry.py"),
        ("grpo_ray/rewards/length.py", "integration/pages/watch/test_page.py", None),
        ("tests/fault_injection/test_s3.py", "fault_injection/test_s3.py", "is changed"),
        ("tests/helpers/faulty_runs.py", "fault_injection/test_s3.py", "imports tests/helpers/faulty_runs.py"),
        ("tests/helpers/faulty_runs.py", "integration/pages/watch/test_page.py", None),
        ("tests/conftest.py", "fault_injection/test_s3.py", "uses tests/conftest.py"),
        ("tests/integration/conftest.py", "fault_injection/test_s3.py", None),
        ("notebooks/grpo_with_ray_train.ipynb", "integration/test_notebook.py", "names grpo_with_ray_train.ipynb"),
        ("tests/benchmarks/bench_engine.py", "benchmarks/test_benchmarks.py", "names bench_engine.py"),
        ("tests/benchmarks/peers.py", "benchmarks/test_benchmarks.py", "starts tests/benchmarks/peers.py"),
        ("LICENSE", "integration/test_notebook.py", None),
    ],
)
def test_reason_is_that_of_the_strongest_tie(changed: str, test: str, found: str | None) -> None:
    assert test in slow_test_files()
    assert reason(test, changed) == found


@pytest.mark.parametrize(
    ("source", "is_slow"),
    [
        ("pytestmark = pytest.mark.slow", True),
        ("@pytest.mark.slow\ndef test_one(): ...", True),
        ("CASES = [*pairs_then_all([1, 2], [3, 4])]", True),
        ("CASES = all_pairs([1, 2], [3, 4])", False),
        ("pytestmark = pytest.mark.gpu  # pytest.mark.slow", False),
    ],
)
def test_marker_is_found_in_source(source: str, is_slow: bool, tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(source, encoding="utf-8")
    assert has_slow_tests(path) == is_slow


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def test_changed_files_are_those_since_the_branch_began(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    for name in ("kept", "edited", "deleted", "staged"):
        (tmp_path / name).write_text("first\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("ignored\n", encoding="utf-8")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "switch", "-c", "branch")
    (tmp_path / "edited").write_text("second\n", encoding="utf-8")
    git(tmp_path, "commit", "-am", "second")
    (tmp_path / "deleted").unlink()
    (tmp_path / "staged").write_text("third\n", encoding="utf-8")
    git(tmp_path, "add", "staged")
    for name in ("new", "ignored"):
        (tmp_path / name).touch()
    assert changed_files(tmp_path, default_base(tmp_path)) == ["deleted", "edited", "new", "staged"]
    assert changed_files(tmp_path, "HEAD") == ["deleted", "new", "staged"]
    with pytest.raises(SystemExit, match="--base must be a commit"):
        changed_files(tmp_path, "nothing")


def test_main_prints_reasons_and_files_without_a_slow_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["LICENSE", "grpo_ray/observers/terminal/screen.py", "grpo_ray/config/recorded.py"]
    monkeypatch.setattr("slow_tests.changed_files", lambda root, base: changed)
    assert main(["--base", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert "3 files differ from HEAD" in printed
    assert "tests/fault_injection/test_terminals.py: runs observers/terminal/screen.py" in printed
    assert "no slow test guards grpo_ray/config/recorded.py: it reads a file" in printed


@pytest.mark.slow
def test_slow_test_files_are_those_that_pytest_collects() -> None:
    folders = [str(ROOT / "tests" / tier) for tier in TIERS]
    command = [sys.executable, "-m", "pytest", "-m", "slow", "--collect-only", "-q", "-p", "no:cacheprovider", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    expected = {f"tests/{test}" for test in slow_test_files()}
    assert collected - expected == set(), "these are never picked"
    # Cases of `pairs_then_all` may all be needed, and none slow; a marker in the file itself marks one.
    assert [each for each in expected - collected if "pytest.mark.slow" in (ROOT / each).read_text("utf-8")] == []
