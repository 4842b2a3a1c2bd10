"""Tests of the check of a form before a run."""

from typing import Any

import pytest

from grpo_ray.config.sampling import StructuredOutputs
from grpo_ray.errors import ConfigError
from grpo_ray.inference.structured_outputs import require_valid_form


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"\\boxed\{-?[0-9]+\}"},
        {"json": {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}},
        {"json": {}},
        {"choice": ("A", "B")},
        {"grammar": 'root ::= "a" | "b" root'},
    ],
)
def test_valid_form_is_taken(form: dict[str, Any]) -> None:
    require_valid_form(StructuredOutputs(**form))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "[0-9"}, "regex cannot be used: Regex parsing error at position 5: Unclosed '['"),
        ({"regex": "(?=a)b"}, "regex cannot be used: Regex parsing error at position 3: Lookahead is not supported"),
        ({"json": {"type": "objec"}}, 'json cannot be used: Unsupported type "objec"'),
        ({"grammar": "a ::= b"}, "grammar cannot be used: EBNF parser error at line 1, column 1: The root rule"),
    ],
)
def test_form_that_cannot_be_compiled_is_one_line(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_valid_form(StructuredOutputs(**form))
    assert f"rollout.structured_outputs.{message}" in str(error.value) and "\n" not in str(error.value)
