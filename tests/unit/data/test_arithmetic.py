import re
import subprocess
import sys

import pytest

from grpo_ray.data import open_dataset
from grpo_ray.data.arithmetic import HELDOUT, QUESTIONS, Task, arithmetic, tasks
from grpo_ray.problem import parse_problem
from grpo_ray.sections import DataConfig

TRAIN, HELD_OUT = tasks("train"), tasks("heldout")


def boxed(text: str) -> str:
    """What stands in the box at the end."""
    found = re.search(r" \\boxed\{(-?\d+)\}$", text)
    assert found and text.count("\\boxed") == 1, text
    return found[1]


def test_training_and_heldout_problems_share_nothing():
    assert not set(TRAIN) & set(HELD_OUT)
    assert not {t.problem().id for t in TRAIN} & {t.problem().id for t in HELD_OUT}


def test_no_problem_comes_twice():
    ids = [task.problem().id for task in (*TRAIN, *HELD_OUT)]
    assert len(ids) == len(set(ids))


def test_the_splits_have_the_sizes_that_are_promised():
    assert len(HELD_OUT) == HELDOUT == 600
    assert len(TRAIN) == 19_179


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT], ids=["train", "heldout"])
def test_every_kind_of_question_is_in_each_split(split):
    for kind in QUESTIONS:
        assert sum(task.kind == kind for task in split) > len(split) / 20


@pytest.mark.parametrize(
    ("task", "answer", "worked", "slip"),
    [
        # 7 + 5 = 12: write 2, carry 1; 4 + 3 + 1 = 8. Without the carry: 72.
        (Task("sum", 47, 35), 82, "7+5=12, 4+3+1=8", 72),
        (Task("sum", 99, 99), 198, "9+9=18, 9+9+1=19", 188),
        (Task("sum", 10, 10), 20, "0+0=0, 1+1=2", 20),
        # 2 - 5 does not go: borrow, 12 - 5 = 7; 6 - 3 - 1 = 2. Larger minus smaller digit: 3, 33.
        (Task("difference", 62, 35), 27, "12-5=7, 6-3-1=2", 33),
        (Task("difference", 68, 35), 33, "8-5=3, 6-3=3", 33),
        (Task("difference", 50, 50), 0, "0-0=0, 5-5=0", 0),
        (Task("difference", 41, 39), 2, "11-9=2, 4-3-1=0", 18),
        # 7 x 5 = 35: the last digit is 5, the first one is 3.
        (Task("last_digit", 47, 35), 5, "7*5=35", 3),
        (Task("last_digit", 10, 99), 0, "0*9=0", 0),
        # 7 + 5 = 12: the remainder is 2; not divided: 12.
        (Task("remainder", 47, 35), 2, "7+5=12", 12),
        (Task("remainder", 42, 35), 7, "2+5=7", 7),
    ],
    ids=str,
)
def test_answers_and_workings_checked_by_hand(task, answer, worked, slip):
    assert task.answer == answer
    assert task.worked() == f"{worked} \\boxed{{{answer}}}"
    assert boxed(task.mistaken()) == str(slip)


def recomputed(kind: str, a: int, b: int) -> int:
    """The answer, from the long way round."""
    if kind == "sum":
        return len([*range(a), *range(b)])
    if kind == "difference":
        return len(range(b, a))
    if kind == "last_digit":
        return int(str(a * b)[-1])
    return divmod(a + b, 10)[1]


def test_every_working_ends_in_the_right_answer():
    for task in (*TRAIN, *HELD_OUT):
        assert boxed(task.worked()) == str(recomputed(task.kind, task.a, task.b)), task
        assert task.answer >= 0


def test_every_step_of_every_working_is_true():
    for task in (*TRAIN, *HELD_OUT):
        for step in task.worked().rpartition(" \\boxed")[0].split(", "):
            left, _, right = step.partition("=")
            first, *terms = re.findall(r"[-+*]?\d+", left)
            value = int(first)
            for term in terms:
                value = value * int(term[1:]) if term[0] == "*" else value + int(term)
            assert value == int(right), (task, step)


def test_most_problems_can_be_got_wrong():
    for split in (TRAIN, HELD_OUT):
        wrong = sum(boxed(task.mistaken()) != str(task.answer) for task in split)
        assert wrong >= len(split) / 2


def test_a_mistake_that_is_not_one_is_the_right_working():
    for task in HELD_OUT:
        if boxed(task.mistaken()) == str(task.answer) and task.kind != "last_digit":
            assert task.mistaken() == task.worked()


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    assert tasks("train") == TRAIN
    assert tasks("train", seed=1)[:100] != TRAIN[:100]
    every = {*TRAIN, *HELD_OUT}
    assert {*tasks("train", seed=1), *tasks("heldout", seed=1)} == every


def test_the_order_is_the_same_in_another_process():
    code = "from grpo_ray.data.arithmetic import tasks; print([(t.kind, t.a, t.b) for t in tasks('heldout')[:20]])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str([(t.kind, t.a, t.b) for t in HELD_OUT[:20]])


def test_problems_have_the_shape_of_deepmath():
    for task, problem in zip(HELD_OUT, arithmetic("heldout"), strict=True):
        (message,) = problem.prompt
        assert message == {"role": "user", "content": QUESTIONS[task.kind].format(a=task.a, b=task.b)}
        assert re.fullmatch(r"\$\d+\$", problem.solution) and problem.solution.strip("$") == str(task.answer)
        assert problem.columns == {"topic": task.kind}
        assert parse_problem(problem.row(), where="here") == problem


def test_the_dataset_of_the_table_gives_these_problems():
    (shard,) = open_dataset("arithmetic", "heldout", DataConfig())
    assert list(shard.read()) == list(arithmetic("heldout")) and shard.rows == 600


def test_a_system_prompt_of_the_config_is_put_before_these_problems_too():
    (shard,) = open_dataset("arithmetic", "heldout", DataConfig(system_prompt="Be brief."))
    assert next(iter(shard.read())).prompt[0] == {"role": "system", "content": "Be brief."}
