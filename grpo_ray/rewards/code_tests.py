"""Reward for programs: the tests of the problem that a program passes.

    rewards: {functions: [code_tests]}
    data: {train: mbpp.parquet, columns: {prompt: text, tests: test_list, setup: test_setup_code}}

The forms of tests are in `data/program_tests.py`; how programs run, and why none can print its own verdict, in
`code/grading.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from grpo_ray.data.program_tests import Test, parse_tests
from grpo_ray.errors import DataError, RewardError
from grpo_ray.rewards.code.grading import CodeGrader, Limits, ProgramVerdict, shared_code_grader, usual_parallel
from grpo_ray.rewards.code.program_text import program_of
from grpo_ray.rewards.completions import Completion, completion_text


class CodeTests:
    """Reward for a program that passes the tests in the column `tests`: 1.0 if it passes all, else 0.0.

    The program is the last fenced block of Python in the completion. A row without tests gives None.
    """

    def __init__(
        self,
        *,
        partial: bool = False,
        cpu_seconds: float = 5.0,
        memory_gib: float = 1.0,
        isolation: str = "required",
        parallel: int | None = None,
    ) -> None:
        """
        Args:
            partial: reward the share of the passed tests in place of 1.0 for all and 0.0 otherwise. Programs that print
                one constant then earn something.
            cpu_seconds: CPU time of the program in one test; CPU time, so that verdicts do not depend on the load of
                the machine. A program that waits is ended after ten times this time, plus 10 s.
            memory_gib: memory of the program's processes.
            isolation: as `rollout.isolation`.
            parallel: programs that run at the same time on a worker. None: one for each of its cores.

        Raises:
            RewardError: a setting is not allowed.
        """
        if not (0 < cpu_seconds <= 600 and memory_gib >= 0.25):
            raise RewardError(
                "rewards.settings.code_tests: cpu_seconds must be above 0 and at most 600, and memory_gib at least 0.25"
            )
        if isolation not in ("required", "best", "none"):
            raise RewardError("rewards.settings.code_tests.isolation must be required, best or none")
        self.partial = partial
        self.limits = Limits(cpu_seconds, memory_gib, isolation, parallel or usual_parallel())

    def begin(self, completion: Completion, row: Mapping[str, Any]) -> "Future[ProgramVerdict] | None":
        """Start grading a completion while others are still sampled; the reward then finds its verdict ready.

        Args:
            row: columns of the problem.
        """
        if row.get("tests") is None:
            return None
        tests = read_tests(row["tests"], row.get("entry_point"), row.get("setup"))
        return self._grader.submit(whole_program(completion, row.get("preamble")), tests)

    def __call__(
        self,
        completions: Sequence[Completion],
        tests: Sequence[Any] | None = None,
        entry_point: Sequence[str | None] | None = None,
        setup: Sequence[str | None] | None = None,
        preamble: Sequence[str | None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Return the reward of each completion.

        Args:
            tests: column with the tests of each problem; None in a row to which the reward does not apply.
            entry_point: column with the name of the tested function, for tests that need it.
            setup: column with Python code that runs before each test of a function.
            preamble: column with Python code that stands before the program, such as the functions of its question.
            log_metric: receives `reward/code_tests_passed_share` (mean share of passed tests) and
                `reward/code_tests_timeout_share` (share of tests that hit the time limit).

        Raises:
            RewardError: the problems have no column `tests`, a test has an unknown form, or no process can run.
        """
        if tests is None:
            raise RewardError("code_tests: the problems have no column `tests`; name it with data.columns")
        nothing = [None] * len(completions)
        parsed: list[tuple[Test, ...] | None] = [
            None if each is None else read_tests(each, name, code)
            for each, name, code in zip(tests, entry_point or nothing, setup or nothing, strict=True)
        ]
        futures = [
            None if each is None else self._grader.submit(whole_program(completion, before), each)
            for completion, before, each in zip(completions, preamble or nothing, parsed, strict=True)
        ]
        verdicts = [None if future is None else future.result() for future in futures]
        graded = [verdict for verdict in verdicts if verdict is not None]
        if log_metric is not None and graded:
            count = sum(len(verdict.passed) for verdict in graded)
            log_metric("reward/code_tests_passed_share", sum(verdict.share for verdict in graded) / len(graded))
            log_metric("reward/code_tests_timeout_share", sum(verdict.timeouts for verdict in graded) / count)
        return [
            None if verdict is None else verdict.share if self.partial else float(all(verdict.passed))
            for verdict in verdicts
        ]

    @property
    def _grader(self) -> CodeGrader:
        return shared_code_grader(self.limits)


def whole_program(completion: Completion, preamble: str | None) -> str:
    """Return the program of a completion after its preamble; "" without a program."""
    program = program_of(completion_text(completion))
    return f"{preamble}\n\n{program}" if preamble and program else program


def read_tests(tests: Any, entry_point: str | None, setup: str | None) -> tuple[Test, ...]:
    """Return the tests of a problem; see `parse_tests`. Raises RewardError."""
    try:
        return parse_tests(tests, entry_point, setup)
    except DataError as error:
        raise RewardError(f"code_tests: {error}") from None
