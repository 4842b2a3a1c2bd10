r"""Conversion of benchmarks' rows to problems.

Questions end with an instruction for the form of the answer that the score reads: `\boxed{...}`, or a block of Python.
The choices of a multiple-choice question are in an order that depends on their texts alone.
"""

import base64
import hashlib
import json
import pickletools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_ray.config.benchmarks import Benchmark
from grpo_ray.data.files import FileShard, check_tests, file_shards
from grpo_ray.data.problem import Problem, problem_id
from grpo_ray.errors import DataError

BOXED = r"Put the final answer in \boxed{}."
BOXED_LETTER = r"Put the letter of the right choice in \boxed{}."
PYTHON = "Answer with one block of Python."
IMPORTS = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, comb, floor, gcd, inf, sqrt"""
"""Imports that every program gets on the websites of LiveCodeBench's tasks."""
MAX_TESTS_BYTES = 1 << 28
"""Largest size of the tests of a problem after decompression."""
TEXT_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})
"""Instructions of a pickle of a single text, besides the text itself."""


@dataclass(frozen=True)
class Form:
    """Form of a benchmark's rows."""

    columns: Mapping[str, str]
    """Our column -> the file's."""
    make: Callable[[Problem], Problem]
    """Function that converts a row, already read as a problem with these columns, to the benchmark's problem."""

    @property
    def has_solution(self) -> bool:
        """True if rows have a solution; False if they have tests."""
        return "solution" in self.columns


def math(problem: Problem) -> Problem:
    """Return a mathematics problem; a solution without dollar signs is treated as LaTeX."""
    solution = problem.solution if "$" in problem.solution else f"${problem.solution}$"
    return _problem(problem, f"{_question(problem)}\n\n{BOXED}", solution)


def gpqa(problem: Problem) -> Problem:
    """Return a multiple-choice question of GPQA (arXiv 2311.12022)."""
    question = _question(problem)
    wrong = [str(problem.columns[f"Incorrect Answer {number}"]).strip() for number in (1, 2, 3)]
    right = problem.solution.strip()
    choices = sorted([right, *wrong], key=lambda each: hashlib.sha256(f"{question}\n{each}".encode()).digest())
    lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return _problem(problem, f"{question}\n\n{lettered}\n\n{BOXED_LETTER}", "ABCD"[choices.index(right)])


def humaneval(problem: Problem) -> Problem:
    """Return a function of HumanEval (arXiv 2107.03374) to complete, with its test."""
    code, entry_point = _question(problem), problem.columns["entry_point"]
    # Tests and completions may use what stands before the function.
    before = code.rpartition(f"def {entry_point}(")[0]
    tests = {
        "tests": problem.columns["tests"], "entry_point": entry_point, "setup": before or None,
        "preamble": before or None,
    }  # fmt: skip
    return _problem(
        problem, f"Complete the last function.\n\n```python\n{code.strip()}\n```\n\n{PYTHON}", columns=tests
    )


def mbpp(problem: Problem) -> Problem:
    """Return a task of MBPP (arXiv 2108.07732). As in the paper, the prompt has the tests, which name the function."""
    tests = list(problem.columns["tests"])
    prompt = f"{_question(problem)}\n\nYour code must pass these tests:\n\n" + "\n".join(tests)
    setup = problem.columns.get("setup") or None
    return _problem(
        problem,
        f"{prompt}\n\n{PYTHON}",
        columns={"tests": tests, "entry_point": None, "setup": setup, "preamble": None},
    )


def livecodebench(problem: Problem) -> Problem:
    """Return a task of LiveCodeBench (arXiv 2403.07974) with its public and private tests."""
    columns, starter = problem.columns, str(problem.columns.get("starter_code") or "").strip()
    entry_point = json.loads(columns.get("metadata") or "{}").get("func_name")
    tests = [*json.loads(columns["tests"]), *_private_tests(columns["private_test_cases"], problem.where)]
    if starter:
        form = f"Complete this code.\n\n```python\n{starter}\n```\n\n{PYTHON}"
    else:
        form = f"Read from standard input, and print to standard output. {PYTHON}"
    return _problem(problem, f"{_question(problem)}\n\n{form}", columns={
        "tests": json.dumps(tests), "entry_point": entry_point, "setup": None, "preamble": IMPORTS,
    })  # fmt: skip


_MATH = Form({"prompt": "problem", "solution": "answer"}, math)

FORMS: dict[str, Form] = {
    "math500": _MATH,
    "aime24": _MATH,
    "aime25": _MATH,
    "amc": _MATH,
    "olympiadbench": Form({"prompt": "question", "solution": "final_answer"}, math),
    "gpqa": Form({"prompt": "Question", "solution": "Correct Answer"}, gpqa),
    "humaneval": Form({"tests": "test"}, humaneval),
    "mbpp": Form({"prompt": "text", "tests": "test_list", "setup": "test_setup_code"}, mbpp),
    "livecodebench": Form({"prompt": "question_content", "tests": "public_test_cases"}, livecodebench),
}
"""Name of a benchmark -> form of its rows."""


@dataclass(frozen=True)
class BenchmarkShard:
    """Rows of one file of a benchmark."""

    file: FileShard
    benchmark: Benchmark
    system_prompt: str | None = None

    @property
    def num_rows(self) -> int:
        return self.file.num_rows

    def read(self) -> Iterator[Problem]:
        """Yield the shard's problems in the file's order. Raises DataError; the message names file and row."""
        form = FORMS[self.benchmark.name]
        for row in self.file.read():
            try:
                problem = form.make(row)
            except (KeyError, ValueError, TypeError) as error:
                raise DataError(f"{row.where}: no row of {self.benchmark.name} ({error!r:.200})") from None
            if not form.has_solution:
                check_tests(problem)
            problem = problem.of_source(self.benchmark.source)
            yield problem if self.system_prompt is None else problem.with_system_prompt(self.system_prompt)


def not_trained_on(benchmark: Benchmark) -> DataError:
    """Return the error of a benchmark that `data.train` names."""
    return DataError(f"{benchmark.name} is a benchmark and is not trained on; name it in data.heldout")


def benchmark_shards(benchmark: Benchmark, path: str, split: str, system_prompt: str | None) -> list[BenchmarkShard]:
    """Return the shards of a benchmark.

    Args:
        path: path or URI of its files.
        split: "heldout".

    Raises:
        DataError: `split` is "train", or the files cannot be read.
    """
    if split == "train":
        raise not_trained_on(benchmark)
    form = FORMS[benchmark.name]
    files = file_shards(path, form.columns)
    # Rows without a solution are different tasks even if their questions are equal.
    decide = not form.has_solution
    files = [replace(each, needs_solution=form.has_solution, columns_decide=decide) for each in files]
    return [BenchmarkShard(each, benchmark, system_prompt) for each in files]


def _question(problem: Problem) -> str:
    return problem.prompt[-1]["content"].strip()


def _problem(problem: Problem, prompt: str, solution: str = "", columns: Mapping[str, Any] | None = None) -> Problem:
    """Return a problem with this content in place of the row's.

    Its `question_id` stays that of the row, so that `grpo-ray check` finds rows that are also trained on.
    """
    messages = [{"role": "user", "content": prompt}]
    return Problem(
        id=problem_id(messages, solution, columns), prompt=messages, solution=solution, columns=columns or {},
        where=problem.where, question_id=problem.question_id,
    )  # fmt: skip


def _private_tests(text: str, where: str) -> list[Any]:
    """Return LiveCodeBench's private tests: JSON, or JSON in a pickled text, compressed by zlib, in base64.

    The pickle is parsed, never executed, and must hold a single text.

    Raises:
        DataError: they have another form, or are larger than MAX_TESTS_BYTES.
    """
    try:
        return list(json.loads(text))
    except ValueError:
        pass
    try:
        decompressor = zlib.decompressobj()
        pickled = decompressor.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
        if not decompressor.eof:
            raise ValueError(f"more than {MAX_TESTS_BYTES} bytes")
        instructions = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled)]
        (tests,) = (argument for name, argument in instructions if name not in TEXT_OPCODES)
        return list(json.loads(str(tests)))
    except (ValueError, TypeError, zlib.error) as error:
        raise DataError(f"{where}: 'private_test_cases' cannot be read ({error})") from None
