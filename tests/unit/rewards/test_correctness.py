import subprocess
import sys
from fractions import Fraction

import pytest
from judged_answers import FIXTURES, SHARED, load

from grpo_ray.rewards.answer import final_answers, solution_text
from grpo_ray.rewards.clean import clean, squash
from grpo_ray.rewards.correctness import correctness, understand
from grpo_ray.rewards.guard import refuses
from grpo_ray.rewards.pool import VerifierPool
from grpo_ray.rewards.words import is_boolean

FOOLING = load(FIXTURES / "fooling.jsonl")


def boxed(answer: str) -> str:
    return rf"We work it out and find \boxed{{{answer}}}."


def wrong_verdicts(rows: list[dict], pool: VerifierPool) -> list[tuple]:
    verdicts = pool.score([(row["completion"], row["solution"]) for row in rows])
    return [
        (row["solution"], row["completion"][:200], row["reward"], verdict)
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict.reward != row["reward"]
    ]


# --- judged pairs


def test_every_judged_pair_gets_its_reward(pool: VerifierPool) -> None:
    assert len(FOOLING) >= 120
    assert wrong_verdicts(FOOLING, pool) == []


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
def test_at_least_95_percent_of_the_shared_judged_pairs_get_their_reward(pool: VerifierPool) -> None:
    rows = load(SHARED / "fooling_examples.jsonl")
    assert len(wrong_verdicts(rows, pool)) <= 0.05 * len(rows)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
def test_real_completions_agree_with_an_independent_verdict_but_for_one(pool: VerifierPool) -> None:
    rows = [
        {"solution": row["solution"], "completion": completion, "reward": float(correct)}
        for row in load(SHARED / "scored_completions.jsonl")
        for completion, correct in zip(row["completions"], row["correct"], strict=True)
    ]
    # The one: 10000 for $10{,}000$, which the independent verdict holds to be wrong.
    assert len(rows) == 400
    assert len(wrong_verdicts(rows, pool)) <= 1


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
@pytest.mark.parametrize("name", ["olympiadbench", "gsm8k"])
def test_solutions_verify_against_themselves(name: str, pool: VerifierPool) -> None:
    solutions = [row["solution"] for row in load(SHARED / f"{name}.jsonl")]
    rows = [{"solution": text, "completion": f"The answer is {text}", "reward": 1.0} for text in solutions]
    # A dollar sign is missing in it, so that no reader can tell formula from text.
    assert {row[0] for row in wrong_verdicts(rows, pool)} <= {"$221,$8$"}


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
def test_the_next_solution_is_a_wrong_answer(pool: VerifierPool) -> None:
    texts = list(dict.fromkeys(row["solution"] for row in load(SHARED / "olympiadbench.jsonl")))
    following = [*texts[1:], texts[0]]
    items = [(f"The answer is {other}", text) for text, other in zip(texts, following, strict=True)]
    assert sum(verdict.reward or 0.0 for verdict in pool.score(items)) == 0


# --- principles, each by hand


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (r"\frac{1}{3}", 1.0),
        ("0.333333", 1.0),  # six decimals, rounded
        ("0.3333", 0.0),
        (r"33.333333\%", 1.0),
        ("1/3", 1.0),
        (r"\frac{333333}{1000000}", 0.0),  # exact forms are meant exactly
    ],
)
def test_a_decimal_stands_for_a_fraction_from_six_decimals_on(answer: str, reward: float) -> None:
    assert correctness(boxed(answer), r"$\frac{1}{3}$") == reward


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        (r"x = 10\sqrt{3} \approx 17.3", r"$10\sqrt{3}$", 1.0),
        (r"x = 10\sqrt{3} \approx 17.3", "$17.3$", 1.0),
        (r"x \approx 17.3", "$17.3$", 1.0),
        (r"10\sqrt{3} \approx 17.5", r"$10\sqrt{3}$", 0.0),  # 17.32...: not its rounding
        (r"100 \approx 101", "$100$", 0.0),
        (r"100 \approx 101", "$101$", 0.0),
    ],
)
def test_an_approximation_must_be_the_rounding_of_its_value(answer: str, solution: str, reward: float) -> None:
    assert correctness(boxed(answer), solution) == reward


@pytest.mark.parametrize("tiny", ["e^{-60}", "0", "0.0", "10^{-30}", "2e^{-50}"])
def test_tiny_numbers_are_compared_by_their_size(tiny: str) -> None:
    assert correctness(boxed(tiny), "$e^{-50}$") == 0.0
    assert correctness(boxed(r"\frac{1}{e^{50}}"), "$e^{-50}$") == 1.0


def test_numbers_that_differ_in_the_hundredth_digit_differ() -> None:
    assert correctness(boxed("100!+1"), "$100!$") == 0.0
    assert correctness(boxed("1-2^{-200}"), "$1$") == 0.0
    assert correctness(boxed(r"\pi+10^{-60}"), r"$\pi$") == 0.0


@pytest.mark.parametrize(
    "hedge",
    [
        r"\boxed{7} \boxed{5}",
        r"\boxed{5} or \boxed{7}",
        r"\boxed{\boxed{7}\boxed{5}}",
        r"\boxed{5 \text{ or } 7}",
        r"\boxed{5, 7}",
        r"\boxed{5 \pm 2}",
    ],
)
def test_several_different_answers_are_wrong(hedge: str) -> None:
    assert correctness(hedge, "$5$") == 0.0


def test_the_last_box_counts_where_the_text_moves_on() -> None:
    text = r"\boxed{5}. Wait, that is wrong: \boxed{7}"
    assert correctness(text, "$7$") == 1.0
    assert correctness(text, "$5$") == 0.0


def test_boxes_in_a_list_are_one_answer() -> None:
    assert correctness(r"\boxed{2} and \boxed{1}", "$1,2$") == 1.0


def test_nothing_inside_thoughts_counts() -> None:
    assert correctness(r"<think>\boxed{5}</think> It is \boxed{7}", "$5$") == 0.0
    assert correctness(r"<think>\boxed{7}</think> It is \boxed{5}", "$5$") == 1.0
    assert correctness(r"<think>\boxed{5}", "$5$") == 0.0


def test_an_answer_behind_thousands_of_characters_is_found() -> None:
    assert correctness("So we go on. " * 5_000 + r"\boxed{5}", "$5$") == 1.0
    assert correctness(r"\boxed{5}" + " and that is all." * 5_000, "$5$") == 1.0


@pytest.mark.parametrize("everything", [r"\mathbb{R}", r"(-\infty,\infty)", "[4,6]", r"\{1,2,3,4,5\}", "x", "1=1"])
def test_what_contains_everything_is_no_number(everything: str) -> None:
    assert correctness(boxed(everything), "$5$") == 0.0


def test_prose_without_a_box_or_formula_is_no_answer() -> None:
    assert correctness("The answer is 5", "$5$") == 0.0
    assert correctness("The answer is Yes", "Yes") == 0.0
    assert correctness("The answer is $5$", "$5$") == 1.0
    assert correctness("<answer>5</answer>", "$5$") == 1.0


# --- zero and unknown differ


@pytest.mark.parametrize("solution", ["", "  ", "$$", "This follows from the lemma above and needs no value at all."])
def test_a_solution_without_an_answer_gives_none_for_every_completion(solution: str) -> None:
    assert correctness(boxed("5"), solution) is None
    assert correctness("", solution) is None


@pytest.mark.parametrize("word", ["Yes", "No", "True", "False", "Even", "Divergent", "Does not exist", r"$\text{Yes}$"])
def test_words_are_scored_and_never_none(word: str) -> None:
    plain = word.replace(r"$\text{", "").replace("}$", "")
    assert correctness(boxed(rf"\text{{{plain}}}"), word) == 1.0
    assert correctness(boxed(plain.lower()), word) == 1.0
    assert correctness(boxed("5"), word) == 0.0
    assert correctness(boxed(rf"\text{{{plain} and not {plain}}}"), word) == 0.0
    assert correctness("no idea", word) == 0.0


def test_booleans_are_recognised_in_every_dress() -> None:
    assert all(is_boolean(text) for text in ("Yes", "no", r"$\text{True}$", r"\boxed{False}"))
    assert not any(is_boolean(text) for text in ("$5$", "Even", "$x$", ""))


# --- plain Math-Verify


def test_without_strict_the_verdicts_are_math_verifys_own() -> None:
    said_back = boxed(r"\int_0^1 \frac{1}{1+x^2}\,dx")
    assert correctness(said_back, r"$\frac{\pi}{4}$", strict=False) == 1.0
    assert correctness(said_back, r"$\frac{\pi}{4}$") == 0.0
    assert correctness(boxed("5"), "Yes", strict=False) is None


# --- the fast paths change nothing


def test_caches_change_no_verdict() -> None:
    from grpo_ray.rewards.value import parse

    rows = FOOLING[:60]
    warm = [correctness(row["completion"], row["solution"]) for row in rows]
    cold = []
    for row in reversed(rows):
        understand.cache_clear()
        parse.cache_clear()
        cold.append(correctness(row["completion"], row["solution"]))
    assert cold[::-1] == warm


@pytest.mark.parametrize(
    "text", [r"\frac{1}{2}", "x^2+1", r"\sqrt{3}-1", "(1,2)", "[0,1)", r"\{1,2,3\}", "x>3", r"\ln 2", "n!"]
)
def test_the_string_match_agrees_with_the_comparison_behind_it(text: str) -> None:
    from grpo_ray.rewards.compare import same_answer

    # The second spelling is another string, so only the comparison can accept it.
    assert same_answer(clean(text), clean(text.replace("1", "1.0")))


def test_the_guard_refuses_no_solution_of_its_own_kind() -> None:
    for row in FOOLING:
        if row["reward"] == 1.0:
            solution = clean(solution_text(row["solution"]))
            answers = [clean(answer) for answer in final_answers(row["completion"])]
            assert not any(refuses(answer, solution) for answer in answers)


# --- reading


def test_cleaning_brings_spellings_together() -> None:
    assert clean(r"1\,000") == clean("1,000") == clean("1{,}000") == clean("1 000") == "1000"
    assert clean("\uff15") == clean("\u200b5") == clean("5.") == clean(r"\mathbf{5}") == clean(r"\text{5}") == "5"
    assert clean(r"\dfrac{1}{2}") == r"\frac{1}{2}"
    assert squash("x ^ {2}") == "x^2"


def test_cleaning_keeps_what_differs_apart() -> None:
    assert clean("5²") == "5^{2}"
    assert clean("12, 13") != clean("12,130")
    assert squash(clean(r"5 \quad 7")) != squash("57")


def test_exact_arithmetic_stays_exact() -> None:
    from grpo_ray.rewards.arithmetic import evaluate
    from grpo_ray.rewards.value import parse

    assert evaluate(parse(r"2^{10}-\frac{3}{4}")) == Fraction(4093, 4)  # 1024 - 0.75
    assert evaluate(parse(r"\binom{6}{2}+3!")) == 21  # 15 + 6
    assert evaluate(parse(r"\sin(\pi)")) == 0


def test_importing_the_rewards_imports_nothing_heavy() -> None:
    heavy = "torch", "trl", "ray", "vllm", "sympy", "math_verify", "latex2sympy2_extended", "mpmath"
    script = f"import grpo_ray.rewards, sys; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
