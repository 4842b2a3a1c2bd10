"""Tests of the reward for programs: forms of tests, two hundred programs, and verdicts that repeat."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program_cases import HOSTILE, TASKS, Case, cases

from grpo_ray.config.loader import load_config
from grpo_ray.data.program_tests import AssertTest, StdinTest, parse_tests
from grpo_ray.data.stream import open_splits
from grpo_ray.errors import DataError, RewardError
from grpo_ray.rewards.code import grading
from grpo_ray.rewards.code.assertions import checker, is_result
from grpo_ray.rewards.code.grading import CodeGrader, Limits, ProgramRun, ProgramVerdict, read_results
from grpo_ray.rewards.code.program_text import program_of
from grpo_ray.rewards.code.values import NotPlainError, decode, encode
from grpo_ray.rewards.registry import load_reward
from grpo_ray.tools.sandbox.protocol import CallResult, Status

LIMITS = Limits(cpu_seconds=0.5, memory_gib=1.0, isolation="required", parallel=2)
CASES = cases()


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(LIMITS)
    yield grader
    grader.close()


def passes(grader: CodeGrader, case: Case) -> bool:
    return all(grader.grade(case.program, parse_tests(case.task.tests, case.task.entry_point)).passed)


def test_there_are_two_hundred_programs() -> None:
    assert len(CASES) >= 200 and len({case.name for case in CASES}) == len(CASES)
    no_python = ("nests its source", "repeats an operator", "has a null byte", "has half a surrogate")
    for case in CASES:  # another hostile program with a mistake in its syntax would show nothing
        title = case.name.removeprefix(case.task.name).strip()
        if title in HOSTILE and title not in no_python:
            compile(case.program, title, "exec")


@pytest.mark.parametrize("case", [case for case in CASES if case.passes], ids=lambda case: case.name)
def test_right_program_passes(case: Case, grader: CodeGrader) -> None:
    assert passes(grader, case)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if not case.passes], ids=lambda case: case.name)
def test_wrong_or_hostile_program_passes_no_problem(case: Case, grader: CodeGrader) -> None:
    assert not passes(grader, case)
    if case.name.endswith(("forks without end", "kills its parent", "takes all memory", "ignores its timer")):
        right = next(each for each in CASES if each.passes and each.task is case.task)
        assert passes(grader, right)  # the processes of the pool still serve others


@pytest.mark.slow
def test_verdicts_repeat() -> None:
    outcomes = []
    for _ in range(2):
        grader = CodeGrader(LIMITS)
        futures = [
            grader.submit(case.program, parse_tests(case.task.tests, case.task.entry_point)) for case in CASES[:60]
        ]
        outcomes.append([future.result().passed for future in futures])
        grader.close()
    assert outcomes[0] == outcomes[1]


def test_reward_is_one_for_all_tests_or_their_share(grader: CodeGrader) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9", "assert f(-2) == 4"]
    completions = ["```python\ndef f(n): return n * n\n```", "```py\ndef f(n): return n * abs(n)\n```", "I cannot."]
    metrics: dict[str, float] = {}
    rows: dict[str, Any] = {"tests": [tests, tests, tests]}
    whole, partial = load_reward("code_tests"), load_reward("code_tests", partial=True)
    assert whole(completions=completions, **rows, log_metric=metrics.__setitem__) == [1.0, 0.0, 0.0]
    assert metrics == {
        "reward/code_tests_passed_share": pytest.approx(1.75 / 3),
        "reward/code_tests_timeout_share": 0.0,
    }
    assert partial(completions=completions, **rows) == [1.0, 0.75, 0.0]
    assert partial(completions=completions, tests=[None, tests, None]) == [None, 0.75, None]
    assert whole.begin(completions[0], {"tests": json.dumps(tests)}).result().passed == (True,) * 4  # type: ignore[attr-defined]
    assert whole.begin(completions[0], {}) is None  # type: ignore[attr-defined]


def test_setup_and_helpers_of_the_tests_stay_out_of_the_program(grader: CodeGrader) -> None:
    tests = parse_tests(["assert double(3) == reference(3)"], setup="def reference(n): return 2 * n")
    assert all(grader.grade("def double(n): return n + n", tests).passed)
    assert not all(grader.grade("def reference(n): return 0\ndef double(n): return 0", tests).passed)


@pytest.mark.long
def test_test_that_exceeds_its_own_limit_is_not_passed(grader: CodeGrader) -> None:
    """A program can have a test run on for ever, by a result that a loop of the test depends on."""
    tests = parse_tests(["while f(1):\n    pass"])
    assert grader.grade("def f(n): return 0", tests).passed == (True,)
    assert grader.grade("def f(n): return 1", tests).passed == (False,)


@pytest.mark.long
def test_timeouts_end_the_tests_of_a_program(grader: CodeGrader) -> None:
    verdict = grader.grade("def f(n):\n    while n: pass", parse_tests([f"assert f({n}) is None" for n in range(20)]))
    assert verdict.passed == (True,) + (False,) * 19 and verdict.timeouts == 19


@pytest.mark.parametrize("loading", ["while True: pass", "import time\ntime.sleep(10**6)"], ids=["computes", "waits"])
def test_loading_has_the_limits_of_one_test(loading: str) -> None:
    """All calls together may take far more: 50 s of CPU time, and 510 s."""
    script = (
        "from grpo_ray.rewards.code import program_driver as driver\n"
        "driver.WALL_FACTOR, driver.WALL_SECONDS = 10.0, 0.0\n"
        f"asked = {{'program': {loading!r}, 'cpu_seconds': 0.2, 'calls': [{{}}] * 249, 'max_timeouts': 2}}\n"
        "data, cpu, status = driver.in_child(lambda pipe: driver.serve_calls(asked, pipe), 50.0)\n"
        "print(data, cpu < 10, status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "b'' True timeout\n"


def test_program_that_never_loads_hits_the_limit_in_all_tests(grader: CodeGrader) -> None:
    verdict = grader.grade("while True: pass", parse_tests([f"assert f({n}) == 1" for n in range(20)]))
    assert verdict.passed == (False,) * 20 and verdict.timeouts == 20


def test_program_that_needs_time_to_load_has_the_whole_limit_in_each_call(grader: CodeGrader) -> None:
    """The limit is 0.5 s; loading and one call take 0.6 s together."""
    busy = "import time\ndef work():\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
    program = busy + "work()\ndef f(n):\n    work()\n    return n"
    assert grader.grade(program, parse_tests(["assert f(1) == 1", "assert f(2) == 2"])).passed == (True, True)


class Counting(CodeGrader):
    """Grader of a program whose `f(n)` returns n + 1, and hits the time limit for n of at least 100."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.timeouts = 0

    def _run(self, run: ProgramRun, **asked: Any) -> tuple[dict[int, Any], str]:
        results: dict[int, Any] = {}
        timeouts = 0
        for number, call in enumerate(asked["calls"]):
            if timeouts >= asked["max_timeouts"]:
                return results, "timeout"
            (n,) = decode(call["args"])
            results[number] = {"status": "timeout"} if n >= 100 else {"value": encode(n + 1)}
            timeouts += n >= 100
            self.timeouts += n >= 100
        return results, ""


@pytest.fixture
def counting() -> Iterator[Counting]:
    grader = Counting()
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("tests", "passed", "timeouts"),
    [
        (["assert f(100) + f(101) == f(102) + f(103)", "assert f(1) == 2"], (False, False), 2),
        (["assert f(1) == 2", "assert f(1) == 3", "assert f(100) == 101"], (True, False, False), 1),
        (["assert f(1) == 2 or f(100) == 101"], (True,), 0),
    ],
    ids=["several calls", "one call", "a call that was not needed"],
)
def test_timeouts_are_counted_by_test(
    tests: list[str], passed: tuple[bool, ...], timeouts: int, counting: Counting
) -> None:
    verdict = counting.grade("def f(n): ...", parse_tests(tests))
    assert (verdict.passed, verdict.timeouts) == (passed, timeouts)


def test_timeouts_are_limited_over_all_rounds(counting: Counting) -> None:
    """Each test needs one round more than the one before until its call that hits the limit is known."""
    calls = ["100", "f(0) + 100", "f(f(0)) + 100", "f(f(f(0))) + 100", "f(f(f(f(0)))) + 100"]
    verdict = counting.grade("def f(n): ...", parse_tests([f"assert f({call}) == 0" for call in calls]))
    assert verdict.passed == (False,) * 5 and verdict.timeouts == 5 and counting.timeouts == 2


class SlowInterpreters:
    """Pool and episode whose interpreters take a time, print the results of a hostile program, and make no call."""

    def __init__(self, printed: str, seconds: float, status: Status = "ok") -> None:
        self.result = CallResult(status, printed, seconds=seconds)
        self.started = 0

    def open(self, *arguments: Any) -> "SlowInterpreters":
        return self

    def call(self, name: str, arguments: dict[str, Any]) -> "Future[CallResult]":
        self.started += 1
        future: Future[CallResult] = Future()
        future.set_result(self.result)
        return future

    def close(self) -> None:
        pass


def grade_slowly(interpreters: SlowInterpreters, tests: Any) -> ProgramVerdict:
    grader = CodeGrader(replace(LIMITS, cpu_seconds=5.0))
    grader._pool = interpreters  # type: ignore[assignment]
    verdict = grader.grade("...", parse_tests(tests))
    grader.close()
    return verdict


CUT_AFTER_ONE = '\x1e{"number": 0, "value": 1}\n\x1e{"rest": "cut"}\n'


def test_program_that_makes_one_call_per_interpreter_is_ended() -> None:
    """The limit is 290 s for one interpreter and 2 * 5 s for each of 20 tests, 490 s: used up by the third of 200 s."""
    slow = SlowInterpreters(CUT_AFTER_ONE, 200.0)
    verdict = grade_slowly(slow, [f"assert f({n}) == 1" for n in range(20)])
    assert slow.started == 3 and verdict.passed == (True,) * 3 + (False,) * 17 and verdict.timeouts == 17


def test_program_that_uses_its_whole_time_is_not_ended() -> None:
    """20 tests may take 5 s each, and an interpreter needs time to start."""
    slow = SlowInterpreters(CUT_AFTER_ONE, 5.0 + 10.0)
    verdict = grade_slowly(slow, [f"assert f({n}) == 1" for n in range(20)])
    assert slow.started == 20 and verdict.passed == (True,) * 20 and verdict.timeouts == 0


def test_program_that_delays_each_part_of_its_inputs_is_ended() -> None:
    """The limit is 290 s + 50 * 2 * 5 s = 790 s, used up by the third interpreter; each runs 10 inputs."""
    slow = SlowInterpreters('\x1e{"number": 0, "hash": "x"}\n', 280.0)
    verdict = grade_slowly(slow, {"inputs": ["1"] * 50, "outputs": ["1"] * 50})
    assert slow.started == 3 and verdict.passed == (False,) * 50 and verdict.timeouts == 20


def test_interpreter_that_reaches_its_limit_is_a_timeout_of_all_calls() -> None:
    slow = SlowInterpreters("", 290.0, "timeout")
    verdict = grade_slowly(slow, [f"assert f({n}) == 1" for n in range(20)])
    assert slow.started == 1 and verdict.passed == (False,) * 20 and verdict.timeouts == 20


def test_each_test_is_checked_with_the_results_of_its_own_calls(
    grader: CodeGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of all 50 tests together have 5 MB."""
    sizes: list[int] = []
    ask = checker.ask

    def measure(request: bytes) -> bytes | None:
        sizes.append(len(request))
        return ask(request)

    monkeypatch.setattr(checker, "ask", measure)
    shared = ["assert f(f(1)) == f(0)", "assert len(f(f(1))) == 100_000", "assert f(0) == f(1)[:5]"]
    tests = parse_tests([*(f"assert f({n}) == 'a' * 100_000" for n in range(50)), *shared])
    verdict = grader.grade("def f(n): return 'a' * 100_000", tests)
    assert verdict.passed == (True,) * 52 + (False,) and verdict.timeouts == 0
    assert 100_000 < max(sizes) < 1_000_000


def test_results_of_a_program_are_limited_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result has more than 100 characters and fewer than 150."""
    monkeypatch.setattr(grading, "MAX_RESULT_CHARS", 450)
    value = "a" * 80
    printed = "".join(f'\x1e{{"number": {n}, "value": "{value}"}}\n' for n in range(9))
    interpreters = SlowInterpreters(printed, 1.0)
    verdict = grade_slowly(interpreters, [f"assert len(f({n})) == 80" for n in range(9)])
    assert verdict.passed == (True,) * 4 + (False,) * 5 and verdict.timeouts == 0 and interpreters.started == 1


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("First:\n```python\na = 1\n```\nBetter:\n```py\na = 2\n```\nDone.", "a = 2"),
        ("<think>```python\na = 1\n```</think>\n```\na = 3\n```", "a = 3"),
        ("<think>```python\na = 1\n```", ""),
        ("```python\na = 1\n```\n```bash\nls\n```", "a = 1"),
        ("```bash\nls\n```", ""),
        ("a = 1", "a = 1"),
        ("```python\na = 1", ""),
        ("```python\na = 1\n```\n```python\ncut off", "a = 1"),
        ("```python\na = 1\n```\nOutput:\n```\n1\n```", "a = 1"),
        ("", ""),
    ],
)
def test_program_is_the_last_block_of_python(completion: str, program: str) -> None:
    assert program_of(completion) == program


def test_forms_of_tests_are_read() -> None:
    assert parse_tests('{"inputs": ["1"], "outputs": ["2"]}') == (StdinTest("1", "2"),)
    assert parse_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}) == (StdinTest("1\n2", "3"),)
    assert parse_tests(["assert f()"], setup="import math") == (AssertTest("import math\nassert f()"),)
    (check,) = parse_tests("def check(candidate):\n    assert candidate(1)\n", entry_point="f")
    assert isinstance(check, AssertTest) and check.source.endswith("\ncheck(f)")
    assert [len(parse_tests(task.tests, task.entry_point)) for task in TASKS] == [3, 1, 1, 2, 4, 2, 1, 3, 1]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (["assert ("], "a test is not Python"),
        ("def check(candidate): pass", "no column `entry_point`"),
        ({"inputs": ["1"], "outputs": []}, "lists of equal length"),
        ({"inputs": [1], "outputs": [2], "fn_name": "f"}, "a list of arguments"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f("}, "is not the name of a function"),
        ([{"input": "x", "output": "1", "testtype": "functional"}], "`entry_point`"),
        ({"inputs": [], "outputs": []}, "has no test"),
        ([], "must be a list of Python statements"),
        (5, "must be a list of Python statements"),
        ({"a": 1}, "must be a list of Python statements"),
        ({1, 2}, "is not JSON"),
    ],
)
def test_tests_of_unknown_form_are_refused(tests: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_tests(tests)
    with pytest.raises(RewardError, match=f"code_tests: .*{message}"):
        load_reward("code_tests")(completions=["a"], tests=[tests])


def test_tests_of_unknown_form_are_refused_with_file_and_row_before_a_run(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tests": ["assert f()"]}, {"prompt": "b"}, {"prompt": "c", "tests": ["assert ("]}]
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(None, [f"data.train={path}", "rewards.functions=[code_tests]", "data.heldout=arithmetic"])
    training, _ = open_splits(config)
    problems = training[""].read()
    assert len(list(itertools.islice(problems, 2))) == 2  # the reward does not apply to a row without tests
    with pytest.raises(DataError, match=r"code\.jsonl, row 3: a test is not Python"):
        next(problems)
    renamed = load_config(
        None, [f"data.train={path}", "rewards.functions=[code_tests]", "data.columns={tests: checks}"]
    )
    with pytest.raises(DataError, match="row 1: no column 'checks'"):
        list(open_splits(renamed)[0][""].read())


def test_mistaken_settings_and_a_missing_column_are_refused() -> None:
    for settings in ({"cpu_seconds": 0}, {"memory_gib": 0.1}, {"isolation": "maybe"}):
        with pytest.raises(RewardError, match=r"rewards\.settings\.code_tests"):
            load_reward("code_tests", **settings)
    with pytest.raises(RewardError, match="no column `tests`"):
        load_reward("code_tests")(completions=["a"])


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1.5, "é", [1, [2]], (1, ()), {1, 2}, frozenset({"a"}), {(1, 2): [3], None: {}}, b"\0", 1j],
    ids=repr,
)
def test_plain_values_are_read_back(value: Any) -> None:
    read = decode(json.loads(json.dumps(encode(value))))
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("value", [object(), [object()], {"a": open}, iter(())], ids=lambda value: type(value).__name__)
def test_other_values_are_not_plain(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode(value)


@pytest.mark.parametrize(
    "content", [[1], {"list": 5}, {"set": [{"list": []}]}, {"dict": [[1]]}, {"bytes": "x"}, {"a": 1, "b": 2}, {}]
)
def test_content_that_is_no_value_is_refused(content: Any) -> None:
    with pytest.raises(NotPlainError):
        decode(content)


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        ((1, 2), [1, 2], True), ([1, 2], [[1, 2]], True), (0.1 + 0.2, 0.3, True), (3, 3.0, True), (True, 1, False),
        (1, True, False), ({1: 2}, {"1": 2}, True), ({1: 2}, {"2": 2}, False), ("a", ["a"], True), ("a", "b", False),
        ([1], [1, 1], False), (None, [None], True), (float("nan"), 1.0, False),
    ],
)  # fmt: skip
def test_results_of_calls_are_compared_as_in_the_datasets(result: Any, expected: Any, equal: bool) -> None:
    assert is_result(result, expected) is equal


def test_results_that_are_forged_or_cut_are_left_out() -> None:
    args = '"args": {"tuple": []}'
    text = f'noise\x1e{{"number": 1, "value": 2, {args}}}\n\x1e{{"number": 1, "value": 3, {args}}}\n\x1e[1]\n\x1e{{"num'
    assert read_results(text, 2) == ({1: {"number": 1, "value": 2, "args": {"tuple": []}}}, "")
    assert read_results('\x1e{"number": 0, "packed": "%%%"}\n\x1e{"rest": "cut"}\n', 1) == ({}, "cut")
    deep = "[" * 5000 + "]" * 5000
    numbers = ('"number": 1e999', '"number": 99999, "value": 1', '"number": true', '"number": -1', '"number": "x"')
    for forged in (*numbers, f'"number": 0, "value": {deep}', '"number": 0, "value": {"a": 1}'):
        assert read_results(f"\x1e{{{forged}}}\n", 2) == ({}, ""), forged


def test_tests_with_random_arguments_and_of_builtin_names(grader: CodeGrader) -> None:
    loop = "    for _ in range(30):\n        a, b = random.random(), random.random()\n"
    source = f"import random\ndef check(candidate):\n{loop}        assert candidate(a, b) == a + b\n"
    tests = parse_tests(source, entry_point="add")
    assert all(grader.grade("def add(a, b): return a + b", tests).passed)
    shadowed = parse_tests(["assert sum(10, 15) == 6"])
    assert all(grader.grade("def sum(a, b): return 6", shadowed).passed)


def test_program_supplies_no_helper_of_a_check(grader: CodeGrader) -> None:
    """HumanEval/32 asserts that a polynomial, which the program defines too, is near 0 at the solution."""
    check = "def check(candidate):\n    assert abs(poly([2, 1], candidate([2, 1]))) < 1e-4\n"
    cheat = "def poly(*a): return 0.0\ndef find_zero(xs): return 0.0"
    assert not all(grader.grade(cheat, parse_tests(check, "find_zero")).passed)
    poly = "def poly(xs, x): return sum(c * x ** n for n, c in enumerate(xs))"
    known = parse_tests(check, "find_zero", poly)
    assert all(grader.grade("def find_zero(xs): return -xs[0] / xs[1]", known).passed)
    assert not all(grader.grade(cheat, known).passed)


def test_exception_of_a_program_ends_no_iteration_of_a_test(grader: CodeGrader) -> None:
    tests = parse_tests(["assert all(map(lambda n: f(n) == n, [1, 2]))", "for r in map(f, [1]): assert r == 1"])
    assert grader.grade("def f(n): raise StopIteration", tests).passed == (False, False)
    assert grader.grade("def f(n): return n", tests).passed == (True, True)


def test_large_arguments_are_no_part_of_the_result(grader: CodeGrader) -> None:
    numbers = [pow(7, n, 10**9 + 7) for n in range(10_000)]
    tests = parse_tests([{"input": json.dumps(numbers), "output": "10000", "testtype": "functional"}], "count")
    assert all(grader.grade("class Solution:\n    def count(self, a: List[int]): return len(a)", tests).passed)


def test_output_of_threads_and_exit_functions_counts(grader: CodeGrader) -> None:
    tests = parse_tests({"inputs": [""], "outputs": ["a\nb"]})
    thread = "import threading, time\ndef main():\n    time.sleep(0.2)\n    print('a')\n"
    program = f"{thread}threading.Thread(target=main).start()\nimport atexit\natexit.register(print, 'b')"
    assert all(grader.grade(program, tests).passed)


def test_setup_may_be_a_list_of_texts() -> None:
    assert parse_tests(["assert f()"], setup=["import a", "import b"]) == (
        AssertTest("import a\nimport b\nassert f()"),
    )
    with pytest.raises(DataError, match="the column `entry_point` must be text, not int"):
        parse_tests(["assert f()"], entry_point=3)  # type: ignore[arg-type]


@pytest.mark.long
def test_program_that_forges_the_end_of_its_calls_ends(grader: CodeGrader) -> None:
    forge = 'os.write(descriptor, b\'\\x1e{"number": 99999, "value": 1}\\n\\x1e{"rest": "cut"}\\n\')'
    program = f"import os\nfor descriptor in range(3, 64):\n    try: {forge}\n    except OSError: pass\nos._exit(0)"
    assert not any(grader.grade(program, parse_tests(["assert f() == 1"])).passed)
