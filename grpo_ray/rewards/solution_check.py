r"""Is a problem's solution one that can be rewarded? Each is held against itself, and against another problem's.

A completion that says `\boxed{<the solution>}` or `The answer is $<the solution>$` must be right; one that says the
solution of the next problem must be wrong. `kind_of` names what kind of answer a solution asks for, so that a gap shows
where it is.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.rewards.math.extract import solution_text
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.rewards.math.structure import Chain, Leaf
from grpo_ray.rewards.math.verify import parse_solution
from grpo_ray.rewards.math.words import is_boolean, same_choice
from grpo_ray.rewards.sandbox.pool import VerifierPool

SET = "set, interval or tuple"
KINDS = ("number", "fraction", "expression", SET, "equation", "boolean", "word", "choice letter", "text")
"""What `kind_of` tells apart: booleans can be guessed, and of texts a comparison can say little."""
EXCERPT = 60
"""Characters of a solution that are shown."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:\\%)?")
_FRACTION = re.compile(r"[-+]?(?:\d*\\frac(?:\d|\{-?\d+\})(?:\d|\{-?\d+\})|\d+/\d+)")


@dataclass(frozen=True)
class Coverage:
    """How the solutions of one kind or topic fared."""

    problems: int
    verified: int
    """Those whose own solution is rewarded."""
    seconds: float
    """Mean time of one verdict."""


@dataclass(frozen=True)
class Unverifiable:
    """A problem whose own solution is not rewarded."""

    id: str
    solution: str
    """Its first characters."""
    reason: str
    """`not understood`, `not equal to itself`, or the limit that was hit: timeout, memory, crash, error."""


@dataclass(frozen=True)
class AcceptedWrongAnswer:
    """A problem that another row's solution solves, in different words. They may well be equal: look."""

    id: str
    solution: str
    answer: str
    """The other row's solution."""


def kind_of(solution: str) -> str:
    """What kind of answer a raw solution asks for: one of `KINDS`. An inequality counts as an equation."""
    if is_boolean(solution):
        return "boolean"
    stated = parse_solution(solution)
    if stated is None:
        return "text"
    if stated.word is not None:
        return "word"
    if same_choice(stated.text, stated.text) is not None:
        return "choice letter"
    if isinstance(stated.shape, Chain):
        return SET if r"\in" in stated.shape.ops else "equation"
    if not isinstance(stated.shape, Leaf) or stated.value == r"\emptyset":
        return SET
    value = strip_spacing(stated.value)
    if _NUMBER.fullmatch(value):
        return "number"
    if _FRACTION.fullmatch(value):
        return "fraction"
    return "text" if r"\text{" in value else "expression"


def stated_answer(solution: str) -> str:
    """A solution's answer as a completion would write it into a box: without its dollars."""
    return re.sub(r"(?<!\\)\$", "", solution_text(solution)).strip()


def boxed(answer: str) -> str:
    """A completion that gives this answer."""
    return rf"The answer is \boxed{{{answer}}}."


def verify_solutions(pairs: Iterable[tuple[Problem, Problem]], rewards: RewardsConfig) -> dict[str, Any]:
    """Hold each problem's solution against itself, and against that of the problem beside it.

    Gives what JSON can hold: counts, the rows worth a look, and sums for each kind and topic as
    [problems, verified, verdicts, seconds]. Raises VerifierError as the pool does.
    """
    found: dict[str, Any] = {"verified": 0, "boxed": 0, "formula": 0, "probes": 0}
    found |= {"unverifiable": [], "fooled": [], "kinds": {}, "topics": {}}
    # One item after the other in one process: only so the time between question and verdict is the verdict's own.
    with VerifierPool(processes=1, limit_seconds=rewards.time_limit, strict=rewards.strict) as pool:
        pool.score([(boxed(r"\frac{2}{4}"), "$0.5$")])  # the first verdict waits for the process and for sympy
        for problem, neighbour in pairs:
            _verify(pool, problem, neighbour, found)
    return found


def _verify(pool: VerifierPool, problem: Problem, neighbour: Problem, found: dict[str, Any]) -> None:
    """Add one problem to what was found."""
    solution, answer, other = problem.solution, stated_answer(problem.solution), stated_answer(neighbour.solution)
    items = [(boxed(answer), solution), (f"The answer is ${answer}$.", solution)]
    if strip_spacing(normalize_latex(other)) != strip_spacing(normalize_latex(answer)):
        items.append((boxed(other), solution))
    begun = time.perf_counter()
    in_box, in_formula, *probe = pool.score(items)
    seconds = time.perf_counter() - begun
    verified = 1.0 in (in_box.reward, in_formula.reward)
    found["verified"] += 1
    found["boxed"] += in_box.reward == 1.0
    found["formula"] += in_formula.reward == 1.0
    found["probes"] += len(probe)
    if probe and probe[0].reward == 1.0:
        found["fooled"].append(
            asdict(AcceptedWrongAnswer(problem.id, solution[:EXCERPT], neighbour.solution[:EXCERPT]))
        )
    if not verified:
        reason = "not understood" if in_box.reward is None else "not equal to itself"
        reason = reason if in_box.status == "ok" else in_box.status
        found["unverifiable"].append(asdict(Unverifiable(problem.id, solution[:EXCERPT], reason)))
    groups = [("kinds", kind_of(solution))]
    if problem.columns.get("topic") is not None:
        groups.append(("topics", str(problem.columns["topic"])))
    for table, name in groups:
        sums = found[table].get(name, (0, 0, 0, 0.0))
        found[table][name] = [a + b for a, b in zip(sums, (1, int(verified), len(items), seconds), strict=True)]


def merge_coverage(tables: Iterable[Mapping[str, Sequence[float]]], order: Sequence[str] = ()) -> dict[str, Coverage]:
    """Sums from several calls of `verify_solutions` as coverage by name; in `order`, or the largest first."""
    totals: dict[str, list[float]] = {}
    for table in tables:
        for name, sums in table.items():
            totals[name] = [a + b for a, b in zip(totals.get(name, (0, 0, 0, 0.0)), sums, strict=True)]
    names = [name for name in order if name in totals] or sorted(totals, key=lambda name: (-totals[name][0], name))
    return {
        name: Coverage(int(problems), int(verified), seconds / verdicts)
        for name in names
        for problems, verified, verdicts, seconds in [totals[name]]
    }
