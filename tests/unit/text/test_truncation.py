"""Tests of texts that are shortened before they are recorded."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from grpo_ray.text.truncation import truncate_middle


@given(
    text=st.builds(
        lambda part, times: part * times, st.text("xé∎👩\u200d🔬\ud800", min_size=1, max_size=6), st.integers(0, 900)
    ),
    limit=st.sampled_from([0, 1, 20, 100, 4096]) | st.integers(0, 5000),
)
@example(text="x" * 10_000_000, limit=4096)
@example(text="a" + "é" * 4999, limit=4096)
@example(text="👩\u200d🔬" * 1000, limit=100)
@example(text="\ud800" * 5000, limit=20)
@example(text="x" * 4096, limit=4096)
@example(text="é" * 2048, limit=4096)
@example(text="", limit=0)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_truncate_middle_cuts_the_middle_of_long_texts_only(text: str, limit: int) -> None:
    whole = text.replace("\ud800", "?")
    short = truncate_middle(text, limit)
    if len(whole.encode()) <= limit:
        assert short == whole
        return
    assert limit - 6 <= len(short.encode()) <= limit  # up to two characters are cut through
    if limit >= 100:
        assert short[0] == whole[0] and short[-1] == whole[-1]
        begin, _, end = short.partition("\n[... of ")
        assert whole.startswith(begin) and whole.endswith(end.partition(" bytes ...]\n")[2]) and end
