"""Tests of vectors, matrices and their linear combinations, each worked by hand."""

import pytest

from grpo_ray.rewards.math.linear import parse_tensor


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", (("1", "2"), ("3", "4"))),
        (r"\frac{1}{2}\begin{pmatrix}1&4\end{pmatrix}", ((r"\frac{1}{2}", "2"),)),
        (r"-\begin{pmatrix}1\\x\end{pmatrix}", (("-1",), ("-(x)",))),
        ("(1,2)+t(3,4)", (("1+((t)(3))", "2+((t)(4))"),)),
        (r"3\hat{i}-\hat{k}", (("3", "0", "-1"),)),
        ("(1,2)^T", (("1",), ("2",))),
        ("(f(1,2),3)^T", (("f(1,2)",), ("3",))),  # commas inside brackets separate no entries
        ("(a_{1,2},[3,4])^T", (("a_{1,2}",), ("[3,4]",))),
        (r"(\{1,2\},3)^T", ((r"\{1,2\}",), ("3",))),
        (r"\begin{pmatrix}2\\[0,1]\end{pmatrix}", (("2",), ("[0,1]",))),  # lengths of row breaks are normalized away
        (r"\begin{array}{cc}1&2\\3&4\\\end{array}", (("1", "2"), ("3", "4"))),  # a break behind the last row
    ],
)
def test_parse_tensor_of_each_form(text: str, rows: tuple[tuple[str, ...], ...]) -> None:
    tensor = parse_tensor(text)
    assert tensor is not None and tensor.rows == rows


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "(1,2)",  # a tuple is read by its brackets
        r"\gcd(4,6)+1",
        r"\begin{pmatrix}1&2\\3\end{pmatrix}",  # rows of different length
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{-1}",  # left to be computed
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^T",
        r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
    ],
)
def test_parse_tensor_of_other_text_is_none(text: str) -> None:
    assert parse_tensor(text) is None
