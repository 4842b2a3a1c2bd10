r"""Tests of words, units, dates, numbers in words and quantities with several units, each worked by hand."""

from fractions import Fraction

import pytest

from grpo_ray.rewards.math.words import (
    calendar_date,
    choice_letters,
    measure,
    multiply_out_scale,
    number_in_words,
    same_mixed_words,
    split_unit,
    without_announcement,
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (r"5\text{ cm}", "5", "cm"),
        (r"5\text{ m s}^{-1}", "5", "m/s"),
        (r"5\text{ m s}^{-2}", "5", "m/s^2"),
        (r"5\text{ kg m/s}^2", "5", "kg m/s^2"),
        (r"5\text{ m}^2", "5", "m^2"),
        (r"5\frac{m}{s}", "5", "m/s"),
        (r"5\frac{\text{km}}{\text{h}}", "5", "km/h"),
        (r"5\frac{m}{s^2}", "5", "m/s^2"),
        (r"5\text{ m s}^{0}", "5", "m"),  # to the power of 0 is 1
        (r"5\text{ s}^{-1}", r"5\text{ s}^{-1}", None),  # one unit below the line is no quotient
        (r"5\text{ m meters}^{-1}", r"5\text{ m meters}^{-1}", None),  # one unit twice
        (r"5\frac{m}{n}", r"5\frac{m}{n}", None),  # letters
        (r"5\frac{\text{x}}{\text{y}}", r"5\frac{\text{x}}{\text{y}}", None),
        (r"5\text{ or so}", r"5\text{ or so}", None),
        (r"5^\circ C", "5", "C"),
        (r"5^\circ \text{C}", "5", "C"),
        (r"5^\circ", "5", "degree"),
    ],
)
def test_split_unit_of_each_form(text: str, value: str, unit: str | None) -> None:
    assert split_unit(text) == (value, unit)


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        ("hundred", 100), ("thousand", 1_000), ("million", 1_000_000), ("billion", 10**9), ("trillion", 10**12),
        ("lakh", 100_000), ("crore", 10_000_000), ("dozen", 12),
    ],
)  # fmt: skip
def test_multiply_out_scale_of_each_large_word(words: str, factor: int) -> None:
    assert multiply_out_scale(rf"5\text{{ {words}}}") == str(5 * factor)


@pytest.mark.parametrize(
    ("words", "denominator"),
    [
        ("halves", 2), ("thirds", 3), ("quarters", 4), ("fourths", 4), ("fifths", 5), ("sixths", 6), ("sevenths", 7),
        ("eighths", 8), ("ninths", 9), ("tenths", 10), ("hundredths", 100), ("thousandths", 1_000),
    ],
)  # fmt: skip
def test_multiply_out_scale_of_each_part(words: str, denominator: int) -> None:
    assert multiply_out_scale(rf"11\text{{ {words}}}") == rf"\frac{{11}}{{{denominator}}}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("five", "5"),
        (r"\text{Nine}", "9"),
        (r"\text{minus }9", "-9"),
        (r"\text{negative nine}", "-9"),
        (r"\text{one half}", r"\frac{1}{2}"),
        (r"\text{half}", r"\frac{1}{2}"),
        (r"\text{a third}", r"\frac{1}{3}"),
        (r"\text{two-thirds}", r"\frac{2}{3}"),
        (r"\text{one and a half}", r"\frac{3}{2}"),
        (r"\text{twenty-five}", "25"),
        (r"\text{two hundred and five}", "205"),
        (r"\text{three thousand forty}", "3040"),
        (r"\text{two million six thousand}", "2006000"),
        (r"\text{zero}", "0"),
    ],
)
def test_number_in_words_of_each_form(text: str, number: str) -> None:
    assert number_in_words(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "fifth",  # a place in an order
        "third",
        "five six",
        "five or six",
        "twenty twenty",
        "twenty eleven",
        "five twenty",
        "five and six",
        "hundred",
        "five hundred hundred",
        "five thousand thousand",
        "thousand five",
        "zero five",
        "and",
        "a",
        "minus",
        r"\text{minus }-9",
        r"\text{minus }x",
        r"\text{not five}",
        "5",
    ],
)
def test_number_in_words_leaves_other_texts(text: str) -> None:
    assert number_in_words(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"4\text{ hours }30\text{ minutes}", (Fraction(16_200), "time", 2)),  # 4 * 3600 + 30 * 60
        (r"4\text{ hours and }30\text{ minutes}", (Fraction(16_200), "time", 2)),
        (r"4.5\text{ hours}", (Fraction(16_200), "time", 1)),
        (r"4\frac{1}{2}\text{ hours}", (Fraction(16_200), "time", 1)),
        (r"5\text{ ft }6\text{ in}", (Fraction(66), "length", 2)),
        ("2 kg 300 g", (Fraction(2_300_000), "mass", 2)),
        (r"30\text{ minutes }4\text{ hours}", None),  # no one writes the smaller unit first
        (r"4\text{ hours }4\text{ hours}", None),
        (r"4\text{ hours }30\text{ cm}", None),
        (r"4\text{ hours }30", None),
        (r"4\text{ apples}", None),
        ("4", None),
    ],
)
def test_measure_of_each_form(text: str, expected: tuple[Fraction, str, int] | None) -> None:
    assert measure(text) == expected


@pytest.mark.parametrize(
    ("large", "small", "count"),
    [
        ("week", "day", 7),
        ("day", "h", 24),
        ("h", "min", 60),
        ("min", "s", 60),
        ("mi", "yd", 1760),
        ("yd", "ft", 3),
        ("ft", "in", 12),
        ("km", "m", 1000),
        ("m", "cm", 100),
        ("cm", "mm", 10),
        ("kg", "g", 1000),
        ("g", "mg", 1000),
        ("lb", "oz", 16),
        ("dollar", "cent", 100),
    ],
)
def test_measure_unit_is_a_count_of_the_smaller(large: str, small: str, count: int) -> None:
    assert measure(f"1 {large}") == measure(f"{count} {small}") is not None


def test_calendar_date_day_and_month_in_either_order() -> None:
    assert calendar_date(r"\text{March 5}") == (2, 5, "")
    assert calendar_date("5th of March") == (2, 5, "")
    assert calendar_date(r"\text{Dec. 31, 1999}") == (11, 31, "1999")
    assert calendar_date(r"\text{5 May}") == (4, 5, "")
    for text in (r"\text{March}", "5", r"\text{March 5 or 6}", r"5\text{ may}be", "5 marches"):
        assert calendar_date(text) is None


def test_choice_letters_need_two_joined_by_and_or_commas() -> None:
    assert choice_letters(r"\text{A and C}") == choice_letters("C, A") == frozenset("AC")
    assert choice_letters(r"A, B \text{ and } (D)") == frozenset("ABD")
    assert choice_letters("I and III") == frozenset(["I", "III"])
    for text in ("A", "A or C", "AC", "A, x", "A and not C"):
        assert choice_letters(text) is None


def test_same_mixed_words_counted_things_stand_in_any_order() -> None:
    assert same_mixed_words("3 apples and 2 pears", r"\text{2 pears and 3 apples}")
    assert same_mixed_words(r"3\text{ apples and }2\text{ pears}", r"3\text{ apples}, 2\text{ pears}")
    assert not same_mixed_words("3 apples and 2 pears", "2 apples and 3 pears")
    assert not same_mixed_words("3 out of 5 times", "5 out of 3 times")
    assert not same_mixed_words("2abc", "2ABC")  # letters, whose case counts


def test_without_announcement_keeps_what_it_does_not_announce() -> None:
    for text in (
        r"\text{The answer is }5",
        r"\text{The final answer is 5}",
        r"\text{Answer: }5",
        r"\text{So the answer is:} 5",
    ):
        assert without_announcement(text) == "5"
    for text in (r"\text{The answer is not }5", r"\text{The answer is not 5}", "5", r"\text{answer}"):
        assert without_announcement(text) == text
