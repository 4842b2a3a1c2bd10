"""Tests of the list of planted faults: each can be planted in today's code, and its test files exist."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

INVARIANTS = (
    "data/ledger.py", "data/split.py", "data/stream.py", "inference/arguments.py", "inference/engine.py",
    "inference/sync_proof.py", "inference/weight_", "learner/", "rewards/", "storage/checkpoint", "storage/fencing.py",
    "training/problem_loader.py", "training/start_point.py", "training/attempt.py",
)  # fmt: skip
"""Path prefixes of the modules behind the invariants: exactness, ledger, checkpoints, weight sync and grading."""


def load_script() -> ModuleType:
    """Import the script by its path: `tests/benchmarks` is not on `sys.path`."""
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "tests" / "benchmarks" / "planted_faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


def source(fault: Any) -> str:
    return (ROOT / "grpo_ray" / fault.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", SCRIPT.FAULTS, ids=lambda fault: fault.name)
def test_fault_occurs_once_and_changes_code_that_parses(fault: Any) -> None:
    text = source(fault)
    assert text.count(fault.old) == 1
    # A change of comments or spaces would be no fault.
    assert ast.dump(ast.parse(SCRIPT.plant(text, fault))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", SCRIPT.FAULTS, ids=lambda fault: fault.name)
def test_fault_has_tests_and_their_files_exist(fault: Any) -> None:
    SCRIPT.check_fault(ROOT, fault)
    assert fault.test_files("unit") or fault.test_files("integration")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"old": "no such text"}, ValueError),
        ({"new": "return ("}, SyntaxError),
        ({"unit": ("test_missing.py",)}, FileNotFoundError),
    ],
    ids=["text", "syntax", "test file"],
)
def test_check_fault_that_cannot_be_planted_raises(change: dict[str, Any], error: type[Exception]) -> None:
    (fault,) = (each for each in SCRIPT.FAULTS if each.name == "loss-keeps-the-rows-left-as-denominator")
    SCRIPT.check_fault(ROOT, fault)
    with pytest.raises(error):
        SCRIPT.check_fault(ROOT, SCRIPT.Fault(**(vars(fault) | change)))


def test_fault_names_are_unique() -> None:
    names = [fault.name for fault in SCRIPT.FAULTS]
    assert len(set(names)) == len(names)


def test_table_of_tests_has_no_stale_module() -> None:
    assert set(SCRIPT.TESTS) == {fault.file for fault in SCRIPT.FAULTS}


def test_faults_are_mostly_in_modules_behind_the_invariants() -> None:
    assert len(SCRIPT.FAULTS) >= 40
    behind = [fault for fault in SCRIPT.FAULTS if fault.file.startswith(INVARIANTS)]
    assert len(behind) >= len(SCRIPT.FAULTS) / 2
