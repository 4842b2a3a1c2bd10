"""Tests of the mutation tester: the mutants of a source, the choice of tests, and outcomes in a small checkout."""

import ast
import functools
import json
import sys
from pathlib import Path

import mutants
import pytest
from mutants import (
    EQUIVALENT,
    PACKAGES,
    ForkedTests,
    Limits,
    Mutant,
    Result,
    candidates_of,
    choose,
    digest_of,
    format_scores,
    modules_of,
    mutants_of,
    scores,
    try_mutant,
    unit_tests_of,
)
from planted_faults import TIMED_OUT, Copy

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", ["x = (a <= b)", "x = (a >= b)"]),
        ("x = a == b", ["x = (a != b)"]),
        ("x = a is not b", ["x = (a is b)"]),
        ("x = 0 < a <= b", [
            "x = (0 <= a <= b)", "x = (0 >= a <= b)", "x = (0 < a < b)", "x = (0 < a > b)", "x = 1 < a <= b",
            "x = -1 < a <= b",
        ]),
        ("x = a and b or c", ["x = ((a and b) and c)", "x = (a or b) or c"]),
        ("x = -a", ["x = (a)"]),
        ("x = not a", ["x = (a)"]),
        ("x = a - b", ["x = (a + b)"]),
        ("x = a // b", ["x = (a * b)"]),
        ("x = 'a' + b", []),
        ("x = 3", ["x = 4", "x = 2"]),
        ("x = 0.5", ["x = 1.0", "x = 0.25"]),
        ("x = True", ["x = False"]),
        ("x += 1", ["x -= 1", "pass", "x += 2", "x += 0"]),
        ("f(a)", ["pass"]),
        ("x = f(a)", []),
        ("x.y = a", ["pass"]),
        ("if a: b", ["if (not (a)): b"]),
        ("if not a: b", ["if (a): b"]),
        ("x = [b for b in c if b]", ["x = [b for b in c if (not (b))]"]),
        ("for a in b: break", ["for a in b: pass"]),
        ("def f():\n if a:\n  return b\n return c", ["if (not (a)):", "pass"]),  # not the last return
    ],
)  # fmt: skip
def test_mutants_of_statement_are(source: str, changed: list[str]) -> None:
    found = mutants_of(source)
    assert sorted(each.after for each in found) == sorted(changed)


@pytest.mark.parametrize(
    "source",
    [
        '"""One."""',
        "x: Literal[1] = a",
        "def f(x: Literal[1] = a) -> Literal[2]: ...",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = f'{a + 1}'",
        "x = zip(a, b, strict=True)",
        "if TYPE_CHECKING:\n x = 1",
        "if __name__ == '__main__':\n main(1)",
    ],
)
def test_mutants_of_leaves_unchanged(source: str) -> None:
    assert mutants_of(source) == []


def test_mutants_of_source_change_nothing_else() -> None:
    source = 'name = "µ"; x = (a <\n     b)  # a comment\nif c: pass\n'
    first, *_ = mutants_of(source, "a.py")
    assert first.source == 'name = "µ"; x = ((a <= b))  # a comment\nif c: pass\n'
    assert (first.line, first.before) == (1, 'name = "µ"; x = (a < b) # a comment')
    assert first.after == 'name = "µ"; x = ((a <= b)) # a comment'


@functools.cache
def mutants_in(file: str) -> list[Mutant]:
    return mutants_of((ROOT / "grpo_ray" / file).read_text(encoding="utf-8"), file)


@pytest.mark.long
@pytest.mark.parametrize("file", ["data/ledger.py", "learner/batch.py", "rewards/math/linear.py"])
def test_mutants_of_module_parse_and_differ(file: str) -> None:
    source = (ROOT / "grpo_ray" / file).read_text(encoding="utf-8")
    trees = [ast.dump(ast.parse(each.source)) for each in mutants_in(file)]
    assert len({*trees, ast.dump(ast.parse(source))}) == len(trees) + 1 > 20


@pytest.mark.long
@pytest.mark.parametrize("pattern", [pattern for patterns in PACKAGES.values() for pattern in patterns])
def test_pattern_of_package_matches_modules_with_tests(pattern: str) -> None:
    files = [file for file in modules_of(pattern) if any(function_names(file))]
    assert files and all(unit_tests_of(file) for file in files)


def function_names(file: str) -> list[str]:
    tree = ast.parse((ROOT / "grpo_ray" / file).read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.long
def test_unit_tests_of_begin_with_the_module_then_planted_faults_then_importers() -> None:
    tests = unit_tests_of("learner/batch.py")
    assert tests[:3] == (
        "unit/learner/test_batch.py", "unit/learner/test_exact_savings.py", "unit/learner/test_micro_batches.py"
    )  # fmt: skip
    assert "unit/learner/rollouts/test_recorded_samples.py" in tests[3:]


@pytest.mark.parametrize("row", EQUIVALENT, ids=lambda row: f"{row.file} {row.after}")
def test_row_of_an_equivalent_mutant_is_not_stale(row: mutants.Equivalent) -> None:
    source = (ROOT / "grpo_ray" / row.file).read_text(encoding="utf-8")
    found = [each for each in candidates_of(source) if (each.before, each.after) == (row.before, row.after)]
    assert any(digest_of(each.source) not in (None, digest_of(source)) for each in found)
    assert row.reason


def test_choose_same_seed_repeats_and_other_seed_differs() -> None:
    found = mutants_of("\n".join(f"x = a{n} < b" for n in range(50)))
    chosen = choose(found, 10, "0/ledger")
    assert len(chosen) == 10 and chosen == choose(found, 10, "0/ledger") != choose(found, 10, "1/ledger")
    assert [each.line for each in chosen] == sorted(each.line for each in chosen)
    assert choose(found, 100, "0/ledger") == choose(found, None, "0/ledger") == found


def test_scores_leave_equivalent_mutants_out() -> None:
    def result(outcome: str) -> Result:
        return Result("ledger", "data/ledger.py", 7, "a < b", "(a <= b)", outcome)

    results = [result("caught"), result("caught"), result("SURVIVED"), result("equivalent")]
    assert scores(results) == {"ledger": (2, 1, 1)}
    text = format_scores(results)
    assert "ledger: 2 of 3 caught (67%), 1 equivalent" in text
    assert "SURVIVED grpo_ray/data/ledger.py:7\n  - a < b\n  + (a <= b)" in text


NUMBER = """\
def clamp(value, most):
    while value > most:
        value -= 1
    return value
"""
NUMBER_TESTS = """\
from hypothesis import given, strategies
from grpo_ray.data.number import clamp
def test_clamp_small_value_is_unchanged():
    assert clamp(2, 5) == 2
@given(strategies.just(7))
def test_clamp_large_value_is_the_most(value):
    assert clamp(value, 5) == 5
"""


@pytest.fixture
def tests(tmp_path: Path) -> ForkedTests:
    """Runner on a checkout with one module and its tests."""
    checkout, scratch = tmp_path / "checkout", tmp_path / "scratch"
    files = {
        "grpo_ray/__init__.py": "", "grpo_ray/data/__init__.py": "", "grpo_ray/data/number.py": NUMBER,
        "tests/unit/data/test_number.py": NUMBER_TESTS, "pyproject.toml": "[tool.pytest.ini_options]\n",
    }  # fmt: skip
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text, encoding="utf-8")
    return ForkedTests(Copy(checkout, scratch, Path(sys.executable), with_cluster=False, max_seconds=0.0))


def number_mutant(old: str, new: str) -> Mutant:
    assert NUMBER.count(old) == 1
    return Mutant("data/number.py", 2, old, new, NUMBER.replace(old, new))


def outcome_of(tests: ForkedTests, mutant: Mutant) -> Result:
    return try_mutant(tests, "ledger", mutant, ("unit/data/test_number.py",))


@pytest.mark.long
def test_try_mutant_that_a_test_catches_names_the_test(tests: ForkedTests) -> None:
    result = outcome_of(tests, number_mutant("value > most", "value >= most"))
    assert (result.outcome, result.tests) == ("caught", ("unit/data/test_number.py",))
    assert result.detail == "tests/unit/data/test_number.py::test_clamp_large_value_is_the_most"
    assert (tests.copy.tree / "grpo_ray/data/number.py").read_text(encoding="utf-8") == NUMBER


@pytest.mark.slow
def test_try_mutant_that_passes_all_tests_survives(tests: ForkedTests) -> None:
    assert outcome_of(tests, number_mutant("value > most", "value > most != 6")).outcome == "SURVIVED"


@pytest.mark.slow
def test_try_mutant_that_cannot_be_imported_is_caught(tests: ForkedTests) -> None:
    result = outcome_of(tests, number_mutant("def clamp", "1 / 0\ndef clamp"))
    assert result.outcome == "caught" and "test_number.py" in result.detail


@pytest.mark.slow
def test_run_endless_loop_is_over_the_limit(tests: ForkedTests) -> None:
    mutant = number_mutant("value -= 1", "value += 1")
    with tests.copy.changed(mutant.file, mutant.source):
        outcome = tests.run(["unit/data/test_number.py"], Limits(seconds=600, cpu_seconds=2))
    assert outcome.code == TIMED_OUT


@pytest.mark.slow
def test_run_waiting_mutant_is_over_the_limit(tests: ForkedTests) -> None:
    mutant = number_mutant("value -= 1", "import time; time.sleep(600)")
    with tests.copy.changed(mutant.file, mutant.source):
        outcome = tests.run(["unit/data/test_number.py"], Limits(seconds=5, cpu_seconds=600))
    assert outcome.code == TIMED_OUT


@pytest.mark.long
def test_try_mutant_tests_that_fail_anyway_raises(tests: ForkedTests) -> None:
    (tests.copy.tree / "tests/unit/data/test_number.py").write_text("def test_it(): assert False", encoding="utf-8")
    with pytest.raises(RuntimeError, match="without a mutant"):
        outcome_of(tests, number_mutant("value > most", "value >= most"))


def test_try_mutant_equivalent_is_not_run(tests: ForkedTests, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = number_mutant("value > most", "most < value")
    row = mutants.Equivalent(mutant.file, mutant.before, mutant.after, "the same comparison")
    monkeypatch.setattr(mutants, "EQUIVALENT", (row,))
    monkeypatch.setattr(tests, "run", None)
    assert outcome_of(tests, mutant).outcome == "equivalent"


@pytest.mark.long
def test_select_again_takes_the_survivors(tmp_path: Path) -> None:
    source = (ROOT / "grpo_ray" / "storage" / "fencing.py").read_text(encoding="utf-8")
    first, second, *_ = mutants_of(source, "storage/fencing.py")
    rows = [
        Result("checkpoints", m.file, m.line, m.before, m.after, o)
        for m, o in ((first, "caught"), (second, "SURVIVED"))
    ]
    mutants.save(tmp_path / "results.json", rows)
    assert len(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))) == 2
    assert mutants.select(["checkpoints"], 20, 0, tmp_path / "results.json") == [("checkpoints", second)]
