"""Tests of the embedded arithmetic problems: splits, workings, mistakes, and the order by seed."""

import re
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from grpo_ray.config.schema import DataConfig
from grpo_ray.data.arithmetic import HELDOUT, QUESTIONS, ArithmeticTask, arithmetic_problems, list_tasks
from grpo_ray.data.problem import parse_problem
from grpo_ray.data.registry import open_dataset

TRAIN, HELD_OUT = list_tasks("train"), list_tasks("heldout")
EVERY = (*TRAIN, *HELD_OUT)


def boxed(text: str) -> str:
    """Return the number in the box at the end of a text."""
    found = re.search(r" \\boxed\{(-?\d+)\}$", text)
    assert found and text.count("\\boxed") == 1, text
    return found[1]


def test_tasks_splits_have_no_problem_in_common_or_twice() -> None:
    assert len({task.problem().id for task in EVERY}) == len(set(EVERY)) == len(EVERY)


def test_tasks_splits_have_the_documented_sizes() -> None:
    assert len(HELD_OUT) == HELDOUT == 600
    assert len(TRAIN) == 19_179


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT], ids=["train", "heldout"])
def test_tasks_each_split_has_every_kind(split: Sequence[ArithmeticTask]) -> None:
    for kind in QUESTIONS:
        assert sum(task.kind == kind for task in split) > len(split) / 20


@pytest.mark.parametrize(
    ("task", "answer", "worked", "slip"),
    [
        # 7 + 5 = 12: write 2, carry 1; 4 + 3 + 1 = 8. Without the carry: 72.
        (ArithmeticTask("sum", 47, 35), 82, "7+5=12, 4+3+1=8", 72),
        (ArithmeticTask("sum", 99, 99), 198, "9+9=18, 9+9+1=19", 188),
        (ArithmeticTask("sum", 10, 10), 20, "0+0=0, 1+1=2", 20),
        # 2 < 5, so borrow: 12 - 5 = 7; 6 - 3 - 1 = 2. Larger minus smaller digit: 3, 33.
        (ArithmeticTask("difference", 62, 35), 27, "12-5=7, 6-3-1=2", 33),
        (ArithmeticTask("difference", 68, 35), 33, "8-5=3, 6-3=3", 33),
        (ArithmeticTask("difference", 50, 50), 0, "0-0=0, 5-5=0", 0),
        (ArithmeticTask("difference", 41, 39), 2, "11-9=2, 4-3-1=0", 18),
        # 7 x 5 = 35: the last digit is 5, the first one is 3.
        (ArithmeticTask("last_digit", 47, 35), 5, "7*5=35", 3),
        (ArithmeticTask("last_digit", 10, 99), 0, "0*9=0", 0),
        # 7 + 5 = 12: the remainder is 2; not divided: 12.
        (ArithmeticTask("remainder", 47, 35), 2, "7+5=12", 12),
        (ArithmeticTask("remainder", 42, 35), 7, "2+5=7", 7),
    ],
    ids=str,
)
def test_task_answer_working_and_mistake_by_hand(task: ArithmeticTask, answer: int, worked: str, slip: int) -> None:
    assert task.answer == answer
    assert task.worked_solution() == f"{worked} \\boxed{{{answer}}}"
    assert boxed(task.mistaken_solution()) == str(slip)


def recomputed(kind: str, a: int, b: int) -> int:
    """Compute the answer in another way."""
    if kind == "sum":
        return len([*range(a), *range(b)])
    if kind == "difference":
        return len(range(b, a))
    if kind == "last_digit":
        return int(str(a * b)[-1])
    return divmod(a + b, 10)[1]


def value(expression: str) -> int:
    """Compute the value of numbers joined by +, - and *, from left to right."""
    first, *terms = re.findall(r"[-+*]?\d+", expression)
    total = int(first)
    for term in terms:
        total = total * int(term[1:]) if term[0] == "*" else total + int(term)
    return total


NUMBERS = st.integers(10, 99)
TASKS = st.builds(ArithmeticTask, st.sampled_from([*QUESTIONS]), NUMBERS, NUMBERS).filter(
    lambda task: task.kind != "difference" or task.a >= task.b
)


@given(task=TASKS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_task_working_has_true_steps_and_the_right_answer(task: ArithmeticTask) -> None:
    assert boxed(task.worked_solution()) == str(task.answer) == str(recomputed(task.kind, task.a, task.b))
    assert task.answer >= 0
    for step in task.worked_solution().rpartition(" \\boxed")[0].split(", "):
        left, _, right = step.partition("=")
        assert value(left) == int(right), step
    if boxed(task.mistaken_solution()) == str(task.answer) and task.kind != "last_digit":
        assert task.mistaken_solution() == task.worked_solution()


def test_task_every_working_ends_in_the_right_answer() -> None:
    for task in EVERY:
        assert task.answer == recomputed(task.kind, task.a, task.b) >= 0
        assert task.worked_solution().endswith(f" \\boxed{{{task.answer}}}")


def test_task_most_have_a_wrong_mistake() -> None:
    for split in (TRAIN, HELD_OUT):
        wrong = sum(boxed(task.mistaken_solution()) != str(task.answer) for task in split)
        assert wrong >= len(split) / 2


def test_tasks_order_depends_on_the_seed_only() -> None:
    train, heldout = list_tasks("train", seed=1), list_tasks("heldout", seed=1)
    assert train[:100] != TRAIN[:100]
    assert {*train, *heldout} == {*EVERY}
    assert list_tasks("heldout", seed=1) == heldout


def test_tasks_order_is_the_same_in_every_process_and_version() -> None:
    # A resumed run continues in this order, and its held-out problems must stay out of training.
    assert [(t.kind, t.a, t.b) for t in HELD_OUT[:5]] == [
        ("remainder", 58, 84),
        ("remainder", 10, 29),
        ("last_digit", 52, 22),
        ("sum", 75, 49),
        ("last_digit", 65, 43),
    ]
    assert [(t.kind, t.a, t.b) for t in TRAIN[:5]] == [
        ("remainder", 64, 87),
        ("last_digit", 63, 55),
        ("last_digit", 73, 29),
        ("last_digit", 72, 55),
        ("remainder", 13, 97),
    ]


def test_arithmetic_problems_have_the_shape_of_deepmath() -> None:
    for task, problem in zip(HELD_OUT, arithmetic_problems("heldout"), strict=True):
        (message,) = problem.prompt
        assert message == {"role": "user", "content": QUESTIONS[task.kind].format(a=task.a, b=task.b)}
        assert re.fullmatch(r"\$\d+\$", problem.solution) and problem.solution.strip("$") == str(task.answer)
        assert problem.columns == {"topic": task.kind}
        row = {**problem.columns, "prompt": problem.prompt, "solution": problem.solution}
        # The column follows from the question, so it is not part of the id.
        assert replace(parse_problem(row, where="here"), id=problem.id) == problem
        assert problem.id == problem.question_id == parse_problem(row, where="here").question_id


def test_open_dataset_arithmetic_reads_these_problems() -> None:
    (shard,) = open_dataset("arithmetic", "heldout", DataConfig())
    assert list(shard.read()) == [task.problem() for task in HELD_OUT] and shard.num_rows == 600


def test_open_dataset_arithmetic_takes_system_prompt() -> None:
    (shard,) = open_dataset("arithmetic", "heldout", DataConfig(system_prompt="Be brief."))
    assert next(iter(shard.read())).prompt[0] == {"role": "system", "content": "Be brief."}
