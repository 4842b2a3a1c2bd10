"""Tests of untrusted text on the page: secrets, invisible characters, length."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_ray.text.display import safe_text

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
INVISIBLE = re.compile("[\0\x1b\u202a-\u202e\u2066-\u2069\u200b\u200e\u200f\u2028\ufeff\U000e0041]")
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
URI = f"s3://{KEY}:{SECRET}@bucket/runs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\0b\x1b", "a⟨U+0000⟩b⟨U+001B⟩"),
        ("\x7f\x85", "⟨U+007F⟩⟨U+0085⟩"),
        ("abc\u202edef", "abc⟨U+202E⟩def"),
        ("\u200b\u2028\ufeff", "⟨U+200B⟩⟨U+2028⟩⟨U+FEFF⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("line\n\tline", "line\n\tline"),
        ("مرحبا 世界 é 👩‍🔬", "مرحبا 世界 é 👩‍🔬"),
        (None, "None"),
    ],
)
def test_safe_text_invisible_characters_are_written_out(text: str, expected: str) -> None:
    assert safe_text(text) == expected


def test_safe_text_long_text_keeps_begin_and_end() -> None:
    shortened = safe_text("question " + "x" * 10_000 + " answer", 300)
    assert shortened.startswith("question x") and shortened.endswith("x answer")
    assert "of 10016 characters" in shortened
    assert len(shortened) < 350
    assert safe_text("abc" * 200 + "answer", 300).endswith("answer")


CHARACTERS = st.text(st.one_of(st.characters(codec=None), st.sampled_from("\0\x1b\u202e\u200b\ufeff\ud800\U000e0041")))


@QUICK
@given(text=CHARACTERS, copies=st.integers(1, 3000), limit=st.integers(30, 400))
def test_safe_text_any_text_is_visible_and_short(text: str, copies: int, limit: int) -> None:
    shortened = safe_text(text * copies, limit)
    assert not INVISIBLE.search(shortened)
    assert len(shortened) <= 9 * (limit + 50)  # one character may become `⟨U+E0041⟩`
    assert safe_text("seen " * copies).startswith("seen ")


CUT = st.one_of(st.integers(250, 450), st.integers(0, 9000))


@QUICK
@given(before=CUT, after=CUT, copies=st.integers(1, 200))
@example(before=300, after=9000, copies=1)
@example(before=9000, after=300, copies=1)
@example(before=4396, after=300, copies=1)
@example(before=0, after=0, copies=200)
def test_safe_text_cut_text_shows_no_part_of_secret(before: int, after: int, copies: int) -> None:
    shortened = safe_text("x" * before + URI * copies + "x" * after, 400)
    assert SECRET[:5] not in shortened and SECRET[-5:] not in shortened and KEY[:6] not in shortened
