"""Tests of correctness: pairs with known rewards, the rules of comparison, extraction and normalization."""

import re
from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_answers import FIXTURES, SHARED, load

from grpo_ray.rewards.math.arithmetic import Point, UndefinedValueError, UnsupportedFormulaError, equal, evaluate
from grpo_ray.rewards.math.compare import same_answer
from grpo_ray.rewards.math.extract import extract_answers, solution_text
from grpo_ray.rewards.math.limits import exceeds_limits
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.rewards.math.values import parse_formula
from grpo_ray.rewards.math.verify import correctness, grade, parse_solution
from grpo_ray.rewards.math.words import is_boolean
from grpo_ray.rewards.sandbox.pool import VerifierPool

FOOLING = load(FIXTURES / "fooling.jsonl")
FAMILIES = load(FIXTURES / "answer_families.jsonl")
needs_shared_data = pytest.mark.skipif(not SHARED.exists(), reason="the shared data are absent")
repeatable = settings(max_examples=50, deadline=None, derandomize=True)


def boxed(answer: str) -> str:
    return rf"We work it out and find \boxed{{{answer}}}."


def wrong_verdicts(rows: list[dict], pool: VerifierPool) -> list[tuple]:
    """Return the rows whose verdict differs from their reward, or that hit a limit."""
    verdicts = pool.grade([(row["completion"], row["solution"]) for row in rows])
    return [
        (row["solution"], row["completion"][:200], row["reward"], verdict)
        for row, verdict in zip(rows, verdicts, strict=True)
        if (verdict.reward, verdict.status) != (row["reward"], "ok")
    ]


# --- pairs with known rewards


@pytest.mark.long
def test_correctness_fixture_pairs_get_their_rewards(pool: VerifierPool) -> None:
    assert len(FOOLING) >= 120
    assert wrong_verdicts(FOOLING, pool) == []


@pytest.mark.long
def test_correctness_answer_families_get_their_rewards(pool: VerifierPool) -> None:
    assert len(FAMILIES) >= 490 and len({row["family"] for row in FAMILIES}) >= 25
    assert wrong_verdicts(FAMILIES, pool) == []


ARGUABLE = {
    # Units are compared and not converted: the problem may ask for kilometres.
    (r"$5\text{ km}$", r"So \boxed{5\times10^3\text{ m}}."),
}
"""Solutions and completions on which the judges and the documented rules differ."""


@needs_shared_data
def test_correctness_pays_no_wrong_judged_answer(pool: VerifierPool) -> None:
    rows = [row for row in load(SHARED / "judge_cases.jsonl") if row["reward"] == 0.0]
    assert len(rows) >= 140
    assert wrong_verdicts(rows, pool) == []


@needs_shared_data
def test_correctness_pays_right_judged_answers_but_arguable_ones(pool: VerifierPool) -> None:
    rows = [row for row in load(SHARED / "judge_cases.jsonl") if row["reward"] == 1.0]
    assert len(rows) >= 170
    assert {(solution, completion) for solution, completion, *_ in wrong_verdicts(rows, pool)} == ARGUABLE


@needs_shared_data
def test_correctness_agrees_with_95_percent_of_shared_pairs(pool: VerifierPool) -> None:
    rows = load(SHARED / "fooling_examples.jsonl")
    assert len(wrong_verdicts(rows, pool)) <= 0.05 * len(rows)


@needs_shared_data
def test_correctness_agrees_with_independent_verdicts_but_one(pool: VerifierPool) -> None:
    rows = [
        {"solution": row["solution"], "completion": completion, "reward": float(correct)}
        for row in load(SHARED / "scored_completions.jsonl")
        for completion, correct in zip(row["completions"], row["correct"], strict=True)
    ]
    # The exception: 10000 for $10{,}000$, which the independent verdict counts as wrong.
    assert len(rows) == 400
    assert len(wrong_verdicts(rows, pool)) <= 1


@needs_shared_data
@pytest.mark.parametrize("name", ["olympiadbench", "gsm8k"])
def test_correctness_real_solutions_equal_themselves(name: str, pool: VerifierPool) -> None:
    solutions = dict.fromkeys(row["solution"] for row in load(SHARED / f"{name}.jsonl"))
    rows = [{"solution": text, "completion": f"The answer is {text}", "reward": 1.0} for text in solutions]
    # The exception lacks a dollar sign, so formula and text cannot be separated.
    assert {row[0] for row in wrong_verdicts(rows, pool)} <= {"$221,$8$"}


@pytest.mark.long
@needs_shared_data
def test_correctness_next_problems_solution_is_wrong(pool: VerifierPool) -> None:
    texts = list(dict.fromkeys(row["solution"] for row in load(SHARED / "olympiadbench.jsonl")))
    following = [*texts[1:], texts[0]]
    items = [(f"The answer is {other}", text) for text, other in zip(texts, following, strict=True)]
    assert sum(verdict.reward or 0.0 for verdict in pool.grade(items)) == 0


# --- rules of comparison, worked by hand


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (r"\frac{1}{3}", 1.0),
        ("0.333333", 1.0),  # six decimals, rounded
        ("0.3333", 0.0),
        (r"33.333333\%", 1.0),
        ("1/3", 1.0),
        (r"\frac{333333}{1000000}", 0.0),  # a fraction is an exact value
    ],
)
def test_correctness_rounded_decimal_needs_six_decimals(answer: str, reward: float) -> None:
    assert correctness(boxed(answer), r"$\frac{1}{3}$") == reward


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        (r"x = 10\sqrt{3} \approx 17.3", r"$10\sqrt{3}$", 1.0),
        (r"x = 10\sqrt{3} \approx 17.3", "$17.3$", 1.0),
        (r"x \approx 17.3", "$17.3$", 1.0),
        (r"10\sqrt{3} \approx 17.5", r"$10\sqrt{3}$", 0.0),  # 17.32... does not round to it
        (r"100 \approx 101", "$100$", 0.0),
        (r"100 \approx 101", "$101$", 0.0),
    ],
)
def test_correctness_approximation_must_round_its_value(answer: str, solution: str, reward: float) -> None:
    assert correctness(boxed(answer), solution) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (r"1,2,\dots,5", 1.0),
        (r"1,\dots,5", 1.0),
        (r"1,x,\dots,5", 0.0),  # the step is not known
    ],
)
def test_correctness_progression_with_dots_states_its_values(answer: str, reward: float) -> None:
    assert correctness(boxed(answer), "$1,2,3,4,5$") == reward


@pytest.mark.parametrize(
    "answer", [r"5^{\circ}\text{C}", r"5^\circ\mathrm{C}", r"5^{\circ}\text{ C}", r"5^\circ C", "5°C"]
)
def test_correctness_spellings_of_degrees_celsius_are_equal(answer: str) -> None:
    for solution in (r"$5^{\circ}\text{C}$", r"$5^\circ\text{C}$", r"$5^\circ C$"):
        assert correctness(boxed(answer), solution) == 1.0
    assert correctness(boxed(answer), r"$5^\circ\text{F}$") == 0.0
    assert correctness(boxed(answer), r"$6^\circ\text{C}$") == 0.0


def test_correctness_rounded_side_of_an_equation_is_no_value() -> None:
    assert correctness(boxed(r"2x = 10\sqrt{3} \approx 17.3"), "$17.3$") == 0.0


def test_correctness_rounded_solution_keeps_its_name() -> None:
    solution = r"$x = 10\sqrt{3} \approx 17.3$"
    assert correctness(boxed("x = 17.3"), solution) == 1.0
    assert correctness(boxed("y = 17.3"), solution) == 0.0


def test_correctness_list_of_families_is_answered_by_their_union() -> None:
    solution = r"$n\pi, \frac{\pi}{2}+n\pi, n\in\mathbb{Z}$"
    assert correctness(boxed(r"\frac{k\pi}{2}, k\in\mathbb{Z}"), solution) == 1.0


@pytest.mark.parametrize(("domain", "reward"), [(r", n\in\mathbb{Z}", 1.0), ("", 1.0), (r", n\in\mathbb{N}", 0.0)])
def test_correctness_family_of_another_domain_is_wrong(domain: str, reward: float) -> None:
    assert correctness(boxed(rf"n\pi{domain}"), r"$n\pi, n\in\mathbb{Z}$") == reward


def test_correctness_cases_of_three_columns_are_wrong() -> None:
    solution = r"$\begin{cases} x & x>0 \\ 0 & x=0 \end{cases}$"
    assert correctness(boxed(r"\begin{cases} x & x>0 & 1 \\ 0 & x=0 & 1 \end{cases}"), solution) == 0.0


def test_correctness_chain_that_ends_in_its_name_states_a_value() -> None:
    assert correctness(boxed(r"\frac{10}{2} = 5 = x"), "$5$") == 1.0


@pytest.mark.parametrize("answer", [r"3\frac{ 4 }{ 2 }", r"3\frac{\,4\,}{\,2\,}"])
def test_correctness_improper_mixed_number_with_spaces_is_wrong(answer: str) -> None:
    assert correctness(boxed(answer), "$5$") == 0.0


@pytest.mark.parametrize("name", [r"\frac{ dy }{ dx }", r"\frac{ NO }{ BO }"])
def test_correctness_solution_quotient_with_spaces_takes_the_value(name: str) -> None:
    assert correctness(boxed("2x"), f"${name}=2x$") == 1.0


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        (r"2\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"$\begin{pmatrix}2&4\\6&8\end{pmatrix}$", 1.0),
        (r"2\left(\begin{array}{cc}1&2\\4&3\end{array}\right)", r"$\begin{pmatrix}2&4\\6&8\end{pmatrix}$", 0.0),
        (r"\left[\begin{array}{cc}4&5\end{array}\right]^T", r"$\begin{pmatrix}4\\5\end{pmatrix}$", 1.0),
        (r"\left[\begin{array}{cc}5&4\end{array}\right]^T", r"$\begin{pmatrix}4\\5\end{pmatrix}$", 0.0),
    ],
)
def test_correctness_array_in_brackets_is_a_matrix(answer: str, solution: str, reward: float) -> None:
    assert correctness(boxed(answer), solution) == reward


@pytest.mark.parametrize(
    "pole", [r"\ln 0", r"\zeta(1)", r"\operatorname{arctanh} 1", r"-\ln 0", r"5+\ln 0", r"\tan\frac{\pi}{2}"]
)
def test_correctness_value_at_a_pole_equals_no_number(pole: str) -> None:
    assert correctness(boxed(pole), "$5$") == 0.0
    assert correctness(boxed(pole), r"$\sqrt2$") == 0.0


@pytest.mark.parametrize("tiny", ["e^{-60}", "0", "0.0", "10^{-30}", "2e^{-50}"])
def test_correctness_tiny_numbers_are_compared_by_size(tiny: str) -> None:
    assert correctness(boxed(tiny), "$e^{-50}$") == 0.0
    assert correctness(boxed(r"\frac{1}{e^{50}}"), "$e^{-50}$") == 1.0


def test_correctness_hundredth_digit_differs_is_wrong() -> None:
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
def test_correctness_several_different_answers_are_wrong(hedge: str) -> None:
    assert correctness(hedge, "$5$") == 0.0


def test_correctness_corrected_answer_counts_last_box() -> None:
    text = r"\boxed{5}. Wait, that is wrong: \boxed{7}"
    assert correctness(text, "$7$") == 1.0
    assert correctness(text, "$5$") == 0.0


def test_correctness_boxes_in_a_list_are_one_answer() -> None:
    assert correctness(r"\boxed{2} and \boxed{1}", "$1,2$") == 1.0


def test_correctness_ignores_boxes_inside_thoughts() -> None:
    assert correctness(r"<think>\boxed{5}</think> It is \boxed{7}", "$5$") == 0.0
    assert correctness(r"<think>\boxed{7}</think> It is \boxed{5}", "$5$") == 1.0
    assert correctness(r"<think>\boxed{5}", "$5$") == 0.0


def test_correctness_finds_answer_in_long_text() -> None:
    assert correctness("So we go on. " * 5_000 + r"\boxed{5}", "$5$") == 1.0
    assert correctness(r"\boxed{5}" + " and that is all." * 5_000, "$5$") == 1.0


@pytest.mark.parametrize("whole", [r"\mathbb{R}", r"(-\infty,\infty)", "[4,6]", r"\{1,2,3,4,5\}", "x", "1=1"])
def test_correctness_set_or_identity_is_no_number(whole: str) -> None:
    assert correctness(boxed(whole), "$5$") == 0.0


def test_correctness_prose_without_formula_is_no_answer() -> None:
    assert correctness("The answer is 5", "$5$") == 0.0
    assert correctness("The answer is Yes", "Yes") == 0.0
    assert correctness("The answer is $5$", "$5$") == 1.0
    assert correctness("<answer>5</answer>", "$5$") == 1.0


@given(p=st.integers(-10_000, 10_000), q=st.integers(1, 999), factor=st.integers(1, 99))
@repeatable
def test_correctness_any_form_of_a_fraction_is_equal(p: int, q: int, factor: int) -> None:
    solution = rf"$\frac{{{p}}}{{{q}}}$"
    expanded = rf"\frac{{{p * factor}}}{{{q * factor}}}"
    assert correctness(boxed(expanded), solution) == 1.0
    assert correctness(boxed(f"{p * factor}/{q * factor}"), solution) == 1.0
    assert correctness(boxed(rf"\frac{{{p + 1}}}{{{q}}}"), solution) == 0.0


# --- zero and unknown differ


@pytest.mark.parametrize("solution", ["", "  ", "$$", "This follows from the lemma above and needs no value at all."])
def test_correctness_solution_without_answer_gives_none(solution: str) -> None:
    assert correctness(boxed("5"), solution) is None
    assert correctness("", solution) is None


@pytest.mark.parametrize("word", ["Yes", "No", "True", "False", "Even", "Divergent", "Does not exist", r"$\text{Yes}$"])
def test_correctness_word_solution_is_always_scored(word: str) -> None:
    plain = word.replace(r"$\text{", "").replace("}$", "")
    assert correctness(boxed(rf"\text{{{plain}}}"), word) == 1.0
    assert correctness(boxed(plain.lower()), word) == 1.0
    assert correctness(boxed("5"), word) == 0.0
    assert correctness(boxed(rf"\text{{{plain} and not {plain}}}"), word) == 0.0
    assert correctness("no idea", word) == 0.0


def test_is_boolean_any_markup_is_recognised() -> None:
    assert all(is_boolean(text) for text in ("Yes", "no", r"$\text{True}$", r"\boxed{False}"))
    assert not any(is_boolean(text) for text in ("$5$", "Even", "$x$", ""))


# --- plain Math-Verify


@pytest.mark.long
def test_correctness_not_strict_gives_math_verify_verdict() -> None:
    restated = boxed(r"\int_0^1 \frac{1}{1+x^2}\,dx")
    assert correctness(restated, r"$\frac{\pi}{4}$", strict=False) == 1.0
    assert correctness(restated, r"$\frac{\pi}{4}$") == 0.0
    assert correctness(boxed("5"), "Yes", strict=False) is None


# --- undecided


@pytest.mark.parametrize(
    ("answer", "is_undecided"),
    [
        ("5", False),  # right
        ("6", False),  # compared and wrong
        (r"\{1,2\}", False),  # another kind of answer
        ("(fg)'", True),  # the grammar would drop the prime
        (r"A^T", True),
        (r"9^{9^{9^{9}}}", True),  # beyond the limits
        (r"\cancel{3}5", True),
        (r"\text{It is unknown}", False),  # a statement in words
    ],
)
def test_grade_form_that_cannot_be_compared_is_undecided(answer: str, is_undecided: bool) -> None:
    verdict = grade(boxed(answer), "$5$")
    assert verdict.reward == float(answer == "5")
    assert verdict.is_undecided == is_undecided


# --- caches, string matches and limits


def test_correctness_cold_caches_give_same_verdicts() -> None:
    rows = FOOLING[:60]
    warm = [correctness(row["completion"], row["solution"]) for row in rows]
    cold = []
    for row in reversed(rows):
        parse_solution.cache_clear()
        parse_formula.cache_clear()
        cold.append(correctness(row["completion"], row["solution"]))
    assert cold[::-1] == warm


@pytest.mark.parametrize(
    "text", [r"\frac{1}{2}", "x^2+1", r"\sqrt{3}-1", "(1,2)", "[0,1)", r"\{1,2,3\}", "x>3", r"\ln 2", "n!"]
)
def test_same_answer_agrees_with_string_match(text: str) -> None:
    # The second text is another string, so only the comparison of values can accept it.
    assert same_answer(normalize_latex(text), normalize_latex(text.replace("1", "1.0")))


def test_exceeds_limits_accepts_every_right_answer() -> None:
    for row in FOOLING:
        if row["reward"] == 1.0:
            solution = normalize_latex(solution_text(row["solution"]))
            answers = [normalize_latex(answer) for answer in extract_answers(row["completion"])]
            assert not any(exceeds_limits(answer, solution) for answer in answers)


# --- extraction, normalization and evaluation

FRAGMENTS = [
    *re.findall(
        r"\S+", r"\boxed{ \text{ \frac{ \left( \right) \[ \] \( \quad \, \\ { } ( ) ^ _ $ $$ , - = % ½ ² 1 000 5 x"
    ),
    *re.findall(r"\S+", "<answer> </answer> <think> </think> answer and Yes"),
    *(" ", "\n", "\ud800", "\x00"),
]
"""Strings that extraction and normalization look for."""


def test_normalize_spellings_of_one_value_become_equal() -> None:
    assert (
        normalize_latex(r"1\,000")
        == normalize_latex("1,000")
        == normalize_latex("1{,}000")
        == normalize_latex("1 000")
        == "1000"
    )
    assert (
        normalize_latex("\uff15")
        == normalize_latex("\u200b5")
        == normalize_latex("5.")
        == normalize_latex(r"\mathbf{5}")
        == normalize_latex(r"\text{5}")
        == "5"
    )
    assert normalize_latex(r"\dfrac{1}{2}") == r"\frac{1}{2}"
    assert strip_spacing("x ^ {2}") == "x^2"


@given(number=st.integers(1000, 10**15))
@repeatable
def test_normalize_thousands_separators_are_removed(number: int) -> None:
    for separator in (",", "{,}", r"\,", r"\;", " ", "~"):
        assert normalize_latex(f"{number:,}".replace(",", separator)) == str(number)


@given(text=st.text(st.characters()) | st.lists(st.sampled_from(FRAGMENTS)).map("".join))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_extract_and_normalize_any_text_never_raise(text: str) -> None:
    normalized = normalize_latex(text)
    strip_spacing(normalized)
    solution_text(text)
    is_boolean(text)
    assert not exceeds_limits(normalized, normalized)
    assert exceeds_limits(normalized + "1" * 2000, "5")
    assert all(isinstance(answer, str) for answer in extract_answers(text))


def test_normalize_different_values_stay_different() -> None:
    assert normalize_latex("5²") == "5^{2}"
    assert normalize_latex("12, 13") != normalize_latex("12,130")
    assert strip_spacing(normalize_latex(r"5 \quad 7")) != strip_spacing("57")


def test_evaluate_symbols_are_positive_at_the_first_five_points() -> None:
    values = [evaluate(parse_formula("x"), Point(number)) for number in range(8)]
    assert [value > 0 for value in values] == [True] * 5 + [False] * 3
    assert [values[5], values[6], values[7]] == [value * Fraction(-13, 7) for value in values[:3]]
    assert len(set(values)) == 8
    share = values[1]  # k/101 with 1 <= k <= 97
    assert 0 < share < 1 and share.denominator == 101
    assert (values[0], values[4]) == (share + 1, 3 + 5 * share)
    # Between -1 and 1: the share divided by 2, 3, ..., 7, with alternating signs.
    extra = [evaluate(parse_formula("x"), Point(number)) for number in range(8, 14)]
    assert extra == [share / 2, -share / 3, share / 4, -share / 5, share / 6, -share / 7]


def test_evaluate_named_functions_up_to_their_largest_argument() -> None:
    def value(text: str) -> Any:
        return evaluate(parse_formula(text))

    assert equal(value(r"\zeta(2)"), value(r"\frac{\pi^2}{6}"))
    assert value(r"\zeta(100)") > 1
    for text in (r"\zeta(101)", r"\operatorname{erf}(101)", r"\zeta(1)"):  # beyond the bound, and a pole
        with pytest.raises(UndefinedValueError):
            value(text)
    assert equal(value(r"\operatorname{erf}(1)+\operatorname{erfc}(1)"), Fraction(1))
    assert not equal(value(r"\operatorname{erf}(1)"), value(r"\operatorname{erfc}(1)"))


def test_evaluate_exact_arithmetic_stays_exact() -> None:
    assert evaluate(parse_formula(r"2^{10}-\frac{3}{4}")) == Fraction(4093, 4)  # 1024 - 0.75
    assert evaluate(parse_formula(r"\binom{6}{2}+3!")) == 21  # 15 + 6
    assert evaluate(parse_formula(r"\sin(\pi)")) == 0
    assert evaluate(parse_formula("10^{10^{10}}-10^{10^{10}}")) == 0  # neither power is computed


@given(a=st.integers(-99, 99), b=st.integers(1, 99), c=st.integers(0, 99), d=st.integers(1, 99), n=st.integers(0, 9))
@repeatable
def test_evaluate_agrees_with_fractions(a: int, b: int, c: int, d: int, n: int) -> None:
    text = rf"\frac{{{a}}}{{{b}}}+{c}\cdot\frac{{1}}{{{d}}}-{d}^{{{n}}}"
    assert evaluate(parse_formula(text)) == Fraction(a, b) + Fraction(c, d) - d**n


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        (r"(0,1]", r"$0 < x \le 1$", 1.0),
        (r"[0,1)", r"$0 < x \le 1$", 0.0),
        (r"0 < x \le 1", r"$(0,1]$", 1.0),
        (r"0 \le x < 1", r"$(0,1]$", 0.0),
    ],
)
def test_correctness_interval_matches_its_inequality(answer: str, solution: str, reward: float) -> None:
    assert correctness(boxed(answer), solution) == reward


@pytest.mark.parametrize(("answer", "reward"), [(r"\{1,2,3\}", 1.0), (r"\{1,2\}", 0.0), ("1,2", 0.0)])
def test_correctness_part_of_a_set_is_wrong(answer: str, reward: float) -> None:
    assert correctness(boxed(answer), r"$\{1,2,3\}$") == reward


@pytest.mark.parametrize("infinite", [sympy.oo, -sympy.oo, sympy.zoo, sympy.nan], ids=str)
def test_evaluate_infinity_has_no_value(infinite: sympy.Expr) -> None:
    with pytest.raises(UndefinedValueError):
        evaluate(infinite, Point(0))


def test_evaluate_unknown_operation_is_unsupported() -> None:
    with pytest.raises(UnsupportedFormulaError):
        evaluate(sympy.Integral(sympy.Symbol("x"), sympy.Symbol("x")), Point(0))
