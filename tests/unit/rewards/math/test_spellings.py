"""Metamorphic tests: a pair keeps its reward in every spelling that the rules of `spellings` make of it."""

import random
from functools import cache

import pytest
from judged_answers import FIXTURES, load
from spellings import RULES, Variant, variants

from grpo_ray.rewards.sandbox.pool import VerifierPool

PAIRS = load(FIXTURES / "fooling.jsonl") + load(FIXTURES / "answer_families.jsonl")
SAMPLE = 600
"""Variants of the fast test."""


@cache
def all_variants() -> list[Variant]:
    return [variant for row in PAIRS for variant in variants(row)]


def changed_verdicts(tried: list[Variant], pool: VerifierPool) -> list[tuple]:
    """Return the variants whose reward is not their pair's."""
    verdicts = pool.grade([(variant.completion, variant.solution) for variant in tried])
    return [
        (variant.rule, variant.reward, variant.solution, variant.completion)
        for variant, verdict in zip(tried, verdicts, strict=True)
        if (verdict.reward, verdict.status) != (variant.reward, "ok")
    ]


@pytest.mark.long
def test_correctness_sampled_spellings_keep_their_rewards(pool: VerifierPool) -> None:
    assert changed_verdicts(random.Random(30).sample(all_variants(), SAMPLE), pool) == []


@pytest.mark.slow
def test_correctness_all_spellings_keep_their_rewards(pool: VerifierPool) -> None:
    assert changed_verdicts(all_variants(), pool) == []


def test_variants_every_rule_is_used() -> None:
    used = {variant.rule for variant in all_variants()}
    assert set(RULES) <= used and len(all_variants()) >= 40_000


def test_variants_row_breaks_are_rewritten() -> None:
    row = {
        "solution": r"$\begin{pmatrix}1\\2\end{pmatrix}$",
        "completion": r"So \boxed{\begin{pmatrix}2\\1\end{pmatrix}}.",
        "reward": 0.0,
    }
    spelled = {variant.rule: variant for variant in variants(row)}
    assert spelled["row break and a space"].completion == r"So \boxed{\begin{pmatrix}2\\ 1\end{pmatrix}}."
    assert spelled["solution: row break with a length"].solution == r"$\begin{pmatrix}1 \\[4pt] 2\end{pmatrix}$"
    assert {variant.reward for variant in spelled.values()} == {0.0}
