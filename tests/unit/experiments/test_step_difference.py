"""Tests of the comparison of one step: the first quantity that differs, and what is not recorded."""

import math
from typing import Any

import pytest

from grpo_ray.experiments.step_difference import QUANTITIES, Difference, StepRecord, compare_steps, same_bits


def group(problem: str = "a" * 16, **changes: Any) -> dict[str, Any]:
    """Return a sampled group of two completions."""
    tokens = [{"texts": ["4", ""], "engine_logps": [-0.5, -0.1]}, {"texts": ["5", ""], "engine_logps": [-1.0, -0.1]}]
    row: dict[str, Any] = {"epoch": 0, "source": "", "problem": problem, "prompt": "2 + 2", "trained": True}
    row |= {"lengths": [2, 2], "truncated": [False, False], "completions": ["4", "5"], "tokens": tokens}
    return row | {"rewards": [1.0, 0.0], "correct": [1.0, math.nan], "advantages": [1.0, -1.0]} | changes


def without_sample(row: dict[str, Any]) -> dict[str, Any]:
    return row | dict.fromkeys(("prompt", "completions", "tokens", "advantages"))


def record(*groups: dict[str, Any], **fields: Any) -> StepRecord:
    values: dict[str, Any] = {"gradient_norm": 0.25, "weights": {"model.safetensors": "0a"}} | fields
    return StepRecord(7, groups, **values)


def test_equal_records_are_equal_in_every_quantity() -> None:
    compared = compare_steps(record(group()), record(group()))
    assert compared.first is None and dict(compared.outcomes) == dict.fromkeys(QUANTITIES, "equal")
    assert tuple(compared.outcomes) == QUANTITIES


TOKENS = [{"texts": ["4", ""], "engine_logps": []}, {"texts": ["6", ""], "engine_logps": []}]
CASES: dict[str, tuple[StepRecord, str, str]] = {
    "problem": (record(group("b" * 16)), "problem", "the step's groups"),
    "epoch": (record(group(epoch=1)), "problem", "the step's groups"),
    "one more": (record(group(), group("b" * 16)), "problem", "the step's groups"),
    "prompt": (record(group(prompt="2 + 3")), "prompt", f"prompt of problem {'a' * 16} of epoch 0"),
    "length": (record(group(lengths=[2, 3])), "tokens", "completion 1"),
    "truncated": (record(group(truncated=[True, False])), "tokens", "completion 0"),
    "text": (record(group(completions=["4", "6"])), "tokens", "completion 1"),
    "token": (record(group(tokens=TOKENS)), "tokens", "completion 1"),
    "reward": (record(group(rewards=[1.0, math.nextafter(0.0, 1.0)])), "reward", "rewards of problem"),
    "zero": (record(group(rewards=[1.0, -0.0])), "reward", "rewards of problem"),
    "verdict": (record(group(correct=[1.0, 0.0])), "reward", "correct of problem"),
    "trained": (record(group(trained=False)), "reward", "trained of problem"),
    "number": (record(group(rewards=[1.0])), "reward", "rewards of problem"),
    "advantage": (record(group(advantages=[1.0, -0.5])), "advantage", "completion 1"),
    "gradient": (record(group(), gradient_norm=math.nextafter(0.25, 1)), "gradient", "the step, as its norm"),
    "weights": (record(group(), weights={"model.safetensors": "0b"}), "weights", "model.safetensors"),
    "file": (record(group(), weights={"model.safetensors": "0a", "b.safetensors": "1"}), "weights", "b.safetensors"),
}
"""Name -> another record, and the quantity and place of the first difference."""


@pytest.mark.parametrize("name", CASES)
def test_one_difference_is_found_in_its_quantity(name: str) -> None:
    other, quantity, where = CASES[name]
    for pair in ((record(group()), other), (other, record(group()))):
        compared = compare_steps(*pair)
        assert compared.first is not None and compared.first.quantity == quantity and where in compared.first.where
        if quantity != "problem":
            assert [each for each, outcome in compared.outcomes.items() if outcome == "differs"] == [quantity]


def test_first_of_several_differences_is_reported() -> None:
    other = record(group(rewards=[0.0, 0.0], advantages=[0.0, 0.0]), gradient_norm=0.0)
    compared = compare_steps(record(group()), other)
    assert compared.first is not None
    assert (
        str(compared.first) == f"step 7: reward of rewards of problem {'a' * 16} of epoch 0, completion 0: 1.0 and 0.0"
    )
    assert compared.outcomes["gradient"] == "differs" and compared.outcomes["weights"] == "equal"


def test_long_values_are_shown_from_their_difference_on() -> None:
    texts = ["a" * 150 + place + "z" * 150 for place in "47"]
    compared = compare_steps(*(record(group(completions=["4", text], tokens=None)) for text in texts))
    assert compared.first is not None
    assert compared.first.recorded.startswith("..." + "a" * 20 + "4zz")
    assert compared.first.other.startswith("..." + "a" * 20 + "7zz")
    assert compare_steps(record(group()), record(group(prompt="2 + 3"))).first == Difference(
        7, "prompt", f"prompt of problem {'a' * 16} of epoch 0", "2 + 2", "2 + 3"
    )


def test_missing_records_are_not_recorded() -> None:
    bare = record(without_sample(group()), gradient_norm=None, weights=None)
    outcomes = compare_steps(bare, record(group())).outcomes
    assert [quantity for quantity, outcome in outcomes.items() if outcome == "not recorded"] == [
        "prompt", "advantage", "gradient", "weights",
    ]  # fmt: skip
    assert outcomes["tokens"] == "equal"  # lengths are recorded for every group
    empty = compare_steps(StepRecord(7, ()), StepRecord(7, ()))
    assert set(empty.outcomes.values()) == {"not recorded"} and empty.first is None


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (math.nan, math.nan, True),
        (0.0, -0.0, False),
        (1.0, math.nextafter(1.0, 2.0), False),
        ([1.0, [None, "x"]], [1.0, [None, "x"]], True),
        ([1.0], [1.0, 2.0], False),
        ({"a": [math.nan]}, {"a": [math.nan]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0.0, False),
    ],
)
def test_same_bits(a: Any, b: Any, is_same: bool) -> None:
    assert same_bits(a, b) is is_same and same_bits(b, a) is is_same
