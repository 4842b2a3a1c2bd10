"""Tests of the reward for multiple-choice questions, with hedges and hostile texts."""

import time

import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards.registry import load_reward

RIGHT = [
    r"so \boxed{B}",
    r"\boxed{\text{B. } 17}",
    r"\boxed{(b)}",
    "The answer is (B).",
    "**Answer:** B",
    "Final Answer: **(B)**",
    "the correct option is B. A man walks on.",
    "<answer>B</answer>",
    "<answer>(B) Paris</answer>",
    "B",
    "(B)",
    "**B**",
    "B. Paris",
    "<think>Answer: A</think>The answer is B",
    r"\boxed{A}. Wait, \boxed{B}",
]
WRONG = [
    r"\boxed{A}",
    r"\boxed{A} or \boxed{B}",
    r"\boxed{b}",
    r"\boxed{A, B}",
    r"\boxed{}",
    "Answer: A or B",
    "Answer: B, or rather C",
    "Answer: A\nAnswer: B",
    "<answer>A or B</answer>",
    "<think>Answer: B",
    "B or A",
    "B\n\nA",
    "I pick B",
    "b",
    "A man",
    "",
    "Answer:",
    "The answer is Beth",
    "The answer is B's",
    "option D",
    r"Answer: B \boxed{C}",
    "A B C D",
]


@pytest.mark.parametrize("completion", RIGHT)
def test_choice_right_letter_earns_one(completion: str) -> None:
    assert load_reward("choice")(completions=[completion], solution=["B"]) == [1.0]


@pytest.mark.parametrize("completion", WRONG)
def test_choice_other_letter_hedge_or_nothing_earns_nothing(completion: str) -> None:
    assert load_reward("choice")(completions=[completion], solution=["B"]) == [0.0]


@pytest.mark.parametrize("completion", [*RIGHT, *WRONG])
def test_choice_one_text_earns_for_one_letter_at_most(completion: str) -> None:
    rewards = load_reward("choice")(completions=[completion] * 4, solution=[*"ABCD"])
    assert sum(rewards) <= 1.0


def test_choice_reads_messages_and_every_spelling_of_a_solution() -> None:
    completions = [[{"role": "assistant", "content": "Answer: C"}]] * 5
    solutions = ["C", "(C)", r"\boxed{C}", "$C$", "C."]
    assert load_reward("choice")(completions=completions, solution=solutions) == [1.0] * 5


def test_choice_row_without_a_choice_has_no_reward() -> None:
    reward = load_reward("choice", choices="ABCDE")
    assert reward(completions=["E"] * 5, solution=["E", "F", None, "", "5"]) == [1.0, None, None, None, None]
    assert load_reward("choice")(completions=["E"], solution=["E"]) == [None]


@pytest.mark.parametrize("choices", ["", "A", "AA", "abcd", "A,B", "XYZ"])
def test_choice_bad_letters_raise(choices: str) -> None:
    with pytest.raises(RewardError, match="choices must be at least two capital letters"):
        load_reward("choice", choices=choices)(completions=["A"], solution=["A"])


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "Answer:" + " " * 500_000 + "B",
        "answer " * 100_000,
        "Answer: B " * 100_000,
        r"\boxed{" + "(" * 500_000 + "}",
        "A" * 500_000,
    ],
    ids=["spaces", "anchors", "statements", "open", "one word"],
)
def test_choice_long_text_takes_linear_time(text: str) -> None:
    begin = time.process_time()
    load_reward("choice")(completions=[text], solution=["B"])
    assert time.process_time() - begin < 5  # about 0.1 s; a quadratic one would take minutes
