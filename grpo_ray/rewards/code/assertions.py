"""Process that runs the tests of functions, with stand-ins in place of the program's functions.

The tests and their expected values are in this process only; the program runs in another one. A test is run in rounds,
since the program's results become known step by step:

1. The test is run. For a call whose result is known, the stand-in returns that result. At the first other call the run
   ends.
2. The test is run once more to list all further calls that it needs. Their results are unknown: every operation on one
   gives another unknown value, and no assertion fails.
3. The program makes these calls elsewhere, and the next round begins, until the test needs no further call.
"""

import ast
import builtins
import contextlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from grpo_ray.processes.limited_process import LimitedProcess, cpu_limit, serve
from grpo_ray.rewards.code.values import NotPlainError, decode, encode

CPU_SECONDS = 5.0
"""CPU time of one test, without the program's functions."""
MEMORY_BYTES = 1 << 30
MAX_CALLS = 2_000
"""Calls that are listed at once."""
TOLERANCE = 1e-6
"""Relative and absolute difference up to which two numbers in results count as equal."""

checker = LimitedProcess("grpo_ray.rewards.code.assertions", needs="grpo_ray")


class NeedCall(BaseException):
    """Call whose result is not known. A BaseException, so that `except Exception` in a test does not catch it."""

    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.call = call


_ENDS_ITERATION = (StopIteration, StopAsyncIteration)


class ProgramError(Exception):
    """Stand-in for an exception of the program that is not a usual built-in one, or for a call without a result."""


def call_key(call: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal calls."""
    return json.dumps([call["path"], call["args"], call["kwargs"]], sort_keys=True)


def main(descriptor: int) -> None:
    """Answer requests until the connection closes. `descriptor` is the process's end of it."""
    serve(descriptor, _answer, MEMORY_BYTES)


def _answer(request: bytes) -> bytes:
    source, known, only_list = json.loads(request)
    random.seed(0)  # a test with random arguments must make the same calls each time that it is run
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    with cpu_limit(CPU_SECONDS):
        answer: Any = list_calls(source, known) if only_list else run_test(source, known)
    return json.dumps(answer).encode()


def run_test(source: str, known: Mapping[str, Any]) -> bool | dict[str, Any]:
    """Run a test; return True if the program passes it, False if not, or the first call whose result is not known.

    Args:
        known: key of a call -> its result: `value` and `args` (the arguments after the call), or `error`.
    """
    tree = ast.parse(source)
    try:
        exec(compile(tree, "<test>", "exec", dont_inherit=True), _namespace(tree, Calls(known)))
    except NeedCall as need:
        return need.call
    except BaseException:  # a failed assertion, or an exception of the program that the test does not expect
        return False
    return True


def list_calls(source: str, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a test whose results are not known, but whose arguments are."""
    tree = ast.fix_missing_locations(_WithoutAssertions().visit(ast.parse(source)))
    calls = Calls(known, needed={})
    with contextlib.suppress(BaseException):  # a test may raise anything on unknown values; the calls so far count
        exec(compile(tree, "<test>", "exec", dont_inherit=True), _namespace(tree, calls))
    return list((calls.needed or {}).values())


def _namespace(tree: ast.Module, calls: "Calls") -> dict[str, Any]:
    """Return the namespace of a test, with stand-ins for all names that the test reads but does not define."""
    free, classes = free_names(tree)
    free = free or called_builtins(tree)
    if checked := checked_function(tree):
        free &= {checked}  # otherwise the program could supply helpers of the test
    namespace: dict[str, Any] = {"__name__": "test", "_is_result": is_result}
    namespace |= {name: StandIn([name], calls, is_class=name in classes) for name in free}
    return namespace | {"_function": lambda name: StandIn([name], calls)}


class _WithoutAssertions(ast.NodeTransformer):
    """Replacement of each assertion by its condition, whose value and exceptions are ignored."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        return ast.Try([ast.Expr(node.test)], [handler], [], [])


class Unknown:
    """Result of a call that is not known."""

    def __getattr__(self, name: str) -> "Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Unknown":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _give_unknown(self: Unknown, *args: Any) -> Unknown:
    return self


_OPERATIONS = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs invert and rand or ror xor
rxor lshift rshift getitem round
"""
for _name in _OPERATIONS.split():
    setattr(Unknown, f"__{_name}__", _give_unknown)
for _name in ("lt", "le", "gt", "ge", "ne", "contains", "bool"):
    setattr(Unknown, f"__{_name}__", lambda self, *args: True)


@dataclass
class Calls:
    """Calls of a program's functions by a test."""

    known: Mapping[str, Any]
    needed: dict[str, dict[str, Any]] | None = None
    """Calls whose results are not known; None if the first one ends the test."""

    def make(self, call: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """Return the result of a call, or raise the program's exception; apply the program's changes to `args`."""
        key = call_key(call)
        result = self.known.get(key)
        if result is None:
            if self.needed is None or len(self.needed) >= MAX_CALLS:
                raise NeedCall(call)
            self.needed[key] = call
            return Unknown()
        if "value" not in result:
            kind = getattr(builtins, str(result.get("error")), ProgramError)
            # A StopIteration could silently end a loop of the test, and so skip the loop's checks.
            is_usual = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_ITERATION)
            raise kind() if is_usual else ProgramError()
        if "args" in result:
            _write_back(args, decode(result["args"]))
        return decode(result["value"])


class StandIn:
    """Stand-in of a function, class, instance or method of the program."""

    def __init__(self, path: list[Any], calls: Calls, is_class: bool = False) -> None:
        """
        Args:
            path: name of a function; or name of a class, arguments of an instance, and name of a method.
            is_class: True if calling it makes an instance.
        """
        self._path, self._calls, self._is_class = path, calls, is_class

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        nothing = {"args": encode(()), "kwargs": encode({})}
        return StandIn([self._path[0], self._path[1] if len(self._path) > 1 else nothing, name], self._calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            given = {"args": encode(args), "kwargs": encode(kwargs)}
        except NotPlainError:
            if self._calls.needed is None:
                raise
            return Unknown()  # an argument is unknown
        if self._is_class:
            return StandIn([self._path[0], given], self._calls)
        return self._calls.make({"path": self._path, **given}, args)


def _write_back(before: tuple[Any, ...], after: Any) -> None:
    """Give the test's lists and mappings the contents that the program has left in them."""
    if not isinstance(after, tuple | list) or len(after) != len(before):
        return
    for own, new in zip(before, after, strict=True):
        if isinstance(own, list) and isinstance(new, list):
            own[:] = new
        elif (isinstance(own, dict) and isinstance(new, dict)) or (isinstance(own, set) and isinstance(new, set)):
            own.clear()
            own.update(new)


@cache
def _builtin_names() -> frozenset[str]:
    return frozenset(dir(builtins)) | {"__name__", "_is_result", "_function"}


def free_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a test reads but does not define, which are the program's, and those of them for classes.

    A name is that of a class if an attribute of its call is used: `Solution().solve(1)`.
    """
    read: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    free = read - bound - _builtin_names()
    attributes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    called = (value.func for value in attributes if isinstance(value, ast.Call))
    return free, free & {function.id for function in called if isinstance(function, ast.Name)}


def checked_function(tree: ast.Module) -> str | None:
    """Return the function that a test in the form of HumanEval is about: f in `check(f)`; None for other tests."""
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    last = tree.body[-1].value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if not defines or not isinstance(last, ast.Call) or len(last.args) != 1:
        return None
    is_check = isinstance(last.func, ast.Name) and last.func.id == "check"
    return last.args[0].id if is_check and isinstance(last.args[0], ast.Name) else None


def called_builtins(tree: ast.Module) -> set[str]:
    """Return the first builtin that a test calls, as a set; empty if it calls none.

    For a test that names no other function: the program then redefines a builtin, as for MBPP's
    `assert sum(10, 15) == 6`. All further builtins are Python's own.
    """
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = [function.id for function in calls if isinstance(function, ast.Name) and hasattr(builtins, function.id)]
    return set(names[:1])


def is_result(result: Any, expected: Any) -> bool:
    """Return True if the result of a call is the expected one, by the rules of APPS and LiveCodeBench.

    Tuples equal lists, numbers are equal within `TOLERANCE`, and the expected value may be wrapped in a list.
    """
    equal: Callable[[Any, Any], bool] = _are_equal
    return equal(result, expected) or (isinstance(expected, list) and len(expected) == 1 and equal(result, expected[0]))


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        # In JSON every key is a text.
        mine, theirs = ({str(key): value for key, value in each.items()} for each in (a, b))
        return mine.keys() == theirs.keys() and all(_are_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) or isinstance(b, float):
        both = isinstance(a, int | float) and isinstance(b, int | float)
        return both and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)
