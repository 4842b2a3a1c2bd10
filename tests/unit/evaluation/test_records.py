"""Tests of the records of a measurement: which problems have texts, and the files of the run folder."""

from pathlib import Path
from typing import Any

from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import EvaluationResult, summarize_sets
from grpo_ray.evaluation.records import make_records, problems_with_texts, write_records
from grpo_ray.storage.records.heldout_files import TEXT_PROBLEMS, compare_measurements, read_measurements
from grpo_ray.storage.run_folder import RunFolder

PROBLEMS = [
    Problem(id=f"{n:016x}", prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}?"}],
            solution=f"${n}$")
    for n in range(TEXT_PROBLEMS + 2)
]  # fmt: skip


def row(problem: Problem, score: float = 1.0, texts: bool = True) -> dict[str, Any]:
    numbers = {"scores": [score], "answers": ["1"], "truncated": [False], "lengths": [4], "seconds": 1.0}
    return {"id": problem.id, "texts": ["$\\boxed{1}$"] if texts else None} | numbers


def test_problems_with_texts_are_the_first_of_each_set() -> None:
    sets = {"heldout/a": PROBLEMS, "heldout/b": PROBLEMS[:0:-1]}
    kept = problems_with_texts(sets)
    assert PROBLEMS[0].id in kept and PROBLEMS[-1].id in kept
    assert problems_with_texts({"heldout/a": PROBLEMS}) == {problem.id for problem in PROBLEMS[:TEXT_PROBLEMS]}


def test_make_records_texts_only_of_the_first_problems_of_the_set() -> None:
    records = make_records([row(problem, texts=n != 1) for n, problem in enumerate(PROBLEMS)], PROBLEMS)
    assert len(records) == len(PROBLEMS)
    with_texts = [n for n, record in enumerate(records) if record.completions is not None]
    assert with_texts == [0, *range(2, TEXT_PROBLEMS)]  # that of problem 1 was not returned
    assert (records[2].prompt, records[2].solution) == ("system: Be brief.\n\nuser: 2?", "$2$")
    assert (records[-1].prompt, records[-1].correct, records[-1].lengths) == (None, (1.0,), (4,))


def test_write_records_of_two_steps_can_be_compared(tmp_path: Path) -> None:
    folder, sets = RunFolder(str(tmp_path), "run"), {"heldout/a": PROBLEMS[:2], "heldout/b": PROBLEMS[1:3]}
    conditions = {key: {"count": 2} for key in sets}
    for step, scores in ((0, (0.0, 1.0, 0.0)), (20, (1.0, 0.0, 0.0))):
        rows = [row(problem, score) for problem, score in zip(PROBLEMS[:3], scores, strict=True)]
        write_records(folder, step, summarize_sets(rows, sets, 1), policy=f"policy {step}", conditions=conditions)
    earlier, later = read_measurements(folder, "heldout/a")
    assert (earlier.policy, later.policy) == ("policy 0", "policy 20")
    changes = compare_measurements(earlier, later)
    assert (changes.solved, changes.lost) == ((PROBLEMS[0].id,), (PROBLEMS[1].id,))
    assert compare_measurements(*read_measurements(folder, "heldout/b")).lost == (PROBLEMS[1].id,)


def test_evaluation_result_in_json_has_no_records() -> None:
    result = summarize_sets([row(PROBLEMS[0])], {"heldout": PROBLEMS[:1]}, 1)["heldout"]
    assert len(result.records) == 1 and "records" not in result.to_dict()
    read = EvaluationResult.from_dict(result.to_dict())
    assert read == result and read.records == ()
