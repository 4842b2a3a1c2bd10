r"""Tests of row breaks, systems of equations and number separators in normalized texts, each worked by hand."""

import pytest

from grpo_ray.rewards.math.normalize import normalize_latex

COLUMN = r"\begin{pmatrix} 2\\3 \end{pmatrix}"


@pytest.mark.parametrize(
    "row_break", [r"\\", r" \\ ", "\\\\\n", r"\\ ", r"\\*", r" \\[2pt] ", r" \\ [0.5em]", r" \cr ", r" \\ \hline "]
)
def test_normalize_row_breaks_have_one_form(row_break: str) -> None:
    assert normalize_latex(rf"\begin{{pmatrix}} 2{row_break}3 \end{{pmatrix}}") == COLUMN


def test_normalize_entry_in_square_brackets_is_no_length() -> None:
    assert normalize_latex(r"\begin{pmatrix} 2 \\ [0,1] \end{pmatrix}") == r"\begin{pmatrix} 2\\[0,1] \end{pmatrix}"


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2"),
        (r"\begin{cases} x=1, \\ y=2. \end{cases}", "x=1, y=2"),
        (r"\left\{\begin{array}{l} x=1 \\ y=2 \end{array}\right.", "x=1, y=2"),
        (r"\begin{aligned} x&=1 \\ y&=2+3 \\ &=5 \end{aligned}", "x=1, y=2+3=5"),
        (
            r"\begin{cases} x=1\\y=2 \end{cases} \text{ or } \begin{cases} x=2\\y=1 \end{cases}",
            "(x=1, y=2) or (x=2, y=1)",
        ),
        (r"x=1 \\ y=2", "x=1 , y=2"),
        (r"\begin{cases} x & x>0 \\ 0 & x=0 \end{cases}", r"\begin{cases} x&x>0\\0&x=0\end{cases}"),
        (
            r"\begin{cases} x, & \text{if } x>0, \\ 0 \text{ if } x=0 \end{cases}",
            r"\begin{cases} x&x>0\\0&x=0\end{cases}",
        ),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2\\3 & 4 \end{pmatrix}"),
    ],
)
def test_normalize_systems_are_lists(text: str, normalized: str) -> None:
    assert " ".join(normalize_latex(text).split()) == normalized


def test_normalize_thousands_as_math_writes_them() -> None:
    assert normalize_latex(r"32,\! 349") == normalize_latex(r"32,\!349") == "32349"
    assert normalize_latex(r"1,\! 234,\! 567") == "1234567"
    assert normalize_latex(r"3,\! 49") != "349"


def test_normalize_residue_rings_have_one_form() -> None:
    for text in (r"\mathbb{Z}/6\mathbb{Z}", r"\mathbb{Z}/(6)", r"\mathbb Z/6\mathbb Z", r"\mathbb{Z}/\langle 6\rangle"):
        assert normalize_latex(text) == r"\mathbb{Z}_{6}"


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        (r"\left(\begin{array}{cc}1&2\end{array}\right)^T", r"\begin{pmatrix}1&2\end{pmatrix}^T"),
        (r"2\left[\begin{array}{c} 1 \\ 2 \end{array}\right]", r"2\begin{pmatrix} 1\\2 \end{pmatrix}"),
        (r"\bigl( \begin{smallmatrix} 1 & 2 \end{smallmatrix} \bigr)", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
        (r"[\begin{matrix}1&2\end{matrix}]", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"(\begin{matrix}1&2\end{matrix}]", r"(\begin{matrix}1&2\end{matrix}]"),  # no pair of brackets
        (r"|\begin{matrix}1&2\end{matrix}|", r"|\begin{matrix}1&2\end{matrix}|"),  # a determinant
        (r"(\begin{array}{c|c}1&2\end{array})", r"(\begin{array}{c|c}1&2\end{array})"),  # two blocks
        (r"(2\begin{matrix}1&2\end{matrix})", r"(2\begin{matrix}1&2\end{matrix})"),
    ],
)
def test_normalize_rows_in_brackets_are_a_matrix(text: str, normalized: str) -> None:
    assert normalize_latex(text) == normalized


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        (r"\frac{ dy }{ dx }", r"\frac{dy}{dx}"),
        (r"\frac{\, 1 \,}{ \sqrt{ 2 } }", r"\frac{1}{\sqrt{2}}"),
        (r"\{ 1, 2 \}", r"\{1, 2 \}"),
        (r"\text{ no solution }", r"\text{no solution}"),
    ],
)
def test_normalize_spaces_inside_braces_are_removed(text: str, normalized: str) -> None:
    assert normalize_latex(text) == normalized


@pytest.mark.parametrize("behind", ["", " ", r"\,", ".", r"\,.", "$", r"\)", r"\ "])
def test_normalize_mark_at_the_end_is_removed(behind: str) -> None:
    assert normalize_latex(rf"9\ \checkmark{behind}") == "9"


def test_normalize_mark_before_a_value_stays() -> None:
    assert normalize_latex(r"\square 9") == r"\square 9"
