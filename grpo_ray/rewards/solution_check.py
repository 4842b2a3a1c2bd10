r"""Check that solutions can be rewarded: each is graded as an answer to its own problem and to another problem.

A completion with `\boxed{<the solution>}` or `The answer is $<the solution>$` must be right; one with the solution of
the next problem must be wrong. `answer_kind` classifies solutions, so that gaps in coverage can be located.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.rewards.math.extract import solution_text
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.rewards.math.structure import Leaf, Relation
from grpo_ray.rewards.math.verify import parse_solution
from grpo_ray.rewards.math.words import is_boolean, same_choice
from grpo_ray.rewards.sandbox.pool import VerifierPool

SET = "set, interval or tuple"
KINDS = ("number", "fraction", "expression", SET, "equation", "boolean", "word", "choice letter", "text")
"""Kinds that `answer_kind` returns. A boolean can be guessed; a text can hardly be compared."""
EXCERPT = 60
"""Characters of a solution that are shown in a report."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:\\%)?")
_FRACTION = re.compile(r"[-+]?(?:\d*\\frac(?:\d|\{-?\d+\})(?:\d|\{-?\d+\})|\d+/\d+)")


@dataclass(frozen=True)
class Coverage:
    """Verification results of one kind or topic of solutions."""

    problems: int
    verified: int
    """Problems whose own solution is graded as right."""
    seconds: float
    """Mean seconds per verdict."""


@dataclass(frozen=True)
class Unverifiable:
    """A problem whose own solution is not graded as right."""

    id: str
    solution: str
    """The first `EXCERPT` characters."""
    reason: str
    """`cannot be parsed`, `not equal to itself`, or the verdict's status: timeout, memory, crash, error."""


@dataclass(frozen=True)
class AcceptedWrongAnswer:
    """A problem for which another problem's solution, written differently, is graded as right.

    The two solutions may be equal, so check these pairs by eye.
    """

    id: str
    solution: str
    """The first `EXCERPT` characters."""
    answer: str
    """The other problem's solution."""


class VerificationCounts(TypedDict):
    """Result of `verify_solutions`, in JSON types."""

    verified: int
    """Problems checked."""
    boxed: int
    """Own solutions graded as right in a box."""
    formula: int
    """Own solutions graded as right after `The answer is`."""
    probes: int
    """Other problems' solutions graded; those written like the problem's own are left out."""
    unverifiable: list[dict[str, str]]
    """Fields of `Unverifiable`."""
    fooled: list[dict[str, str]]
    """Fields of `AcceptedWrongAnswer`."""
    kinds: dict[str, list[float]]
    """Sums per kind: [problems, verified, verdicts, seconds]."""
    topics: dict[str, list[float]]
    """The same per value of the column `topic`."""


def answer_kind(solution: str) -> str:
    """Return the kind of a raw solution: one of `KINDS`. An inequality is an equation."""
    if is_boolean(solution):
        return "boolean"
    gold = parse_solution(solution)
    if gold is None:
        return "text"
    if gold.word is not None:
        return "word"
    if same_choice(gold.text, gold.text) is not None:
        return "choice letter"
    if isinstance(gold.structure, Relation):
        return SET if r"\in" in gold.structure.operators else "equation"
    if not isinstance(gold.structure, Leaf) or gold.value == r"\emptyset":
        return SET
    value = strip_spacing(gold.value)
    if _NUMBER.fullmatch(value):
        return "number"
    if _FRACTION.fullmatch(value):
        return "fraction"
    return "text" if r"\text{" in value else "expression"


def stated_answer(solution: str) -> str:
    """Return a solution's answer without dollar signs, as a completion would write it in a box."""
    return re.sub(r"(?<!\\)\$", "", solution_text(solution)).strip()


def boxed_completion(answer: str) -> str:
    """Return a completion that gives this answer in a box."""
    return rf"The answer is \boxed{{{answer}}}."


def verify_solutions(pairs: Iterable[tuple[Problem, Problem]], rewards: RewardsConfig) -> VerificationCounts:
    """Grade each problem's own solution, which must be right, and its neighbour's, which must be wrong.

    Args:
        pairs: Each problem with another problem.
        rewards: `time_limit` and `strict` are used.

    Raises:
        VerifierError: No verifier process can run.
    """
    counts = VerificationCounts(
        verified=0, boxed=0, formula=0, probes=0, unverifiable=[], fooled=[], kinds={}, topics={}
    )
    # One process and one problem at a time, so that the time of a verdict includes no other problem's.
    with VerifierPool(processes=1, time_limit=rewards.time_limit, strict=rewards.strict) as pool:
        # The first verdict waits for the start of the process and the import of sympy; it is not timed.
        pool.grade([(boxed_completion(r"\frac{2}{4}"), "$0.5$")])
        for problem, neighbour in pairs:
            _verify_problem(pool, problem, neighbour, counts)
    return counts


def _verify_problem(pool: VerifierPool, problem: Problem, neighbour: Problem, counts: VerificationCounts) -> None:
    """Grade one problem's own and its neighbour's solution, and add the results to the counts."""
    solution, answer, other = problem.solution, stated_answer(problem.solution), stated_answer(neighbour.solution)
    items = [(boxed_completion(answer), solution), (f"The answer is ${answer}$.", solution)]
    if strip_spacing(normalize_latex(other)) != strip_spacing(normalize_latex(answer)):
        items.append((boxed_completion(other), solution))
    started = time.perf_counter()
    in_box, in_formula, *probe = pool.grade(items)
    seconds = time.perf_counter() - started
    verified = 1.0 in (in_box.reward, in_formula.reward)
    counts["verified"] += 1
    counts["boxed"] += in_box.reward == 1.0
    counts["formula"] += in_formula.reward == 1.0
    counts["probes"] += len(probe)
    if probe and probe[0].reward == 1.0:
        accepted = AcceptedWrongAnswer(problem.id, solution[:EXCERPT], neighbour.solution[:EXCERPT])
        counts["fooled"].append(asdict(accepted))
    if not verified:
        reason = "cannot be parsed" if in_box.reward is None else "not equal to itself"
        reason = reason if in_box.status == "ok" else in_box.status
        counts["unverifiable"].append(asdict(Unverifiable(problem.id, solution[:EXCERPT], reason)))
    added = (1, int(verified), len(items), seconds)
    _add_sums(counts["kinds"], answer_kind(solution), added)
    if problem.columns.get("topic") is not None:
        _add_sums(counts["topics"], str(problem.columns["topic"]), added)


def _add_sums(table: dict[str, list[float]], name: str, added: Sequence[float]) -> None:
    """Add [problems, verified, verdicts, seconds] to a row of a table."""
    table[name] = [a + b for a, b in zip(table.get(name, (0, 0, 0, 0.0)), added, strict=True)]


def merge_coverage(tables: Iterable[Mapping[str, Sequence[float]]], order: Sequence[str] = ()) -> dict[str, Coverage]:
    """Merge the sums of several calls of `verify_solutions` into the coverage of each kind or topic.

    Args:
        tables: `kinds` or `topics` of each call.
        order: Names in the order of the result; without it, the largest first.
    """
    totals: dict[str, list[float]] = {}
    for table in tables:
        for name, sums in table.items():
            _add_sums(totals, name, sums)
    names = [name for name in order if name in totals] or sorted(totals, key=lambda name: (-totals[name][0], name))
    return {
        name: Coverage(int(problems), int(verified), seconds / verdicts)
        for name in names
        for problems, verified, verdicts, seconds in [totals[name]]
    }
