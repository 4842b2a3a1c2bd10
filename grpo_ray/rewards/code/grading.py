"""Grading of programs: their processes in the sandbox of the Python tool, and the rounds of tests and calls.

The program runs in the confined interpreter of the Python tool (`program_driver.py`), the tests of functions in another
process (`assertions.py`), and outputs are compared here. The program's interpreter gets inputs and arguments, but never
the expected results, so that no program can print, return or read its own verdict.
"""

import atexit
import base64
import hashlib
import inspect
import json
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_ray.data.program_tests import AssertTest, StdinTest, Test
from grpo_ray.errors import RewardError, ToolError
from grpo_ray.processes.limited_process import StartError
from grpo_ray.rewards.code import program_driver, values
from grpo_ray.rewards.code.assertions import call_key, checker
from grpo_ray.rewards.code.program_driver import MARK, output_hash, wall_limit
from grpo_ray.tools.definitions import NO_TOOLS, RolloutDefinition
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits

PYTHON = "grpo_ray.tools.python_tool:python"
CALLS_AT_ONCE = 500
INPUTS_AT_ONCE = 10
MAX_ROUNDS = 64
"""Rounds of calls after which a test that still needs another call has failed."""
MAX_TIMEOUTS = 2
"""Inputs, or calls of tests, that may hit the time limit; all later ones count as if they did, and are not run."""
MAX_RESULT_CHARS = 32 << 20
"""Characters of JSON of all results of a program's calls; further results are not kept, and fail their tests."""
CACHE_SIZE = 8_192


@dataclass(frozen=True)
class Limits:
    """Limits of the processes of one program."""

    cpu_seconds: float
    """CPU time of one test."""
    memory_gib: float
    isolation: str
    parallel: int
    """Programs that run at the same time on this worker."""

    @property
    def wall_seconds(self) -> float:
        """Time limit of one interpreter, for programs that evade the limits of their processes."""
        return 60.0 + (MAX_TIMEOUTS + 1) * wall_limit(self.cpu_seconds) + INPUTS_AT_ONCE * self.cpu_seconds

    def program_seconds(self, tests: int) -> float:
        """Time limit of all interpreters of a program together: a program decides how many of them its calls need.

        The limit of one interpreter covers starts and timeouts. Twice the CPU time of each test leaves time to an
        honest program that needs nearly all of it, while other processes use the cores too.

        Args:
            tests: number of the program's tests.
        """
        return self.wall_seconds + 2 * self.cpu_seconds * tests


@dataclass(frozen=True)
class ProgramVerdict:
    """Outcome of a program's tests."""

    passed: tuple[bool, ...]
    """One for each test."""
    timeouts: int
    """Tests that hit the limit of CPU or wall time."""

    @property
    def share(self) -> float:
        """Share of the tests that the program passes, 0 to 1."""
        return sum(self.passed) / len(self.passed)


@dataclass
class ProgramRun:
    """Processes of a program that is graded, and their limits over all of its tests."""

    program: str
    episode: Any
    seconds: float
    """Time that its interpreters may still take."""
    result_chars: int
    """Characters that the results of its further calls may have."""


class CodeGrader:
    """Grader of one process. Its methods may be called from any thread; processes start with the first program."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pool = EpisodePool(
            RolloutDefinition((PYTHON,), NO_TOOLS, {}, {}),
            SandboxLimits(
                time_limit=limits.wall_seconds,
                memory_bytes=int(limits.memory_gib * 2**30),
                isolation=limits.isolation,
            ),
        )
        self._threads = ThreadPoolExecutor(limits.parallel, thread_name_prefix="code-tests")
        self._verdicts: OrderedDict[bytes, Future[ProgramVerdict]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, program: str, tests: tuple[Test, ...]) -> Future[ProgramVerdict]:
        """Start grading a program, or return the future of the same grading from the cache."""
        # A digest, so that the cache does not keep megabytes of tests alive.
        key = hashlib.blake2b(repr((program, tests)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            future = self._verdicts.get(key)
            if future is None or (future.done() and future.exception() is not None):
                future = self._verdicts[key] = self._threads.submit(self.grade, program, tests)
                if len(self._verdicts) > CACHE_SIZE:
                    self._verdicts.popitem(last=False)
        return future

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        checker.close()

    def grade(self, program: str, tests: Sequence[Test]) -> ProgramVerdict:
        """Run a program on its tests.

        Raises:
            RewardError: no process for programs can run here.
        """
        # The program is compiled in its interpreter only: compiling untrusted text can crash or use all memory.
        if not program:
            return ProgramVerdict((False,) * len(tests), 0)
        episode = self._pool.open(None, 0, {}, 0)
        run = ProgramRun(program, episode, self.limits.program_seconds(len(tests)), MAX_RESULT_CHARS)
        try:
            of_outputs = self._run_on_inputs(run, [each for each in tests if isinstance(each, StdinTest)])
            of_calls = self._run_assertions(run, [each for each in tests if isinstance(each, AssertTest)])
        except (ToolError, StartError) as error:
            raise RewardError(f"code_tests: {error}") from None
        finally:
            episode.close()
        outputs, calls = iter(of_outputs[0]), iter(of_calls[0])
        passed = tuple(next(outputs) if isinstance(each, StdinTest) else next(calls) for each in tests)
        return ProgramVerdict(passed, of_outputs[1] + of_calls[1])

    def _run_on_inputs(self, run: ProgramRun, tests: Sequence[StdinTest]) -> tuple[list[bool], int]:
        passed, timeouts = [False] * len(tests), 0
        for first in range(0, len(tests), INPUTS_AT_ONCE):
            if timeouts >= MAX_TIMEOUTS or run.seconds <= 0:
                return passed, timeouts + len(tests) - first
            part = tests[first : first + INPUTS_AT_ONCE]
            asked = [each.input for each in part]
            results, rest = self._run(run, inputs=asked, max_timeouts=MAX_TIMEOUTS - timeouts)
            if not results:  # the interpreter has reached its own limit, or the program has broken it
                return passed, timeouts + 1
            for number, test in enumerate(part):
                result = results.get(number, {"status": rest})
                passed[first + number] = result.get("hash") == output_hash(test.output)
                timeouts += result.get("status") == "timeout"
        return passed, timeouts

    def _run_assertions(self, run: ProgramRun, tests: Sequence[AssertTest]) -> tuple[list[bool], int]:
        """Run the tests of functions, in rounds: make the calls that they need, then run them again."""
        known: dict[str, Any] = {}
        open_tests, passed = dict(enumerate(tests)), [False] * len(tests)
        keys: list[set[str]] = [set() for _ in tests]
        """Calls of each test."""
        unlisted: set[int] = set()
        """Tests whose further calls cannot be listed, because the listing exceeds the limits of a test."""
        for _ in range(MAX_ROUNDS):
            calls = []
            for number, test in list(open_tests.items()):
                # Not the results of other tests: a program of many tests with large results would take minutes.
                results = {key: known[key] for key in keys[number] if key in known}
                outcome = self._ask_checker(test, results)
                if not isinstance(outcome, dict):
                    passed[number] = outcome is True
                    del open_tests[number]
                    continue
                own = [outcome]
                further = None if number in unlisted else self._ask_checker(test, results, only_list=True)
                if further is None:
                    unlisted.add(number)
                else:
                    own += further
                keys[number].update(map(call_key, own))
                calls += own
            if not open_tests:
                break
            self._make_calls(run, calls, known)
        late = {key for key, result in known.items() if result.get("status") == "timeout"}
        # A passed test may have such a call among those that were listed ahead, without having needed it.
        return passed, sum(not has and not late.isdisjoint(own) for has, own in zip(passed, keys, strict=True))

    def _ask_checker(self, test: AssertTest, results: Mapping[str, Any], only_list: bool = False) -> Any:
        """Return the checker's answer; None if the test exceeds its limits.

        Args:
            results: known results of the test's calls.
        """
        answer = checker.ask(json.dumps([test.source, results, only_list]).encode("utf-8", "surrogatepass"))
        return None if answer is None else json.loads(answer)

    def _make_calls(self, run: ProgramRun, calls: Sequence[Any], known: dict[str, Any]) -> None:
        """Make calls of the program's functions, and add their results to `known`."""
        waiting = [call for key, call in {call_key(call): call for call in calls}.items() if key not in known]
        timeouts = sum(result.get("status") == "timeout" for result in known.values())  # of earlier rounds
        while waiting:
            if timeouts >= MAX_TIMEOUTS or run.seconds <= 0:
                known |= {call_key(call): {"status": "timeout"} for call in waiting}
                return
            part = waiting[:CALLS_AT_ONCE]
            results, rest = self._run(run, calls=part, max_timeouts=MAX_TIMEOUTS - timeouts)
            is_cut = rest == program_driver.CUT and bool(results)  # with a result in each turn, so that the loop ends
            done = [number for number in range(len(part)) if number in results or not is_cut]
            for number in done:
                result = results.get(number, {"status": rest or "crash"})
                timeouts += result.get("status") == "timeout"
                run.result_chars -= len(json.dumps(result))
                if run.result_chars < 0:
                    result = {"status": "timeout" if result.get("status") == "timeout" else "output"}
                known[call_key(part[number])] = result
            waiting = [call for number, call in enumerate(part) if number not in done] + waiting[CALLS_AT_ONCE:]

    def _run(self, run: ProgramRun, **asked: Any) -> tuple[dict[int, Any], str]:
        """Run the driver in a new interpreter; return its results by number, and the status of the missing ones."""
        request = json.dumps({"program": run.program, "cpu_seconds": self.limits.cpu_seconds, **asked})
        called = run.episode.call("python", {"code": f"{_driver()}\nmain({request!r})\n"}).result()
        run.seconds -= called.seconds
        results, rest = read_results(called.text or "", len(asked.get("inputs") or asked["calls"]))
        return results, "timeout" if called.status == "timeout" else rest


def read_results(text: str, asked: int) -> tuple[dict[int, Any], str]:
    """Read the driver's results by number; skip lines that are not valid results, since any may be forged or cut.

    Args:
        asked: number of inputs or calls.
    """
    results: dict[int, Any] = {}
    rest = ""
    for line in text.split(MARK)[1:]:
        try:
            result = json.loads(line.partition("\n")[0])
            if "rest" in result:
                rest = str(result["rest"])
                continue
            number = result["number"]
            if "packed" in result:
                result = _unpack(result["packed"])
            if "value" in result:  # a value that cannot be decoded is not a result
                values.decode(result["value"])
                values.decode(result.get("args"))
            json.dumps(result)
        except Exception:  # untrusted: a program can write any text, and no text may end the run
            continue
        if isinstance(result, dict) and type(number) is int and 0 <= number < asked:
            results.setdefault(number, result)
    return results, rest


def _unpack(packed: str) -> Any:
    """Return a compressed result. Raises ValueError or zlib.error if it is malformed, or larger than 1 MiB."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b85decode(packed), 1 << 20)
    if unpacker.unconsumed_tail:
        raise ValueError("too long")
    return json.loads(data)


@lru_cache(maxsize=1)
def _driver() -> str:
    """Return the source of the driver and of the values that it exchanges, without their imports of grpo_ray."""
    sources = [inspect.getsource(values), inspect.getsource(program_driver)]
    lines = [line for source in sources for line in source.splitlines() if not line.startswith("from grpo_ray.")]
    return "\n".join(lines)


@lru_cache(maxsize=4)
def shared_code_grader(limits: Limits) -> CodeGrader:
    """Return this process's grader for these limits; its processes end with this process."""
    grader = CodeGrader(limits)
    atexit.register(grader.close)
    return grader


def usual_parallel() -> int:
    """Return the number of programs that run at the same time by default: one for each core of this process."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
