r"""Tests of answers with an integer parameter: congruences and their classes."""

import pytest

from grpo_ray.rewards.math.families import Congruence, Quantified, parse_congruence, same_classes, split_quantifier


def test_parse_congruence_reduces_residues() -> None:
    assert parse_congruence(r"x\equiv -7 \pmod{12}") == Congruence("x", frozenset({5}), 12)  # -7 + 12
    assert parse_congruence(r"1, 3 \pmod{4}") == Congruence(None, frozenset({1, 3}), 4)


def test_parse_congruence_space_behind_minus_is_ignored() -> None:
    assert parse_congruence(r"x\equiv - 7, - 8 \pmod{12}") == Congruence("x", frozenset({5, 4}), 12)  # -7 + 12, -8 + 12


def test_parse_congruence_other_text_is_none() -> None:
    assert parse_congruence(r"x\equiv y \pmod{12}") is None
    assert parse_congruence(r"100 \pmod{1}") is None
    assert parse_congruence("x=5") is None


def test_congruence_without_a_name_takes_any_name() -> None:
    one, named, other = (Congruence(name, frozenset({1}), 7) for name in (None, "x", "y"))
    assert one.agrees_with(named) and named.agrees_with(one)
    assert not named.agrees_with(other)
    assert not one.agrees_with(Congruence("x", frozenset({1}), 8))
    assert not one.agrees_with(Congruence("x", frozenset({2}), 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"2n\pi, n\in\mathbb{Z}", Quantified(r"2n\pi", "n", "Z")),
        (r"2n\pi, n\in\mathbb{Z}^+", Quantified(r"2n\pi", "n", "Z^+")),
        (r"2k+1, k\in\mathbb{N}", Quantified("2k+1", "k", "N")),
        (r"2n\pi\text{, where n is an integer}", Quantified(r"2n\pi", "n", "Z")),
        (r"2k+1\text{ for any integer k}", Quantified("2k+1", "k", "Z")),
        (r"(1,t), t\in\mathbb{R}", Quantified("(1,t)", "t", "R")),
        (r"2n\pi\text{, where k is an integer}", Quantified(r"2n\pi\text{, where k is an integer}", None, "")),
        ("2n+1", Quantified("2n+1", None, "")),
    ],
)
def test_split_quantifier_of_each_form(text: str, expected: Quantified) -> None:
    assert split_quantifier(text) == expected


@pytest.mark.parametrize(
    ("gold", "answer", "are_same"),
    [
        (("2n",), ("2n+4",), True),  # the count starts elsewhere
        (("2n",), ("-2n",), True),  # and runs backwards
        (("2n",), ("2n+1",), False),
        (("2n",), ("4n", "4n+2"), True),
        (("2n",), ("4n",), False),
        (("n",), ("2n", "2n+1"), True),
        (("n",), ("n", "n^2"), False),  # squares are not affine in n
        (("n", "n^2"), ("n",), False),
        (("n",), ("5",), False),
        (("2n",), (), False),
        ((), (), False),
    ],
)
def test_same_classes_compares_sets_of_values(gold: tuple[str, ...], answer: tuple[str, ...], are_same: bool) -> None:
    assert same_classes(gold, answer, "n", of_angles=False) == are_same


def test_same_classes_of_angles_need_a_period_of_pi() -> None:
    assert same_classes((r"n\pi",), (r"n\pi+2\pi",), "n", of_angles=True)
    assert same_classes((r"\frac{n\pi}{3}",), (r"\frac{n\pi}{3}",), "n", of_angles=True)
    assert not same_classes(("n",), ("n",), "n", of_angles=True)


def test_congruence_as_family_lists_one_formula_per_residue() -> None:
    assert Congruence("n", frozenset({0, 2}), 3).as_family().text == "n=3q+0, 3q+2"
