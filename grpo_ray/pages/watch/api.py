"""JSON responses to the page's requests: state, groups, problems, and held-out results."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from starlette.exceptions import HTTPException

from grpo_ray.errors import DataError
from grpo_ray.pages.report.facts import last_step, max_steps, run_name
from grpo_ray.pages.report.health import run_status
from grpo_ray.pages.watch.heldout import MAX_SIDE_BY_SIDE, HeldoutSet, Kind, describe_problem
from grpo_ray.pages.watch.live_run import Snapshot
from grpo_ray.pages.watch.refresher import View
from grpo_ray.pages.watch.rollouts import GroupQuery, Order, Outcome, ProblemOrder
from grpo_ray.text.display import safe_text

C = TypeVar("C", bound=str)

PAGE_GROUPS, PAGE_PROBLEMS = 50, 50
"""Groups and problems on one page of a list."""
MAX_SEARCH_CHARS = 200
MAX_STEP = 10**15


@dataclass(frozen=True)
class Parameters:
    """Parameters of a request; each method refuses a value of the wrong form with an `HTTPException`."""

    values: Mapping[str, str]

    def text(self, name: str, limit: int = MAX_SEARCH_CHARS) -> str:
        """Return a text; "" if it is absent."""
        value = self.values.get(name, "").strip()
        if len(value) > limit:
            raise HTTPException(400, f"{name} has {len(value)} characters; at most {limit} are allowed")
        return value

    def whole(self, name: str) -> int | None:
        """Return a whole number from 0; None if it is absent."""
        value = self.text(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit()) or int(value) > MAX_STEP:
            raise HTTPException(400, f"{name}={value!r} must be a whole number from 0")
        return int(value)

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        value = self.text(name)
        try:
            number = float(value) if value else default
        except ValueError:
            number = math.nan
        if math.isnan(number) or (value and math.isinf(number)):
            raise HTTPException(400, f"{name}={value!r} must be a number")
        return number

    def choice(self, name: str, choices: tuple[C, ...]) -> C:
        """Return a value that is one of the choices; the first choice if it is absent."""
        value = self.text(name) or choices[0]
        for choice in choices:
            if choice == value:
                return choice
        raise HTTPException(400, f"{name} must be one of {', '.join(choices)}")


def answer_state(view: View) -> dict[str, Any]:
    """Describe the state of the page: number and age of the contents, status of the run, and unreadable files."""
    state: dict[str, Any] = {
        "now": time.time(),
        "read_at": view.read_at or None,
        "problem": view.problem or None,
        "number": None,
    }
    if (snapshot := view.snapshot) is None:
        return state
    status = run_status(snapshot.run, time.time())
    rollouts = snapshot.rollouts
    return state | {
        "number": snapshot.number,
        "name": run_name(snapshot.run),
        "uri": safe_text(snapshot.run.folder.uri, 600),
        "status": {"level": status.level, "text": status.text},
        "step": last_step(snapshot.run),
        "max_steps": max_steps(snapshot.run),
        "groups": len(rollouts),
        "samples": int(rollouts.has_texts.sum()),
        "sources": rollouts.sources(),
        "last_group_step": int(rollouts.step.max()) if len(rollouts) else None,
        "heldout": [each.describe() for each in snapshot.heldout],
    }


def answer_groups(snapshot: Snapshot, given: Parameters) -> dict[str, Any]:
    """List one page of groups; with a search text, the groups that one search finds in a bounded time.

    The parameter `until` is the newest step when the first page was listed. Later pages leave out newer groups, so
    that they continue the first page while the run goes on.
    """
    rollouts = snapshot.rollouts
    last, until = given.whole("last"), given.whole("until")
    text = given.text("text")
    if until is None:
        until = int(rollouts.step.max()) if len(rollouts) else 0
    query = GroupQuery(
        first_step=given.whole("first") or 0,
        last_step=until if last is None else min(last, until),
        problem=given.text("problem"),
        source=given.text("source"),
        outcome=given.choice("outcome", get_args(Outcome)),
        min_reward=given.number("low", -math.inf),
        max_reward=given.number("high", math.inf),
        with_texts=bool(text) or given.choice("texts", ("1", "0")) == "1",
        order=given.choice("order", get_args(Order)),
    )
    if text and query.order not in ("newest", "oldest"):
        raise HTTPException(400, "a search lists groups by step; order must be newest or oldest")
    rows, skip = rollouts.select(query), given.whole("skip") or 0
    page: dict[str, Any] = {"total": len(rows), "until": until}
    if text:
        groups, searched = rollouts.search(text, rows, skip, PAGE_GROUPS)
        return page | {"groups": groups, "next": searched, "searched": len(rows) if searched is None else searched}
    groups = rollouts.describe(rows[skip : skip + PAGE_GROUPS])
    return page | {"groups": groups, "next": skip + PAGE_GROUPS if skip + PAGE_GROUPS < len(rows) else None}


def answer_group(snapshot: Snapshot, given: Parameters) -> dict[str, Any]:
    """Describe one group with its texts and tokens."""
    step, epoch = given.whole("step"), given.whole("epoch")
    row = snapshot.rollouts.find(step or 0, epoch or 0, given.text("problem"))
    if row is None:
        raise HTTPException(404, "this group does not exist any more: the run has taken its step again")
    return snapshot.rollouts.detail(row)


def answer_problems(snapshot: Snapshot, given: Parameters) -> dict[str, Any]:
    """List one page of the problems with their solve rates."""
    skip = given.whole("skip") or 0
    order = given.choice("order", get_args(ProblemOrder))
    problems, total = snapshot.rollouts.problems(order, given.text("problem"), skip, PAGE_PROBLEMS)
    return {
        "problems": problems,
        "total": total,
        "next": skip + PAGE_PROBLEMS if skip + PAGE_PROBLEMS < total else None,
    }


def answer_changes(snapshot: Snapshot, given: Parameters) -> dict[str, Any]:
    """List the held-out problems by their outcome at two checkpoints."""
    heldout = _heldout_set(snapshot, given)
    before, after = (heldout.at(given.whole(name) or 0) for name in ("before", "after"))
    if before is None or after is None:
        raise HTTPException(404, "this checkpoint has no held-out records any more")
    skip = given.whole("skip") or 0
    kind = given.choice("kind", get_args(Kind))
    answer = heldout.changes(snapshot.run.folder, before, after, kind, skip, PAGE_PROBLEMS)
    return answer | {"next": skip + PAGE_PROBLEMS if skip + PAGE_PROBLEMS < answer["counts"][kind] else None}


def answer_heldout_problem(snapshot: Snapshot, given: Parameters) -> dict[str, Any]:
    """Describe a held-out problem with its completions at some checkpoints."""
    heldout = _heldout_set(snapshot, given)
    steps = [word for word in given.text("steps").split(",") if word.isascii() and word.isdigit()]
    return describe_problem(
        snapshot.run.folder, heldout, given.text("problem"), [int(word) for word in steps[:MAX_SIDE_BY_SIDE]]
    )


def _heldout_set(snapshot: Snapshot, given: Parameters) -> HeldoutSet:
    key = given.text("set")
    found = next((each for each in snapshot.heldout if each.key == key), None)
    if found is None:
        raise HTTPException(404, "this held-out set has no records")
    return found


ANSWERS: Mapping[str, Callable[[Snapshot, Parameters], dict[str, Any]]] = {
    "groups": answer_groups,
    "group": answer_group,
    "problems": answer_problems,
    "changes": answer_changes,
    "heldout-problem": answer_heldout_problem,
}
"""Name of a request -> function that answers it from the latest snapshot."""


def answer(name: str, view: View, values: Mapping[str, str]) -> dict[str, Any]:
    """Answer a request of the page.

    Args:
        name: Last part of the request's path: "state" or a key of `ANSWERS`.
        view: State of the page.
        values: Parameters of the request.

    Raises:
        HTTPException: There is no such request, a parameter is wrong, or the files cannot be read now.
    """
    if name == "state":
        return answer_state(view)
    if name not in ANSWERS:
        raise HTTPException(404, "there is no such page")
    if view.snapshot is None:
        raise HTTPException(503, view.problem or "the run folder is being read; try again in a moment")
    try:
        return ANSWERS[name](view.snapshot, Parameters(values))
    except (DataError, OSError) as error:
        raise HTTPException(503, safe_text(f"cannot be read now: {error}", 600)) from None
