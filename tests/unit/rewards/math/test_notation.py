"""Tests of rewritten notations, each worked by hand."""

import pytest

from grpo_ray.rewards.math.notation import decimal_degrees, rename_symbols, rewrite_notation, symbols


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        (r"0.\overline{27}", r"\frac{3}{11}"),  # 27/99
        (r"0.1\overline{6}", r"\frac{1}{6}"),  # 1/10 + 6/90
        (r"0.\dot{3}", r"\frac{1}{3}"),
        ("0.(3)", r"\frac{1}{3}"),
        (r"0.272723\dots", r"0.272723\dots"),  # the period must repeat to the end
        (r"0.272727\dots", r"\frac{3}{11}"),
        ("1.5e3", r"1.5\cdot 10^{3}"),
        ("2e-1", "2e-1"),  # 2e minus 1
        (r"33\frac{1}{3}\%", r"\frac{1}{3}"),  # (100/3)/100
        ("C_5^2", r"\binom{5}{2}"),
        ("C_1^2", "C_1^2"),  # the square of a constant
        (r"{}_5C_2", r"\binom{5}{2}"),
        (r"\lg 2", r"\log_{10} 2"),
        (r"\cos 60^\circ", r"\cos (\frac{60\pi}{180})"),
        ("f''(2)", "f_{prime2}(2)"),
        ("f'(2)", "f_{prime1}(2)"),
        ("y_1'", "y_{1prime1}"),
        ("y_{12}''", "y_{12prime2}"),
        (r"\alpha'", r"\alpha_{prime1}"),
        ("x+1", "x+1"),
    ],
)
def test_rewrite_notation_of_each_form(text: str, rewritten: str) -> None:
    assert rewrite_notation(text) == rewritten


@pytest.mark.parametrize("text", ["5'", "(fg)'", r"\sin' x", "A^T", r"\end{pmatrix}^{\top}"])
def test_rewrite_notation_what_the_grammar_drops_is_none(text: str) -> None:
    assert rewrite_notation(text) is None


def test_decimal_degrees_minutes_are_sixtieths() -> None:
    assert decimal_degrees(r"30^\circ 15'") == r"\frac{121}{4}^\circ"  # 30 + 15/60
    assert decimal_degrees("f'(2)") == "f'(2)"


def test_rename_symbols_leaves_environments() -> None:
    text = r"\begin{pmatrix}t\\a\end{pmatrix}"
    assert symbols(text) == {"t", "a"}
    assert rename_symbols(text, {"t": "s", "a": "b"}) == r"\begin{pmatrix}s\\b\end{pmatrix}"


def test_rename_symbols_exchanges_names_at_once() -> None:
    assert rename_symbols(r"C_1e^{x}+C_{2}\sin x", {"C_1": "C_2", "C_2": "C_1"}) == r"C_2e^{x}+C_1\sin x"
    assert symbols(r"C_{1}e^{x}+\sin t") == {"C_1", "e", "x", "t"}
