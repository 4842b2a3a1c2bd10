"""Tests of the list of planted faults: each can be planted in today's code, and its test files exist."""

import ast
from pathlib import Path
from typing import Any

import planted_faults
import pytest

ROOT = Path(__file__).parents[2]

INVARIANTS = (
    "data/ledger.py", "data/split.py", "data/stream.py", "inference/arguments.py", "inference/dedicated_engine.py",
    "inference/engine.py", "inference/learner_end.py", "inference/local_engine.py", "inference/pool/",
    "inference/sync_proof.py", "inference/weight_", "learner/", "rewards/", "storage/checkpoint", "storage/fencing.py",
    "training/problem_loader.py", "training/start_point.py", "training/attempt.py",
)  # fmt: skip
"""Path prefixes of the modules behind the invariants: exactness, ledger, checkpoints, weight sync and grading."""


def source(fault: Any) -> str:
    return (ROOT / "grpo_ray" / fault.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_fault_occurs_once_and_changes_code_that_parses(fault: Any) -> None:
    text = source(fault)
    assert text.count(fault.old) == 1
    # A change of comments or spaces would be no fault.
    assert ast.dump(ast.parse(planted_faults.plant(text, fault))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_fault_has_tests_and_their_files_exist(fault: Any) -> None:
    planted_faults.check_fault(ROOT, fault)
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
    (fault,) = (each for each in planted_faults.FAULTS if each.name == "loss-keeps-the-rows-left-as-denominator")
    planted_faults.check_fault(ROOT, fault)
    with pytest.raises(error):
        planted_faults.check_fault(ROOT, planted_faults.Fault(**(vars(fault) | change)))


def test_fault_names_are_unique() -> None:
    names = [fault.name for fault in planted_faults.FAULTS]
    assert len(set(names)) == len(names)


def test_table_of_tests_has_no_stale_module() -> None:
    assert set(planted_faults.TESTS) == {fault.file for fault in planted_faults.FAULTS}


def test_faults_are_mostly_in_modules_behind_the_invariants() -> None:
    assert len(planted_faults.FAULTS) >= 40
    behind = [fault for fault in planted_faults.FAULTS if fault.file.startswith(INVARIANTS)]
    assert len(behind) >= len(planted_faults.FAULTS) / 2
