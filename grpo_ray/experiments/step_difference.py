"""Comparison of one step as two runs record it: the first quantity in which they differ, bit for bit.

A step computes its quantities one from the other: problems, prompts, tokens, rewards, advantages, gradient, weights.
So the first that differs is where the cause lies, and the later ones differ as its consequence.

| quantity | recorded for |
|---|---|
| problem | every group: epoch, source, id |
| prompt | sampled groups: the text |
| tokens | every completion: length, truncation; sampled groups: the texts of completions and tokens |
| reward | every completion: reward, verdict of `correctness`; whether the group was trained on |
| advantage | sampled groups |
| gradient | logged steps: its norm before clipping |
| weights | steps with a checkpoint: checksum of each file |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from grpo_ray.pages.report.read import RunData
from grpo_ray.storage.checkpoints import CheckpointInfo, resume_candidates
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.text.display import one_line
from grpo_ray.text.redaction import redact

Quantity = Literal["problem", "prompt", "tokens", "reward", "advantage", "gradient", "weights"]
Outcome = Literal["equal", "differs", "not recorded"]
QUANTITIES: tuple[Quantity, ...] = ("problem", "prompt", "tokens", "reward", "advantage", "gradient", "weights")
"""Quantities in the order in which a step computes them."""
GRADIENT = "learner/gradient_norm"
OPTIMIZER_PREFIX = "shards/optimizer"
"""Folder of a sharded checkpoint whose files are not weights of the policy."""
VALUE_CHARS = 80
"""Characters of a value that a difference shows."""
CONTEXT_CHARS = 20
"""Characters before the first different one, with which a longer value begins."""


@dataclass(frozen=True)
class Difference:
    """First difference of a step."""

    step: int
    quantity: Quantity
    where: str
    """Group, completion, metric or file."""
    recorded: str
    """Value in the first run, shortened."""
    other: str
    """Value in the second run, shortened."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.quantity} of {self.where}: {self.recorded} and {self.other}"


@dataclass(frozen=True)
class StepComparison:
    """Comparison of one step of two runs."""

    step: int
    outcomes: Mapping[Quantity, Outcome]
    """In the order of `QUANTITIES`."""
    first: Difference | None
    """Difference in the first quantity that differs; None if all recorded ones are equal."""


@dataclass(frozen=True)
class StepRecord:
    """One step as a run records it."""

    step: int
    groups: Sequence[Mapping[str, Any]]
    """Rows of `rollouts/` that were drawn for the step, by epoch and problem; empty in the later steps on a batch."""
    gradient_norm: float | None = None
    """None if the step was not logged."""
    weights: Mapping[str, str] | None = None
    """File with weights -> SHA-256 checksum; None without a checkpoint of this step."""


def read_records(run: RunData, first: int, last: int, limit: int | None = None) -> dict[int, StepRecord]:
    """Read the records of some steps.

    Args:
        first, last: first and last step, both included.
        limit: largest size of the groups in memory, bytes; None: any.

    Returns:
        Step -> its record, for each step with anything recorded.

    Raises:
        DataError: a file of `rollouts/` cannot be read.
    """
    groups: dict[int, list[Mapping[str, Any]]] = {}
    table = read_steps(run.folder, first, last, with_texts=True, with_tokens=True, limit=limit)
    for row in table.to_pylist():
        groups.setdefault(row["step"], []).append(row)
    norms = {step: value for step, value in run.series(GRADIENT) if first <= step <= last}
    # Without those that `run.resume=best` has discarded: the run has taken their steps again.
    kept = [each for each in resume_candidates(run.folder, "latest", "")[::-1] if first <= each.step <= last]
    weights = {each.step: weight_files(each) for each in kept}
    return {
        step: StepRecord(step, groups.get(step, ()), norms.get(step), weights.get(step))
        for step in sorted({*groups, *norms, *weights})
    }


def weight_files(checkpoint: CheckpointInfo) -> dict[str, str]:
    """Return the checksums of a checkpoint's files with weights, by name, as its manifest has them."""
    return {
        name: str(file.get("sha256"))
        for name, file in sorted(checkpoint.files.items())
        if name.endswith(".safetensors") and not name.startswith(OPTIMIZER_PREFIX)
    }


def compare_steps(recorded: StepRecord, other: StepRecord) -> StepComparison:
    """Compare two records of one step, in all quantities that both have."""
    first: Difference | None = None
    outcomes: dict[Quantity, Outcome] = {}
    for quantity in QUANTITIES:
        pairs = _PAIRS[quantity](recorded, other)
        found = next((pair for pair in pairs if not same_bits(pair[1], pair[2])), None)
        outcomes[quantity] = "differs" if found else "equal" if pairs else "not recorded"
        if found and first is None:
            first = Difference(recorded.step, quantity, found[0], *_show(found[1], found[2]))
    return StepComparison(recorded.step, outcomes, first)


def same_bits(a: Any, b: Any) -> bool:
    """Return True for equal values; numbers that are not known (NaN) are equal, and 0.0 and -0.0 are not."""
    if isinstance(a, float) and isinstance(b, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)


Pair = tuple[str, Any, Any]
"""Name of a place, and the values of both runs there."""
_Groups = Mapping[tuple[int, str, str], Mapping[str, Any]]


def _by_problem(record: StepRecord) -> _Groups:
    return {(row["epoch"], row["source"], row["problem"]): row for row in record.groups}


def _problems(recorded: StepRecord, other: StepRecord) -> list[Pair]:
    both = [_by_problem(record) for record in (recorded, other)]
    if not any(both):
        return []
    lists = ([f"{problem} of epoch {epoch}" for epoch, _, problem in sorted(groups)] for groups in both)
    here, there = lists
    missing = next((pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]), None)
    if missing is None and len(here) != len(there):
        return [("the step's groups", f"{len(here)} groups", f"{len(there)} groups")]
    return [("the step's groups", *(missing or ("", "")))]


def _common(recorded: StepRecord, other: StepRecord) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return the groups of one problem that both have: their name, and the rows."""
    here, there = _by_problem(recorded), _by_problem(other)
    return [(f"problem {key[2]} of epoch {key[0]}", here[key], there[key]) for key in here if key in there]


def _columns(recorded: StepRecord, other: StepRecord, *names: str, only_samples: bool = False) -> list[Pair]:
    """Return the values of some columns; of those that only samples have, where both runs have sampled the group."""
    pairs: list[Pair] = []
    for where, here, there in _common(recorded, other):
        for name in names:
            if only_samples and (here[name] is None or there[name] is None):
                continue
            if isinstance(here[name], list) and isinstance(there[name], list):
                pairs += _items(f"{name} of {where}", here[name], there[name])
            else:
                pairs.append((f"{name} of {where}", here[name], there[name]))
    return pairs


def _items(where: str, here: Sequence[Any], there: Sequence[Any]) -> list[Pair]:
    if len(here) != len(there):
        return [(where, f"{len(here)} completions", f"{len(there)} completions")]
    return [(f"{where}, completion {i}", *pair) for i, pair in enumerate(zip(here, there, strict=True))]


def _token_texts(record: StepRecord) -> StepRecord:
    """Return the record with the texts of tokens alone in the column `tokens`: log-probabilities are no tokens."""
    rows = [
        {**row, "tokens": None if row["tokens"] is None else [each["texts"] for each in row["tokens"]]}
        for row in record.groups
    ]
    return StepRecord(record.step, rows, record.gradient_norm, record.weights)


def _tokens(recorded: StepRecord, other: StepRecord) -> list[Pair]:
    samples = _columns(_token_texts(recorded), _token_texts(other), "completions", "tokens", only_samples=True)
    return [*_columns(recorded, other, "lengths", "truncated"), *samples]


def _weights(recorded: StepRecord, other: StepRecord) -> list[Pair]:
    here, there = recorded.weights, other.weights
    if here is None or there is None:
        return []
    return [(name, here.get(name, "no file"), there.get(name, "no file")) for name in sorted({*here, *there})]


def _gradient(recorded: StepRecord, other: StepRecord) -> list[Pair]:
    here, there = recorded.gradient_norm, other.gradient_norm
    return [] if here is None or there is None else [("the step, as its norm", here, there)]


_PAIRS: Mapping[Quantity, Callable[[StepRecord, StepRecord], list[Pair]]] = {
    "problem": _problems,
    "prompt": lambda a, b: _columns(a, b, "prompt", only_samples=True),
    "tokens": _tokens,
    "reward": lambda a, b: _columns(a, b, "rewards", "correct", "trained"),
    "advantage": lambda a, b: _columns(a, b, "advantages", only_samples=True),
    "gradient": _gradient,
    "weights": _weights,
}
"""Quantity -> function that returns what both records have of it."""


def _show(here: Any, there: Any) -> tuple[str, str]:
    """Return two different values as short texts; long ones begin shortly before their first difference."""
    a, b = redact(str(here)), redact(str(there))
    start = 0
    if max(len(a), len(b)) > VALUE_CHARS:
        shorter = min(len(a), len(b))
        start = max(0, next((i for i in range(shorter) if a[i] != b[i]), shorter) - CONTEXT_CHARS)
    dots = "..." if start else ""
    return dots + one_line(a[start:], VALUE_CHARS), dots + one_line(b[start:], VALUE_CHARS)
