"""Tests of the section `rollout`: import, description and checks of the functions and classes that it names."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.tools.definitions import NO_TOOLS, load_definition, own_tools

MULTIPLY = "grpo_ray.tools.examples:multiply"
GUESS = "grpo_ray.tools.examples:Guess"
COUNTER = "hostile_tools:Counter"

SOURCE = '''
import functools

def no_docstring(a: int) -> int:
    return a

def no_hint(a) -> int:
    """Return a.

    Args:
        a: Any.
    """

def no_argument(a: int, b: int) -> int:
    """Return a.

    Args:
        a: Any.
    """

number = 3

def multiply(a: int) -> int:
    """Double.

    Args:
        a: Any.
    """

half_applied = functools.partial(int, 3)

class NoReset:
    """Cannot begin."""

class BadTool:
    """Environment with a method that has no docstring."""
    def reset(self): ...
    def look(self) -> str: ...

class Multiplier:
    """Environment with a tool that has the name of an example."""
    def reset(self): ...
    def multiply(self, a: int) -> int:
        """Double.

        Args:
            a: Any.
        """

class Base:
    def __init__(self, size: int): ...
    def reset(self): ...
    def look(self) -> str:
        """Look."""
    def _hidden(self): ...
    def __len__(self): return 0

class Child(Base):
    limit = 3
    def get_reward(self): ...
    def touch(self) -> str:
        """Touch."""

class Static:
    def reset(self): ...
    @staticmethod
    def double(a: int) -> int:
        """Double.

        Args:
            a: The number.
        """
    @classmethod
    def create(cls) -> str:
        """Create."""
'''


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    """A module `sample_tools` of small functions and classes, most of them wrong."""
    found = types.ModuleType("sample_tools")
    sys.modules["sample_tools"] = found
    exec(SOURCE, vars(found))
    yield
    del sys.modules["sample_tools"]


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_definition(RolloutConfig(**fields))
    return str(caught.value)


# What is loaded


def test_no_tools_load_nothing() -> None:
    definition = load_definition(RolloutConfig())
    assert definition.tool_set(None) == NO_TOOLS and definition.tool_set("any") == NO_TOOLS
    assert not definition.has_reward(None) and not definition.has_step(None)


def test_tools_are_described_in_the_order_of_the_config() -> None:
    definition = load_definition(RolloutConfig(tools=("hostile_tools:add", MULTIPLY)))
    tools = definition.tool_set(None)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "multiply"]
    assert tools.names == {"add", "multiply"} and definition.tools == ("hostile_tools:add", MULTIPLY)
    assert tools.schemas[1]["function"]["parameters"]["properties"]["b"] == {
        "type": "integer",
        "description": "The second factor.",
    }


def test_environment_has_its_tools_and_the_shared_ones() -> None:
    definition = load_definition(RolloutConfig(tools=(MULTIPLY,), environment=GUESS, settings={GUESS: {"limit": 3}}))
    tools = definition.tool_set(None)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["multiply", "guess"]
    assert list(tools.schemas[1]["function"]["parameters"]["properties"]) == ["number"]  # without self
    assert definition.shared.names == {"multiply"} and definition.settings == {GUESS: {"limit": 3}}
    assert definition.has_reward(None) and not definition.has_step(None)


def test_environments_are_kept_apart() -> None:
    environments = {"game": GUESS, "count": COUNTER, "narrow": "hostile_tools:Narrow"}
    definition = load_definition(RolloutConfig(environment=environments))
    assert {name: set(definition.tool_set(name).names) for name in environments} == {
        "game": {"guess"},
        "count": {"increase", "crash"},
        "narrow": {"show"},
    }
    assert [definition.has_reward(name) for name in environments] == [True, True, False]
    assert [definition.has_step(name) for name in environments] == [False, True, False]
    assert definition.shared == NO_TOOLS


def test_own_tools_are_public_methods_also_inherited_ones() -> None:
    assert list(own_tools(sys.modules["sample_tools"].Child)) == ["look", "touch"]


def test_static_method_is_a_tool_and_class_method_is_not() -> None:
    definition = load_definition(RolloutConfig(environment="sample_tools:Static"))
    (schema,) = definition.environments[None].tools.schemas
    assert schema["function"]["name"] == "double"
    assert list(schema["function"]["parameters"]["properties"]) == ["a"]


# Problems that name environments


def test_problem_without_environment_is_refused() -> None:
    definition = load_definition(RolloutConfig(environment={"game": GUESS, "count": COUNTER}))
    with pytest.raises(DataError, match=r"no column 'environment', and rollout\.environment has game, count"):
        definition.tool_set(None)


def test_problem_with_unknown_environment_is_refused() -> None:
    definition = load_definition(RolloutConfig(environment={"game": GUESS}))
    with pytest.raises(DataError, match=r"environment='Game', and rollout\.environment has game"):
        definition.require("Game")
    assert not definition.has_reward("Game") and not definition.has_step("Game")


# What is refused, each in one line that names field and function

LINES: list[tuple[dict[str, Any], list[str]]] = [
    ({"tools": ("no_colon",)}, ["rollout.tools", "'no_colon'", "package.module:name"]),
    ({"tools": (":f",)}, ["rollout.tools", "':f'", "package.module:name"]),
    ({"tools": ("m:",)}, ["rollout.tools", "'m:'", "package.module:name"]),
    ({"tools": ("no_such_module:f",)}, ["rollout.tools", "'no_such_module:f'", "cannot be imported", "PYTHONPATH"]),
    ({"environment": "no_such:F"}, ["rollout.environment", "'no_such:F'", "cannot be imported"]),
    ({"tools": ("hostile_tools:ad",)}, ["rollout.tools", "hostile_tools", "'ad'", "add"]),
    ({"tools": ("sample_tools:number",)}, ["rollout.tools", "sample_tools", "'number'"]),
    ({"tools": ("sample_tools:no_docstring",)}, ["rollout.tools", "'no_docstring'", "docstring"]),
    ({"tools": ("sample_tools:no_hint",)}, ["rollout.tools", "'no_hint'", "type hint"]),
    ({"tools": ("sample_tools:no_argument",)}, ["rollout.tools", "'no_argument'", "b"]),
    ({"tools": (MULTIPLY, MULTIPLY)}, ["rollout.tools", "'multiply'", "two functions"]),
    ({"tools": (MULTIPLY, "sample_tools:multiply")}, ["rollout.tools", "'multiply'", "two functions"]),
    ({"tools": (GUESS,)}, ["rollout.tools", repr(GUESS), "must be a function", "a class"]),
    ({"tools": ("sample_tools:half_applied",)}, ["rollout.tools", "'sample_tools:half_applied'", "partial"]),
    ({"tools": ("math:sqrt",)}, ["rollout.tools", "'sqrt'"]),
    ({"environment": MULTIPLY}, ["rollout.environment", repr(MULTIPLY), "must be a class", "function"]),
    ({"environment": "sample_tools:NoReset"}, ["rollout.environment", "'sample_tools:NoReset'", "no method reset"]),
    ({"environment": "sample_tools:BadTool"}, ["rollout.environment", "'sample_tools:BadTool'", "'BadTool.look'"]),
    ({"environment": "sample_tools:Base"}, ["rollout.settings", "'sample_tools:Base'", "size"]),
    ({"environment": GUESS, "settings": {GUESS: {"limt": 3}}}, ["rollout.settings", repr(GUESS), "limt"]),
    (
        {"tools": (MULTIPLY,), "environment": "sample_tools:Multiplier"},
        ["rollout.environment", "'sample_tools:Multiplier'", "'multiply'", "rollout.tools", "rename"],
    ),
]


@pytest.mark.parametrize(("fields", "words"), LINES, ids=[str(number) for number in range(len(LINES))])
def test_refusal_names_field_and_function_in_one_line(fields: dict[str, Any], words: list[str]) -> None:
    message = refusal(**fields)
    assert "\n" not in message and all(word in message for word in words), message


def test_module_that_fails_on_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "a_missing_dependency" in refusal(tools=("needs_more:f",))
