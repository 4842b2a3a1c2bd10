"""Records of the completions of a held-out evaluation: built from its rows, and written to the run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_ray.data.problem import Problem
from grpo_ray.storage.records.conversation_columns import ConversationRecord
from grpo_ray.storage.records.groups import prompt_text
from grpo_ray.storage.records.heldout_files import TEXT_PROBLEMS, HeldoutRecord, bound_heldout_text, write_heldout
from grpo_ray.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from grpo_ray.evaluation.metrics import EvaluationResult


def problems_with_texts(sets: Mapping[str, Sequence[Problem]]) -> set[str]:
    """Return the ids of the problems whose completions are recorded: the first `TEXT_PROBLEMS` of each held-out set."""
    return {problem.id for problems in sets.values() for problem in problems[:TEXT_PROBLEMS]}


def make_records(rows: Sequence[Mapping[str, Any]], problems: Sequence[Problem]) -> tuple[HeldoutRecord, ...]:
    """Make the records of one held-out set.

    Args:
        rows: (P,) rows of `metrics.score_completions`, in the order of `problems`.
        problems: (P,) problems of the set.
    """
    records = []
    for place, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        record = HeldoutRecord(
            problem=problem.id,
            correct=tuple(row["scores"]),
            lengths=tuple(row["lengths"]),
            truncated=tuple(row["truncated"]),
        )
        # A problem in two sets may have its texts only because the other set records them.
        if row["texts"] is not None and place < TEXT_PROBLEMS:
            samples = len(row["scores"])
            record = replace(
                record,
                prompt=bound_heldout_text(prompt_text(problem.prompt), samples),
                solution=bound_heldout_text(problem.solution, samples),
                completions=tuple(row["texts"]),
            )
            if row.get("conversations") is not None:
                conversations = tuple(ConversationRecord.from_json(each) for each in row["conversations"])
                record = replace(record, conversations=conversations)
        records.append(record)
    return tuple(records)


def write_records(
    folder: RunFolder,
    step: int,
    results: "Mapping[str, EvaluationResult]",
    *,
    policy: str,
    conditions: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the records of a measurement, one file for each held-out set.

    Args:
        step: step of the measured policy; 0 for the initial one.
        results: key of a held-out set -> its evaluation.
        policy: name of the measured checkpoint; "" for the initial policy.
        conditions: key of a held-out set -> conditions of its measurement (`metrics.measurement_conditions`).
    """
    for key, result in results.items():
        write_heldout(folder, key, step, result.records, policy=policy, conditions=conditions[key])
