"""Tests of a program, in the forms of APPS, LiveCodeBench, MBPP and HumanEval.

| value of the column `tests` | form |
|---|---|
| list of texts | MBPP's `test_list`: Python statements with `assert` |
| text that is Python | the same in one text, or HumanEval's `check(candidate)` |
| mapping with `inputs` and `outputs` | APPS: standard input and output, or arguments and result of `fn_name` |
| list of mappings with `input` and `output` | LiveCodeBench: the same, with `testtype` "stdin" or "functional" |

Mappings and lists may be JSON texts, as the datasets store them.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_ray.errors import DataError


@dataclass(frozen=True)
class StdinTest:
    """Input of a whole program, and the output that it must print."""

    input: str
    output: str


@dataclass(frozen=True)
class AssertTest:
    """Python code that calls functions of the program, and raises an exception unless their results are right."""

    source: str


Test = StdinTest | AssertTest


def parse_tests(tests: Any, entry_point: str | None = None, setup: Any = None) -> tuple[Test, ...]:
    """Return the tests of a problem.

    Args:
        tests: value of the column `tests`.
        entry_point: name of the function that `check(candidate)` or a functional test calls.
        setup: Python code that runs before each test of a function: text, or a list of texts.

    Raises:
        DataError: the value has none of the known forms, or has no test.
    """
    if isinstance(setup, list | tuple) and all(isinstance(each, str) for each in setup):
        setup = "\n".join(setup)  # MBPP's `test_imports`
    for name, value in (("entry_point", entry_point), ("setup", setup)):
        if value is not None and not isinstance(value, str):
            raise DataError(f"the column `{name}` must be text, not {type(value).__name__}")
    try:
        content = tests if isinstance(tests, str) else json.dumps(tests, sort_keys=True)
    except (TypeError, ValueError):
        raise DataError("the column `tests` is not JSON") from None
    return _parse(content, entry_point, setup)


@lru_cache(maxsize=128)
def _parse(content: str, entry_point: str | None, setup: str | None) -> tuple[Test, ...]:
    try:
        value = json.loads(content)
    except ValueError:
        value = content
    if isinstance(value, str):
        found: list[Test] = [AssertTest(_with_check(value, entry_point, setup))]
    elif isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        found = _of_pairs(value["inputs"], value["outputs"], value.get("fn_name") or None, setup)
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        found = [AssertTest(_with_check(each, entry_point, setup)) for each in value]
    elif isinstance(value, list) and value and all(_is_case(each) for each in value):
        found = [test for each in value for test in _of_case(each, entry_point, setup)]
    else:
        raise DataError(
            "the column `tests` must be a list of Python statements, Python code, a mapping with `inputs` "
            f"and `outputs`, or a list of mappings with `input` and `output`, not {str(value)[:60]!r}"
        )
    if not found:
        raise DataError("the column `tests` has no test")
    return tuple(found)


def _with_check(source: str, entry_point: str | None, setup: str | None) -> str:
    """Return a test after its setup, followed by the call of HumanEval's `check` if it is missing. Raises DataError."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"a test is not Python: {error}: {source[:60]!r}") from None
    defined = {each.name for each in body if isinstance(each, ast.FunctionDef)}
    made = (each.value.func for each in body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call))
    calls = {function.id for function in made if isinstance(function, ast.Name)}
    if "check" in defined and "check" not in calls:
        if not entry_point:
            raise DataError("a test defines check(candidate), and the row has no column `entry_point`")
        source = f"{source}\ncheck({entry_point})"
    return f"{setup}\n{source}" if setup else source


def _is_case(value: Any) -> bool:
    return isinstance(value, Mapping) and {"input", "output"} <= value.keys()


def _of_case(case: Mapping[str, Any], entry_point: str | None, setup: str | None) -> list[Test]:
    """Return a test of LiveCodeBench; the arguments of a functional one are JSON values, one on each line."""
    if case.get("testtype", "stdin") != "functional":
        return _of_pairs([case["input"]], [case["output"]], None, setup)
    if not entry_point:
        raise DataError("a functional test needs the column `entry_point`, the function's name")
    try:
        arguments = [json.loads(line) for line in str(case["input"]).splitlines() if line.strip()]
        expected = json.loads(case["output"]) if isinstance(case["output"], str) else case["output"]
    except ValueError as error:
        raise DataError(f"a functional test is not JSON: {error}") from None
    return [_call(entry_point, arguments, expected, setup)]


def _of_pairs(inputs: Any, outputs: Any, function: str | None, setup: str | None) -> list[Test]:
    """Return the tests of APPS. Raises DataError."""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError("`inputs` and `outputs` must be lists of equal length")
    if function is None:
        return [StdinTest(_lines(a), _lines(b)) for a, b in zip(inputs, outputs, strict=True)]
    if not all(isinstance(each, list) for each in inputs):
        raise DataError("with `fn_name` each entry of `inputs` must be a list of arguments")
    return [_call(function, a, b, setup) for a, b in zip(inputs, outputs, strict=True)]


def _lines(value: Any) -> str:
    """Return a text; a list stands for its lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _call(function: str, arguments: Sequence[Any], expected: Any, setup: str | None) -> AssertTest:
    """Return a test of one call. As in the datasets, a tuple equals a list, and a result may be wrapped in a list."""
    if not function.isidentifier():
        raise DataError(f"{function!r} is not the name of a function")
    source = f"_is_result(_function({function!r})(*{list(arguments)!r}), {expected!r})"
    return AssertTest(f"{setup}\nassert {source}" if setup else f"assert {source}")
