r"""Tests of answers with an integer parameter: congruences and their classes."""

from grpo_ray.rewards.math.families import Congruence, parse_congruence


def test_parse_congruence_reduces_residues() -> None:
    assert parse_congruence(r"x\equiv -7 \pmod{12}") == Congruence("x", frozenset({5}), 12)  # -7 + 12
    assert parse_congruence(r"1, 3 \pmod{4}") == Congruence(None, frozenset({1, 3}), 4)


def test_parse_congruence_other_text_is_none() -> None:
    assert parse_congruence(r"x\equiv y \pmod{12}") is None
    assert parse_congruence(r"100 \pmod{1}") is None
    assert parse_congruence("x=5") is None


def test_congruence_as_family_lists_one_formula_per_residue() -> None:
    assert Congruence("n", frozenset({0, 2}), 3).as_family().text == "n=3q+0, 3q+2"
